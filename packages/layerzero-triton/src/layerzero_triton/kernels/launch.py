"""Launching a Triton kernel: through Triton the first time, then straight to what it compiled.

Triton's launcher looks at every argument to find the right compiled kernel, which takes 15 to 30 µs a call. Here the
caller's own key finds it. That is sound because our kernels follow three rules: arguments come as tensors, then
numbers, then constants; every number has a declared type and `do_not_specialize`, so its value never matters to the
compiler; and everything else the compiler looks at (dtypes, 16-byte alignment of pointers, constants) is in the key.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from layerzero.errors import BackendNotAvailableError
from layerzero_triton import cache

_DIRECT_VERSIONS = ("3.5.", "3.6.")  # whose CompiledKernel.run takes the arguments below; newer ones go the long way
_direct = triton.__version__.startswith(_DIRECT_VERSIONS)
_GPU = torch.version.cuda is not None or torch.version.hip is not None
_stream_of: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
_hooks: Any = triton.knobs.runtime.launch_enter_hook  # profilers hang themselves here
_counts: dict[int, int] = {}
_stood_for: ContextVar[int | None] = ContextVar("stood_for", default=None)  # multiprocessors of a device elsewhere

_collected: ContextVar[list[Launch] | None] = ContextVar("collected", default=None)

plain_launches = [0]  # launches that went through Triton's own launcher; the rest found their compiled kernel

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch was asked to do."""

    kernel: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int


@dataclass(slots=True, eq=False)
class Plan:
    """The part of a launch that depends on shapes alone, worked out once for a shape."""

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    warps: int = 4
    stages: int = 3
    index: int = -1
    run: Callable[..., None] | None = None  # what was compiled for pointers aligned to 16 bytes


def remember(plans: dict[Any, Kept], key: Any, plan: Kept) -> Kept:
    """Keep a plan; a program with very many shapes starts over now and then instead of growing for ever."""
    if len(plans) >= 4096:
        plans.clear()
    plans[key] = plan
    return plan


@contextlib.contextmanager
def collecting() -> Iterator[list[Launch]]:
    """Inside the block nothing is launched: the launches are collected. With meta tensors nothing is allocated."""
    found: list[Launch] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def prepare(launches: Sequence[Launch], device: torch.device) -> None:
    """Compile for launches that were collected, for pointers aligned to 16 bytes, without running anything.

    A kernel whose best tile depends on a size that changes from call to call prepares all its tiles at its first call,
    so that no later call meets a compiler.
    """
    if device.type == "cpu" or _collected.get() is not None:
        return
    with cache.scoped(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            kinds = (None if tensor is None else tensor.dtype for tensor in launch.tensors)
            launch.kernel.warmup(
                *kinds, *launch.numbers, *launch.constants, grid=(1, 1, 1), num_warps=launch.warps,
                num_stages=launch.stages, **early(launch.kernel, triton.runtime.driver.active.get_current_target()),
            )  # fmt: skip


@contextlib.contextmanager
def standing_for(multiprocessors: int) -> Iterator[None]:
    """Inside the block meta tensors stand for those of a device with so many multiprocessors, to compile for it."""
    token = _stood_for.set(multiprocessors)
    try:
        yield
    finally:
        _stood_for.reset(token)


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return bool(triton.knobs.runtime.interpret)


def assembling() -> bool:
    """Whether NVIDIA's assembler sees our kernels."""
    return not interpreting() and torch.version.hip is None


def early(kernel: Any, target: Any) -> dict[str, bool]:
    """What Triton is told of a kernel that may be launched before the one in front of it has ended.

    Its last constant is EARLY: with it the kernel itself waits (`wait_for_previous`), which SM 9.0 and newer can.
    """
    able = kernel.arg_names[-1] == "EARLY" and target.backend == "cuda" and target.arch >= 90
    return {"EARLY": True, "launch_pdl": True} if able else {}


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; 1 under the interpreter."""
    if device.type != "cuda":
        return _stood_for.get() or 1
    index = device.index if device.index is not None else torch.cuda.current_device()
    found = _counts.get(index)
    if found is None:
        found = _counts[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return found


class Launcher:
    """One `@triton.jit` function, and what was compiled of it in this process."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.name: str = getattr(kernel, "__name__", "kernel")
        self._extra = (True,) if kernel.arg_names[-1] == "EARLY" else ()
        self._ready: dict[Any, Callable[..., None]] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        warps: int = 4,
        stages: int = 3,
    ) -> None:
        """Run the kernel on the current stream of the tensors' device."""
        first = tensors[0]
        assert first is not None
        found = _collected.get()
        if found is not None:
            found.append(Launch(self.kernel, grid, tuple(tensors), tuple(numbers), constants, warps, stages))
            return
        index = first.get_device()
        if index < 0 or not _GPU or _stream_of is None or _current_device is None:
            self._through_triton(grid, tensors, numbers, constants, warps, stages)
            return
        if index != _current_device():
            with torch.cuda.device(index):
                self(grid, tensors, numbers, constants, warps, stages)
            return
        pointers: list[int | None] = []
        together = 0
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
            else:
                pointer = tensor.data_ptr()
                together |= pointer
                pointers.append(pointer)
        kinds = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        aligned: Any = together & 15 == 0 or tuple([p is not None and p & 15 == 0 for p in pointers])
        key = (index, kinds, aligned, constants, warps, stages)
        run = self._ready.get(key)
        if run is None or _hooks.calls:
            compiled = self._through_triton(grid, tensors, numbers, constants, warps, stages)
            if compiled is not None:
                with self._lock:
                    self._ready[key] = _bound(compiled, self._extra)
            return
        run(grid, _stream_of(index), (*pointers, *numbers, *constants))

    def go(self, plan: Plan, tensors: Sequence[Tensor | None], numbers: tuple[float, ...] = ()) -> None:
        """Run a plan whose key, the caller's, has every dtype and the device in it; `numbers` follow the plan's own."""
        run = plan.run if _collected.get() is None else None
        if run is not None and _current_device() == plan.index and not _hooks.calls:  # type: ignore[misc]
            pointers: list[int | None] = []
            together = 0
            for tensor in tensors:
                if tensor is None:
                    pointers.append(None)
                else:
                    pointer = tensor.data_ptr()
                    together |= pointer
                    pointers.append(pointer)
            if together & 15 == 0:
                run(plan.grid, _stream_of(plan.index), (*pointers, *plan.numbers, *numbers, *plan.constants))  # type: ignore[misc]
                return
        self(plan.grid, tensors, (*plan.numbers, *numbers), plan.constants, plan.warps, plan.stages)
        if plan.run is None and _direct and _collected.get() is None:
            index = tensors[0].get_device()  # type: ignore[union-attr]
            kinds = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
            plan.index = index
            plan.run = self._ready.get((index, kinds, True, plan.constants, plan.warps, plan.stages))

    def _through_triton(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
    ) -> Any:
        first = tensors[0]
        assert first is not None
        if first.device.type == "cpu" and not interpreting():
            raise BackendNotAvailableError(
                f"Triton has no compiler for the CPU; {self.name} got CPU tensors",
                code="PLATFORM_MISMATCH",
                value="cpu",
                limit="cuda, rocm, xpu",
                hint="set TRITON_INTERPRET=1 before Triton is imported to run its kernels in Python",
            )
        plain_launches[0] += 1
        if first.device.type == "cpu":
            return self.kernel[grid](*tensors, *numbers, *constants)
        words = early(self.kernel, triton.runtime.driver.active.get_current_target())
        with cache.scoped():
            return self.kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages, **words)


def _bound(compiled: Any, extra: tuple[Any, ...]) -> Callable[[tuple[int, int, int], int, tuple[Any, ...]], None]:
    """A function that launches a compiled kernel; `extra` stands for arguments that it does not read."""
    if not _direct:
        return lambda grid, stream, args: compiled[grid](*args, *extra, stream=stream)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if type(run).__name__ == "CudaLauncher" and not (run.global_scratch_size or run.profile_scratch_size):
        # the C function behind it; what stands between them serves kernels that need scratch memory
        enter, together, early = run.launch, run.launch_cooperative_grid, run.launch_pdl

        def straight(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
            enter(*grid, stream, function, together, early, None, None, packed, None, None, None, *args, *extra)

        return straight

    def launch(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        run(grid[0], grid[1], grid[2], stream, function, packed, None, None, None, *args, *extra)

    return launch
