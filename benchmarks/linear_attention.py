"""Linear attention beside what transformers runs without other packages.

    python benchmarks/linear_attention.py --machine NAME [--budget SECONDS]

Each case is one call with the sizes of a released model. The two ways take turns, and the median of the ratios of
neighbouring calls counts, so that what else the machine does weighs on both alike.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

import layerzero as lz

MODELS = "transformers.models"


def delta(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], Any], ...]:
    """The gated delta rule of Qwen3-Next or the attention of Kimi Linear: 32 heads of 128, a state from before."""
    kimi = kind == "kimi_delta_attention"
    file = "kimi_linear.modeling_kimi_linear" if kimi else "qwen3_next.modeling_qwen3_next"
    names = {False: ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")}
    names[True] = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    own = getattr(importlib.import_module(f"{MODELS}.{file}"), names[kimi][tokens == 1])
    shape = (batch, tokens, 32)
    q, k, v = (torch.randn(*shape, 128, dtype=dtype, device=device) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(*shape, *((128,) if kimi else ()), device=device) + 3)
    beta = torch.rand(shape, device=device).to(dtype)
    state = torch.randn(batch, 32, 128, 128, device=device)
    op = getattr(lz.ops, kind)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda: op(q, k, v, g, beta, state, qk_l2norm=True), lambda: own(q, k, v, g=g, beta=beta, **options)


def scan(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], Any], ...]:
    """Mamba-2 of 2.7 B: 80 heads of 64, states of 128."""
    file: Any = importlib.import_module(f"{MODELS}.mamba2.modeling_mamba2")
    heads, width, size = 80, 64, 128
    x = torch.randn(batch, tokens, heads, width, dtype=dtype, device=device)
    B, C = (torch.randn(batch, tokens, 1, size, dtype=dtype, device=device) for _ in range(2))
    dt, bias = torch.randn(batch, tokens, heads, dtype=dtype, device=device), torch.randn(heads, device=device)
    A, D = -torch.rand(heads, device=device) - 0.1, torch.randn(heads, device=device)
    state = torch.randn(batch, heads, width, size, device=device)
    ours = functools.partial(lz.ops.mamba2_scan, x, dt, A, B, C, D, bias, state, dt_softplus=True)
    if tokens > 1:
        options = {"D": D, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "return_final_states": True}
        return ours, lambda: file.mamba2_chunk_scan(x, dt, A, B, C, 256, **options)
    wide = dt.transpose(1, 2).expand(-1, -1, width)
    many = A[:, None, None].expand(-1, width, size)
    rest = (D[:, None].expand(-1, width), bias[:, None].expand(-1, width), True)
    step = file.mamba2_selective_state_update
    return ours, lambda: step(state.clone(), x[:, 0], wide, many, B[:, 0], C[:, 0], *rest)


def conv(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[Callable[[], Any], ...]:
    """The convolution of Qwen3-Next: 8192 channels, four taps, channels dense as its projection leaves them."""
    file: Any = importlib.import_module(f"{MODELS}.qwen3_next.modeling_qwen3_next")
    x = torch.randn(batch, tokens, 8192, dtype=dtype, device=device).transpose(1, 2)
    weight = torch.randn(8192, 4, dtype=dtype, device=device)
    state = torch.randn(batch, 8192, 4, dtype=dtype, device=device)
    if tokens == 1:
        ours = functools.partial(lz.ops.causal_conv1d, x, weight, None, state, activation="silu")
        return ours, lambda: file.causal_conv1d_update(x, state, weight, None, "silu")
    ours = functools.partial(lz.ops.causal_conv1d, x, weight, activation="silu")
    return ours, lambda: file.causal_conv1d_fn(x, weight, None, activation="silu")


KINDS = {"gated_delta_rule": delta, "kimi_delta_attention": delta, "mamba2_scan": scan, "causal_conv1d": conv}


def seconds(function: Callable[[], Any], device: str) -> float:
    """One call's time."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measured(kind: str, batch: int, tokens: int, dtype: torch.dtype, device: str, budget: float) -> dict[str, Any]:
    """Times of both ways in microseconds, and how many times faster ours is."""
    torch.manual_seed(0)
    ways = KINDS[kind](kind, batch, tokens, dtype, device)
    for way in ways * 3:
        seconds(way, device)
    pairs, end = [], time.perf_counter() + budget
    while len(pairs) < 5 or (time.perf_counter() < end and len(pairs) < 400):
        pairs.append([seconds(way, device) for way in ways])
    ours, theirs = (statistics.median(pair[i] for pair in pairs) * 1e6 for i in (0, 1))
    times = statistics.median(pair[1] / pair[0] for pair in pairs)
    case = {"op": kind, "batch": batch, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
    kernel = next(reversed(_kernels(kind)), "")
    return case | {
        "kernel": kernel,
        "us": round(ours, 1),
        "transformers_us": round(theirs, 1),
        "times": round(times, 2),
    }


def _kernels(kind: str) -> list[str]:
    """What the op's calls of this process were given to, the newest last."""
    from layerzero.runtime.state import state

    return [bound.kernel_id for bound in state.world.hot.values() if f".{kind}." in bound.kernel_id]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a folder of benchmarks/results")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a case")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((1, 8192), (64, 1)) if device == "cuda" else ((1, 256), (1, 1), (8, 1))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    transformers = importlib.import_module("transformers")
    cases = []
    with torch.inference_mode():
        for kind in KINDS:
            for batch, tokens in shapes:
                cases.append(measured(kind, batch, tokens, dtype, device, given.budget))
                print(json.dumps(cases[-1]), flush=True)
    command = "python benchmarks/linear_attention.py " + " ".join(sys.argv[1:])
    report = {"commit": commit(), "command": command, "machine": machine(), "transformers": transformers.__version__}
    report |= {"threads": torch.get_num_threads(), "cases": cases}
    write_json(RESULTS / given.machine / "linear_attention.json", report)


if __name__ == "__main__":
    main()
