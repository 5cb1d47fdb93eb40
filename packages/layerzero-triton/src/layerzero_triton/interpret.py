"""Triton's interpreter beside a new NumPy.

Triton 3.6 reads a scalar of its interpreter as `int(array)` of an array with one element, which NumPy refuses from 2.4
on. `mend()` makes it read the element; it changes the interpreter alone, and only where kernels are interpreted.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Call before a kernel is interpreted; a second call does nothing."""
    import triton

    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
