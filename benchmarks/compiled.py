"""A Llama block on LayerZero's ops under torch.compile, against the same block in plain torch under torch.compile.

    python benchmarks/compiled.py --machine NAME [--json FILE] [--quick] [--seconds N] [--only NAME …]

Contestants, all compiled with fullgraph=True: `torch` is the block as one writes it in plain torch; `native` is
LayerZero's ops with torch's own kernels (backend="torch", "sdpa"), which are written into the graph; `selected` takes
what LayerZero selects inside a graph: foreign kernels as opaque ops where they were measured to win there, all else
written out; `attention` selects for attention alone and keeps the rest native. Results are compared before
anything is timed. Everyone is timed in every round, in turning order; a ratio is the median of the ratios within a
round. On a GPU each call is timed with a cold cache, and, for one token a sequence, also as a replayed CUDA graph of
the compiled block. Writes JSON with graph breaks and the opaque ops of each graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from blocks import LLAMA, MIDDLE, SMALL, Case, layer, rounds_of
from timing import RESULTS, commit, machine, write_json

import layerzero as lz
from layerzero_tune.timing.clock import clock_for, graphed

CPU = (Case(1, 1, *SMALL, "float32"), Case(1, 64, *SMALL, "float32"), Case(1, 128, *MIDDLE, "float32"))
# Attention is a small part of a block at 2 048 tokens and most of it at 16 384.
SIZES = ((1, 2048), (8, 1), (1, 512), (1, 1), (1, 8192), (1, 16384))
CUDA = tuple(Case(batch, tokens, *LLAMA, "bfloat16") for batch, tokens in SIZES)
LIMIT = 1.02
# Beyond this length attention in float64, which torch computes unfused, takes more memory than there is.
WIDE_TRUTH = 4096


def plain(case: Case, t: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The block as one writes it without a library; gate and up are one product, as in `ours`."""
    gate_up = torch.cat((t["w_gate"], t["w_up"]))

    def turned(x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        cos, sin = t["cos"][:, None], t["sin"][:, None]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    def run(x: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], t["ln1"], 1e-6)
        q, k, v = (F.linear(normed, t[name]) for name in ("wq", "wk", "wv"))
        q = q.unflatten(-1, (case.heads, case.head_dim))
        k, v = (item.unflatten(-1, (case.kv_heads, case.head_dim)) for item in (k, v))
        q, k, v = (item.transpose(1, 2) for item in (turned(q), turned(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
        stream = F.linear(out, t["wo"]) + x
        normed = F.rms_norm(stream, x.shape[-1:], t["ln2"], 1e-6)
        gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
        return stream + F.linear(F.silu(gate) * up, t["w_down"])

    return run


def ours(case: Case, t: dict[str, Tensor], *, attention: str | None, rest: str | None) -> Callable[[Tensor], Tensor]:
    """The block on LayerZero's ops; None: what is selected."""
    gate_up = torch.cat((t["w_gate"], t["w_up"]))
    # torch has a rope of its own for the CPU only; elsewhere its plain form is the reference's.
    turn = "reference" if rest is not None and t["x"].is_cuda else rest

    def run(x: Tensor) -> Tensor:
        normed = lz.rms_norm(x, t["ln1"], 1e-6, backend=rest)
        q, k, v = (lz.linear(normed, t[name], backend=rest) for name in ("wq", "wk", "wv"))
        q = q.unflatten(-1, (case.heads, case.head_dim))
        k, v = (item.unflatten(-1, (case.kv_heads, case.head_dim)) for item in (k, v))
        q, k = lz.rope(q, k, t["cos"], t["sin"], layout="BSHD", backend=turn)
        out = lz.attention(q, k, v, is_causal=True, layout="BSHD", backend=attention).flatten(-2)
        normed, stream = lz.add_rms_norm(lz.linear(out, t["wo"], backend=rest), x, t["ln2"], 1e-6, backend=rest)
        gated = lz.silu_and_mul(lz.linear(normed, gate_up, backend=rest), backend=rest)
        return stream + lz.linear(gated, t["w_down"], backend=rest)

    return run


def compiled(
    name: str, function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The function compiled by Inductor, and what its graph holds."""
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx

    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "layerzero" in str(node.target))
        return compile_fx(graph, inputs)

    counters.clear()
    begin = time.monotonic()
    # Dynamo keeps graphs by code: contestants that share theirs would try each other's guards at every call.
    function.__code__ = function.__code__.replace(co_name=name)
    call = torch.compile(function, fullgraph=True, backend=backend)
    call(x)
    found = {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "opaque": seen,
        "compile_s": round(time.monotonic() - begin, 2),
    }
    return call, found


def measure(case: Case, device: str, seconds: float, only: Sequence[str]) -> dict[str, Any]:
    """One case: compile, compare, race."""
    t = layer(case, device)
    x = t["x"]
    contestants: dict[str, Callable[[Tensor], Tensor]] = {
        "torch": plain(case, t),
        "native": ours(case, t, attention="sdpa", rest="torch"),
        "selected": ours(case, t, attention=None, rest=None),
        "attention": ours(case, t, attention=None, rest="torch"),
    }
    wide = torch.float64 if case.tokens <= WIDE_TRUTH else torch.float32
    truth = plain(case, {name: item.to(wide) for name, item in t.items()})(x.to(wide)).double()
    torch._dynamo.reset()
    ready: dict[str, Callable[[], Tensor]] = {}
    graphs: dict[str, Any] = {}
    errors: dict[str, float] = {}
    for name, function in contestants.items():
        if only and name not in only and name != "torch":
            continue
        for _ in range(2):
            function(x)  # foreign kernels compile and bind here, not while the graph is timed
        call, graphs[name] = compiled(name, function, x)
        ready[name] = lambda call=call: call(x)  # type: ignore[misc]
        errors[name] = float((call(x).double() - truth).norm() / truth.norm())
        # Each rounds in places of its own; none may be farther from the truth than twice the plain block.
        assert errors[name] <= 2 * errors["torch"] + 1e-7, (name, errors)
    samples = rounds_of(ready, clock_for(device), 121, seconds)
    row: dict[str, Any] = {
        "case": case.name, "batch": case.batch, "tokens": case.tokens, "hidden": case.hidden, "dtype": case.dtype,
        "median_us": {name: statistics.median(values) for name, values in samples.items()},
        "over_torch": {name: over(samples, name) for name in samples if name != "torch"},
        "error": errors, "graphs": graphs, "rounds": len(samples["torch"]),
        "kernels": kernels(case, t),
    }  # fmt: skip
    if device == "cuda" and case.tokens == 1:
        row["replayed"] = replayed(ready, seconds)
    return row


def replayed(ready: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, Any]:
    """The same blocks captured, so that no launch is counted."""
    replays = {name: graphed(call) for name, call in ready.items()}
    samples = rounds_of(replays, lambda call, count: statistics.median(call() for _ in range(count)), 61, seconds / 2)  # type: ignore[arg-type]
    return {
        "median_us": {name: statistics.median(values) for name, values in samples.items()},
        "over_torch": {name: over(samples, name) for name in samples if name != "torch"},
    }


def kernels(case: Case, t: dict[str, Tensor]) -> dict[str, str]:
    """What LayerZero selects for the ops of the block inside a compiled graph."""
    q = t["x"].new_empty(case.batch, case.tokens, case.heads, case.head_dim)
    k = t["x"].new_empty(case.batch, case.tokens, case.kv_heads, case.head_dim)
    wide = t["x"].new_empty(case.batch, case.tokens, 2 * case.inner)
    return {
        "rms_norm": lz.which("rms_norm", t["x"], t["ln1"], compiled=True),
        "add_rms_norm": lz.which("add_rms_norm", t["x"], t["x"], t["ln1"], compiled=True),
        "rope": lz.which("rope", q, k, t["cos"], t["sin"], layout="BSHD", compiled=True),
        "attention": lz.which("attention", q, k, k, is_causal=True, layout="BSHD", compiled=True),
        "silu_and_mul": lz.which("silu_and_mul", wide, compiled=True),
        "linear": lz.which("linear", t["x"], t["wq"], compiled=True),
    }


def over(samples: dict[str, list[float]], name: str) -> float:
    """How one compares with plain torch, round by round."""
    return statistics.median(a / b for a, b in zip(samples[name], samples["torch"], strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="name of the folder under benchmarks/results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the smallest cases alone")
    parser.add_argument("--seconds", type=float, help="for the rounds of one case; 12, on a GPU 7")
    parser.add_argument("--only", nargs="*", default=(), help="contestants beside torch")
    # Their kernels compile for half a minute each.
    parser.add_argument(
        "--deny", nargs="*", default=["flashinfer.*", "inductor.*"], help="on a GPU, kernels to leave out"
    )
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CUDA if device == "cuda" else CPU
    seconds = given.seconds or (7.0 if device == "cuda" else 12.0)
    if device == "cuda":
        lz.configure(jit="block", deny=given.deny)
    rows: list[dict[str, Any]] = []
    path = given.json or RESULTS / given.machine / "compiled.json"
    command = f"python benchmarks/compiled.py --machine {given.machine}"
    about = {"machine": machine(), "commit": commit(), "command": command, "device": device, "limit": LIMIT}
    with torch.no_grad():
        for case in cases[:2] if given.quick else cases:
            try:
                rows.append(measure(case, device, seconds, given.only))
            except Exception as error:  # one case must not cost the others
                print(f"{case.name:24} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            tell(rows[-1])
            write_json(path, {**about, "graph_breaks": breaks(rows), "cases": rows})
    native = [row["over_torch"]["native"] for row in rows if "native" in row["over_torch"]]
    print(f"graph breaks {breaks(rows)}; native at most {max(native, default=0.0):.3f}x of plain torch (limit {LIMIT})")
    for row in rows:
        found = [part["over_torch"].get("selected") for part in (row, row.get("replayed")) if part is not None]
        told = ", replayed ".join(f"{ratio:.3f}x" for ratio in found if ratio is not None)
        print(f"{row['case']:24} selected {told} with {row['kernels']['attention']}")
    print(f"written to {path}")
    return 0 if len(rows) and not breaks(rows) and max(native, default=0.0) <= LIMIT else 1


def tell(row: dict[str, Any]) -> None:
    """One case in a line, two where it was replayed as well."""
    for name, found in ((row["case"], row), ("", row.get("replayed"))):
        if found is not None:
            told = "  ".join(f"{way} {ratio:.3f}x" for way, ratio in found["over_torch"].items())
            print(f"{name:24} torch {found['median_us']['torch']:9.1f} µs  {told}", flush=True)


def breaks(rows: list[dict[str, Any]]) -> int:
    """Graph breaks, and graphs beyond the first."""
    return sum(graph["graph_breaks"] + graph["graphs"] - 1 for row in rows for graph in row["graphs"].values())


if __name__ == "__main__":
    sys.exit(main())
