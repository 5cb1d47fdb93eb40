"""Norms and rotary embedding of ours beside vLLM's on a CPU, compiled and not. Run it with the Python that has vLLM.

    python benchmarks/vllm_ops.py [--hidden N] [--inner N] [--dtype float32 bfloat16] [--json FILE]

Two layers as a decoder has them, without attention: norms between linears that vLLM has packed, compiled with Inductor
as vLLM's CPU platform compiles. Once the norms are vLLM's chain of torch ops, which Inductor fuses with what stands
around it, once they are ops that call `lz.rms_norm` and `lz.add_rms_norm`; both take turns. Without a compiler the
norm, and the rotation of heads of 64, are raced alone. Times are microseconds; the figures are the mean gain of ours.
They hold what docs/vllm.md says of who is taken where.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TOKENS = (1, 8, 64, 256)
GAIN = 1.02  # what the plugin calls clearly quicker: beyond it the graphs would have to be raced, too
OPTIONS = {"dce": True, "size_asserts": False, "nan_asserts": False, "epilogue_fusion": True}


def packed(rows: int, width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A linear as vLLM packs it."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter((torch.randn(rows, width) / math.sqrt(width)).to(dtype), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, False)
    return lambda x: layer.cpu_linear(x, layer.weight, None)


def layers(
    norms: Any, dtype: torch.dtype, hidden: int, inner: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two compiled layers with these norms."""
    torch.manual_seed(0)
    weight = torch.randn(hidden).to(dtype)
    linears = [packed(rows, width, dtype) for rows, width in ((hidden, hidden), (2 * inner, hidden), (hidden, inner))]

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x, residual = norms.add(x, residual, weight, 1e-6)
            x, residual = norms.add(linears[0](x), residual, weight, 1e-6)
            both = linears[1](x)
            x = linears[2](torch.nn.functional.silu(both[:, :inner]) * both[:, inner:])
        return norms.plain(x, weight, 1e-6), residual

    torch._dynamo.reset()
    return torch.compile(run, dynamic=True, fullgraph=True, options=OPTIONS)


def define() -> torch.library.Library:
    """Ours as ops that no compiler looks into."""
    import layerzero as lz

    library = torch.library.Library("vllm_ops", "DEF")
    library.define("plain(Tensor x, Tensor weight, float eps) -> Tensor")
    library.define("add(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
    library.impl("plain", lz.rms_norm, "CPU")
    library.impl("add", lz.add_rms_norm, "CPU")
    torch.library.register_fake("vllm_ops::plain", lambda x, *rest: torch.empty_like(x), lib=library)
    torch.library.register_fake(
        "vllm_ops::add", lambda x, *rest: (torch.empty_like(x), torch.empty_like(x)), lib=library
    )
    return library


def measured(dtype: torch.dtype, hidden: int, inner: int) -> list[dict[str, Any]]:
    """Times of both, of compiled layers and of norms alone, by tokens."""
    from vllm import _custom_ops as ops
    from vllm import ir

    import layerzero as lz
    from layerzero_vllm.attend import race
    from layerzero_vllm.choice import OURS, THEIRS

    plain, add = (getattr(ir.ops, name).impls["native"].impl_fn for name in ("rms_norm", "fused_add_rms_norm"))
    norms = {
        OURS: SimpleNamespace(plain=lz.rms_norm, add=lz.add_rms_norm),
        THEIRS: SimpleNamespace(plain=plain, add=add),
    }
    # traced, ours would be the same formula: in a graph it has to be an op
    inside = {**norms, OURS: SimpleNamespace(plain=torch.ops.vllm_ops.plain, add=torch.ops.vllm_ops.add)}
    compiled = {side: layers(one, dtype, hidden, inner) for side, one in inside.items()}
    weight, table, rows = torch.randn(hidden).to(dtype), torch.randn(max(TOKENS), 64).to(dtype), []
    halves = table[:, :32].contiguous(), table[:, 32:].contiguous()
    for tokens in TOKENS:
        x, residual = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
        one, other = (run(x, residual)[0].float() for run in compiled.values())
        if (one - other).norm() > (1e-4 if dtype is torch.float32 else 3e-2) * other.norm():
            raise SystemExit(f"the two disagree: {dtype}, {tokens} tokens")
        alone: dict[str, Callable[[], Any]] = {
            side: lambda one=one: one.add(x, residual, weight, 1e-6)  # noqa: B023
            for side, one in norms.items()
        }
        graphs: dict[str, Callable[[], Any]] = {
            side: lambda run=run: run(x, residual)  # noqa: B023
            for side, run in compiled.items()
        }
        places, query = torch.arange(tokens), torch.randn(tokens, hidden).to(dtype)
        key = torch.randn(tokens, 4 * 64).to(dtype)
        heads = query.view(1, tokens, -1, 64), key.view(1, tokens, -1, 64)
        tables = {"layout": "BSHD", "position_ids": places, "inplace": True}
        rotary: dict[str, Callable[[], Any]] = {
            OURS: functools.partial(lz.rope, *heads, *halves, **tables),
            THEIRS: functools.partial(ops.rotary_embedding, places, query, key, 64, table, True),
        }
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tokens": tokens}
        for name, ways in (("norm alone", alone), ("rotary alone", rotary), ("compiled layers", graphs)):
            times = race({side: [way] for side, way in ways.items()}, seconds=1.0)
            row[name] = {side: round(taken, 1) for side, taken in times.items()}
            row[f"{name}, times"] = round(times[THEIRS] / times[OURS], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_grad_enabled(False)
    library = define()
    rows = [row for name in given.dtype for row in measured(getattr(torch, name), given.hidden, given.inner)]
    mean = {
        name: round(statistics.geometric_mean(row[f"{name}, times"] for row in rows), 3)
        for name in ("norm alone", "rotary alone", "compiled layers")
    }
    figures = {
        "compiled layers: ours over Inductor's": {"value": mean["compiled layers"], "at_most": GAIN},
        "rotary alone: ours over vLLM's": {"value": mean["rotary alone"], "at_most": GAIN},
        "norm alone: ours over vLLM's": {"value": mean["norm alone"], "at_least": GAIN},
    }
    del library
    print(json.dumps(figures))
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "figures": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
