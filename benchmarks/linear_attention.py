"""Linear attention beside what transformers runs, with the packages that are here and without any, and beside the
libraries called directly.

    python benchmarks/linear_attention.py --machine NAME [--budget SECONDS] [--only OP ...]

Each case is one call with the sizes of a released model; on a GPU 16 heads of 128. The ways take turns, and the median
of the ratios of neighbouring calls counts, so that what else the machine does weighs on all alike. They take turns as
long before anything is timed: a GPU that has waited for imports and compilers is slow for some tenths of a second. On a
GPU a call is timed by events behind a write of 256 MB, as Triton's do_bench does.

fla-core tries out many variants of its kernels at the first prompt, and Triton keeps on disk what it compiled and which
was fastest: a first run spends minutes on that (`seconds` of each case in the report), a second one seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

import layerzero as lz

lz.configure(jit="block")  # the first call of a kernel waits until it is compiled

MODELS = "transformers.models"
Ways = dict[str, Callable[[], Any]]


def bare(function: Any) -> Callable[..., Any]:
    """A function of transformers without the package it prefers to call: its own form in torch."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    found: Callable[..., Any] = function
    return found


def library(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a library, None where that is not installed."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    return found


def delta(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Ways:
    """The gated delta rule of Qwen3-Next or the attention of Kimi Linear: heads of 128, a state from before."""
    kimi = kind == "kimi_delta_attention"
    file = "kimi_linear.modeling_kimi_linear" if kimi else "qwen3_next.modeling_qwen3_next"
    names = {False: ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")}
    names[True] = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    own = getattr(importlib.import_module(f"{MODELS}.{file}"), names[kimi][tokens == 1])
    shape = (batch, tokens, 16 if device == "cuda" else 32)
    q, k, v = (torch.randn(*shape, 128, dtype=dtype, device=device) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(*shape, *((128,) if kimi else ()), device=device) + 3)
    beta = torch.rand(shape, device=device).to(dtype)
    state = torch.randn(batch, shape[2], 128, 128, device=device)
    op = getattr(lz.ops, kind)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    ways: Ways = {"ours": lambda: op(q, k, v, g, beta, state, qk_l2norm=True)}
    ways["transformers"] = lambda: own(q, k, v, g=g, beta=beta, **options)
    if device == "cuda":
        ways["transformers_bare"] = lambda: bare(own)(q, k, v, g=g, beta=beta, **options)
        name = "kda" if kimi else "gated_delta_rule"
        fla = library(f"fla.ops.{name}", f"{'fused_recurrent' if tokens == 1 else 'chunk'}_{name}")
        if fla is not None:
            ways["fla"] = lambda: fla(q, k, v, g=g, beta=beta, **options)
        module = library("flashinfer.jit.gdn", "gen_gdn_prefill_sm90_module") if tokens > 1 and not kimi else None
        if module is not None and module().is_compiled:  # which takes minutes, and is not done here
            chunks: Any = library("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
            lengths: Any = library("layerzero_linear_attention.gpu", "l2norm")  # theirs takes none
            offsets = torch.arange(0, batch * tokens + 1, tokens, device=device)
            theirs = state.transpose(-1, -2).contiguous()
            rest = {"initial_state": theirs, "output_final_state": True, "cu_seqlens": offsets}
            ways["flashinfer"] = lambda: chunks(
                lengths(q).flatten(0, 1),
                lengths(k).flatten(0, 1),
                v.flatten(0, 1),
                g=g.flatten(0, 1).exp(),
                beta=beta.flatten(0, 1).float(),
                **rest,
            )
    return ways


def scan(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Ways:
    """Mamba-2 of 2.7 B: 80 heads of 64, states of 128."""
    file: Any = importlib.import_module(f"{MODELS}.mamba2.modeling_mamba2")
    heads, width, size = (16, 128, 128) if device == "cuda" else (80, 64, 128)
    x = torch.randn(batch, tokens, heads, width, dtype=dtype, device=device)
    B, C = (torch.randn(batch, tokens, 1, size, dtype=dtype, device=device) for _ in range(2))
    dt, bias = torch.randn(batch, tokens, heads, dtype=dtype, device=device), torch.randn(heads, device=device)
    A, D = -torch.rand(heads, device=device) - 0.1, torch.randn(heads, device=device)
    state = torch.randn(batch, heads, width, size, device=device)
    ours = functools.partial(lz.ops.mamba2_scan, x, dt, A, B, C, D, bias, state, dt_softplus=True)
    if tokens > 1:
        options = {"D": D, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "return_final_states": True}
        return {"ours": ours, "transformers": lambda: file.mamba2_chunk_scan(x, dt, A, B, C, 256, **options)}
    wide = dt.transpose(1, 2).expand(-1, -1, width)
    many = A[:, None, None].expand(-1, width, size)
    rest = (D[:, None].expand(-1, width), bias[:, None].expand(-1, width), True)
    step = file.mamba2_selective_state_update
    ways: Ways = {"ours": ours}
    ways["transformers"] = lambda: step(state.clone(), x[:, 0], wide, many, B[:, 0], C[:, 0], *rest)
    flashinfer = library("flashinfer.mamba", "selective_state_update") if device == "cuda" else None
    if flashinfer is not None:
        skip, before = rest[:2]
        narrow = dt[:, 0].float()[:, :, None].expand(-1, -1, width)
        ways["flashinfer"] = lambda: flashinfer(
            state, x[:, 0], narrow, many, B[:, 0], C[:, 0], skip, dt_bias=before, dt_softplus=True
        )
    return ways


def conv(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Ways:
    """The convolution of Qwen3-Next: 8192 channels, four taps, channels dense as its projection leaves them."""
    file: Any = importlib.import_module(f"{MODELS}.qwen3_next.modeling_qwen3_next")
    x = torch.randn(batch, tokens, 8192, dtype=dtype, device=device).transpose(1, 2)
    weight = torch.randn(8192, 4, dtype=dtype, device=device)
    state = torch.randn(batch, 8192, 4, dtype=dtype, device=device)
    if tokens == 1:
        ours = functools.partial(lz.ops.causal_conv1d, x, weight, None, state, activation="silu")
        return {"ours": ours, "transformers": lambda: file.causal_conv1d_update(x, state, weight, None, "silu")}
    ours = functools.partial(lz.ops.causal_conv1d, x, weight, activation="silu")
    return {"ours": ours, "transformers": lambda: file.causal_conv1d_fn(x, weight, None, activation="silu")}


KINDS = {"gated_delta_rule": delta, "kimi_delta_attention": delta, "mamba2_scan": scan, "causal_conv1d": conv}


def seconds(function: Callable[[], Any], device: str) -> float:
    """One call's time."""
    if device == "cuda":
        begin, end = events()
        flushed().zero_()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@functools.cache
def events() -> list[Any]:
    """A pair of them; making one takes the host longer than a step takes the GPU, which would wait meanwhile."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


@functools.cache
def flushed() -> torch.Tensor:
    """More than the GPU's caches hold; writing it also gives the host time to launch."""
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def measured(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str, budget: float) -> dict[str, Any]:
    """The time of each way in microseconds, and how many times faster ours is."""
    torch.manual_seed(0)
    began = time.perf_counter()
    ways = KINDS[kind](kind, batch, tokens, dtype, device)
    turns(ways, device, 3, budget)
    rounds = turns(ways, device, 5, budget)
    case: dict[str, Any] = {"op": kind, "batch": batch, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
    case["kernel"] = next(reversed(_kernels(kind)), "")
    for name in ways:
        us = statistics.median(found[name] for found in rounds) * 1e6
        case["us" if name == "ours" else f"{name}_us"] = round(us, 1)
    for name in ways:
        times = statistics.median(found[name] / found["ours"] for found in rounds)
        case |= {} if name == "ours" else {"times" if name == "transformers" else f"{name}_times": round(times, 2)}
    return case | {"rounds": len(rounds), "seconds": round(time.perf_counter() - began, 1)}


def turns(ways: Ways, device: str, least: int, budget: float) -> list[dict[str, float]]:
    """The times of all ways, called one after the other, round by round."""
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + budget
    gc.collect()
    gc.disable()
    try:
        while len(rounds) < least or (time.perf_counter() < end and len(rounds) < 400):
            rounds.append({name: seconds(way, device) for name, way in ways.items()})
    finally:
        gc.enable()
    return rounds


def _kernels(kind: str) -> list[str]:
    """What the op's calls of this process were given to, the newest last."""
    from layerzero.runtime.state import state

    return [bound.kernel_id for bound in state.world.hot.values() if f".{kind}." in bound.kernel_id]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a folder of benchmarks/results")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a case, and as many before it is timed")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="these ops")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((64, 1), (1, 8192)) if device == "cuda" else ((1, 256), (1, 1), (8, 1))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    command = "python benchmarks/linear_attention.py " + " ".join(sys.argv[1:])
    report: dict[str, Any] = {"commit": commit(), "command": command, "machine": machine()}
    for dist in ("transformers", "fla-core", "flashinfer-python"):
        with contextlib.suppress(PackageNotFoundError):
            report[dist] = version(dist)
    report |= {"threads": torch.get_num_threads(), "cases": []}
    with torch.inference_mode():
        for batch, tokens in shapes:  # on a GPU the steps come first: prefill is autotuned, which takes long
            for kind in given.only:
                report["cases"].append(measured(kind, batch, tokens, dtype, device, given.budget))
                print(json.dumps(report["cases"][-1]), flush=True)
                write_json(RESULTS / given.machine / "linear_attention.json", report)  # also what a cut run has found


if __name__ == "__main__":
    main()
