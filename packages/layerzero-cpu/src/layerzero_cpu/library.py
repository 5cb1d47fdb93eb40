"""The compiled kernels, loaded once: `from layerzero_cpu.library import native`.

LAYERZERO_CPU_ISA names the best instruction set that may be used: portable, avx2, avx512, avx512_vnni, avx512_bf16,
amx on x86-64; portable, neon, dotprod on aarch64. LAYERZERO_CPU_THREADS=own keeps to worker threads of the library's
own; otherwise (torch) torch's do the work where torch runs on OpenMP.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from layerzero.errors import invalid
from layerzero.plugin import BackendNotAvailableError

__all__ = ["adapted", "again", "done", "in_c", "in_python", "native", "torchs_team"]

F = TypeVar("F", bound=Callable[..., Any])

# torch's dtypes in the order in which native/lz.hpp numbers them
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def torchs_team() -> int:
    """The address of the function that has torch's own threads do something; 0 where they are not OpenMP's.

    The GNU runtime's entry, which Intel's and LLVM's have too. torch makes its runtime known to the whole process.
    """
    if not torch.backends.openmp.is_available():
        return 0
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0


def _load() -> Any:
    try:
        from layerzero_cpu import _native
    except ImportError as error:
        raise BackendNotAvailableError(
            f"layerzero-cpu has no compiled kernels here: {error}", code="NATIVE_KERNELS_MISSING", value=str(error)
        ) from error
    _native.setup(torch.Tensor, torch.get_num_threads)
    whose = os.environ.get("LAYERZERO_CPU_THREADS", "").strip()
    if whose not in ("", "own", "torch"):
        raise invalid("VALUE_INVALID", whose, "own, torch", f"LAYERZERO_CPU_THREADS is {whose!r}, not own or torch")
    _native.set_team(0 if whose == "own" else torchs_team())
    # The maker of Inductor's results: the same tensor in two thirds of the time, and no mode can replace it.
    empty = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cpu", _empty)
    wanting = inspect.getattr_static(torch.Tensor, "requires_grad")
    _native.setup_adapters(torch.nn.Parameter, wanting, torch.is_grad_enabled, empty, _DTYPES, torch.Tensor.uniform_)
    wanted = os.environ.get("LAYERZERO_CPU_ISA", "").strip()
    if wanted:
        if wanted not in _native.isas_here():
            message = f"LAYERZERO_CPU_ISA is {wanted!r}"
            raise invalid("CPU_FEATURE_MISSING", wanted, ", ".join(_native.isas_here()), message)
        _native.set_isa(wanted)
    return _native


def done(answer: Any) -> None:
    """For calls with dense tensors, which no kernel may send back."""
    if answer is not None:
        raise RuntimeError("a kernel of layerzero-cpu asked for other strides than the dense ones it was given")


def again(
    formula: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor | None, ...], grad: torch.Tensor
) -> list[Any]:
    """Gradients that can be derived once more, by a formula in torch's own operations: where a backward is recorded."""
    with torch.enable_grad():
        out = formula(*inputs)
        wanted = [item for item in inputs if item is not None and item.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if item is not None and item.requires_grad else None for item in inputs]


native: Any = _load()


# The functions behind the adapters, by name: what does the calls that are not plain.
in_python: dict[str, Callable[..., Any]] = {}


def adapted(function: F) -> F:
    """The same function with plain calls done whole in C (native/adapter.hpp); all others are still `function`'s."""
    in_python[function.__name__] = function
    return in_c(function)


def in_c(function: F) -> F:
    """The C form that hands its other calls to this function."""
    parameters = inspect.signature(function).parameters.values()
    shown = inspect.Signature([item.replace(annotation=item.empty) for item in parameters])
    doc = f"{function.__name__}{shown}\n--\n\n{inspect.getdoc(function)}"
    return native.adapter(function.__name__, function.__module__, doc, function)  # type: ignore[no-any-return]
