"""The gates of a release: figures inside their limits, no open P0 or P1, nothing wrong that was right before.

    python -m tools.gates                 every figure with a limit and how it stands; the ledger; a fresh `lz verify`
    python -m tools.gates --no-verify     the first two alone, which read files only
    python -m tools.gates --report FILE   all three, with a report of `lz verify --json` instead of a fresh run

A kept file whose sources changed since it was made (tools/sources.py) is stale: a warning with `--no-verify`, else a
failure. One that says of itself `"steady": false` is never a verdict. A waiver in benchmarks/waivers.toml names a file
and figures (globs; "age" for a stale file), how far outside their limit they may be, and why. It never covers more than
it says. The other two gates are tools/known_issues.py and tools/regressions.py.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools import regressions
from tools.known_issues import Ledger
from tools.requirements_doc import ROOT
from tools.sources import CORE, Drift, drift, sources

__all__ = ["Figure", "Waiver", "ages", "figures", "judged", "main", "performance", "unread", "unsteady", "waivers"]

RESULTS = ROOT / "benchmarks" / "results"
WAIVERS = ROOT / "benchmarks" / "waivers.toml"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and its limit. `over` is how many times outside it is; at most 1 when it is inside."""

    file: str
    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def over(self) -> float:
        """Value against limit, so that above 1 is outside."""
        worse, better = (self.limit, self.value) if self.at_least else (self.value, self.limit)
        return worse / better if better > 0 else float("inf") if worse > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Waiver:
    """Figures that may be outside, how far (in multiples of the limit, or `worst` as a value), and why."""

    file: str
    figures: str
    up_to: float
    why: str
    worst: float | None = None  # for limits of zero, of which there are no multiples

    def covers(self, figure: Figure) -> bool:
        """Whether it speaks of this figure, and far enough."""
        named = fnmatchcase(figure.file, self.file) and fnmatchcase(figure.name, self.figures)
        near = self.worst is not None and not figure.at_least and figure.value <= self.worst
        return named and (near or figure.over <= self.up_to)


def waivers(path: Path = WAIVERS) -> list[Waiver]:
    """The waivers in force; one without a reason is an error."""
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("waiver", ())
    found = [Waiver(**{"up_to": 1.0, **item}) for item in listed]
    for item in found:
        if len(item.why.split()) < 5 or not (item.up_to > 1 or (item.worst or 0) > 0):
            raise ValueError(f"{path.name}: the waiver of {item.figures} in {item.file} gives no reason or no bound")
    return found


def figures(folder: Path = RESULTS) -> Iterator[Figure]:
    """Every figure of the kept results that has a limit beside it."""
    for path in sorted(folder.glob("*/*.json")):
        data, name = json.loads(path.read_bytes()), f"{path.parent.name}/{path.name}"
        yield from (Figure(name, *row) for row in _rows(data))


def unread(folder: Path = RESULTS) -> list[str]:
    """Kept files in which no figure with a limit was found and that are not known to have none."""
    read = {figure.file for figure in figures(folder)}
    kept = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob("*/*.json"))]
    return [name for name in kept if name not in read and name.partition("/")[2] not in WITHOUT]


def unsteady(folder: Path = RESULTS) -> list[str]:
    """Kept files that say of themselves that the machine changed its speed under the run: no verdict rests on them."""
    kept = {
        f"{path.parent.name}/{path.name}": json.loads(path.read_bytes()) for path in sorted(folder.glob("*/*.json"))
    }
    return [name for name, data in kept.items() if data.get("steady") is False]


def ages(folder: Path = RESULTS, root: Path = ROOT) -> Iterator[tuple[Figure, Drift | None]]:
    """How many commits changed the sources of each kept file since; one that names no known commit counts as one."""
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_bytes())
        tool = re.search(r"-m tools\.(\w+)", data.get("command") or "")
        named = [f"tools/{tool[1]}.py"] if tool else [f"{place}/{_kind(data)}.py" for place in ("benchmarks", "tools")]
        script = next((root / name for name in named if (root / name).is_file()), None)
        made_from = sources(script, root) if script is not None else (CORE,)
        since = drift(str(data.get("commit")), made_from, root)
        yield Figure(f"{path.parent.name}/{path.name}", "age", since.changed if since else 1.0, 0.0), since


def _rows(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Name, value, limit and whether the limit is the least: what a kept file says of itself, whatever its form."""
    yield from _stated(data)
    limits, values = data.get("limits"), data.get("figures")
    if isinstance(limits, dict) and isinstance(values, dict):
        for key, limit in limits.items():
            if isinstance(values.get(key), (int, float)) and isinstance(limit, (int, float)):
                yield key, float(values[key]), float(limit)
    yield from _OF.get(_kind(data), _nothing)(data)


def _stated(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Figures that stand beside their own limit: {"value": 1.02, "at_most": 1.05}."""
    for table in (data.get("targets"), data.get("figures")):
        for key, item in table.items() if isinstance(table, dict) else ():
            if isinstance(item, dict) and isinstance(item.get("value"), (int, float)):
                low = "at_least" in item
                yield key, float(item["value"]), float(item["at_least" if low else "at_most"]), low


def _kind(data: dict[str, Any]) -> str:
    """Which benchmark wrote a file: what it says, or the script in its command."""
    script = re.search(r"benchmarks/(\w+)\.py", data.get("command", ""))
    written = "isolation" if "budget_ms_x86" in data else ""  # older files name no command
    return str(data.get("benchmark") or (script[1] if script else written))


def _nothing(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield from ()


def _telemetry(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, item in data["calls"].items():
        yield f"counting {key}", max(0.0, float(item["cost_ns"])), float(data["target_ns"])


def _ranks(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield "agree", float(data["agree"]["max_s"]), float(data["agree"]["target_s"])


def _soak(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield "memory drift", max(0.0, float(data["rss_drift"])), 0.01


def _faults(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield "breaker ns", max(0.0, data["breaker_ns"]), data["breaker_limit_ns"]


def _cli_start(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, item in data["commands"].items():
        if "--help" in key or key.startswith("lz "):
            yield key, item["least_ms"], data["limit_ms"]


def _compile_latency(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Requests beside compilers: ms more at p99, or the tokens of a model over those without any."""
    for key, item in data["cases"].items():
        if "budget_ms" in data:
            yield f"{key}: ms more at p99", item["p99_over_off_ms"], data["budget_ms"]
        elif key != "off":
            for quantile, limit in data["budget"].items():
                yield f"{key}: {quantile} ÷ off", item["us"][quantile] / data["cases"]["off"]["us"][quantile], limit


def _compiled(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for item in data["cases"]:
        yield f"{item['case']}: native ÷ torch", item["over_torch"]["native"], data["limit"]


def _adapters(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, item in data.get("ops", {}).items():
        yield f"{key}: µs more than torch", max(0.0, item["more_us"]), data["limit"]["us"]
    if "pairs" in data:
        yield "adapters within the limit on the host", data["host_within"], data["pairs"], True
        yield "adapters within the limit on the device", data["device_within"], data["pairs"], True


def _isolation(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for device, item in data["devices"].items():
        yield f"{device}: ms for 4 MiB there", item["median_us"]["4 MiB there"] / 1e3, data["budget_ms_x86"]


def _linear_attention(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """On a CPU steps of one token and convolutions: three times as fast as transformers without other packages. On a
    GPU no slower than transformers with those that are installed or than a library called directly, and heads (the
    convolution has none) ten times as fast as transformers without any."""
    for item in data["cases"]:
        name = f"{item['op']} B{item['batch']} T{item['tokens']} {item['dtype']}: ×"
        conv = item["op"] == "causal_conv1d"
        if not data["machine"].get("gpu"):
            if item["tokens"] == 1 or conv:
                yield f"{name} transformers", item["times"], 3.0, True
            continue
        yield f"{name} transformers", item["times"], 1.0, True
        for library in ("fla", "flashinfer"):
            if f"{library}_times" in item:
                yield f"{name} {library}", item[f"{library}_times"], 0.97, True
        if not conv:
            yield f"{name} transformers alone", item.get("transformers_bare_times", item["times"]), 10.0, True


def _experts(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Each call beside its goal; on a GPU plain experts twice as fast as torch's grouped products in the mean."""
    for item in data["cases"]:
        keys = ("model", "format", "granularity", "tokens", "m", "n", "k", "heads", "batch", "length")
        name = " ".join(str(item[key]) for key in keys if item.get(key) is not None)
        if item.get("goal"):
            yield f"{item['op']} {name}", item.get("times", 0.0), item["goal"], True
    for model, value in data["geomean"].items() if data["machine"].get("gpu") else ():
        yield f"{model}: × torch.moe.grouped", value, 2.0, True


def _accel(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, limit in data["limits"]["keyed_us_scaled"].items():
        yield key, data["scaled"][key] / 1e3, limit
    for key, limit in data["limits"]["ratios"].items():
        yield f"{key}: ÷ Python", data["ratios"][key], limit


def _tokenizers(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for library, item in data["libraries"].items():
        for key, limit in data["limits"].items():
            if item["ratios"].get(key) is not None:
                yield f"{library}: {key}", item["ratios"][key], limit, key == "system prompt"


def _cpu(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for row in data.get("cases") or data.get("rows") or ():
        for goal in row.get("goals", ()):
            yield f"{row['group']} {row['case']}: × {goal['against']}", goal["reached"], goal["factor"], True


def _grouped(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for row in data["rows"]:
        yield f"{row['case']}: × a call for each group", row["ratio"], 1.0, True


def _models(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Patched over stock, by the kind of the case; µs that a patched part costs more than its kernel."""
    limits, cpu = data["limits"], not data["machine"].get("gpu")
    for key, us in (data.get("overhead_us") or {}).items():
        yield f"overhead of {key}, µs", us, limits["overhead"]
    for key, item in data["figures"].items():
        kind = key.partition(" ")[0]
        half = " bf16" if cpu and "bfloat16" in key and "cpu decode bf16" in limits else ""
        limit = limits.get(f"cpu {kind}{half}" if cpu else kind)
        if limit is not None and "patched" in item.get("times faster", {}):
            yield f"{key}: × stock", item["times faster"]["patched"], limit, True


def _models_generate(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Whole calls of `generate`: on an H200 over stock's compiled ones, and a step over reading the weights; on a CPU
    over stock's eager ones, and compiled over compiled."""
    cpu = data["ways"][0] == "stock"
    for key, row in data["figures"].items() if cpu else ():
        yield f"{key}: patched ÷ stock", row["times faster"]["patched"], 1.5 if "bfloat16" in key else 1.2, True
        if "stock static" in row["ms"]:
            faster = row["ms"]["stock static"] / row["ms"]["patched static"]
            yield f"{key}: patched compiled ÷ stock compiled", faster, 1.0, True
    for key, row in data["figures"].items() if not cpu else ():
        faster, weights = row["times faster"], data["weights"][key.partition(" ")[0]]
        yield f"{key}: patched static ÷ stock static", faster["patched static"], 1.02, True
        if "graphs" in faster:
            yield f"{key}: graphs ÷ stock static", faster["graphs"], 1.8 if row["batch"] == 1 else 2.0, True
            yield f"{key}: floor of a step with graphs", weights / 4.8e9 / row["step_ms"]["graphs"], 0.45, True
        errors = row["error of log-probabilities"]
        for way in data["ways"][1:3]:
            yield f"{key}: log-probabilities, {way} ÷ stock static", errors[way] / errors["stock static"], 1.0


def _models_batching(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """`generate_batch` of mixed prompts over its sdpa."""
    yield "patched ÷ sdpa", data["speedup"]["patched"], 1.3, True


def _training(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """A compiled step over stock's compiled one, and its memory over that of Liger's model."""
    yield "patched ÷ stock, compiled", data["speedup"]["patched"], 1.15, True
    yield "peak memory ÷ Liger's", data["peak_mib"]["patched"] / data["peak_mib"]["liger"], 1.0


_OF = {
    "telemetry": _telemetry, "ranks": _ranks, "soak": _soak, "faults": _faults, "cli_start": _cli_start,
    "compile_latency": _compile_latency, "compiled": _compiled, "adapters": _adapters, "isolation": _isolation,
    "accel": _accel, "tokenization": _tokenizers, "cpu": _cpu, "models": _models,
    "linear_attention": _linear_attention, "experts": _experts, "models_generate": _models_generate,
    "models_batching": _models_batching, "training": _training, "grouped": _grouped,
}  # fmt: skip
# Kept files that have no limits: counts that must be zero and pass or fail by themselves, or figures nobody promised.
WITHOUT = frozenset(
    (
        "kits.json", "tests.json", "left_out.json", "fuzz.json", "verify.json", "verify_isa.json", "threads.json",
        "diffusion.json",
    )
)  # fmt: skip


def judged(found: Sequence[Figure], allowed: Sequence[Waiver]) -> list[tuple[Figure, Waiver | None]]:
    """Figures outside their limit, each with the waiver that covers it, or None."""
    outside = [figure for figure in found if figure.over > 1]
    return [(figure, next((item for item in allowed if item.covers(figure)), None)) for figure in outside]


def main(argv: Sequence[str] = ()) -> int:
    """Print how every gate stands; 1 when one fails."""
    bad = performance() + aged(fatal="--no-verify" not in argv)
    ledger = Ledger.read()
    for item in ledger.blocking:
        print(f"OPEN    {item.severity} {item.id}: {item.what}")
    print(f"issues: {len(ledger.open)} open, {len(ledger.blocking)} of them P0 or P1")
    wrong = 0 if "--no-verify" in argv else regressions.main(argv)
    return 1 if bad or ledger.blocking or wrong else 0


def performance() -> int:
    """Print how every figure stands; how many are outside without a waiver."""
    found, allowed = list(figures()), waivers()
    verdicts = dict(judged(found, allowed))
    bad = 0
    for figure in found:
        waiver = verdicts.get(figure)
        word = "ok" if figure.over <= 1 else "waived" if waiver is not None else "OUTSIDE"
        bad += word == "OUTSIDE"
        why = f"  ({waiver.why})" if waiver is not None else ""
        sign = ">=" if figure.at_least else "<="
        print(f"{word:8}{figure.file:40}{figure.name:48}{figure.value:12.4g} {sign} {figure.limit:g}{why}")
    for name in unread():
        print(f"UNREAD  {name}: no figure with a limit was found in it")
    for name in unsteady():
        print(f"UNSTEADY {name}: the machine changed its speed under the run, take it again")
    return bad + len(unread()) + len(unsteady())


def aged(fatal: bool) -> int:
    """Print every kept file that is older than its sources; how many of them have no waiver, where that counts."""
    allowed = [waiver for waiver in waivers() if waiver.figures == "age"]
    bad = 0
    for figure, since in ages():
        if figure.over > 1:
            waiver = next((item for item in allowed if item.covers(figure)), None)
            bad += waiver is None
            why = f"  ({waiver.why})" if waiver is not None else ""
            word = "waived" if waiver is not None else "STALE" if fatal else "stale"
            print(f"{word:8}{figure.file:40}{since or 'names no commit that is known here'}{why}")
    return bad if fatal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
