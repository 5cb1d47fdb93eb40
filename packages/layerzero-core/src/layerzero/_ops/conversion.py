"""`lz.cast`: a tensor in another dtype, with the same meaning on every device and torch."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero._ops.signature import declare, dispatch
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import dtype_name
from layerzero.model.op import Call

_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_KNOWN = frozenset({*_FLOATS, *_INTEGERS, "bool"})
_NARROW = frozenset(_FLOATS[2:])


def cast(x: Tensor, dtype: torch.dtype, *, saturate: bool = False, backend: str | None = None) -> Tensor:
    """`x` in `dtype`, always a new tensor: floats of 64 to 8 bits (E4M3, E5M2), integers of 64 to 8 bits, bool.

    float to float    to the nearest number, ties to even, in one rounding. NaN stays NaN. What is too large becomes
                      infinity; E4M3 has none and gives NaN. With `saturate` it becomes the largest finite number, and
                      so does infinity itself.
    integer to float  the same.
    float to integer  cut towards zero. NaN gives 0. What is too large wraps around (modulo 2^bits; infinity gives 0);
                      with `saturate` it becomes the smallest or largest integer.
    integer to integer  wraps around, or with `saturate` stops at the limits.
    to bool           whether it is not zero; NaN is not zero.

    Between floats the gradient is cast back to the dtype of `x`; it is zero where a number was clamped, and where it
    became NaN because E4M3 ends.
    """
    return dispatch(CAST, (x, dtype, bool(saturate)), backend=backend)  # type: ignore[no-any-return]


def _describe(call: Call) -> Context:
    x, dtype, saturate = call.args
    x = expect_tensor(x, "x")
    if not isinstance(dtype, torch.dtype):
        raise invalid("TYPE_INVALID", f"dtype: {type(dtype).__name__}", "a torch.dtype")
    source, target = dtype_name(x), str(dtype).removeprefix("torch.")
    for word in (source, target):
        if word not in _KNOWN:
            raise invalid("DTYPE_UNSUPPORTED", word, sorted(_KNOWN))
    from_float8 = source.startswith("float8")
    needs = {
        "saturate": saturate,
        # What torch's own conversion leaves to the machine, or rounds twice.
        "float_to_integer": source in _FLOATS and target not in _FLOATS,
        "to_e4m3": target == "float8_e4m3fn",
        "one_rounding": target in _NARROW and source in ("float64", "int64", "int32"),
        "from_float8": from_float8,
    }
    word = "float32" if from_float8 else source  # read as float32, fp8 needs no fp8 arithmetic of the device
    return context_of(call, "cast", word, {"elements": x.numel()}, needs, (x,), rank=x.ndim)


CAST = declare(
    function=cast,
    fake=lambda x, dtype, *rest: x.new_empty(x.shape, dtype=dtype),
    describe=_describe,
    reference="layerzero.backends.reference.conversion:cast",
    cost=Roofline("elements * (element_bytes + 1)", "elements"),
    shapes={"shape": "*elements"},
    options=("format",),
    example="layerzero._ops.examples_rows:cast",
    tolerance="exact",
    growing=("elements",),
    fusable=True,
    keyed="TWWW",
)
