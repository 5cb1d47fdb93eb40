"""Liger's real kernels on the CPU, by Triton's interpreter. Collected only where TRITON_INTERPRET=1 is set.

`tests/test_interpreted.py` runs this folder in a process of its own: the interpreter has to be chosen before Triton
is imported. What Triton 3.6 leaves out of it is put right here; the kernels run as Liger wrote them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KIT = "liger_on_cpu" in os.environ.get("LIGER_KIT", "")  # the kit runs by itself: it takes long
collect_ignore_glob = ["kit/*" if not KIT else "test_*.py"] if INTERPRETED else ["*"]

if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, patch_tensor = interpreter._implicit_cvt, interpreter._patch_lang_tensor

    def with_floats(arg: Any) -> Any:
        """Compiled kernels get a float argument as a float32 scalar; the interpreter leaves it a Python float."""
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(arg)

    def with_index(tensor: Any, scope: Any) -> None:
        """`int()` of an array of one element, which numpy has since given up."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._implicit_cvt = with_floats
    interpreter._patch_lang_tensor = with_index

    @pytest.fixture(autouse=True, scope="session")
    def math_for_the_interpreter() -> None:
        """GPU math libraries are not linked there; Liger takes tanh and rsqrt from one."""
        from importlib import import_module

        def tanh(x: Any) -> Any:
            return 2.0 * tl.sigmoid(2.0 * x) - 1.0

        def rsqrt(x: Any) -> Any:
            return 1.0 / tl.sqrt(x)

        for name in ("geglu", "cross_entropy"):
            import_module(f"liger_kernel.ops.{name}").tanh = tanh
        for name in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
            import_module(f"liger_kernel.ops.{name}").rsqrt = rsqrt
