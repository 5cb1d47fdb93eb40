"""Render benchmarks/README.md from the kept JSON files, so that the page never says what was not measured.

python benchmarks/page.py            # write it
python benchmarks/page.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from models_page import models_section, training_section
from page_accel import accel_section
from page_cpu import cpu_section
from page_gpu import (
    adapters_section,
    diffusion_section,
    experts_section,
    kits_section,
    linear_attention_section,
    ops_section,
    tests_section,
)
from page_plans import blocks_section, store_section
from page_threads import threads_section
from page_vllm import vllm_section

from layerzero_tune.timing.clock import BEFORE, RULES
from layerzero_tune.timing.host_load import BUSY

HERE = Path(__file__).parent
PAGE = HERE / "README.md"

INTRO = """# Benchmarks

Every figure here is rendered from a JSON file under `results/<machine>/` by `python benchmarks/page.py`; a test keeps
page and files together. Overheads are differences of medians from one interleaved run: the public call against the
chosen kernel called directly, whose own code and data push the interpreter out of the caches; "empty target" is the
same difference around a function that does nothing. The limits are for an idle server on which reading `tensor.shape`
takes 140 ns; each machine's own reading stands above its table, and the last column divides by the ratio of the two, to
compare like with like.

Make them again with `make prove NAME=overhead` (or `python benchmarks/overhead.py --machine NAME`) on an idle machine.
"""

BUDGET_SHAPE_NS = 140.0


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def section(name: str, data: dict[str, Any]) -> str:
    machine = data["machine"]
    # The reads that stand between the figures, where a run took them.
    shape = statistics.median(data.get("shape_read_ns") or [data["calibration_ns"]["shape"]])
    ratio = max(1.0, shape / BUDGET_SHAPE_NS)
    title = f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    lines = [
        f"## {name}: dispatch overhead",
        "",
        f"{title}; Python {machine['python']}, torch {machine['torch']}; load before the run {machine['load']}; commit "
        f"`{data['commit']}`; reading `.shape` takes {shape:.0f} ns here ({ratio:.2f}× the budget's machine)."
        + (f" {data['note']}" if "note" in data else ""),
        "",
        "| figure | µs | limit | verdict | at the budget's speed |",
        "|---|---:|---:|---|---:|",
    ]
    for figure, value in data["figures"].items():
        limit = data["limits"].get(figure)
        verdict = "" if limit is None else "within" if value <= limit else "missed"
        shown = "" if limit is None else _number(limit)
        lines.append(f"| {figure} | {_number(value)} | {shown} | {verdict} | {_number(value / ratio)} |")
    decode, threads, parts = data["decode"], data["threads"], data["parts"]
    few, many = (data["figures"][f"attention hot{tail}"] for tail in (", empty target", ", empty target, many keys"))
    lines += [
        "",
        f"- Growing keys: {data['keys']['few']} against {data['keys']['many']} cached keys change a hot attention call "
        f"by {100 * (many / few - 1):+.1f} %.",
        f"- Decode loop: {decode['selections']} selections in {decode['steps']} steps over {decode['cache']}; mean "
        f"overhead without the outer 5 % {decode['real_trimmed_mean_us']:.2f} µs; around an empty target "
        f"{decode['empty_mean_us']:.2f} µs.",
        f"- A hot lookup: median {parts['hot lookup median']:.2f} µs, p99 {parts['hot lookup p99']:.2f} µs, "
        f"{parts['lookups per second']:,.0f} a second on one thread; building a Context "
        f"{parts['context build']:.0f} µs; a hit in the selection cache {parts['selection cache hit']:.2f} µs.",
    ]
    if threads is not None:
        lines.append(
            f"- {threads['threads']} threads × {threads['lookups_each']} mixed lookups under {threads['swaps']} swaps "
            f"of the World: {threads['errors']} errors, {threads['stale']} stale choices."
        )
    measured = data["peers"].items()
    peers = "; ".join(f"{name} {us:.1f} µs" if isinstance(us, float) else f"{name} {us}" for name, us in measured)
    lines.append(f"- Peers in the same run, overhead of one call: {peers}.")
    return "\n".join(lines) + "\n"


def tokenizers_section(name: str, data: dict[str, Any]) -> str:
    """`lz.tokenize` against each library called directly."""
    machine = data["machine"]
    lines = [
        f"## {name}: tokenization",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); Python {machine['python']}; load before the "
        f"run {machine['load']}; commit `{data['commit']}`. Ratios to the library called directly, its own kernel "
        "locked; for the repeated system prompt how many times faster. Small vocabularies trained on the spot.",
        "",
        "| library | single short text | batch of 1 000 | system prompt | selection, µs | selected for a short text |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for library, item in data["libraries"].items():
        ratios, tokens = item["ratios"], item["system_tokens"]
        lines.append(
            f"| {library} | {ratios['single short text']:.2f} | {ratios['batch of 1 000']:.2f} | "
            f"{ratios['system prompt']:.0f}× ({tokens} tokens) | {ratios['selection µs']:.2f} | "
            f"`{item['selected']}`, {ratios['selected, short text']:.2f} |"
        )
    limits, cache = data["limits"], data["cache"]
    lines += [
        "",
        f"Limits: {limits['single short text']} for a single text, {limits['batch of 1 000']} for a batch, "
        f"{limits['system prompt']:.0f}× for the prompt, {limits['selection µs']:.0f} µs. The prefix cache held "
        f"{cache['bytes']:,} of {cache['max_bytes']:,} bytes.",
    ]
    return "\n".join(lines) + "\n"


def tuned_section(name: str, data: dict[str, Any]) -> str:
    """The tuned choice against the oracle, torch default and each single library."""
    machine = data["machine"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    lines = [
        f"## {name}: tuned choice",
        "",
        f"{device}; Python {machine['python']}, torch {machine['torch']}; load before the run {data['load']}; commit "
        f"`{data['commit']}`; {data['measured']}; {data['method']}. {_rule(data)}Repeat: `{data['command']}`.",
        "",
        "| figure | measured | limit | verdict |",
        "|---|---:|---:|---|",
    ]
    for figure, item in data["targets"].items():
        side = "at_most" if "at_most" in item else "at_least"
        limit = f"{'≤' if side == 'at_most' else '≥'} {item[side]}"
        lines.append(f"| {figure} | {item['value']} | {limit} | {'within' if item['met'] else 'over'} |")
    lines += ["", "| time ÷ fastest of all, torch included | geomean | worst | runs in |", "|---|---:|---:|---:|"]
    found = data["figures"].get("gpu34") or data["figures"]["grid"]
    ways = sorted(found["library_over_fastest"].items(), key=lambda item: item[1]["geomean"])
    for way, item in [("LayerZero", found["layerzero_over_fastest"]), *ways]:
        lines.append(f"| {way} | {item['geomean']} | {item['worst']} | {item['used_in']} of {item['cases']} |")
    by_dtype = ", ".join(
        f"{dtype} {data['figures'][dtype]['speedup_over_torch']}× ({data['figures'][dtype]['cases']} cases)"
        for dtype in ("float32", "float16", "bfloat16")
        if dtype in data["figures"]
    )
    lines += ["", f"Against torch default by dtype: {by_dtype}."]
    slowest = data["figures"]["grid"]["slowest_against_torch"]
    if slowest is not None:
        lines.append(f"The case with the least over torch default: {slowest[0]}, {slowest[1]}×.")
    undone = [stage for stage, done in data["complete"].items() if not done]
    if undone:
        lines.append(f"The budget did not reach all of: {', '.join(undone)}.")
    if data["failed"]:
        lines.append(f"Not measured: {'; '.join(f'{case} ({why})' for case, why in data['failed'].items())}.")
    return "\n".join(lines) + "\n"


def untuned_section(name: str, data: dict[str, Any]) -> str:
    """What is chosen where nobody has tuned, beside the tuned choice of the same machine where that was measured."""
    machine = data["machine"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    tuned = data["tuned"].get("figures", {}).get("random", {})
    over = tuned.get("tuned_over_oracle", {})
    beside = {
        "chosen ÷ oracle, geomean": over.get("geomean"),
        "chosen ÷ oracle, worst": over.get("worst"),
        "× torch, geomean": tuned.get("speedup_over_torch"),
    }
    rows = {
        **{figure: (item["value"], f"≤ {item['at_most']}", item["met"]) for figure, item in data["figures"].items()},
        **{word: (data[word], "", None) for word in data if word.startswith("× torch") and data[word] is not None},
    }
    ranked = ", ".join(f"{word} {count}" for word, count in data.get("ranked by", {}).items())
    lines = [
        f"## {name}: untuned choice{data['title']}",
        "",
        f"{device}; Python {machine['python']}, torch {machine['torch']}; load before the run {data['load']}; commit "
        f"`{data['commit']}`; {data['measured']}; {data['reached']} calls drawn with seed {data['seed']}, "
        f"{data['compared with torch']} of them compared with torch's own code"
        + (f"; ranked by: {ranked}" if ranked else "")
        + (f". Tuned: {tuned['cases']} other sizes, after `lz tune` of the grid." if tuned else ".")
        + f" Repeat: `{data['command']}`.",
        "",
        "| figure | untuned | limit | verdict | tuned |",
        "|---|---:|---:|---|---:|",
    ]
    for figure, (value, limit, met) in rows.items():
        verdict = "" if met is None else "within" if met else "over"
        lines.append(f"| {figure} | {value} | {limit} | {verdict} | {beside.get(figure) or ''} |")
    return "\n".join(lines) + "\n"


def _rule(data: dict[str, Any]) -> str:
    """What counts as a time; results of before one rule held for all say what held then."""
    named = dict.fromkeys(row["rule"] for row in [*data["cases"], *data["graph"]] if "rule" in row)
    busy = sum(row.get("busy", 0.0) > BUSY for row in data["cases"])
    told = f"{busy} of {len(data['cases'])} cases were measured while others used the machine. " if busy else ""
    if named:
        return f"{told}A time, for kernels, torch default and the public call alike: {'; '.join(named)}. "
    return f"{told}A time: {BEFORE['cuda/eager']}. " if data["machine"]["gpu"] else told


def compiled_section(name: str, data: dict[str, Any]) -> str:
    """A Llama block on LayerZero's ops under torch.compile, against the same block in plain torch."""
    machine = data["machine"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    lines = [
        f"## {name}: a compiled Llama block",
        "",
        f"{device}; Python {machine['python']}, torch {machine['torch']}; load before the run {machine['load']}; "
        f"commit `{data['commit']}`; {data['graph_breaks']} graph breaks. Time ÷ plain torch under torch.compile; "
        f"native: torch's own kernels, written into the graph (limit {data['limit']}); selected: foreign kernels as "
        f"opaque ops; attention: selected for attention alone. A time, for all alike: "
        f"{RULES['cuda/compiled' if machine['gpu'] else 'cpu/compiled']}. Repeat: `{data['command']}`.",
        "",
        "| block | plain torch, µs | native | selected | attention | selected kernel of attention |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in data["cases"]:
        lines.append(_compiled_row(row["case"], row, row["kernels"]["attention"]))
        if "replayed" in row:
            lines.append(_compiled_row(f"{row['case']}, replayed graph", row["replayed"], row["kernels"]["attention"]))
    return "\n".join(lines) + "\n"


def _compiled_row(name: str, row: dict[str, Any], kernel: str) -> str:
    ratios = " | ".join(
        f"{row['over_torch'][way]:.3f}" if way in row["over_torch"] else ""
        for way in ("native", "selected", "attention")
    )
    return f"| {name} | {row['median_us']['torch']:,.1f} | {ratios} | `{kernel}` |"


def invariance_section(name: str, data: dict[str, Any]) -> str:
    (label, figure), machine = next(iter(data["figures"].items())), data["machine"]
    verdict = "within" if figure["value"] <= figure["at_most"] else "missed"
    where = machine["gpu"] if data["device"] == "cuda" else f"{machine['cpu']}, {data['threads']} thread(s)"
    refused = ", ".join(data["refused"]) or "none"
    lines = [
        f"## {name}: the price of batch invariance",
        "",
        f"{where}; torch {machine['torch']}; commit `{data['commit']}`; quickest of interleaved rounds. {label}: "
        f"{figure['value']} over {data['cases']} cases (goal {figure['at_most']}: {verdict}), worst {data['worst']}. "
        f"Without such a kernel: {refused}.",
        "",
        "| op | invariant ÷ free |",
        "|---|---:|",
        *(f"| {op} | {ratio} |" for op, ratio in data["by_op"].items()),
    ]
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "overhead.json": section,
    "tokenizers.json": tokenizers_section,
    "tuned.json": tuned_section,
    "untuned*.json": untuned_section,
    "compiled.json": compiled_section,
    "accel.json": accel_section,
    "blocks.json": blocks_section,
    "selection_store.json": store_section,
    "threads.json": threads_section,
    "cpu*.json": cpu_section,
    "models*.json": models_section,
    "training.json": training_section,
    "diffusion.json": diffusion_section,
    "invariance.json": invariance_section,
    "linear_attention.json": linear_attention_section,
    "experts.json": experts_section,
    "vllm*.json": vllm_section,
    "adapters.json": adapters_section,
    "ops_host_*.json": ops_section,
    "kits.json": kits_section,
    "tests.json": tests_section,
}


def render(results: Path = HERE / "results") -> str:
    """The whole page."""
    found = [
        written(path.parent.name, _read(path))
        for files, written in SECTIONS.items()
        for path in sorted(results.glob(f"*/{files}"))
    ]
    return "\n".join([INTRO, *found])


def _read(path: Path) -> dict[str, Any]:
    """What a file says; one about untuned choices has the tuned ones of its machine beside it."""
    data: dict[str, Any] = json.loads(path.read_text())
    if path.stem.startswith("untuned"):
        data["title"] = path.stem.removeprefix("untuned").replace("_", ", ")
        beside = path.with_name("tuned.json")
        data["tuned"] = json.loads(beside.read_text()) if beside.exists() else {}
    return data


def main() -> int:
    text = render()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
