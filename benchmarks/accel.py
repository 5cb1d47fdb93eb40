"""What dispatch costs with layerzero-accel, beside the same functions in Python and bare torch. A table, and JSON.

    LAYERZERO_ACCEL=on python benchmarks/accel.py --machine NAME [--json FILE] [--quick]

Every overhead is a difference of medians from one interleaved run: the public function against its empty target, in C
and in Python, with the gradient mode off (as in inference) and on. The budget was written for a server on which reading
`tensor.shape` takes 140 ns, so each figure is given raw and scaled by that read, timed before and after. Ratios to a
bare torch call ("lz.rms_norm / F.rms_norm") are of real kernels, whatever is chosen here. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.accel import accelerator
from layerzero.runtime.state import state

SHAPE_NS = 140.0  # of the server the budget was written for
LIMITS_US = {"attention, three tensors": 0.45, "layer_norm, three tensors": 0.45}
P99_US = 2.0
RATIOS = {"rms_norm": 1.0, "rope": 1.0, "silu_and_mul": 1.0, "layer_norm": 1.0, "attention": 1.03}


def _nothing(*args: Any) -> None:
    return None


class emptied:
    """Every bound kernel of the World does nothing for a while."""

    def __enter__(self) -> None:
        self.saved = [(bound, bound.run) for bound in {id(b): b for b in state.world.hot.values()}.values()]
        for bound, _ in self.saved:
            bound.run = _nothing

    def __exit__(self, *error: object) -> None:
        for bound, run in self.saved:
            bound.run = run


def inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(1, 64),
        "w": torch.nn.Parameter(torch.ones(64), requires_grad=False),
        "b": torch.zeros(64),
        "q": torch.randn(1, 8, 16, 64),
        "k": torch.randn(1, 2, 16, 64),
        "v": torch.randn(1, 2, 16, 64),
    }


def shape_read() -> float:
    t = torch.randn(1, 8, 16, 64)
    found = interleaved({"shape": lambda: t.shape, "empty": lambda: None}, rounds=40, batch=1000)
    return found["shape"] - found["empty"]


def keyed(rounds: int, batch: int) -> dict[str, float]:
    """ns over the empty target, by op, in C and in Python."""
    t = inputs()
    x, w, b, q, k, v = (t[name] for name in "xwbqkv")
    python = {name: PUBLIC[name].function for name in ("attention", "rms_norm", "layer_norm", "silu_and_mul")}
    attend, norm, layer, silu = python["attention"], python["rms_norm"], python["layer_norm"], python["silu_and_mul"]
    contestants: dict[str, Callable[[], Any]] = {
        "attention, three tensors": lambda: lz.attention(q, k, v, is_causal=True),
        "layer_norm, three tensors": lambda: lz.layer_norm(x, w, b),
        "rms_norm, two tensors": lambda: lz.rms_norm(x, w),
        "silu_and_mul, one tensor": lambda: lz.silu_and_mul(x),
        "attention in Python": lambda: attend(q, k, v, is_causal=True),
        "layer_norm in Python": lambda: layer(x, w, b),
        "rms_norm in Python": lambda: norm(x, w),
        "silu_and_mul in Python": lambda: silu(x),
        "empty 11": lambda: _nothing(q, k, v, None, 0.0, True, None, None, None, None, False),
        "empty 4": lambda: _nothing(x, w, b, 1e-5),
        "empty 3": lambda: _nothing(x, w, 1e-6),
        "empty 1": lambda: _nothing(x),
    }
    base = {"attention": "empty 11", "layer_norm": "empty 4", "rms_norm": "empty 3", "silu_and_mul": "empty 1"}
    for call in contestants.values():
        for _ in range(3):
            call()
    with emptied():
        found = interleaved(contestants, rounds=rounds, batch=batch)
    return {
        name: value - found[base[name.split(",")[0].split(" ")[0]]]
        for name, value in found.items()
        if not name.startswith("empty")
    }


def growing(steps: int) -> dict[str, float]:
    """Mean ns of a step over a growing KV cache, around an empty target: by bucket, one new key a step."""
    q, new = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 1, 16)
    held = [torch.cat([new] * n, dim=2) for n in range(1, steps + 1)]
    found = {}
    for name, function in (("in C", lz.attention), ("in Python", PUBLIC["attention"].function)):
        for k in held:  # every bucket is known
            function(q, k, k)
        state.world.hot.clear()
        for k in held[:: max(1, steps // 200)]:
            function(q, k, k)
        with emptied():
            start = time.perf_counter_ns()
            for k in held:
                function(q, k, k)
            middle = time.perf_counter_ns()
            for k in held:
                _nothing(q, k, k, None, 0.0, False, None, None, None, None, False)
            found[name] = ((middle - start) - (time.perf_counter_ns() - middle)) / steps
    return found


def crowd(threads: int, calls: int) -> dict[str, float]:
    """ns of single calls made by many threads at once, less what the clock itself takes: median and p99."""
    t = inputs()
    q, k, v = t["q"], t["k"], t["v"]
    python = PUBLIC["attention"].function
    found = {}
    for name, function in (("in C", lz.attention), ("in Python", python)):
        for _ in range(4):
            function(q, k, v, is_causal=True)
        samples: list[list[int]] = [[] for _ in range(threads)]

        def work(mine: list[int], function: Callable[..., Any] = function) -> None:
            clock = time.perf_counter_ns
            for _ in range(calls):
                start = clock()
                function(q, k, v, is_causal=True)
                mine.append(clock() - start)

        with emptied():
            pool = [threading.Thread(target=work, args=(mine,)) for mine in samples]
            for thread in pool:
                thread.start()
            for thread in pool:
                thread.join()
        every = sorted(value for mine in samples for value in mine)
        clock = time.perf_counter_ns
        overhead = statistics.median(-(clock() - clock()) for _ in range(2000))
        found[f"{name}, median"] = every[len(every) // 2] - overhead
        found[f"{name}, p99"] = every[len(every) * 99 // 100] - overhead
    return found


def eager_rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """As transformers writes it."""

    def half(x: Any) -> Any:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


def beside_torch(rounds: int, batch: int) -> dict[str, float]:
    """Medians in ns of whole small calls: ours in C, ours in Python, bare torch."""
    torch.manual_seed(0)
    x, w, b = torch.randn(1, 64), torch.ones(64), torch.zeros(64)
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 16, 64), torch.randn(1, 8, 16, 64)
    rq, rk = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64)
    cos, sin = torch.randn(1, 32), torch.randn(1, 32)
    wide_cos, wide_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    gate = torch.randn(1, 128)
    sdpa = F.scaled_dot_product_attention
    python = {name: PUBLIC[name].function for name in RATIOS}
    ours = {
        "rms_norm": lambda f: lambda: f(x, w),
        "layer_norm": lambda f: lambda: f(x, w, b),
        "silu_and_mul": lambda f: lambda: f(gate),
        "rope": lambda f: lambda: f(rq, rk, cos, sin),
        "attention": lambda f: lambda: f(q, k, v),
    }
    bare = {
        "rms_norm": lambda: F.rms_norm(x, (64,), w, 1e-6),
        "layer_norm": lambda: F.layer_norm(x, (64,), w, b, 1e-5),
        "silu_and_mul": lambda: F.silu(gate[..., :64]) * gate[..., 64:],
        "rope": lambda: eager_rope(rq, rk, wide_cos, wide_sin),
        "attention": lambda: sdpa(q, k, v),
    }
    contestants: dict[str, Callable[[], Any]] = {}
    for name in RATIOS:
        contestants[f"{name} in C"] = ours[name](getattr(lz, name))
        contestants[f"{name} in Python"] = ours[name](python[name])
        contestants[f"{name} in torch"] = bare[name]
    for call in contestants.values():
        for _ in range(4):
            call()
    kernels = {
        "rms_norm": lz.which("rms_norm", x, w),
        "layer_norm": lz.which("layer_norm", x, w, b),
        "silu_and_mul": lz.which("silu_and_mul", gate),
        "rope": lz.which("rope", rq, rk, cos, sin),
        "attention": lz.which("attention", q, k, v),
    }
    print("kernels:", kernels)
    return interleaved(contestants, rounds=rounds, batch=batch)


def many_keys(count: int, rounds: int, batch: int) -> dict[str, float]:
    """ns of one call with few and with many keys in the table."""
    w, x = torch.ones(8), torch.randn(1, 64)
    found = {}
    for name, keys in (("few keys", 0), ("many keys", count)):
        for rows in range(1, keys + 1):
            t = torch.empty(rows, 8)
            lz.rms_norm(t, w)
            lz.rms_norm(t, w)
        for _ in range(3):
            lz.silu_and_mul(x)
        with emptied():
            found[name] = interleaved({"call": lambda: lz.silu_and_mul(x)}, rounds=rounds, batch=batch)["call"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="folder under benchmarks/results for the JSON")
    parser.add_argument("--json", type=Path, help="write the JSON to this file instead")
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test, not a figure")
    options = parser.parse_args()
    if accelerator.native is None:
        print(f"layerzero-accel is not in use here: {accelerator.why or 'LAYERZERO_ACCEL=off'}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    rounds, batch = (30, 50) if options.quick else (300, 200)
    lz.rms_norm(torch.ones(1, 8))
    reads = [shape_read()]
    raw: dict[str, float] = {}
    scaled: dict[str, float] = {}

    def block(tail: str) -> None:
        found = {f"{name}{tail}": value for name, value in keyed(rounds, batch).items()}
        reads.append(shape_read())
        speed = (reads[-2] + reads[-1]) / 2 / SHAPE_NS  # the clock may change between blocks
        raw.update(found)
        scaled.update({name: value / speed for name, value in found.items()})

    with torch.no_grad():
        block("")
        with torch.enable_grad():
            block(", gradient mode on")
        loop = growing(256 if options.quick else 2048)
        people = crowd(100, 100 if options.quick else 2000)
        reads.append(shape_read())
        whole = beside_torch(rounds // 2, max(10, batch // 4))
        flat = many_keys(200 if options.quick else 10_000, rounds // 3, batch)
    reads.append(shape_read())
    scale = statistics.median(reads) / SHAPE_NS
    ratios = {name: whole[f"{name} in C"] / whole[f"{name} in torch"] for name in RATIOS}
    in_python = {name: whole[f"{name} in Python"] / whole[f"{name} in torch"] for name in RATIOS}
    for name, value in raw.items():
        limit = LIMITS_US.get(name)
        verdict = "" if limit is None else f"  limit {limit:g}  {'ok' if scaled[name] / 1e3 <= limit else 'OVER'}"
        print(f"{name:48} {value / 1e3:8.3f} us raw {scaled[name] / 1e3:8.3f} us scaled{verdict}")
    for name, value in loop.items():
        print(f"{'decode loop ' + name:48} {value / 1e3:8.3f} us raw {value / scale / 1e3:8.3f} us scaled")
    for name, value in people.items():
        verdict = f"  limit {P99_US:g}" if name == "in C, p99" else ""
        print(f"{'100 threads ' + name:48} {value / 1e3:8.3f} us raw {value / scale / 1e3:8.3f} us scaled{verdict}")
    for name, limit in RATIOS.items():
        print(f"lz.{name} / torch: {ratios[name]:.3f} in C, {in_python[name]:.3f} in Python; limit {limit}")
    print(f"keys: {flat}")
    print(f"ns of a shape read: {[round(item, 1) for item in reads]}, scale {scale:.2f}")
    print(f"counts: {accelerator.native.counts()}")
    data = {
        "benchmark": "accel",
        "commit": commit(),
        "command": "LAYERZERO_ACCEL=on python benchmarks/accel.py",
        "machine": machine(),
        "unit": "ns",
        "raw": {name: round(value, 1) for name, value in raw.items()},
        "scaled": {name: round(value, 1) for name, value in scaled.items()},
        "decode": {name: round(value, 1) for name, value in loop.items()},
        "threads": {name: round(value, 1) for name, value in people.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "ratios_in_python": {name: round(value, 3) for name, value in in_python.items()},
        "medians": {name: round(value, 1) for name, value in whole.items()},
        "keys": {name: round(value, 1) for name, value in flat.items()},
        "shape_read_ns": [round(item, 1) for item in reads],
        "scale": round(scale, 3),
        "limits": {"keyed_us_scaled": LIMITS_US, "p99_us": P99_US, "ratios": RATIOS},
    }
    write_json(options.json or RESULTS / options.machine / "accel.json", data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
