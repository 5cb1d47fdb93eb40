"""The compiled kernels, loaded once: `from layerzero_cpu.library import native`.

LAYERZERO_CPU_ISA names the best instruction set that may be used: portable, avx2, avx512, avx512_bf16, amx on x86-64;
portable, neon, dotprod on aarch64.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from layerzero.plugin import BackendNotAvailableError, InvalidInputError

__all__ = ["done", "native"]


def _load() -> Any:
    try:
        from layerzero_cpu import _native
    except ImportError as error:
        raise BackendNotAvailableError(
            f"layerzero-cpu has no compiled kernels here: {error}", code="NATIVE_KERNELS_MISSING", value=str(error)
        ) from error
    _native.setup(torch.Tensor, torch.get_num_threads)
    wanted = os.environ.get("LAYERZERO_CPU_ISA", "").strip()
    if wanted:
        if wanted not in _native.isas_here():
            raise InvalidInputError(
                f"LAYERZERO_CPU_ISA is {wanted!r}",
                code="CPU_FEATURE_MISSING",
                value=wanted,
                limit=", ".join(_native.isas_here()),
            )
        _native.set_isa(wanted)
    return _native


def done(answer: Any) -> None:
    """For calls with dense tensors, which no kernel may send back."""
    if answer is not None:
        raise RuntimeError("a kernel of layerzero-cpu asked for other strides than the dense ones it was given")


native: Any = _load()
