"""`lz.sample_topk`, `lz.sample_topp`, `lz.sample`: one token id per row of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import declare, dispatch
from layerzero.dispatch import modes
from layerzero.errors import invalid
from layerzero.model.checks import expect_rank, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, Op, parameters
from layerzero.model.shapes import ids

Number = float | Tensor
FILTERS = ("top_k", "top_p", "min_p")


def sample_topk(
    logits: Tensor,
    k: int | Tensor,
    *,
    temperature: Number = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Tensor:
    """Draw from the k largest logits of each row [B, V] → int64 [B]. Temperature 0 takes the largest.

    A parameter is a number or a tensor of one value a row. See `lz.sample` for ties, seeds and logits that are not
    finite.
    """
    check_param(k, "k")
    check_param(temperature, "temperature")
    return dispatch(SAMPLE_TOPK, (logits, k, temperature, generator), backend=backend)  # type: ignore[no-any-return]


def sample_topp(
    logits: Tensor,
    p: Number,
    *,
    temperature: Number = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Tensor:
    """Draw from the smallest set of tokens whose probability reaches p, row by row [B, V] → int64 [B].

    A parameter is a number or a tensor of one value a row. See `lz.sample` for ties, seeds and logits that are not
    finite.
    """
    check_param(p, "p")
    check_param(temperature, "temperature")
    return dispatch(SAMPLE_TOPP, (logits, p, temperature, generator), backend=backend)  # type: ignore[no-any-return]


def sample(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    temperature: Number = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Tensor:
    """Temperature, then top-k, then top-p, then min-p, then one draw per row [B, V] → int64 [B].

    Each parameter is a number or a tensor of one value a row. Temperature 0 takes the largest logit and draws nothing.
    Among equal logits the lower id ranks first, so exactly k tokens stay. -inf bans a token; tokens at +inf share the
    whole mass; a row with a NaN, or with nothing but -inf, has no distribution and gives -1.

    The draw takes one uniform number a row from `generator`, or from torch's default generator of the device. Equal
    generator states give equal tokens: at every call, for a number as for a tensor of the same number, with every
    built-in kernel of the device, and whatever the other rows hold.
    """
    check_filters(top_k, top_p, min_p)
    check_param(temperature, "temperature")
    return dispatch(SAMPLE, (logits, top_k, top_p, min_p, temperature, generator), backend=backend)  # type: ignore[no-any-return]


def check_filters(top_k: Any, top_p: Any, min_p: Any) -> None:
    """Refuse filters that mean nothing; None leaves one out."""
    for name, value in zip(FILTERS, (top_k, top_p, min_p), strict=True):
        if value is not None:
            check_param(value, name)


def check_param(value: Any, name: str) -> None:
    """Values are not in hot keys, so they are checked at each call; tensors only on the CPU, where nobody waits."""
    whole, (low, high) = name in ("k", "top_k"), _RANGES[name]
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if fits and low <= value <= high and value != math.inf:
        return  # nearly every call
    if isinstance(value, Tensor):
        if not modes.plain((value,)) or not value.is_cpu:
            return  # on a device looking would mean waiting: there they are the caller's to keep in range
        wrong = ~((value >= low) & (value <= high))  # NaN is in no range
        if wrong.any():
            found = value[wrong].flatten()[0].item()
            raise invalid("VALUE_INVALID", str(found), f"numbers in [{low}, {high}]", f"{name} holds {found}")
        return
    limit = f"{'an integer' if whole else 'a number'} in [{low}, {high}]"
    raise invalid("VALUE_INVALID", str(value), limit, f"{name} is {value}")


def check_generator(generator: Any, logits: Tensor) -> None:
    """Refuse what is no generator, and one of another device than the logits."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        shown = f"generator: {type(generator).__name__}"
        raise invalid("TYPE_INVALID", shown, "a torch.Generator or None")
    if generator.device.type != logits.device.type and logits.device.type != "meta":
        shown = f"generator on {generator.device}, logits on {logits.device}"
        raise invalid("DEVICE_MIXED", shown)


_RANGES = {
    "k": (1, math.inf),
    "p": (0.0, 1.0),
    "top_k": (1, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "temperature": (0.0, math.inf),
}


def _describer(op: str, names: tuple[str, ...]) -> Callable[[Call], Context]:
    def describe(call: Call) -> Context:
        logits = expect_rank(call.args[0], "logits", (2,))
        batch, vocab = logits.shape
        if vocab == 0:
            raise invalid("SHAPE_INVALID", str(tuple(logits.shape)), "[B, V >= 1]", "logits have no vocabulary")
        check_generator(call.args[-1], logits)
        given = dict(zip(names, call.args, strict=True))
        for name, value in given.items():  # for plans and for calls whose kernel raised
            if name in _RANGES and (value is not None or name not in FILTERS):
                check_param(value, name)
        params = {f"argument {i}": item for i, item in enumerate(call.args[1:], 1) if isinstance(item, Tensor)}
        for name, item in params.items():
            if tuple(item.shape) != (batch,):
                raise invalid("SHAPE_INVALID", str(tuple(item.shape)), f"[{batch}]", f"{name} does not fit")
        needs = {"tensor_params"} if params else set()
        if call.args[-1] is not None:
            needs.add("generator")
        needs |= {f"sample_{name}" for name in FILTERS if given.get(name) is not None}
        call = Call(call.args, call.device, call.layout, call.backend, False)  # an index has no gradient
        return simple_context(
            call, op, logits, dict(params), {"batch": batch, "vocab": vocab}, needs, kind=OpKind.SAMPLING, mixed=True
        )

    return describe


def _op(function: Callable[..., Tensor]) -> Op:
    name = function.__name__
    return declare(
        function=function,
        fake=ids,
        op_kind=OpKind.SAMPLING,
        output_kind="ids",
        describe=_describer(name, tuple(item for item in parameters(function) if item != "backend")),
        reference=f"layerzero.backends.reference.sampling:{name}",
        cost=Roofline("(element_bytes * vocab + 8) * batch", "5 * batch * vocab"),
        shapes={"shape": "batch,vocab"},
        options=tuple(
            option for option in ("top_k", "top_p") if name in ("sample", option.replace("top_", "sample_top"))
        ),
        example="layerzero._ops.examples_rows:sampling",
        tolerance="exact",
        random=lambda args: True,
    )


SAMPLE_TOPK = _op(sample_topk)
SAMPLE_TOPP = _op(sample_topp)
SAMPLE = _op(sample)
