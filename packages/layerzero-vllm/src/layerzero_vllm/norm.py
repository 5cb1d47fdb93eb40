"""RMSNorm of a CPU: `layerzero` among the providers of vLLM's IR ops, taken where no compiler fuses them.

vLLM's own provider on a CPU is a chain of torch ops. With torch.compile Inductor fuses it with what stands around it,
and an op of ours in the middle costs what it saves (`benchmarks/vllm_ops.py` measures it), so the graph is left
alone, and there `lz.rms_norm` itself is the formula. With --enforce-eager both are raced when the model is loaded.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero_vllm.attend import race
from layerzero_vllm.choice import OURS, THEIRS, quicker, told, unraced
from layerzero_vllm.plugin import pinned

PROVIDER = "layerzero"
OPS = ("rms_norm", "fused_add_rms_norm")
TOKENS = (1, 8, 64, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """The IR op of this name, where `serves` says so."""
    return lz.rms_norm(x, weight, epsilon)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The IR op of this name, where `serves_add` says so."""
    return lz.add_rms_norm(x, x_residual, weight, epsilon)


def serves(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether ours computes this: rows of a CPU as wide as their mean, in one dtype with the weight."""
    alike = weight is None or weight.dtype == x.dtype
    return variance_size is None and alike and x.is_cpu and x.dtype in _DTYPES


def serves_add(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """The same with a residual, which has to be of that dtype too."""
    return x_residual.dtype == x.dtype and serves(x, weight, epsilon, variance_size)


def register(ops: Any) -> None:
    """Make ours a provider of vLLM's IR ops: `ops` is vllm.ir.ops."""
    ours = {"rms_norm": (rms_norm, serves), "fused_add_rms_norm": (fused_add_rms_norm, serves_add)}
    for name in OPS:
        function, supports = ours[name]
        getattr(ops, name).register_impl(PROVIDER, supports_args=supports)(function)


class Model(NamedTuple):
    """What the choice depends on: the width and dtype of the hidden states, and whether a compiler sees the ops."""

    hidden: int
    dtype: torch.dtype
    compiled: bool

    def __str__(self) -> str:
        return f"{self.hidden}, {str(self.dtype).removeprefix('torch.')}"


def measure(op: Any, name: str, model: Model) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Microseconds of both, and the kernel of ours, by tokens; nothing where results differ more than vLLM allows."""
    generator = torch.Generator().manual_seed(0)
    times: dict[int, dict[str, float]] = {}
    kernels: dict[int, str] = {}
    for tokens in TOKENS:
        shapes = [(tokens, model.hidden)] * len(op.activations) + [(model.hidden,)]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float32).to(model.dtype) for shape in shapes]
        providers = {OURS: PROVIDER, THEIRS: "native"}
        ways = {side: functools.partial(op.impls[one].impl_fn, *drawn, 1e-6) for side, one in providers.items()}
        found = [way() for way in ways.values()]
        pairs = zip(*([one] if isinstance(one, Tensor) else one for one in found), strict=True)
        if not all(torch.allclose(ours, theirs, **op.get_tolerance(model.dtype)) for ours, theirs in pairs):
            return {}, {}
        times[tokens] = race({side: [way] for side, way in ways.items()}, seconds=0.02)
        kernels[tokens] = lz.which(name.removeprefix("fused_"), *drawn)
    return times, kernels


def choose(op: Any, name: str, model: Model, side: str | None) -> list[dict[str, Any]]:
    """What the report is told of an op; one winner serves it at every number of tokens."""
    if model.compiled and side != THEIRS:
        return [unraced(f"{name} of {model}", "Inductor fuses it with its neighbours")]
    times, kernels = ({}, {}) if side == THEIRS else measure(op, name, model)
    winner = side or (quicker({str(tokens): timed for tokens, timed in times.items()}) if times else THEIRS)
    won = TOKENS if winner == OURS else ()
    return told(f"{name} of {model}", TOKENS, "tokens", (times, kernels), won, side)


_settled = False


def settle() -> None:
    """Choose the provider of each op that no option of vLLM's has named one for; once a process."""
    global _settled
    from vllm import ir
    from vllm.config import CompilationMode, get_current_vllm_config_or_none

    from layerzero_vllm.worker import agreed, key, report

    config = get_current_vllm_config_or_none()
    if _settled or config is None:
        return
    _settled = True
    compiled = config.compilation_config.mode != CompilationMode.NONE
    model = Model(config.model_config.get_hidden_size(), config.model_config.dtype, compiled)
    for name in OPS:
        op = getattr(ir.ops, name)
        if op.get_priority() != ["native"]:
            continue
        rows = agreed(functools.partial(choose, op, name, model, pinned(os.environ)))
        report().norms.extend(rows)
        ours = rows[-1]["winner"] == OURS
        key(f"{name} of {model}", won=ours)
        if ours:
            op.set_default([PROVIDER, "native"])
