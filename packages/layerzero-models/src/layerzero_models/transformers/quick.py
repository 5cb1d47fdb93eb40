"""The ops at the places a patched model calls them, with hot keys written out by hand.

The general key of an op reads every argument in a loop, which takes longer than launching a small kernel. These read
the same facts in a row, look into the same table of the same World, and go the same cold way (`layerzero.dispatch`).
What cannot have changed is not read again: a weight that is the same object at the same address has the same shape,
dtype and device; the tables of a rotation are the same objects in every layer. Under torch.compile, and for whatever
is no plain tensor, the public op takes over. Where layerzero-accel is installed, its C forms are faster still and take
the place of all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.gemma import GEMMA_ADD_RMS_NORM, GEMMA_RMS_NORM, gemma_add_rms_norm, gemma_rms_norm
from layerzero._ops.linear import GELU_AND_MUL, RELU_AND_MUL, SILU_AND_MUL, linear
from layerzero._ops.norm import ADD_RMS_NORM, LAYER_NORM, RMS_NORM, add_rms_norm, layer_norm, rms_norm
from layerzero._ops.positional import ROPE, rope
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.hot import autocast_key, describe_tensor
from layerzero.dispatch.late import current_world, miss, recover
from layerzero.model.op import OperationSpec
from layerzero.runtime.current import now, scope
from layerzero.torch_ops.functions import functions

_GATED = {spec.op_id: spec for spec in (SILU_AND_MUL, GELU_AND_MUL, RELU_AND_MUL)}

_C = functions.accelerated  # filled when layerzero is imported, which is before this
_c_norm, _c_add, _c_layer, _c_rope = (_C.get(op) for op in ("rms_norm", "add_rms_norm", "layer_norm", "rope"))
product: Any = _C.get("linear", linear)  # `lz.linear`: on a CPU its work is long against a general key
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_compiling = torch.compiler.is_compiling
_scope = scope.get
_Odd = (AttributeError, TypeError, RuntimeError)  # not tensors, or tensors without strides
_make: Any = torch.library.Library
_library = _make("layerzero_models", "DEF")  # kept: an op lives as long as its Library
_library.define("computed(Tensor table) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("computed", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("layerzero_models::computed", torch.empty_like, lib=_library)
_numbers: dict[Any, int] = {}  # what is known of parameters -> a short number that stands for it in keys


class Facts:
    """What a key has to know of a module's parameters, read again only when one of them is another or was moved."""

    __slots__ = ("_bias", "_known", "_number", "_own", "_place")

    def __init__(self, own: Mapping[str, Tensor | None]) -> None:
        self._own = own
        self._known: Any = None
        self._bias: Any = None
        self._place = self._number = 0

    def number(self) -> int:
        """Equal numbers stand for equal types, shapes, dtypes, devices and strides of all parameters."""
        weight: Any = self._own["weight"]
        bias = self._own.get("bias")
        place = weight.data_ptr()
        if weight is not self._known or bias is not self._bias or place != self._place:
            parts = tuple(item if item is None else describe_tensor(item) for item in self._own.values())
            self._number = _numbers.setdefault(parts, len(_numbers))
            self._known, self._bias, self._place = weight, bias, place
        return self._number


def public(op: str, *args: Any, **kwargs: Any) -> Any:
    """An op as everybody calls it, where its work is long against a general key."""
    return PUBLIC[op].function(*args, **kwargs)


def norm(gemma: bool, x: Tensor, weight: Tensor, eps: float, facts: Facts | None) -> Tensor:
    """`lz.rms_norm`, or `lz.gemma_rms_norm`. `facts` are None where a graph is traced."""
    if _c_norm is not None and not gemma:
        return _c_norm(x, weight, eps)  # type: ignore[no-any-return]
    public = gemma_rms_norm if gemma else rms_norm
    if facts is None or _compiling():
        return public(x, weight, eps)
    try:
        key = (
            "hft.rms_norm", gemma, facts.number(),
            type(x), x.shape, x.dtype, x.is_cpu or ~x.get_device(), x.is_contiguous() or x.stride(),
            _grad_enabled() and (x.requires_grad or weight.requires_grad),
            autocast_key() if _any_autocast() else False, _deterministic(),
        )  # fmt: skip
    except _Odd:
        return public(x, weight, eps)
    return _run(GEMMA_RMS_NORM if gemma else RMS_NORM, key, (x, weight, eps))  # type: ignore[no-any-return]


def add_norm(
    gemma: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float, facts: Facts
) -> tuple[Tensor, Tensor]:
    """`lz.add_rms_norm` (or Gemma's) without gradients: (norm of the sum, the sum in torch's dtype of both)."""
    if _c_add is not None and not gemma and x.dtype is residual.dtype:
        return _c_add(x, residual, weight, eps)  # type: ignore[no-any-return]
    try:
        key = (
            "hft.add_rms_norm", gemma, facts.number(),
            type(x), x.shape, x.dtype, x.is_cpu or ~x.get_device(), x.is_contiguous() or x.stride(),
            type(residual), residual.shape, residual.dtype, residual.is_cpu or ~residual.get_device(),
            residual.is_contiguous() or residual.stride(),
            autocast_key() if _any_autocast() else False, _deterministic(),
        )  # fmt: skip
    except _Odd:
        return (gemma_add_rms_norm if gemma else add_rms_norm)(x, residual, weight, eps)
    spec = GEMMA_ADD_RMS_NORM if gemma else ADD_RMS_NORM
    found = _hot(spec, key, (x, residual, weight, eps))
    if found is not None:
        return found  # type: ignore[no-any-return]
    if x.dtype is not residual.dtype:
        total = residual + x
        return norm(gemma, total, weight, eps, facts), total
    return miss(spec, current_world(), key, (x, residual, weight, eps), None, None)  # type: ignore[no-any-return]


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, facts: Facts | None) -> Tensor:
    """`lz.layer_norm`. `facts` are None where a graph is traced."""
    if _c_layer is not None:
        return _c_layer(x, weight, bias, eps)  # type: ignore[no-any-return]
    if weight is None or facts is None or _compiling():
        return layer_norm(x, weight, bias, eps)
    try:
        key = (
            "hft.layer_norm", facts.number(),
            type(x), x.shape, x.dtype, x.is_cpu or ~x.get_device(), x.is_contiguous() or x.stride(),
            _grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)),
            autocast_key() if _any_autocast() else False, _deterministic(),
        )  # fmt: skip
    except _Odd:
        return layer_norm(x, weight, bias, eps)
    return _run(LAYER_NORM, key, (x, weight, bias, eps))  # type: ignore[no-any-return]


def activate(op: str, x: Tensor, rest: tuple[str, ...]) -> Tensor:
    """`lz.silu_and_mul` and its like, without gradients: a gated activation of gate and up side by side."""
    if op in _C:
        return _C[op](x, *rest)  # type: ignore[no-any-return]
    try:
        key = (
            "hft.gated", op, rest,
            type(x), x.shape, x.dtype, x.is_cpu or ~x.get_device(), x.is_contiguous() or x.stride(),
            autocast_key() if _any_autocast() else False, _deterministic(),
        )  # fmt: skip
    except _Odd:
        return PUBLIC[op].function(x, *rest)  # type: ignore[no-any-return]
    return _run(_GATED[op], key, (x, *rest))  # type: ignore[no-any-return]


_tables: tuple[Any, Any, Any] = (None, None, None)  # cos, sin and their number, of the latest rotation


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`lz.rope` in the form of transformers' `apply_rotary_pos_emb`."""
    global _tables
    if _grad_enabled() and _compiling() and not torch.compiler._is_exporting_flag and not cos.requires_grad:
        # One tensor of cosines and one of sines for all layers and their gradients: compilers take them anew in each.
        cos, sin = torch.ops.layerzero_models.computed(cos), torch.ops.layerzero_models.computed(sin)
    layout = "BHSD" if unsqueeze_dim == 1 else "BSHD"
    if _c_rope is not None:
        return _c_rope(q, k, cos, sin, layout=layout)  # type: ignore[no-any-return]
    if _compiling():
        return rope(q, k, cos, sin, layout=layout)
    try:
        known, other, number = _tables
        if known is not cos or other is not sin:
            facts = (describe_tensor(cos), describe_tensor(sin))
            number = _numbers.setdefault(facts, len(_numbers))
            _tables = (cos, sin, number)
        key = (
            "hft.rope", layout, number,
            type(q), q.shape, q.dtype, q.is_cpu or ~q.get_device(), q.is_contiguous() or q.stride(),
            type(k), k.shape, k.dtype, k.is_cpu or ~k.get_device(), k.is_contiguous() or k.stride(),
            _grad_enabled() and (q.requires_grad or k.requires_grad or cos.requires_grad or sin.requires_grad),
            autocast_key() if _any_autocast() else False, _deterministic(),
        )  # fmt: skip
    except _Odd:
        return rope(q, k, cos, sin, layout=layout)
    return _run(ROPE, key, (q, k, cos, sin, False, layout, None, False), layout)  # type: ignore[no-any-return]


def rotation(own: Callable[..., Any], pairs: frozenset[tuple[torch.dtype, torch.dtype]]) -> Callable[..., Any]:
    """`rotate` for heads and tables of these dtypes; a model's own function for others, which may promote."""

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if q.dtype is k.dtype and (q.dtype, cos.dtype) in pairs:
            return rotate(q, k, cos, sin, unsqueeze_dim)
        return own(q, k, cos, sin, **({} if unsqueeze_dim == 1 else {"unsqueeze_dim": unsqueeze_dim}))

    return turn


def _run(spec: OperationSpec, key: tuple[Any, ...], args: tuple[Any, ...], layout: str | None = None) -> Any:
    found = _hot(spec, key, args, layout)
    return miss(spec, current_world(), key, args, layout, None) if found is None else found


def _hot(spec: OperationSpec, key: tuple[Any, ...], args: tuple[Any, ...], layout: str | None = None) -> Any:
    """The result of a call whose key is hot; None for one that is new here."""
    active = _scope()
    world = now.world if active is None else active.world()
    bound = world.hot.get(key)
    if bound is None or not (bound.guard is None or bound.guard()):
        return None
    try:
        return bound.run(*args)
    except Exception as error:
        return recover(spec, world, bound, args, layout, None, error)
