"""Experts and quantized products beside bfloat16: what torch runs against what is chosen here.

    python benchmarks/experts.py --machine NAME [--rounds N]

On a GPU each way is a graph that is replayed, so that the host's part is not in the figures; the ways take turns. On a
CPU the calls themselves take turns. Weights that fit the cache are several, used one after the other. What the choice
needs is compiled first; Triton's kernel is a way of its own where it runs the call, chosen or not, and every result is
held against the reference's with the tolerance of the op. Of a quantized weight the baseline is its bfloat16 original.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

import layerzero as lz
from layerzero.backends.torch_native import moe as torch_experts
from layerzero.numerics import compare, tolerance

Way = Callable[[], Any]
BF16 = torch.bfloat16
# hidden, inner, experts, top_k, whether as gpt-oss
SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8, False), "gpt-oss-20b": (2880, 2880, 32, 4, True)}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)


def expert_calls(name: str, tokens: int, device: str, kept: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Arguments of the calls of one case, canonical and by keyword; different experts each, from the same weights."""
    hidden, inner, experts, k, oss = SHAPES[name]

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=BF16).mul_(scale)

    if name not in kept:
        kept.clear()
        kept[name] = (
            drawn(experts, 2 * inner, hidden, scale=hidden**-0.5),
            drawn(experts, hidden, inner, scale=inner**-0.5),
        )
    gate_up, down = kept[name]
    options: dict[str, Any] = {}
    if oss:
        options = {"activation": "swigluoai", "limit": 7.0, "interleaved": True}
        options |= {"gate_up_bias": drawn(experts, 2 * inner), "down_bias": drawn(experts, hidden)}
    made = []
    for _ in range(4 if tokens < 64 else 1):
        shares, ids = lz.topk_gate(torch.randn(tokens, experts, device=device), k)
        made.append(((drawn(tokens, hidden), gate_up, down, shares, ids), options))
    return made


def grouped(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """`torch.moe.grouped`: sorted by expert, two calls of `F.grouped_mm`."""
    usual = {"activation": "silu", "gate_up_bias": None, "down_bias": None, "limit": None, "interleaved": False}
    given = usual | options
    places = ("gate_up_bias", "down_bias", "alpha", "limit", "interleaved")
    rest = [given.get(name, 1.702) for name in places]
    return torch_experts.moe(*args, given["activation"], 0, *rest)


def experts(device: str, sizes: Sequence[int]) -> Iterator[tuple[dict[str, Any], dict[str, list[Way]]]]:
    """Every shape of experts by number of tokens."""
    kept: dict[str, Any] = {}
    for name in SHAPES:
        for tokens in sizes:
            calls = expert_calls(name, tokens, device, kept)
            case = {"op": "moe", "model": name, "tokens": tokens}
            ways = {
                "truth": [lambda c=calls[0]: lz.moe(*c[0], backend="reference", **c[1])],  # type: ignore[misc]
                "baseline": [lambda c=c: grouped(*c) for c in calls],  # type: ignore[misc]
                "chosen": [lambda c=c: lz.moe(*c[0], **c[1]) for c in calls],  # type: ignore[misc]
                "triton": [lambda c=c: lz.moe(*c[0], backend="triton", **c[1]) for c in calls],  # type: ignore[misc]
            }
            yield case | {"kernel": compiled("moe", *calls[0][0], **calls[0][1])}, ways


def compiled(op: str, *args: Any, **options: Any) -> str:
    """The kernel that is chosen for a call, once everything it may run is compiled."""
    lz.warmup([lz.select(op, *args, **options).context], kernels="triton.*", background=False)
    return lz.which(op, *args, **options)


def right(op: str, ways: dict[str, list[Way]]) -> dict[str, Any]:
    """Ways that cannot run the call are taken out, with why; of the others, whether their result is right."""
    told: dict[str, Any] = {}
    truth = ways.pop("truth")[0]()
    for name in list(ways):
        try:
            report = compare(ways[name][0](), truth, tolerance(op, truth.dtype))
        except Exception as error:
            told[f"{name}_refused"] = str(error).splitlines()[0][:200]
            del ways[name]
        else:
            if op == "moe" or name != "baseline":
                told[f"{name}_right"] = report.ok
    return told


LINEARS = (
    # format, granularity, act, rows, n, k
    *(("fp8_e4m3", "channel", "dynamic", m, n, 4096) for m, n in ((4096, 4096), (8192, 14336))),
    *(("fp8_e4m3", "block", "dynamic", m, n, 4096) for m, n in ((4096, 4096), (8192, 14336))),
    *(("int8", "channel", "dynamic", m, n, 4096) for m, n in ((4096, 4096), (8192, 14336))),
    *(("int4", "block", None, m, n, k) for m, n, k in ((1, 28672, 8192), (1, 4096, 4096), (16, 4096, 4096))),
    *(
        ("mxfp4", "block", None, m, n, k)
        for m, n, k in ((1, 28672, 8192), (1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (4096, 4096, 4096))
    ),
)


def linears(device: str) -> Iterator[tuple[dict[str, Any], dict[str, list[Way]]]]:
    """Quantized weights beside the same in bfloat16."""
    from layerzero.model.packed import PackedWeight

    for fmt, granularity, act, m, n, k in LINEARS:
        many = 4 if n * k <= 4096 * 4096 and m <= 64 else 1
        plain = [torch.randn(n, k, device=device, dtype=BF16) for _ in range(many)]
        codes: list[Any] = [lz.quantize(w, fmt, granularity=granularity) for w in plain]
        if act:
            codes = [PackedWeight(code, act=act) for code in codes]
        x = torch.randn(m, k, device=device, dtype=BF16)
        case = {"op": "linear", "format": fmt, "granularity": granularity, "act": act, "m": m, "n": n, "k": k}
        ways = {
            "truth": [lambda w=codes[0], x=x: lz.linear(x, w, backend="reference")],  # type: ignore[misc]
            "baseline": [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in plain],  # type: ignore[misc]
            "chosen": [lambda w=w, x=x: lz.linear(x, w) for w in codes],  # type: ignore[misc]
            "triton": [lambda w=w, x=x: lz.linear(x, w, backend="triton") for w in codes],  # type: ignore[misc]
        }
        yield case | {"kernel": compiled("linear", x, codes[0])}, ways


def replayed(ways: dict[str, list[Way]], rounds: int) -> dict[str, float]:
    """Median µs a call of each way's graph, replayed in turn."""
    graphs = {}
    for name, calls in ways.items():
        for call in calls * 2:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in ways}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / len(ways[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a folder of benchmarks/results")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ops", default="linear,moe", help="parted by commas")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = []
    with torch.inference_mode():
        sources = {"linear": linears(device), "moe": experts(device, given.tokens)}
        for op in given.ops.split(","):
            for case, ways in sources[op]:
                case |= right(op, ways)
                if device == "cuda":
                    found = replayed(ways, given.rounds)
                else:
                    found = interleaved({k: v[0] for k, v in ways.items()}, rounds=given.rounds, batch=1)
                    found = {name: value / 1e3 for name, value in found.items()}
                case |= {f"{name}_us": round(value, 1) for name, value in found.items()}
                cases.append(case | {"times": round(found["baseline"] / found["chosen"], 2)})
                if "triton" in found:
                    cases[-1]["triton_times"] = round(found["baseline"] / found["triton"], 2)
                print(json.dumps(cases[-1]), flush=True)
    means = {
        name: round(math.exp(statistics.fmean(math.log(c["times"]) for c in cases if c.get("model") == name)), 2)
        for name in SHAPES
    }
    print(json.dumps(means))
    command = "python benchmarks/experts.py " + " ".join(sys.argv[1:])
    report = {"commit": commit(), "command": command, "machine": machine(), "geomean": means, "cases": cases}
    write_json(RESULTS / given.machine / "experts.json", report)


if __name__ == "__main__":
    main()
