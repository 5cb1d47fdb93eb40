"""What the `describe` of an op is made of: checks of its arguments, and a Context around one main tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerzero.errors import invalid
from layerzero.model.context import Context
from layerzero.model.describe import check_devices, check_floating, dtype_name, stride_class
from layerzero.model.enums import OpKind
from layerzero.model.op import Call

if TYPE_CHECKING:
    from torch import Tensor


def expect_tensor(value: Any, name: str) -> Tensor:
    """The value, which must be a tensor."""
    from torch import Tensor  # this floor is loaded without torch

    if not isinstance(value, Tensor):
        raise invalid("TYPE_INVALID", f"{name}: {type(value).__name__}", "a torch.Tensor")
    return value


def expect_rank(value: Any, name: str, ranks: Sequence[int]) -> Tensor:
    """The value, which must be a tensor with so many axes."""
    tensor = expect_tensor(value, name)
    if tensor.ndim not in ranks:
        allowed = " or ".join(str(rank) for rank in ranks)
        raise invalid("RANK_INVALID", tensor.ndim, allowed, f"{name} has rank {tensor.ndim}")
    return tensor


def expect_shape(tensor: Tensor | None, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, and what is no tensor; None passes."""
    if tensor is not None and tuple(expect_tensor(tensor, name).shape) != shape:
        raise invalid("SHAPE_INVALID", str(tuple(tensor.shape)), str(shape), f"{name} has shape {tuple(tensor.shape)}")


def expect_index(tensor: Tensor, name: str) -> str:
    """The dtype of indices, which must be int32 or int64."""
    word = dtype_name(expect_tensor(tensor, name))
    if word not in ("int32", "int64"):
        raise invalid("DTYPE_UNSUPPORTED", f"{name} {word}", "int32 or int64", f"{name} {word}")
    return word


def expect_vocabulary(tensor: Tensor, name: str) -> None:
    """Refuse logits or probabilities over no token."""
    if tensor.shape[-1] == 0:
        raise invalid("SHAPE_INVALID", str(tuple(tensor.shape)), "[…, V >= 1]", f"{name} have no vocabulary")


def expect_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse packed tokens [T, heads, head_dim] whose heads, widths or numbers of keys do not fit each other."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    if tuple(value.shape[:2]) != tuple(key.shape[:2]):
        shown = f"key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise invalid("SHAPE_INVALID", shown, "equal tokens and heads", "key and value disagree")
    if dim != key.shape[2]:
        raise invalid("HEAD_DIM_MISMATCH", f"query {dim}, key {key.shape[2]}", "equal")
    if 0 in (dim, heads, kv_heads):
        raise invalid("SHAPE_INVALID", str(tuple(query.shape)), "at least one head and head_dim 1")
    if heads % kv_heads:
        raise invalid("GQA_RATIO_INVALID", heads, kv_heads)


def context_of(
    call: Call,
    op: str,
    dtype: str,
    dims: Mapping[str, int],
    needs: Mapping[str, object],
    tensors: Sequence[Tensor] = (),
    **fields: Any,
) -> Context:
    """A Context from what a description found; `needs` says of each feature whether it is asked for."""
    if tensors:
        fields["strides"] = stride_class(tensors)
    asked = frozenset(name for name, needed in (*needs.items(), ("backward", call.needs_grad)) if needed)
    return Context(
        op=op,
        device=call.device,
        dtype=dtype,
        dims=tuple(dims.items()),
        needs=asked,
        needs_grad=call.needs_grad,
        backend=call.backend,
        **fields,
    )


def simple_context(
    call: Call,
    op: str,
    main: Tensor,
    others: dict[str, Tensor | None],
    dims: dict[str, int],
    needs: Iterable[str] = (),
    *,
    kind: OpKind = OpKind.TENSOR,
    floating: bool = True,
    mixed: bool = False,
    **fields: Any,
) -> Context:
    """A Context around one main tensor. `mixed` tolerates other tensors of another dtype (mixed-precision weights)."""
    expect_tensor(main, "input")
    if main.ndim == 0:
        raise invalid("RANK_INVALID", 0, "1 or more", "the input has rank 0")
    for name, other in others.items():
        if other is not None:
            expect_tensor(other, name)
    check_devices(input=main, **others)
    word = check_floating(main, "input") if floating else dtype_name(main)
    words = [word, *(dtype_name(t) for t in others.values() if t is not None and t.is_floating_point())]
    asked = dict.fromkeys(needs, True)
    if mixed and len(set(words)) > 1:
        asked["mixed_weight"] = True
        words = [word]
    return context_of(call, op, word, dims, asked, (main,), kind=kind, dtypes=tuple(words), rank=main.ndim, **fields)
