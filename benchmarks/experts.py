"""Experts, quantized products and newer forms of attention: what torch runs against what is chosen here.

    python benchmarks/experts.py --machine NAME [--rounds N] [--ops moe,linear,mla,sinks] [--device cpu]

On a GPU each way is a graph that is replayed, so that the host's part is not in the figures; the ways take turns. On a
CPU the calls themselves take turns. Weights that fit the cache are several, used one after the other. What the choice
needs is compiled first, with LAYERZERO_DENY=flashinfer nothing of FlashInfer, which can take minutes. Triton's kernel
is a way of its own where it runs the call, chosen or not, and every result is held against the reference's with the
tolerance of the op. Of a quantized weight the baseline is its bfloat16 original, of experts on a GPU
`torch.moe.grouped`, on a CPU the loop over experts that a model in eager mode runs. Latent attention is held against
what the device could do at best, decode with sinks against the same without. `goal` is what a figure has to reach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

import layerzero as lz
from layerzero.backends.torch_native import moe as torch_experts
from layerzero.model.packed import PackedWeight
from layerzero.numerics import compare, tolerance

Way = Callable[[], Any]
Case = tuple[dict[str, Any], dict[str, list[Way]]]
BF16 = torch.bfloat16
BYTES_A_SECOND, FLOPS = 4.3e12, 790e12  # of an H200: what a copy reaches, and bfloat16 on its matrix units
# hidden, inner, experts, top_k, whether as gpt-oss
SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8, False), "gpt-oss-20b": (2880, 2880, 32, 4, True)}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)


def drawn(device: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16).mul_(scale)


def expert_calls(name: str, tokens: int, device: str, kept: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Arguments of the calls of one case, canonical and by keyword; different experts each, from the same weights."""
    hidden, inner, experts, k, oss = SHAPES[name]
    if name not in kept:
        kept.clear()
        gate_up = drawn(device, experts, 2 * inner, hidden, scale=hidden**-0.5)
        kept[name] = (gate_up, drawn(device, experts, hidden, inner, scale=inner**-0.5))
    gate_up, down = kept[name]
    options: dict[str, Any] = {}
    if oss:
        options = {"activation": "swigluoai", "limit": 7.0, "interleaved": True}
        options |= {"gate_up_bias": drawn(device, experts, 2 * inner), "down_bias": drawn(device, experts, hidden)}
    made = []
    for _ in range(4 if tokens < 64 else 1):
        shares, ids = lz.topk_gate(torch.randn(tokens, experts, device=device), k)
        made.append(((drawn(device, tokens, hidden), gate_up, down, shares, ids), options))
    return made


def grouped(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """`torch.moe.grouped`: sorted by expert, two calls of `F.grouped_mm`."""
    usual = {"activation": "silu", "gate_up_bias": None, "down_bias": None, "limit": None, "interleaved": False}
    given = usual | options
    places = ("gate_up_bias", "down_bias", "alpha", "limit", "interleaved")
    rest = [given.get(name, 1.702) for name in places]
    return torch_experts.moe(*args, given["activation"], 0, *rest)


def eager(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """As models in eager mode: expert by expert, those with tokens, in bfloat16."""
    x, gate_up, down, shares, ids = args
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        both = F.linear(x[token], gate_up[expert], options["gate_up_bias"][expert] if options else None)
        if options:
            gate, up = both[..., ::2].clamp(max=options["limit"]), both[..., 1::2].clamp(-7.0, 7.0)
            middle = (up + 1) * gate * torch.sigmoid(gate * 1.702)
        else:
            gate, up = both.chunk(2, -1)
            middle = F.silu(gate) * up
        made = F.linear(middle, down[expert], options["down_bias"][expert] if options else None)
        out.index_add_(0, token, made * shares[token, place, None].to(x.dtype))
    return out


def experts(device: str, sizes: Sequence[int]) -> Iterator[Case]:
    """Every shape of experts by number of tokens; with their weights quantized, too, beside our bfloat16 on a GPU."""
    kept: dict[str, Any] = {}
    plain = eager if device == "cpu" else grouped
    for name in SHAPES:
        codes: dict[str, Any] = {}
        for tokens in sizes:
            calls = expert_calls(name, tokens, device, kept)
            case = {"op": "moe", "model": name, "tokens": tokens}
            ways = {
                "truth": [lambda c=calls[0]: lz.moe(*c[0], backend="reference", **c[1])],  # type: ignore[misc]
                "baseline": [lambda c=c: plain(*c) for c in calls],  # type: ignore[misc]
                "chosen": [lambda c=c: lz.moe(*c[0], **c[1]) for c in calls],  # type: ignore[misc]
            }
            if device == "cpu" and tokens > 4:
                del ways["baseline"]  # seconds a call
            if device != "cpu":
                ways["triton"] = [lambda c=c: lz.moe(*c[0], backend="triton", **c[1]) for c in calls]  # type: ignore[misc]
            kernel = compiled("moe", *calls[0][0], **calls[0][1])
            yield case | {"kernel": kernel}, ways
            if device != "cpu" and tokens not in (1, 16, 64, 1024):
                continue
            for fmt in ("int8", "int4") if device == "cpu" else ("mxfp4",) if SHAPES[name][4] else ("fp8_e4m3",):
                if fmt not in codes:
                    scales: dict[str, Any] = {"granularity": "channel" if fmt == "int8" else "block"}
                    if fmt == "int4" and SHAPES[name][0] % 128:
                        scales["block_size"] = 64
                    codes[fmt] = [lz.quantize(w, fmt, **scales) for w in kept[name]]
                held = [((c[0][0], *codes[fmt], *c[0][3:]), c[1]) for c in calls]
                quantized = {
                    "truth": [lambda c=held[0]: lz.moe(*c[0], backend="reference", **c[1])],  # type: ignore[misc]
                    "baseline": ways["baseline" if tokens == 1 and device == "cpu" else "chosen"],
                    "bf16": ways["chosen"],
                    "chosen": [lambda c=c: lz.moe(*c[0], **c[1]) for c in held],  # type: ignore[misc]
                }
                kernel = compiled("moe", *held[0][0], **held[0][1])
                yield case | {"format": fmt, "kernel": kernel, "goal": 2.0 if tokens == 1 else 1.0}, quantized


def compiled(op: str, *args: Any, **options: Any) -> str:
    """The kernel that is chosen for a call, once everything it may run is compiled."""
    if torch.cuda.is_available():
        context = lz.select(op, *args, **options).context
        vendors = () if "flashinfer" in os.environ.get("LAYERZERO_DENY", "") else (f"flashinfer.{op}.[!p]*",)
        lz.warmup([context], kernels=("triton.*", *vendors), background=False)  # none for prefill
    return lz.which(op, *args, **options)


def right(case: dict[str, Any], ways: dict[str, list[Way]]) -> dict[str, Any]:
    """Ways that cannot run the call are taken out, with why; of the others, whether their result is right."""
    told: dict[str, Any] = {}
    op, truth = case["op"], ways.pop("truth")[0]()
    for name in list(ways):
        try:
            report = compare(ways[name][0](), truth, tolerance(op, truth.dtype))
        except Exception as error:
            told[f"{name}_refused"] = str(error).splitlines()[0][:200]
            del ways[name]
        else:
            if name not in ("baseline", "bf16", "without") or (op == "moe" and "format" not in case):
                told[f"{name}_right"] = report.ok
                if not report.ok:
                    told[f"{name}_seen"] = report.seen
    return told


LINEARS = (
    # format, granularity, act, rows, n, k, how many times bfloat16
    *(("fp8_e4m3", "channel", "dynamic", m, n, 4096, 1.4) for m, n in ((4096, 4096), (8192, 14336))),
    *(("fp8_e4m3", "block", "dynamic", m, n, 4096, 1.2) for m, n in ((4096, 4096), (8192, 14336))),
    *(("int8", "channel", "dynamic", m, n, 4096, None) for m, n in ((4096, 4096), (8192, 14336))),
    *(("int4", "block", None, *size) for size in ((1, 28672, 8192, 2.5), (1, 4096, 4096, 1.5), (16, 4096, 4096, 1.0))),
    *(("mxfp4", "block", None, m, 28672, 8192, 2.0) for m in (1, 16, 64)),
    *(("mxfp4", "block", None, m, 4096, 4096, 2.0) for m in (1, 16, 64)),
    ("mxfp4", "block", None, 4096, 4096, 4096, 0.9),
)


def linears(device: str) -> Iterator[Case]:
    """Quantized weights beside the same in bfloat16."""
    for fmt, granularity, act, m, n, k, goal in LINEARS:
        many = 4 if n * k <= 4096 * 4096 and m <= 64 else 1
        plain = [drawn(device, n, k, scale=k**-0.5) for _ in range(many)]
        codes: list[Any] = [lz.quantize(w, fmt, granularity=granularity) for w in plain]
        if act:
            codes = [PackedWeight(code, act=act) for code in codes]
        x = torch.randn(m, k, device=device, dtype=BF16)
        case = {"op": "linear", "format": fmt, "granularity": granularity, "act": act, "m": m, "n": n, "k": k}
        ways = {
            "truth": [lambda w=codes[0], x=x: lz.linear(x, w, backend="reference")],  # type: ignore[misc]
            "baseline": [lambda w=w, x=x: F.linear(x, w) for w in plain],  # type: ignore[misc]
            "chosen": [lambda w=w, x=x: lz.linear(x, w) for w in codes],  # type: ignore[misc]
            "triton": [lambda w=w, x=x: lz.linear(x, w, backend="triton") for w in codes],  # type: ignore[misc]
        }
        yield case | {"kernel": compiled("linear", x, codes[0]), "goal": goal}, ways


def pages(device: str, batch: int, length: int, page: int) -> Any:
    """A batch of one new token a sequence, its pages in any order."""
    count = length // page
    table = torch.randperm(batch * count, device=device).view(batch, count).int()
    return lz.paged_batch(table, torch.full((batch,), length, device=device, dtype=torch.int32), capture=True)


def latent(device: str) -> Iterator[Case]:
    """Decode by latent attention of DeepSeek's sizes, beside what reading the cache or multiplying takes at best."""
    count, length = (64, 4096) if device == "cuda" else (4, 1024)
    for heads, goal in ((16, 0.7), (128, 0.6)):
        batch = pages(device, count, length, 64)
        queries = [drawn(device, count, heads, dim) for dim in (512, 64)]
        caches = [drawn(device, count * length // 64, 64, dim) for dim in (512, 64)]
        given, scale = (*queries, *caches, batch), 192**-0.5
        read = count * length * 576 * 2 / BYTES_A_SECOND
        floor = read if heads == 16 else 2 * count * length * heads * (576 + 512) / FLOPS
        case = {"op": "mla_paged_attention", "heads": heads, "batch": count, "length": length}
        if device == "cuda":
            case |= {"floor_us": round(floor * 1e6, 1), "goal": goal}
        calls = {
            name: [lambda g=given, s=scale, b=name: lz.mla_paged_attention(*g, scale=s, backend=b)]  # type: ignore[misc]
            for name in ("reference", "triton", "flashinfer", "cpu")
        }
        ways = {
            "truth": calls["reference"],
            "chosen": [lambda g=given, s=scale: lz.mla_paged_attention(*g, scale=s)],  # type: ignore[misc]
            **({name: calls[name] for name in ("triton", "flashinfer")} if device == "cuda" else {}),
        }
        yield case | {"kernel": compiled("mla_paged_attention", *given, scale=scale)}, ways


def sinks(device: str) -> Iterator[Case]:
    """Decode over pages with a sink a head, beside the same without."""
    for count, length in ((16, 4096), (64, 2048)) if device == "cuda" else ((4, 1024),):
        batch, heads = pages(device, count, length, 16), torch.randn(32, device=device)
        query = drawn(device, count, 32, 128)
        caches = [drawn(device, count * length // 16, 16, 8, 128) for _ in range(2)]
        given = (query, *caches, batch)
        case = {"op": "paged_attention", "sinks": True, "batch": count, "length": length, "goal": 0.97}
        case["without_kernel"] = compiled("paged_attention", *given)
        ways = {
            "truth": [lambda g=given, s=heads: lz.paged_attention(*g, sinks=s, backend="reference")],  # type: ignore[misc]
            "baseline": [lambda g=given: lz.paged_attention(*g)],  # type: ignore[misc]
            "chosen": [lambda g=given, s=heads: lz.paged_attention(*g, sinks=s)],  # type: ignore[misc]
            "without": [lambda g=given: lz.paged_attention(*g, backend="triton")],  # type: ignore[misc]
        }
        if device == "cpu":
            del ways["without"]
        yield case | {"kernel": compiled("paged_attention", *given, sinks=heads)}, ways


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


def measured(case: dict[str, Any], ways: dict[str, list[Way]], device: str, rounds: int) -> dict[str, Any]:
    """A case with its times, and what it reaches of its goal."""
    case = case | right(case, ways)
    if device == "cuda":
        found = replayed(ways, rounds)
    else:
        found = interleaved({k: v[0] for k, v in ways.items()}, rounds=rounds, batch=1)
        found = {name: value / 1e3 for name, value in found.items()}
    case |= {f"{name}_us": round(value, 1) for name, value in found.items()}
    for name in ("chosen", "triton", "flashinfer"):
        best = case.get("floor_us") or found.get("baseline")
        if name in found and best:
            case["times" if name == "chosen" else f"{name}_times"] = round(best / found[name], 3)
    if "bf16" in found:
        case["over_bf16"] = round(found["bf16"] / found["chosen"], 3)
    return case


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="a folder of benchmarks/results")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ops", default="linear,moe,mla,sinks", help="parted by commas")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="another file for the figures")
    given = parser.parse_args()
    device, cases = given.device, []
    sources: dict[str, Callable[[], Iterator[Case]]] = {
        "linear": lambda: linears(device),
        "moe": lambda: experts(device, given.tokens),
        "mla": lambda: latent(device),
        "sinks": lambda: sinks(device),
    }
    command = "python benchmarks/experts.py " + " ".join(sys.argv[1:])
    if denied := os.environ.get("LAYERZERO_DENY"):
        command = f"LAYERZERO_DENY={denied} {command}"
    report = {"commit": commit(), "command": command, "machine": machine(), "geomean": {}, "cases": cases}
    place = given.json or RESULTS / given.machine / "experts.json"
    with torch.inference_mode():
        for op in given.ops.split(","):
            for case, ways in sources[op]():
                cases.append(measured(case, ways, device, given.rounds))
                print(json.dumps(cases[-1]), flush=True)
            write_json(place, report)
    means = report["geomean"]
    for name in SHAPES:
        plain = [math.log(c["times"]) for c in cases if c.get("model") == name and "format" not in c and "times" in c]
        means |= {name: round(math.exp(statistics.fmean(plain)), 2)} if plain else {}
    missed = [c for c in cases if c.get("goal") and c.get("times", 0.0) < c["goal"]]
    wrong = [c for c in cases if any(k.endswith("_right") and k != "baseline_right" and not c[k] for k in c)]
    print(json.dumps(means), f"{len(missed)} of {len(cases)} below their goal, {len(wrong)} wrong")
    write_json(place, report)


if __name__ == "__main__":
    main()
