"""How long requests take while kernels compile beside them, against `LAYERZERO_JIT=off`; with a plot over time.

    python benchmarks/compile_latency.py --machine NAME [--seconds S] [--device cpu|cuda] [--model] [--json FILE]

Each case is a process of its own that makes a call every millisecond and meets a new size now and then, so that a
kernel wants compiling. On a CPU the compile is Triton's for an H200 given by value, a real one that no CPU loads, and
then come compilers that hang, hold the interpreter, crash or fill the disk; "thread" is the same Triton compile in a
thread of the process that serves, as it would be without compilers elsewhere. With `--device cuda` the kernels are
those of the installed backends, with an empty cache. The budget: the p99 of a call is at most 2 ms above that of "off".

The cases run in turns, round by round, and all calls of a case are counted together: whatever else runs on the machine
meets all of them.

`--model` measures tokens instead: a Qwen3-shaped transformers model with random weights, patched by `lz.patch`, makes
them one by one from prompts of 500 tokens, in a fresh process with an empty compile cache, against `LAYERZERO_JIT=off`.
The budget: while kernels compile, p50 at most 1.1 and p99 at most 1.5 times that of "off". On a CPU the model is tiny.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "packages" / "layerzero-core" / "tests" / "jit"))  # planted_compilers

BUDGET_MS = 2.0
CASES = ("off", "compiling", "hang", "hold", "crash", "fill", "thread")
ON_GPU = ("off", "compiling")
MODEL_BUDGET = {"p50": 1.1, "p99": 1.5}
# layers, hidden, intermediate, vocabulary, heads, KV heads, head_dim; prompt, tokens made of each prompt
SIZES = {
    "cuda": (14, 2048, 6144, 151_936, 16, 8, 128, 500, 64),
    "cpu": (2, 64, 192, 512, 4, 2, 16, 50, 16),
}
# The planted kernel is to be wanted: its priority decides.
PLANTED = {"LAYERZERO_JIT_WORKERS": "1", "LAYERZERO_PERFDB_SHIPPED": "0"}
CACHES = (
    "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
)  # fmt: skip
EVERY_S = 0.001
NEW_SIZE_S = 0.5
_BIN_S = 0.05


# -- in a process of its own ---------------------------------------------------------------------
def for_an_h200(order: Any) -> None:
    """The compiler of "compiling": a Triton RMSNorm of this size, for a device that is not here."""
    import torch

    from layerzero.model.artifact import CompileOrder
    from layerzero.model.device import DeviceSpec
    from layerzero.plugin.triton_compiler import compile_order

    hidden = order.args[0].shape[-1]
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, hidden), (hidden,)))
    device = DeviceSpec.for_sm(90, multiprocessors=132)
    compile_order(CompileOrder("a.b.c", "layerzero_triton.norm:rms_norm", (x, w, 1e-6), {}, {}, device))


_seen: set[int] = set()


def here(x: Any, weight: Any, eps: float) -> Any:
    """The adapter of "thread": compiles when it first meets a size."""
    from layerzero.model.artifact import CompileOrder

    hidden = x.shape[-1]
    if hidden not in _seen:
        _seen.add(hidden)
        for_an_h200(CompileOrder("a.b.c", "", (x,), {}, {}, None))  # type: ignore[arg-type]
    return plain(x, weight, eps)


def plain(x: Any, weight: Any, eps: float) -> Any:
    """The adapter of the others."""
    import torch

    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _plant(case: str) -> None:
    """Register a kernel that would be chosen if it were compiled."""
    from layerzero.model.enums import Platform
    from layerzero.model.kernel import KernelSpec
    from layerzero.runtime.state import state

    compiler = {"compiling": "compile_latency:for_an_h200", "thread": None}.get(case, f"planted_compilers:{case}")
    for number in range(8):  # one that fails three times is left alone: there are others
        kernel = KernelSpec(
            f"planted.rms_norm.k{number}", "rms_norm", "planted",
            f"compile_latency:{'here' if case == 'thread' else 'plain'}", priority=300.0 - number, jit=True,
            jit_key=("hidden",), platforms=frozenset({Platform.CPU}), dtypes=frozenset({"float32"}),
            compiler=None if case == "off" else compiler,
        )  # fmt: skip
        state.publish(registry=state.world.registry.add((kernel,)))


def serve(case: str, seconds: float, device: str) -> dict[str, Any]:
    """Make calls for so long; the µs of each, when it was, and when something was compiled or loaded."""
    import torch

    import layerzero as lz

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = [512 + 64 * number for number in range(int(seconds / NEW_SIZE_S) + 1)]
    inputs = [(torch.randn(4, n, device=device, dtype=dtype), torch.ones(n, device=device, dtype=dtype)) for n in sizes]
    lz.rms_norm(*inputs[0], 1e-6)
    if device == "cpu":
        _plant(case)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    marks = _marks(began := time.perf_counter())
    at: list[float] = []
    took: list[float] = []
    while (now := time.perf_counter()) - began < seconds:
        x, w = inputs[int((now - began) / NEW_SIZE_S)]
        start = time.perf_counter()
        lz.rms_norm(x, w, 1e-6)
        sync()
        end = time.perf_counter()
        at.append(start - began)
        took.append((end - start) * 1e6)
        time.sleep(EVERY_S)
    return _told(at, took, marks)


def serve_model(case: str, seconds: float, device: str) -> dict[str, Any]:
    """Make tokens for so long; the µs of each, when it was, and when something was compiled or loaded."""
    import torch
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    import layerzero as lz

    layers, hidden, inner, vocab, heads, kv_heads, head_dim, prompt, count = SIZES[device]
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, vocab_size=vocab, head_dim=head_dim,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(vocab, (1, prompt), device=device)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def tokens(steps: int) -> Any:
        """The seconds of the prompt and then of each token."""
        past, given = DynamicCache(config=config), ids
        for _ in range(steps + 1):
            start = time.perf_counter()
            given = model(given, past_key_values=past, logits_to_keep=1).logits[:, -1:].argmax(-1)
            sync()
            yield start, time.perf_counter() - start

    with torch.inference_mode():
        list(tokens(8))  # torch's own first calls are none of ours
        began = time.perf_counter()
        lz.patch(model)
        patching = time.perf_counter() - began
        if device == "cpu":
            _plant(case)
        marks = _marks(began := time.perf_counter())
        at: list[float] = []
        took: list[float] = []
        prompts: list[float] = []
        while time.perf_counter() - began < seconds:
            (_, first), *rest = tokens(count)
            prompts.append(first * 1e3)
            at.extend(start - began for start, _ in rest)
            took.extend(spent * 1e6 for _, spent in rest)
    return _told(at, took, marks, prompt_ms=prompts, patch_s=round(patching, 2), libraries=_libraries())


def _libraries() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in (
        "torch",
        "transformers",
        "triton",
        "flashinfer-python",
        "flash-attn-4",
        "quack-kernels",
        "liger-kernel",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _marks(began: float) -> list[tuple[str, float]]:
    """When something was compiled or loaded, from now on."""
    from layerzero.telemetry.events import events

    marks: list[tuple[str, float]] = []
    events.subscribe(
        lambda tree: marks.extend(
            (item.kind, round(time.perf_counter() - began, 3)) for item in tree if item.kind in ("compile", "load")
        )
    )
    return marks


def _told(at: list[float], took: list[float], marks: list[tuple[str, float]], **more: Any) -> Any:
    """Hand the figures to the process that asked, and end."""
    from layerzero.runtime.state import state

    found = {
        "at": at, "us": took, "marks": marks, "ready": sorted({artifact[0] for artifact in state.world.ready}),
        "failed": sorted({why.code.value for why in state.world.uncompilable.values()}),
        "reasons": sorted({str(why)[:300] for why in state.world.uncompilable.values()}),
        "long_loads": state.counters.long_loads, **more,
    }  # fmt: skip
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # what is compiling is ended with this process, and nobody waits for it


def _run(case: str, seconds: float, device: str, serving: str = "serve") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "LAYERZERO_JIT": "off" if case == "off" else "background",
            "LAYERZERO_JIT_CACHE_DIR": f"{folder}/jit",
            "LAYERZERO_JIT_TIMEOUT": "3" if case in ("hang", "hold") else "300",
            **({} if device == "cuda" else PLANTED),
            "PLANTED_TOLD": f"{folder}/told.json",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        for name in CACHES:
            env.pop(name, None)
        code = f"import compile_latency; compile_latency.{serving}({case!r}, {seconds}, {device!r})"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{case}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


# -- figures -------------------------------------------------------------------------------------
def percentiles(us: Sequence[float]) -> dict[str, float]:
    """p50, p99, p999 and the slowest."""
    ordered = sorted(us)
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in shares.items()}
    return {name: round(value, 1) for name, value in {**found, "max": ordered[-1]}.items()}


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over all rounds of a case, and what was compiled meanwhile."""
    us = [value for run in runs for value in run["us"]]
    kinds = [kind for run in runs for kind, _ in run["marks"]]
    return {
        "calls": len(us),
        "us": percentiles(us),
        "compiles": kinds.count("compile"),
        "loads": kinds.count("load"),
        "long_loads": sum(run["long_loads"] for run in runs),
        "failed": sorted({code for run in runs for code in run["failed"]}),
    }


def series(run: dict[str, Any]) -> dict[str, list[float]]:
    """The slowest and the median call of each twentieth of a second, for the plot."""
    bins: dict[int, list[float]] = {}
    for at, us in zip(run["at"], run["us"], strict=True):
        bins.setdefault(int(at / _BIN_S), []).append(us)
    rows = sorted(bins.items())
    return {
        "at": [round(number * _BIN_S, 2) for number, _ in rows],
        "slowest_us": [round(max(values), 1) for _, values in rows],
        "median_us": [round(sorted(values)[len(values) // 2], 1) for _, values in rows],
    }


def page(data: dict[str, Any], what: str = "calls") -> str:
    """One self-contained page: a panel a case, µs on a logarithmic axis over seconds; compiles and loads are ticks."""
    import math

    wide, high, left = 900, 120, 60
    seconds, low, top = data["seconds"], 1.0, 6.0
    panels = []
    for number, (case, plot) in enumerate(data["series"].items()):
        base = (number + 1) * (high + 26)
        found = data["cases"][case]

        def x(at: float) -> float:
            return left + (wide - left - 10) * at / seconds

        def y(us: float, base: float = base) -> float:
            return base - high * (min(max(math.log10(max(us, 1.0)), low), top) - low) / (top - low)

        words = (
            f"{case}: p50 {found['us']['p50']:.0f} µs, p99 {found['us']['p99']:.0f}, slowest {found['us']['max']:.0f}"
        )
        panels.append(f'<text x="{left}" y="{base - high - 4}" font-weight="bold">{html.escape(words)}</text>')
        for power, name in ((1, "10 µs"), (3, "1 ms"), (5, "100 ms")):
            at = y(10.0**power)
            panels.append(f'<line x1="{left}" y1="{at:.1f}" x2="{wide - 10}" y2="{at:.1f}" stroke="#ddd"/>')
            panels.append(f'<text x="{left - 4}" y="{at + 4:.1f}" text-anchor="end">{name}</text>')
        for kind, at in data["marks"][case]:
            colour = "#36c" if kind == "load" else "#c80"
            panels.append(f'<line x1="{x(at):.1f}" y1="{base}" x2="{x(at):.1f}" y2="{base - high}" stroke="{colour}"/>')
        for name, colour in (("slowest_us", "#c44"), ("median_us", "#3a7")):
            dots = " ".join(f"{x(a):.1f},{y(us):.1f}" for a, us in zip(plot["at"], plot[name], strict=True))
            panels.append(f'<polyline points="{dots}" fill="none" stroke="{colour}"/>')
    tall = (len(data["series"]) + 1) * (high + 26)
    told = html.escape(f"{data['machine']['cpu']}, {data['device']}, commit {data['commit']}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>'
        f"Latency of {what} while kernels compile</title><body style='font-family:sans-serif'>"
        f"<h1>Latency of {what} while kernels compile</h1><p>{told}. Red: the slowest of each 50 ms, green: "
        "the median; orange lines: a compile ended, blue: an artifact was loaded. "
        "One round of each case; the figures are over all rounds.</p>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-size="11">{"".join(panels)}</svg>'
        "</body></html>\n"
    )


def of_model(given: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure tokens, print, keep."""
    from timing import RESULTS, commit, machine, write_json

    runs = {case: _run(case, given.seconds, given.device, "serve_model") for case in ("off", "compiling")}
    ends = [at for _, at in runs["compiling"]["marks"]]
    if not ends:
        raise SystemExit(f"nothing was compiled beside these tokens: {runs['compiling']['reasons']}")
    until = max(ends)  # later tokens are quicker than those of "off", and are not what is asked about
    beside = [us for at, us in zip(runs["compiling"]["at"], runs["compiling"]["us"], strict=True) if at <= until]
    found = {case: figures([run]) for case, run in runs.items()}
    found["compiling"]["beside"] = percentiles(beside)
    found["compiling"]["over_off"] = {
        name: round(found["compiling"]["beside"][name] / found["off"]["us"][name], 3) for name in MODEL_BUDGET
    }
    for case, row in found.items():
        row |= {name: runs[case][name] for name in ("patch_s", "prompt_ms", "ready", "reasons")}
        print(f"{case:<10} {row['us']} µs, patched in {row['patch_s']} s, ready: {', '.join(row['ready'])}")
        for why in row["reasons"]:
            print(f"{'':<10} {why}")
    ratio, row = found["compiling"]["over_off"], found["compiling"]
    print(
        f"beside {row['compiles']} compiles and {row['loads']} loads ({row['long_loads']} long), until {until:.1f} s: "
    )
    print(f"{row['beside']} µs; of off p50 {ratio['p50']}, p99 {ratio['p99']}; budget {MODEL_BUDGET}")
    data = {
        "command": " ".join(("python benchmarks/compile_latency.py", *argv)), "commit": commit(), "machine": machine(),
        "device": given.device, "libraries": runs["off"]["libraries"], "sizes": SIZES[given.device],
        "budget": MODEL_BUDGET, "seconds": given.seconds, "until": until, "cases": found,
        "series": {case: series(run) for case, run in runs.items()},
        "marks": {case: run["marks"] for case, run in runs.items()},
    }  # fmt: skip
    path = given.json or RESULTS / given.machine / f"model_latency_{given.device}.json"
    write_json(path, data)
    path.with_suffix(".html").write_text(page(data, "tokens of a patched model"), encoding="utf-8")
    return 0


def main(argv: Sequence[str]) -> int:
    """Measure, print, keep."""
    from timing import RESULTS, commit, machine, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if given.model:
        return of_model(given, argv)
    cases = CASES if given.device == "cpu" else ON_GPU
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(given.rounds):
        for case in cases:
            runs[case].append(_run(case, given.seconds, given.device))
    found = {case: figures(rounds) for case, rounds in runs.items()}
    base = found["off"]["us"]["p99"]
    for case, row in found.items():
        row["p99_over_off_ms"] = round((row["us"]["p99"] - base) / 1e3, 3)
        us = row["us"]
        times = "  ".join(f"{name} {us[name]:>9.1f}" for name in ("p50", "p99", "p999", "max"))
        beside = f"{row['compiles']} compiles, {row['loads']} loads ({row['long_loads']} long)"
        print(f"{case:<10} {times} µs  {beside}  {', '.join(row['failed'])}")
    worst = max(row["p99_over_off_ms"] for case, row in found.items() if case != "thread")
    print(f"p99 above off: at most {worst:.2f} ms with compilers elsewhere, budget {BUDGET_MS} ms")
    if not found["compiling"]["compiles"]:
        raise SystemExit("nothing was compiled beside these calls: they show nothing, and are not kept")
    data = {
        "command": " ".join(("python benchmarks/compile_latency.py", *argv)),
        "commit": commit(), "machine": machine(), "device": given.device, "budget_ms": BUDGET_MS,
        "seconds": given.seconds, "rounds": given.rounds, "cases": found,
        "series": {case: series(rounds[0]) for case, rounds in runs.items()},
        "marks": {case: rounds[0]["marks"] for case, rounds in runs.items()},
    }  # fmt: skip
    path = given.json or RESULTS / given.machine / f"compile_latency_{given.device}.json"
    write_json(path, data)
    path.with_suffix(".html").write_text(page(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
