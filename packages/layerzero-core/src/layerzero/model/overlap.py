"""Whether two strided tensors share an element, exactly: writing into both would write one of them twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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
