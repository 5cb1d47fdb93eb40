"""Torch's own code for a call as a contestant: raced in the same rounds as the kernels, by the same clock.

Whoever is chosen has to hold against what a torch user would have written. The code is that of `baselines`, wherever it
gives the reference's result for the call (a softcap, say, it does not know); a quantized weight has none: the code
would compute with another, unquantized one. It is timed and shown under the name `torch.default`, which no kernel can
bear, and what is slower is not stored as a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.measurements.noise import alike
from layerzero.model.context import Context
from layerzero.model.op import OperationSpec
from layerzero_tune.timing.baselines import BASELINES
from layerzero_tune.timing.race import Times

CALLING_US = 1.0
"""What calling a kernel through its binding may take beyond a call of torch: every choice pays it, so none loses by
it."""

Make = Callable[[tuple[Any, ...]], Callable[[], Any]]
"""Arguments of the op -> the torch code for them, ready to be timed."""


def maker(spec: OperationSpec, ctx: Context, layout: str | None) -> Make | None:
    """How torch's code for such calls is made; None for an op or a call that has none."""
    code = BASELINES.get(ctx.op)
    if ctx.quant_format or code is None:
        return None

    def make(args: tuple[Any, ...]) -> Callable[[], Any]:
        given = _given(spec, args, layout)
        return (lambda: code(given)()) if ctx.op == "sample" else code(given)  # a draw from logits, as the kernels

    return make


def result_of(spec: OperationSpec, layout: str | None, make: Make) -> Callable[..., Any]:
    """Torch's code as a function of the op's arguments that gives what the op gives, to be held against the truth."""

    def run(*args: Any) -> Any:
        given, found = _given(spec, args, layout), make(args)()
        if spec.op_id == "paged_attention":
            return found.squeeze(2)
        if spec.op_id == "add_rms_norm":
            return found, given["x"] + given["residual"]
        return found.squeeze(-1) if spec.op_id == "sample" else found

    return run


def loses(choice: Times, plain: Times, noise: float) -> bool:
    """Whether a kernel is slower than torch's code, by more than the noise band and what calling a kernel takes."""
    if alike(plain.median_us, plain.error_us, choice.median_us, choice.error_us, noise):
        return False
    return choice.median_us > plain.median_us + CALLING_US


def _given(spec: OperationSpec, args: tuple[Any, ...], layout: str | None) -> Mapping[str, Any]:
    return {**dict(zip(spec.arguments, args, strict=False)), "layout": layout}
