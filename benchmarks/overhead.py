"""What dispatch costs: hot calls, plans, decode loops, cold selection, first call, import. Prints a table, keeps JSON.

    python benchmarks/overhead.py --machine NAME [--json FILE] [--quick]

Every overhead is a difference of medians from one interleaved run: the public call against the chosen kernel called
directly, whose own code and data push the interpreter out of the caches. "empty target" is the same difference around a
function that does nothing. Run it on an idle machine. One attribute read is timed before and after every figure: where
it moves by more than a tenth the clock changed under the run, which says so and is not kept under benchmarks/results.
`--attempts N` repeats until a run was steady.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

# The path in Python is measured here, whatever is installed; benchmarks/accel.py holds layerzero-accel against it.
os.environ.setdefault("LAYERZERO_ACCEL", "off")

import layerzero as lz
from layerzero.dispatch.bind import resolve
from layerzero.model.context import Context
from layerzero.runtime.state import state
from layerzero.selection.engine import select

LIMITS_US = {
    "rms_norm hot": 1.5,
    "attention hot": 2.6,
    "rms_norm plan": 0.2,
    "attention plan": 0.2,
    "decode loop": 4.0,
    "cold selection, 60 kernels": 300.0,
    "first call": 50_000.0,
    "import": 80_000.0,
    "selection cache hit": 1.0,
}


def chosen(op: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function of the kernel that dispatch runs for this call."""
    return resolve(state.world.registry.get(lz.which(op, *args, **kwargs)))


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(1, 64),
        "w": torch.nn.Parameter(torch.ones(64), requires_grad=False),
        "q": torch.randn(1, 8, 16, 64),
        "k": torch.randn(1, 2, 16, 64),
        "v": torch.randn(1, 2, 16, 64),
    }


def fill(count: int) -> None:
    """Put `count` keys into the hot table by making `count` different calls."""
    w = torch.ones(8)
    for rows in range(1, count + 1):
        lz.rms_norm(torch.empty(rows, 8), w)


def hot(rounds: int, batch: int) -> dict[str, float]:
    t = tensors()
    x, w, q, k, v = t["x"], t["w"], t["q"], t["k"], t["v"]
    norm, attend = chosen("rms_norm", x, w), chosen("attention", q, k, v, is_causal=True)
    norm_plan, attend_plan = lz.plan("rms_norm", x, w), lz.plan("attention", q, k, v, is_causal=True)
    result = interleaved(
        {
            "rms_norm direct": lambda: norm(x, w, 1e-6),
            "rms_norm hot": lambda: lz.rms_norm(x, w),
            "rms_norm plan": lambda: norm_plan(x, w),
            "attention direct": lambda: attend(q, k, v, None, 0.0, True, None, None, None, None, False),
            "attention hot": lambda: lz.attention(q, k, v, is_causal=True),
            "attention plan": lambda: attend_plan(q, k, v),
        },
        rounds=rounds,
        batch=batch,
    )
    # The same path around a target that does nothing: no kernel noise in the difference.
    with nothing("rms_norm", x, w), nothing("attention", q, k, v, is_causal=True):
        norm_plan, attend_plan = lz.plan("rms_norm", x, w), lz.plan("attention", q, k, v, is_causal=True)
        quiet = interleaved(
            {
                "rms_norm hot, empty": lambda: lz.rms_norm(x, w),
                "attention hot, empty": lambda: lz.attention(q, k, v, is_causal=True),
                "rms_norm plan, empty": lambda: norm_plan(x, w),
                "attention plan, empty": lambda: attend_plan(q, k, v),
                "rms_norm empty": lambda: _nothing(x, w, 1e-6),
                "attention empty": lambda: _nothing(q, k, v, None, 0.0, True, None, None, None, None, False),
            },
            rounds=rounds,
            batch=batch * 4,
        )
    return result | quiet


def _nothing(*args: Any) -> None:
    return None


class nothing:
    """Replace the bound kernel of one call by a function that does nothing."""

    def __init__(self, op: str, *args: Any, **kwargs: Any) -> None:
        getattr(lz, op)(*args, **kwargs)
        kernel = lz.which(op, *args, **kwargs)
        self.found = [b for key, b in state.world.hot.items() if b.kernel_id == kernel and key[0] == op]
        self.saved = [b.run for b in self.found]

    def __enter__(self) -> None:
        for bound in self.found:
            bound.run = _nothing

    def __exit__(self, *error: object) -> None:
        for bound, run in zip(self.found, self.saved, strict=True):
            bound.run = run


def decode(steps: int) -> dict[str, Any]:
    """A decode loop over a growing cache, one new key each step; the cost beside the kernel and the cache."""
    cache_kind, append = growing_cache()
    # Small heads: the kernel's own traffic through the caches would otherwise drown what is measured.
    q = torch.randn(1, 2, 1, 16)
    new = torch.randn(1, 1, 1, 16)
    state.counters.reset()
    state.cache.invalidate_all()
    state.world.hot.clear()
    kernel = chosen("attention", q, new, new)
    extra: list[float] = []
    clock = time.perf_counter_ns
    for _ in range(steps):
        k, v = append(new)
        # Alternate the order, so that neither always meets the warm cache.
        times = {}
        for which in ("direct", "lz") if _ % 2 else ("lz", "direct"):
            start = clock()
            if which == "lz":
                lz.attention(q, k, v)
            else:
                kernel(q, k, v, None, 0.0, False, None, None, None, None, False)
            times[which] = clock() - start
        extra.append(times["lz"] - times["direct"])
    selections = state.counters.selections
    return {
        "cache": cache_kind,
        "steps": steps,
        "selections": selections,
        "empty_mean_us": _decode_empty(steps),
        "real_median_us": statistics.median(extra) / 1e3,
        "real_trimmed_mean_us": statistics.fmean(sorted(extra)[steps // 20 : -steps // 20]) / 1e3,
    }


def _decode_empty(steps: int) -> float:
    """The mean over the same loop around an empty target; the selections of the loop are in it."""
    _, append = growing_cache()
    q, new = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 1, 16)
    held = []
    for _ in range(steps):
        held.append(append(new))
    for bound in {id(b): b for b in state.world.hot.values()}.values():
        bound.run = _nothing
    state.world.hot.clear()
    clock = time.perf_counter_ns
    start = clock()
    for k, v in held:
        lz.attention(q, k, v)
    middle = clock()
    for k, v in held:
        _nothing(q, k, v, None, 0.0, False, None, None, None, None, False)
    total = (middle - start) - (clock() - middle)
    state.world.memo.clear()  # the emptied targets must not be met again
    state.world.hot.clear()
    return total / steps / 1e3


def growing_cache() -> tuple[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    try:
        from transformers import DynamicCache
    except ImportError:
        held: list[torch.Tensor] = []

        def concatenate(new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held[:] = [torch.cat([*held, new], dim=2)]
            return held[0], held[0]

        return "torch.cat, as DynamicCache does", concatenate
    cache = DynamicCache()
    return "transformers.DynamicCache", lambda new: cache.update(new, new, 0)


def cold(kernels: int = 60) -> float:
    """µs of one selection among many kernels (no cache)."""
    template = state.world.registry.get("sdpa.attention.flash_cpu")
    extra = [
        replace(template, kernel_id=f"bench.attention.k{i}", backend="bench", priority=float(i % 7))
        for i in range(kernels - len(state.world.registry.by_op("attention")))
    ]
    world = state.world.changed(registry=state.world.registry.add(extra))
    q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    ctx = Context.from_tensors(q, k, k, layout="BHSD", is_causal=True)
    select(ctx, world)
    samples = []
    for _ in range(300):
        start = time.perf_counter_ns()
        select(ctx, world)
        samples.append(time.perf_counter_ns() - start)
    return statistics.median(samples) / 1e3


def starts(runs: int) -> dict[str, float]:
    """µs of `import layerzero` after torch, and of the first call with the core's own backends, in fresh processes."""
    first = (
        "import time, torch\n"
        "q = torch.randn(1, 8, 16, 64); k = torch.randn(1, 2, 16, 64)\n"
        "t = time.perf_counter(); import layerzero as lz; a = time.perf_counter() - t\n"
        "import layerzero.backends.sdpa.kernels\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "t = time.perf_counter(); lz.attention(q, k, k, is_causal=True); print(a, time.perf_counter() - t)"
    )
    imports, calls, everything = [], [], []
    # An installed package has its bytecode; a source tree gets it here in the first run, which is not counted.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", first]
    for _ in range(runs + 1):
        for sink, plugins in ((calls, {"LAYERZERO_PLUGINS": ""}), (everything, {})):
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=env | plugins)
            a, b = out.stdout.split()
            imports.append(float(a) * 1e6)
            sink.append(float(b) * 1e6)
    return {
        "import": statistics.median(imports[2:]),
        "first call": statistics.median(calls[1:]),
        "first call, with every plugin installed here": statistics.median(everything[1:]),
    }


def threads(count: int, lookups: int) -> dict[str, Any]:
    """Many threads, mixed calls, the World swapped all the while: errors and stale choices."""
    shapes = [torch.randn(1, 2, n, 8) for n in range(1, 33)]
    errors: list[BaseException] = []
    stale = [0]
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            lz.lock("attention", "sdpa.attention.math")
            if lz.which("attention", shapes[0], shapes[0], shapes[0]) != "sdpa.attention.math":
                stale[0] += 1
            lz.unlock("attention")
            state.cache.invalidate_all()

    def work(seed: int) -> None:
        try:
            for i in range(lookups):
                t = shapes[(i * 7 + seed) % len(shapes)]
                lz.attention(t, t, t)
        except BaseException as error:
            errors.append(error)

    swapper = threading.Thread(target=swap)
    swapper.start()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    swapper.join()
    return {
        "threads": count,
        "lookups_each": lookups,
        "errors": len(errors),
        "stale": stale[0],
        "swaps": state.counters.swaps,
        "seconds": round(time.perf_counter() - start, 1),
    }


def selection_parts(count: int) -> dict[str, float]:
    """The pieces of a cold call and of a lookup, in µs: context, cached decision, and a hot lookup's distribution."""
    q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    decision = lz.select("attention", q, k, k, is_causal=True)
    key = (decision.context, state.world.fingerprint)
    assert state.cache.get(key) is decision
    lz.attention(q, k, k, is_causal=True)
    table = state.world.hot
    hot_key = next(name for name, bound in table.items() if name[0] == "attention" and bound.decision is decision)
    hits = {
        "selection cache hit": lambda: state.cache.get(key),
        "hot table hit": lambda: table.get(hot_key),
        "nothing": lambda: None,
    }
    build = {"context build": lambda: Context.from_tensors(q, k, k, layout="BHSD", is_causal=True)}
    result = interleaved(hits, rounds=50, batch=500) | interleaved(build, rounds=50, batch=50)
    samples, loaded = lookups(count, (q, k, k)), lookups(count, (q, k, k), beside=4)
    return {
        "context build": result["context build"] / 1e3,
        "selection cache hit": (result["selection cache hit"] - result["nothing"]) / 1e3,
        "hot table hit": (result["hot table hit"] - result["nothing"]) / 1e3,
        "hot lookup median": samples[count // 2] / 1e3,
        "hot lookup p99": samples[count * 99 // 100] / 1e3,
        "lookups per second": 1e9 * count / sum(samples),
        "hot lookup median, under load": loaded[count // 2] / 1e3,
        "hot lookup p99, under load": loaded[count * 99 // 100] / 1e3,
    }


def lookups(count: int, call: tuple[torch.Tensor, ...], beside: int = 0) -> list[int]:
    """ns of hot calls around an empty target, sorted; `beside` so many threads that make calls of their own."""
    stop = threading.Event()

    def other(rows: int) -> None:
        x, w = torch.randn(rows, 64), torch.ones(64)
        while not stop.is_set():
            lz.rms_norm(x, w)

    workers = [threading.Thread(target=other, args=(rows,)) for rows in range(2, beside + 2)]
    for worker in workers:
        worker.start()
    samples = []
    clock = time.perf_counter_ns
    try:
        with nothing("attention", *call, is_causal=True):
            for _ in range(count):
                start = clock()
                lz.attention(*call, is_causal=True)
                samples.append(clock() - start)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    return sorted(samples)


def peers(rounds: int, batch: int) -> dict[str, Any]:
    """The same tiny call through other dispatchers, where they are installed."""
    found: dict[str, Any] = {}
    x = torch.randn(1, 64)

    @torch.library.custom_op(f"lzbench::nothing{time.monotonic_ns()}", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    result = interleaved(
        {"custom_op": lambda: custom(x), "body": lambda: torch.empty_like(x)}, rounds=rounds, batch=batch
    )
    found["torch.library.custom_op"] = (result["custom_op"] - result["body"]) / 1e3
    for name, measure_peer in (("flashinfer_bench", flashinfer_bench_apply), ("xformers", xformers_dispatch)):
        try:
            found[name] = measure_peer(rounds, batch)
        except Exception as error:
            found[name] = f"not measured: {type(error).__name__}"
    return found


def flashinfer_bench_apply(rounds: int, batch: int) -> float:
    """µs of flashinfer-bench's `apply` around a function that does nothing: key, look-up, call."""
    import contextlib
    import io

    import flashinfer_bench
    from flashinfer_bench.apply import ApplyConfig, ApplyRuntime
    from flashinfer_bench.data import Definition, TraceSet

    spec = {"shape": ["rows", "hidden"], "dtype": "float32"}
    definition = Definition(
        name="lz_nothing",
        op_type="rmsnorm",
        axes={"rows": {"type": "var"}, "hidden": {"type": "const", "value": 64}},
        inputs={"x": spec},
        outputs={"y": spec},
        reference="def run(x):\n    return x\n",
    )
    x = torch.randn(1, 64)
    with contextlib.redirect_stdout(io.StringIO()):
        runtime = ApplyRuntime(TraceSet(definitions={definition.name: definition}), ApplyConfig())
    with runtime:
        result = interleaved(
            {
                "apply": lambda: flashinfer_bench.apply("lz_nothing", args=(x,), fallback=_nothing),
                "bare": lambda: _nothing(x),
            },
            rounds=rounds,
            batch=batch,
        )
    return (result["apply"] - result["bare"]) / 1e3


def xformers_dispatch(rounds: int, batch: int) -> float:
    """µs of xFormers' choice among its own attention operators; they need a GPU."""
    from xformers.ops import fmha
    from xformers.ops.fmha.dispatch import _dispatch_fw

    q = torch.randn(1, 16, 8, 64, device="cuda", dtype=torch.float16)
    inputs = fmha.Inputs(q, q, q)
    result = interleaved(
        {"choose": lambda: _dispatch_fw(inputs, False), "nothing": lambda: None}, rounds=rounds, batch=batch
    )
    return (result["choose"] - result["nothing"]) / 1e3


def calibration() -> dict[str, float]:
    """ns of the attribute reads a key is made of: the speed of the machine in the same units."""
    t = torch.randn(1, 8, 16, 64)
    calls = {
        "empty lambda": lambda: None,
        "shape": lambda: t.shape,
        "stride": lambda: t.stride(),
        "dtype": lambda: t.dtype,
        "device": lambda: t.device,
        "is_contiguous": lambda: t.is_contiguous(),
    }
    result = interleaved(calls, rounds=200, batch=2000)
    base = result.pop("empty lambda")
    return {name: round(value - base, 1) for name, value in result.items()}


class Clock:
    """The speed of the machine while the figures are taken: ns of one `tensor.shape`, again and again."""

    def __init__(self) -> None:
        self.reads: list[float] = []
        self.tensor = torch.randn(1, 8, 16, 64)

    def read(self) -> None:
        t = self.tensor
        found = interleaved({"shape": lambda: t.shape, "empty": lambda: None}, rounds=40, batch=1000)
        self.reads.append(round(found["shape"] - found["empty"], 1))

    @property
    def steady(self) -> bool:
        return max(self.reads) <= 1.1 * min(self.reads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="folder under benchmarks/results for the JSON")
    parser.add_argument("--json", type=Path, help="write the JSON to this file instead")
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test, not a figure")
    parser.add_argument("--without-threads", action="store_true", help="leave out the minutes of the thread run")
    parser.add_argument("--attempts", type=int, default=1, help="measure again, up to N times, until a run is steady")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    path = options.json or RESULTS / options.machine / "overhead.json"
    for attempt in range(1, options.attempts + 1):
        data = measure(options, attempt)
        if data["steady"]:
            break
    if options.json is None and not data["steady"]:
        print(f"not kept: the clock moved by {data['clock_spread']:.2f} under every run")
        return 1
    write_json(path, data)
    return 0


def measure(options: argparse.Namespace, attempt: int) -> dict[str, Any]:
    """One run, printed: its figures and how far the clock moved meanwhile."""
    rounds, batch = (30, 50) if options.quick else (400, 250)
    watch = Clock()
    lz.rms_norm(torch.ones(1, 8))  # there is a World
    state.world.hot.clear()  # an earlier attempt left its keys
    watch.read()
    few = hot(rounds, batch)
    watch.read()
    keys_before = len(state.world.hot)
    fill(200 if options.quick else 10_000)
    many = hot(rounds, batch)
    watch.read()
    keys_after = len(state.world.hot)
    figures = {}
    for op in ("rms_norm", "attention"):
        figures[f"{op} hot"] = few[f"{op} hot"] - few[f"{op} direct"]
        figures[f"{op} plan"] = few[f"{op} plan"] - few[f"{op} direct"]
        figures[f"{op} hot, empty target"] = few[f"{op} hot, empty"] - few[f"{op} empty"]
        figures[f"{op} hot, empty target, many keys"] = many[f"{op} hot, empty"] - many[f"{op} empty"]
        figures[f"{op} plan, empty target"] = few[f"{op} plan, empty"] - few[f"{op} empty"]
    figures = {name: round(value / 1e3, 3) for name, value in figures.items()}
    loop = decode(256 if options.quick else 4096)
    figures["decode loop"] = round(loop["real_trimmed_mean_us"], 3)
    figures["decode loop, empty target"] = round(loop["empty_mean_us"], 3)
    watch.read()
    figures["cold selection, 60 kernels"] = round(cold(), 1)
    watch.read()
    figures |= {name: round(value) for name, value in starts(2 if options.quick else 7).items()}
    watch.read()
    parts = selection_parts(2_000 if options.quick else 100_000)
    figures["selection cache hit"] = round(parts["selection cache hit"], 3)
    data = {
        "benchmark": "overhead",
        "commit": commit(),
        "command": "python benchmarks/overhead.py",
        "machine": machine(),
        "unit": "us",
        "figures": figures,
        "limits": LIMITS_US,
        "keys": {"few": keys_before, "many": keys_after},
        "decode": loop,
        "parts": {name: round(value, 3) for name, value in parts.items()},
        "threads": None if options.without_threads else threads(20, 200) if options.quick else threads(100, 10_000),
        "peers": peers(30, 20) if options.quick else peers(100, 100),
        "calibration_ns": calibration(),
        "shape_read_ns": watch.reads,
        "clock_spread": round(max(watch.reads) / min(watch.reads), 3),
        "steady": watch.steady,
        "attempt": attempt,
        "medians_ns": {name: round(value, 1) for name, value in few.items()},
    }
    for name, value in figures.items():
        limit = LIMITS_US.get(name)
        verdict = "" if limit is None else f"  limit {limit:g}  {'ok' if value <= limit else 'OVER'}"
        print(f"{name:42} {value:12.3f} us{verdict}")
    print(f"decode: {loop['selections']} selections in {loop['steps']} steps over {loop['cache']}")
    print(f"parts: {data['parts']}")
    print(f"threads: {data['threads']}")
    print(f"peers: {data['peers']}")
    print(f"machine: {data['machine']}  calibration ns: {data['calibration_ns']}")
    print(f"attempt {attempt}: the clock was {'steady' if watch.steady else 'NOT STEADY'}, ns of a read: {watch.reads}")
    return data


if __name__ == "__main__":
    raise SystemExit(main())
