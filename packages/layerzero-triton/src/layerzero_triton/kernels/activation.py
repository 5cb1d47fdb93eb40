"""Gated activations, silu, gelu and relu of the first half times the second: device code.

Sizes and steps come in units of UNIT elements, see `norm`.
"""

import contextlib

import triton
import triton.language as tl

with contextlib.suppress(ImportError):  # a Triton for other devices alone
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """First in a kernel that may be launched before the one in front of it has ended, see `launch.early`.

    The kernel behind it may be launched from here on; what the one in front has written is there afterwards.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _gate(value, KIND: tl.constexpr):
    """The activation itself, in float32."""
    if KIND == "silu":
        result = value / (1.0 + tl.exp(-value))
    elif KIND == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u: no difference of like numbers
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        result = value / (1.0 + tl.exp(-inner))
    else:
        result = tl.where(value > 0.0, value, tl.where(value != value, value, 0.0))
    return result


@triton.jit
def _slope(value, KIND: tl.constexpr):
    """Its derivative."""
    if KIND == "silu":
        share = 1.0 / (1.0 + tl.exp(-value))
        result = share * (1.0 + value * (1.0 - share))
    elif KIND == "gelu":
        result = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * 0.3989422804014327 * tl.exp(
            -0.5 * value * value
        )
    elif KIND == "gelu_tanh":
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        share = 1.0 / (1.0 + tl.exp(-inner))
        grown = 1.5957691216057308 * (1.0 + 0.134145 * value * value)
        result = share + value * share * (1.0 - share) * grown
    else:
        result = tl.where(value > 0.0, 1.0, 0.0)
    return result


@triton.jit(do_not_specialize=["width", "x_step", "blocks"])
def forward(
    x, out, width: tl.int32, x_step: tl.int64, blocks: tl.int32, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One of `blocks` blocks of columns of a row a program, neighbours in memory next to each other."""
    x_step *= UNIT
    width *= UNIT
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = x + row * x_step
    target = out + row * width
    if EVEN:
        gate = tl.load(source + columns, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(source + width + columns, eviction_policy="evict_first").to(tl.float32)
        tl.store(target + columns, (_gate(gate, KIND) * up).to(out.dtype.element_ty))
    else:
        inside = columns < width
        gate = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + columns, (_gate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width", "x_step", "grad_step", "blocks"])
def backward(
    grad, x, x_grad, width: tl.int32, x_step: tl.int64, grad_step: tl.int64, blocks: tl.int32, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Both halves of the gradient; x_grad is contiguous."""
    x_step *= UNIT
    grad_step *= UNIT
    width *= UNIT
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * x_step + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_step + width + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_step + columns, mask=inside, other=0.0).to(tl.float32)
    to_gate = given * up * _slope(gate, KIND)
    to_up = given * _gate(gate, KIND)
    target = x_grad + row * width * 2
    tl.store(target + columns, to_gate.to(x_grad.dtype.element_ty), mask=inside)
    tl.store(target + width + columns, to_up.to(x_grad.dtype.element_ty), mask=inside)
