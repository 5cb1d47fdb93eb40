"""Compiling beside the requests: in another process where a kernel declares how, and then loading what is ready.

A kernel's `compiler` names a function that compiles for a device given by value. Its order holds what the adapter
would be called with, as metadata; the process that follows it sees no device (`layerzero.isolation.compilers`). This
process only loads the artifact, in a thread of the queue, at most one a second. What a load holds the interpreter for
is done before it: adapters are imported when a model is patched (`import_adapters`) or else ahead of the load, and
shared libraries are mapped by the C library. Kernels without a `compiler` compile in that thread; "device" leaves a
kernel to `lz warmup`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch import compiling as jit
from layerzero.dispatch.adapt import adapt
from layerzero.dispatch.bind import own_layout, resolve
from layerzero.dispatch.compiling import Made
from layerzero.errors import BackendNotAvailableError
from layerzero.forking import fresh_lock
from layerzero.isolation.compilers import IDLE_S, compilers, order_text
from layerzero.isolation.wire import ChildError, ChildOutOfMemory, IsolationFault, Unsendable
from layerzero.jit import cache as jit_cache
from layerzero.model.artifact import Artifact, words_of
from layerzero.model.context import Context
from layerzero.model.decision import Decision, ExecutionPlan
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.reasons import Reason, reason
from layerzero.runtime.state import state
from layerzero.runtime.timers import timers
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for
from layerzero.selection.world import World
from layerzero.telemetry.events import events

_log = logging.getLogger("layerzero.jit")
_APART_S = 1.0  # loads beside requests are at least so far apart
# What a compiler's words say of the disk and not of the kernel.
_DISK = ("No space left on device", "File too large", "Disk quota exceeded", "Read-only file system")
_in_threads: set[str] = set()  # backends of which it was said that they compile in threads


def compiles_elsewhere(kernel: KernelSpec) -> bool:
    """Whether a kernel declares how to compile it without its device."""
    return kernel.compiler is not None and kernel.compiler != "device"


def compile_beside(spec: OperationSpec, ctx: Context, decision: Decision, world: World, args: tuple[Any, ...]) -> None:
    """Have the kernel compiled that a decision waits for, on inputs like these; the call itself does not wait.

    Left to `lz.warmup`: calls that draw random numbers (a compile would draw too), calls under capture, and kernels
    that are compiled only on the device.
    """
    if world.policy.jit != "background" or ctx.capturing or (spec.random is not None and spec.random(args)):
        return
    kernel_id = decision.pending[0]
    kernel = world.registry.kernels[kernel_id]
    artifact = artifact_for(kernel, ctx, world)
    known = artifact in state.world.ready or artifact in state.world.uncompilable
    if known or kernel.compiler == "device" or jit.queue().holds(artifact):
        return
    copied = jit.likeness(args, share=spec.mutates is None or not spec.mutates(args))
    elsewhere = compiles_elsewhere(kernel)
    if not elsewhere and kernel.backend not in _in_threads:
        _in_threads.add(kernel.backend)
        _log.info("%s compiles in threads of this process: it declares no compiler", kernel.backend)
    work = compile_elsewhere if elsewhere else jit.compile_now
    jit.queue().submit(artifact, partial(work, spec, ctx, kernel_id, copied, state.generation), timed=not elsewhere)


def compile_elsewhere(
    spec: OperationSpec, ctx: Context, kernel_id: str, args: tuple[Any, ...], began: int, *, paced: bool = True
) -> Reason | None:
    """Compile one kernel for one call in another process and load it here; the reason when it could not be.

    `paced`: requests are being served, so that loads keep their distance.
    """
    with state.changing():
        if began != state.generation:
            return reason("JIT_NOT_READY", None)
        world = state.world
    kernel = world.registry.kernels[kernel_id]
    order = order_for(spec, ctx, kernel, args, world)
    found = None if order is None else have_compiled(order, artifact_for(kernel, ctx, world), began)
    if found is None:
        return jit.compile_now(spec, ctx, kernel_id, args, began)
    return found if isinstance(found, Reason) else load(spec, ctx, kernel_id, args, began, found, paced=paced)


def have_compiled(order: str, artifact: Artifact, began: int) -> Made | Reason | None:
    """Wait until another process has carried out an order: what to load, or why not; None: compile in a thread here."""
    before = jit_cache.snapshot()
    try:
        with jit.one_compiler(artifact, jit_cache.prepare()):
            said = compilers.ask(order, jit.queue().timeout_s, jit_cache.variables())
    except IsolationFault as error:
        return _failed(artifact, error, began)
    finally:
        timers.after("compilers", IDLE_S, _end_idle)
    if "needs_device" in said and said["in_thread"]:
        return None
    if "needs_device" in said:
        why = reason("JIT_NEEDS_DEVICE", said["needs_device"])
        jit.put_failure(artifact, why, began)
        return why
    return Made(float(said["seconds"]), jit_cache.new_entries(before), tuple(said["libraries"]))


def load(
    spec: OperationSpec, ctx: Context, kernel_id: str, args: tuple[Any, ...], began: int, found: Made, *, paced: bool
) -> Reason | None:
    """Load what another process has compiled and run it once; the reason when it cannot be."""
    world = state.world
    missing = _at_hand(world.registry.kernels[kernel_id], found.libraries, world, began)
    if missing is not None:
        return missing
    with turn(paced):
        token = jit.made.set(replace(found, begun=time.monotonic()))
        try:
            return jit.compile_now(spec, ctx, kernel_id, args, began)
        finally:
            jit.made.reset(token)


def import_adapters(where: torch.device) -> tuple[str, ...]:
    """Import what kernels of this device would be loaded with later, beside requests; the modules that were imported.

    For the start of a server. Nothing is done where kernels are not compiled in the background.
    """
    from layerzero.dispatch.run import current_world

    world, began = current_world(), state.generation
    if world.policy.jit != "background" or where.type != "cuda":
        return ()
    device = DeviceSpec.detect(str(where))
    sm = device.sm_version or 0
    homes: dict[str, KernelSpec] = {}
    for kernel in world.registry.kernels.values():
        backend = world.registry.backends.get(kernel.backend)
        usable = (backend is None or backend.available) and kernel.backend not in world.enclosed
        fits = device.platform in kernel.platforms and (kernel.min_sm or 0) <= sm <= (kernel.max_sm or sm)
        if usable and fits and compiles_elsewhere(kernel):
            homes.setdefault(kernel.function.partition(":")[0], kernel)
    missing = {home: kernel for home, kernel in homes.items() if not _modules(kernel, world) <= sys.modules.keys()}
    return tuple(home for home, kernel in missing.items() if _imported(kernel, world, began) is None)


def _modules(kernel: KernelSpec, world: World) -> set[str]:
    """What a kernel's first call imports: the adapter, and the vendor, which some adapters import late."""
    backend = world.registry.backends.get(kernel.backend)
    vendor = "" if backend is None else backend.vendor_module
    return {kernel.function.partition(":")[0], *filter(None, (vendor,))}


def _imported(kernel: KernelSpec, world: World, began: int) -> Reason | None:
    """Import a kernel's adapter while other threads get their turns; the reason when it cannot be."""
    jit_cache.prepare()  # some vendors read where their cache is when they are imported
    started = time.monotonic()
    try:
        with jit.short_turns():
            resolve(kernel)
            for name in _modules(kernel, world):
                with contextlib.suppress(Exception):  # who cannot be imported says so when it is called
                    importlib.import_module(name)
    except BackendNotAvailableError as error:
        state.unbindable(kernel.kernel_id, error.reasons[0], began)
        return error.reasons[0]
    _log.info("importing %s took %.1f s", kernel.function.partition(":")[0], time.monotonic() - started)
    return None


def _at_hand(kernel: KernelSpec, libraries: Sequence[str], world: World, began: int) -> Reason | None:
    """What a load needs and can be had without holding the interpreter: the adapter, and the libraries mapped."""
    known = _modules(kernel, world) <= sys.modules.keys()
    if not known and (why := _imported(kernel, world, began)) is not None:
        return why
    c = ctypes.CDLL(None)  # calls through it release the interpreter, which Python's own dlopen does not
    for path in libraries:
        c.dlopen(os.fsencode(path), os.RTLD_NOW)  # stays: whoever opens it next finds it mapped
    return None


def order_for(spec: OperationSpec, ctx: Context, kernel: KernelSpec, args: tuple[Any, ...], world: World) -> str | None:
    """The order for a compiler: what the adapter would be called with for this call.

    None where that has no form, or there is nowhere to hand over what is compiled: it is compiled here then.
    """
    if jit_cache.prepare() is None:
        return None
    asked = replace(ctx, backend=kernel.kernel_id, capturing=False, switched_off=frozenset())
    decision = select(asked, jit.blocking(world))
    if decision.chosen != kernel.kernel_id or not ctx.aligned_pointers or kernel.backend in world.enclosed:
        return None
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def adapter(*given: Any, **words: Any) -> Any:
        seen.append((given, words))
        raise _Seen

    fn = adapter
    if len(kernel.layouts) > 1 and "layout" not in spec.arguments:
        fn = partial(adapter, layout=own_layout(kernel, decision))
    run = adapt(fn, decision.context, ExecutionPlan.of(decision).transforms, spec.autocast)
    try:
        with torch.set_grad_enabled(ctx.needs_grad):
            run(*(_meta(item) for item in args))
    except _Seen:
        pass
    except Exception as error:  # a step that looks at numbers, which meta tensors have none of
        _log.info("%s is compiled here, %s: %s", kernel.kernel_id, type(error).__name__, error)
        return None
    try:
        return order_text(kernel, *seen[0], ctx.to_json(), ctx.needs_grad)
    except Unsendable:
        return None


class _Seen(Exception):
    """What the adapter would be called with is known."""


def _meta(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    found = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return found.requires_grad_(item.requires_grad) if item.is_floating_point() else found


def _failed(artifact: Artifact, error: IsolationFault, began: int) -> Reason:
    """Write down what became of a compiler; its own error and a crash are for later processes, too."""
    why, words = error.reason, str(error.reason.value or error.reason)
    if why.code == "ISOLATION_TIMEOUT":
        late = reason("JIT_TIMEOUT", None, f"{jit.queue().timeout_s:g}")
        _log.warning("%s was not compiled within %s s; its compiler was ended", words_of(artifact), late.limit)
        events.tell("compile", error=str(late), kernel=artifact[0], artifact=words_of(artifact))
        jit.put_failure(artifact, late, began)
        return late
    own = isinstance(error, ChildError) and not isinstance(error, ChildOutOfMemory)
    crashed = why.code == "ISOLATION_CRASHED" and "SIGKILL" not in words
    lasting = (own or crashed) and not any(text in words for text in _DISK)
    text = words if own else str(why)
    jit.not_ready(artifact, text, jit_cache.prepare() if lasting else None, began)
    return reason("JIT_FAILED", text[:300])


# -- loads ---------------------------------------------------------------------------------------
_loading = fresh_lock()
_last_load = -_APART_S


@contextlib.contextmanager
def turn(paced: bool) -> Iterator[None]:
    """A load's turn: beside requests one at a time, and at most one a second."""
    global _last_load
    with _loading if paced else contextlib.nullcontext():
        if paced:
            time.sleep(max(0.0, _last_load + _APART_S - time.monotonic()))
        try:
            yield
        finally:
            _last_load = time.monotonic()


def _end_idle() -> None:
    left = compilers.end_idle()
    if left is not None:
        timers.after("compilers", left, _end_idle)
