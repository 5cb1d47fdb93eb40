"""Remarks that the CuTe libraries make about themselves while they compile, kept out of the caller's way.

FlashAttention 4 and QuACK compile at the first call of each configuration, and their compiler warns then: of an
argument of their own that it takes as a constant, and of names that they still use and that will go. Where warnings
are errors, each of these would end the compilation, and the kernel would count as one that cannot be compiled.

Why not `warnings.catch_warnings`: it puts back a whole list of filters when it ends. Two threads in it at once, ours
under a lock or not, put back each other's, and a filter that somebody had for a moment stays for good. Why not a
filter set once, at import: whoever sets one later stands in front of it, as pytest does for each test. So one filter,
of these sentences and no others, is put in front before a vendor is called, unless it stands there already, and is
never taken back: nothing to restore, nothing to restore wrongly. A thread that puts its own in front during the
seconds of a compilation makes that one fail; it is then tried again.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

# By message alone: code that the compiler rewrites runs with globals of its own, so its module has no sure name.
THEIRS = (
    r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument for function 'cutlass___call___flash_attn"
    r"|cutlass\.[\w.]+ is deprecated; use cutlass\."
    r"|(warpgroup|tcgen05)\.OperandMajorMode is deprecated"
    r"|Arch from arch\.py is deprecated"
)
# While they are imported they speak of each other in many words; then the module has its name.
_MODULES = r"(nvidia_)?cutlass|flash_attn|quack|cuda|triton|tvm_ffi"
_theirs = re.compile(THEIRS, re.IGNORECASE)
_TRIES = 4

Result = TypeVar("Result")

_ours: object = None  # our filter as it stands in the list: the same object in every copy that is made of the list


def hush() -> None:
    """Have the vendors' remarks ignored from now on. Costs a comparison where they already are."""
    global _ours
    filters = warnings.filters
    if filters and filters[0] is _ours:
        return
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=_MODULES)
    warnings.filterwarnings("ignore", message=THEIRS, category=Warning)
    _ours = warnings.filters[0]


def quietly(function: Callable[..., Result]) -> Callable[..., Result]:
    """A vendor's function that may compile, called with its remarks ignored."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        for left in reversed(range(_TRIES)):
            hush()
            try:
                return function(*args, **kwargs)
            except Warning as raised:  # a compilation that was ended; nothing has been launched yet
                if not left or not _theirs.match(str(raised)):
                    raise
        raise AssertionError("the last try returns or raises")

    return run


def hush_backward(*outputs: Tensor | None) -> None:
    """The same for the backward pass of a vendor's autograd function, which compiles when it first runs."""
    nodes = {id(item.grad_fn): item.grad_fn for item in outputs if item is not None and item.grad_fn is not None}
    for node in nodes.values():
        node.register_prehook(_before)


def _before(grads: tuple[Tensor, ...]) -> None:
    hush()
