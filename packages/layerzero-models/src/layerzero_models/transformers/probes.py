"""What a part of a model computes, found out by asking it: small random inputs, compared with the formula of an op.

Names and source code of other libraries change; what a part computes on numbers does not lie. A part is patched only
when its own `forward` and the op's formula agree on these inputs, in the part's own dtype and on its own device.

A part may meet other dtypes than its weight's: a float16 T5 keeps some weights in float32, which makes the sums of its
layers float32, and its norms give float16 again. Each pair of dtypes is asked for, and the answer is a rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.model.rotary import rotated

# (dtype of the input, dtype of the weight or table) -> dtype of the result, where the formula holds; others are missing
Rules = dict[tuple[torch.dtype, torch.dtype], torch.dtype]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The gated op of an activation: its name, its arguments, and the activation itself.
_GATED: tuple[tuple[str, tuple[str, ...], Callable[[Tensor], Tensor]], ...] = (
    ("silu_and_mul", (), F.silu),
    ("gelu_and_mul", ("none",), F.gelu),
    ("gelu_and_mul", ("tanh",), lambda x: F.gelu(x, approximate="tanh")),
    ("relu_and_mul", (), F.relu),
)


def agree(got: Any, want: Tensor) -> bool:
    """Whether two results are one formula, rounded here and there: this recognises, it does not judge accuracy."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    eps = torch.finfo(got.dtype).eps
    bound = 8 * eps if eps > 1e-5 else 64 * eps
    return torch.allclose(got.double(), want.double(), rtol=bound, atol=bound)


def _draw(*shape: int, like: Tensor) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7), device="cpu")
    return made.to(device=like.device, dtype=like.dtype)


@torch.no_grad()
def norm_of(module: Any, eps: float) -> tuple[str, Rules] | None:
    """ "rms_norm" or "gemma_rms_norm" (weights as distances from one) and its dtypes; None for anything else."""
    weight, forward = module.weight, type(module).forward
    x = _draw(3, weight.shape[0], like=weight)

    def formula(x: Tensor, scale: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale

    got = forward(module, x)
    scales: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": Tensor.float,
        "gemma_rms_norm": lambda w: 1 + w.float(),
    }
    op = next((op for op, scale in scales.items() if agree(got, formula(x, scale(weight)).to(x.dtype))), None)
    if op is None:
        return None
    rules: Rules = {}
    for dtype in {weight.dtype, *DTYPES}:
        twin = copy.copy(module)  # the module itself is not touched
        vars(twin)["_parameters"] = {"weight": torch.nn.Parameter(weight.to(dtype), requires_grad=False)}
        for given in {weight.dtype, *DTYPES}:
            x = _draw(3, weight.shape[0], like=weight).to(given)
            try:
                got = forward(twin, x)
            except Exception:  # not made for these two: nobody calls it so
                continue
            if not isinstance(got, Tensor) or not got.is_floating_point():
                continue
            roughest = max((got.dtype, dtype, given), key=lambda item: torch.finfo(item).eps)
            if agree(got.to(roughest), formula(x, scales[op](twin.weight)).to(roughest)):
                rules[given, dtype] = got.dtype
    return op, rules


@torch.no_grad()
def activation_of(act: Callable[[Tensor], Any], like: Tensor) -> tuple[str, tuple[str, ...], str] | None:
    """(gated op, its arguments, its word in `lz.moe`) of an activation; None for one that no op has."""
    x = torch.linspace(-6.0, 6.0, 257, device=like.device)  # float32: two kinds of GELU are nearer than bf16 sees
    got = act(x)
    for op, rest, formula in _GATED:
        want = formula(x)
        if isinstance(got, Tensor) and got.shape == want.shape and bool((got - want).abs().max() < 1e-5):
            word = op.removesuffix("_and_mul") + ("_tanh" if rest == ("tanh",) else "")
            return op, rest, word
    return None


@torch.no_grad()
def rotates_halves(function: Callable[..., Any], device: torch.device) -> Rules:
    """The dtypes of heads and tables in which an `apply_rotary_pos_emb` turns pairs (i, i + D/2) by tables [B, S, D].

    None at all for one that turns otherwise; only pairs whose result has the dtype of the heads, as the op's has.
    """
    like = torch.zeros((), device=device)
    angles = _draw(2, 5, 8, like=like)
    wide = [torch.cat((table, table), -1) for table in (angles.cos(), angles.sin())]
    rules: Rules = {}
    for given in DTYPES:
        q, k = (_draw(2, heads, 5, 16, like=like).to(given) for heads in (4, 2))
        for dtype in DTYPES:
            cos, sin = (table.to(dtype) for table in wide)
            try:
                found = function(q, k, cos, sin)
            except Exception:
                continue
            if isinstance(found, tuple) and len(found) == 2:
                wants: Any = rotated(q, k, cos, sin, False, "BHSD", None, False)
                if all(map(agree, found, wants)):
                    rules[given, dtype] = given
    return rules if (torch.float32, torch.float32) in rules else {}


@torch.no_grad()
def gated_mlp(module: Any, gate: Any, up: Any, down: Any, act: Callable[[Tensor], Tensor]) -> str:
    """Why a module is not down(act(gate(x)) * up(x)) when it is not training; empty when it is.

    A `down` of another dtype, as in T5, gets its input cast to that dtype: else the module could not run.
    """
    x = _draw(3, gate.in_features, like=gate.weight)
    training = [part for part in module.modules() if part.training]
    module.train(False)
    try:
        same = agree(module.forward(x), down((act(gate(x)) * up(x)).to(down.weight.dtype)))
    except Exception as error:
        return f"it cannot be tried in {gate.weight.dtype} and {down.weight.dtype}: {error}"
    finally:
        for part in training:
            part.training = True
    return "" if same else "it computes something else than a gated MLP"
