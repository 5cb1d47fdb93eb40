"""Empty tensors like the results of ops, for `Op.fake`: from the shapes of the arguments alone.

Which kernel runs is known only at run time, while the strides of a result must be known when it is traced. So each
result has one order in memory: contiguous, or for 4-D results of an op with `Op.keeps_order` that of its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def heads_inside(like: Tensor) -> bool:
    """Whether a 4-D tensor has axis 1 inside axis 2 in memory (a transposed view)."""
    return like.dim() == 4 and like.stride(1) < like.stride(2)


def ordered(out: Tensor, like: Tensor) -> Tensor:
    """`out` in the memory order of `like`; contiguous where it has not as many axes."""
    if out.dim() == 4 and heads_inside(like):
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def ordered_empty(like: Tensor, last: Any = None) -> Tensor:
    """A tensor shaped like `like` but for its last axis, in its memory order."""
    last = like.shape[-1] if last is None else last
    if heads_inside(like):
        batch, one, two, _ = like.shape
        return like.new_empty((batch, two, one, last)).transpose(1, 2)
    return like.new_empty((*like.shape[:-1], last))


def same(x: Tensor, *rest: Any) -> Tensor:
    """Shaped like the first argument."""
    return x.new_empty(x.shape)


def both(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shaped like the first two arguments."""
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


def turned(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """Like q and k, in their memory order."""
    return ordered_empty(q), None if k is None else ordered_empty(k)


def gated(x: Tensor, *rest: Any) -> Tensor:
    """Half as wide."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def ids(logits: Tensor, *rest: Any) -> Tensor:
    """One id a row."""
    import torch  # late: this floor is there without it

    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def with_lse(out: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The output [tokens, heads, width] of an attention, with `return_lse` beside its log-sum-exp [tokens, heads]."""
    import torch  # late: this floor is there without it

    return (out, out.new_empty(out.shape[:2], dtype=torch.float32)) if return_lse else out


_STEPS = 10_000  # of the search; strides that lie inside each other need a few


def overlapping(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` lies where one of `b` does; strides that take too long to search count as such."""
    if a is b:
        return a.numel() > 0
    gap = b.data_ptr() - a.data_ptr()
    size = a.element_size()
    # a[i…] and b[j…] meet where the steps of i, less those of j, add up to the gap.
    steps = [(stride * size, 0, count - 1) for stride, count in zip(a.stride(), a.shape, strict=True)]
    steps += [(stride * size, 1 - count, 0) for stride, count in zip(b.stride(), b.shape, strict=True)]
    if any(low > high for _, low, high in steps):
        return False
    steps = sorted((step for step in steps if step[0] and step[1] != step[2]), reverse=True)
    lows, highs = [0], [0]  # what the smaller strides can add up to
    for stride, low, high in reversed(steps):
        lows.append(lows[-1] + stride * low)
        highs.append(highs[-1] + stride * high)
    if not lows[-1] - size < gap < highs[-1] + size:
        return False  # nearly every pair: two tensors of their own
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    left = [_STEPS]

    def meets(rest: int, depth: int) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return True
        if depth == len(steps):
            return abs(rest) < size
        stride, low, high = steps[depth]
        below, above = lows[len(steps) - depth - 1] - size, highs[len(steps) - depth - 1] + size
        first, last = max(low, -((above - rest) // stride)), min(high, (rest - below) // stride)
        return any(meets(rest - stride * count, depth + 1) for count in range(first, last + 1))

    return meets(gap, 0)
