"""Compiled kernels and the World: what is ready, what is being compiled, what could not be.

`compiling` stands around the run of a kernel without its artifact: under `jit="block"` in the call itself, else in a
thread of the queue, where what `layerzero.dispatch.beside` has had compiled in another process is only loaded. It alone
decides that an artifact is ready.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero import env
from layerzero.errors import BackendNotAvailableError, LayerZeroError, from_outside
from layerzero.forking import fresh_lock
from layerzero.jit import cache as jit_cache
from layerzero.jit.index import Index, with_hopeless
from layerzero.jit.queue import Queue
from layerzero.model.artifact import Artifact, words_of
from layerzero.model.context import Context
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
_SHARED_BYTES = 64 * 2**20  # a larger tensor is not copied for a compile, but read as it is
LONG_S = 0.02  # a load of more is counted and said: requests waited for the interpreter meanwhile
_TURN_S = 5e-4  # a thread keeps the interpreter so long while others wait for it; usually 5 ms
_PUBLISH_S = 0.5  # each swap costs every hot call a lookup: while more is compiling, results are published together


@dataclass(frozen=True, slots=True)
class Made:
    """What another process has compiled and this one loads: how long that took, what it left on disk, what it is."""

    seconds: float
    evidence: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    begun: float = field(default_factory=time.monotonic)  # the load


made: ContextVar[Made | None] = ContextVar("made", default=None)


# -- results -------------------------------------------------------------------------------------
class _Results:
    """Artifacts that became ready, published together while more are coming. A reset forgets them."""

    def __init__(self) -> None:
        self.fresh: set[Artifact] = set()
        self.published_at = 0.0

    def add(self, artifact: Artifact, generation: int, *, more_coming: bool) -> None:
        with state.changing():
            if generation != state.generation:
                return
            self.fresh.add(artifact)
            wait = more_coming and time.monotonic() - self.published_at < _PUBLISH_S
        if wait:
            timers.after("jit", _PUBLISH_S, self.publish)
        else:
            self.publish()

    def publish(self) -> None:
        """Let what has been compiled take part now."""
        with state.changing():
            fresh, self.fresh = self.fresh, set()
            self.published_at = time.monotonic()
            if not fresh or not state.loaded:
                return
            world = state.world
            failed = {key: why for key, why in world.uncompilable.items() if key not in fresh}
            state.publish(ready=world.ready | fresh, uncompilable=MappingProxyType(failed))


_results = _Results()
publish = _results.publish


def _ready(artifact: Artifact, seconds: float, evidence: tuple[str, ...], folder: Path | None, began: int) -> None:
    more_coming = threading.current_thread().name == "layerzero-jit" and queue().busy > 1
    _results.add(artifact, began, more_coming=more_coming)
    elsewhere = made.get()
    if elsewhere is not None:
        seconds, evidence = elsewhere.seconds, elsewhere.evidence
        took = time.monotonic() - elsewhere.begun
        events.tell("load", took, kernel=artifact[0], artifact=words_of(artifact))
        if took > LONG_S:
            state.counters.long_loads += 1
            _log.warning("loading %s took %.0f ms", words_of(artifact), took * 1e3)
    _log.info("%s is compiled (%.1f s)", words_of(artifact), seconds)
    place = "here" if elsewhere is None else "elsewhere"
    events.tell("compile", seconds, kernel=artifact[0], artifact=words_of(artifact), compiled=place)
    if folder is not None:
        _write(Index(folder), artifact, evidence=evidence, seconds=seconds)


def not_ready(artifact: Artifact, text: str, folder: Path | None, began: int) -> None:
    """An artifact cannot be compiled, with the compiler's words; written down for later processes in this folder."""
    text = text[:2_000] or "no word of its compiler"
    first = text.splitlines()[0]
    _log.warning("%s cannot be compiled and is left alone: %s", words_of(artifact), first)
    events.tell("compile", error=first[:300], kernel=artifact[0], artifact=words_of(artifact))
    put_failure(artifact, reason("JIT_FAILED", first[:300]), began)
    if folder is not None:
        _write(Index(folder), artifact, error=text)


def _write(index: Index, artifact: Artifact, **outcome: Any) -> None:
    try:
        index.add(artifact, **outcome)
    except OSError as error:  # a full or read-only disk costs the next process a compile, not this one its result
        _log.warning("the index of compiled kernels cannot be written: %s", error)


def put_failure(artifact: Artifact, why: Reason, began: int) -> None:
    """Reject the kernel for these values with this reason from now on."""
    state.publish_since(began, lambda world: {"uncompilable": with_hopeless({**world.uncompilable, artifact: why})})


def forget_failures(kernel_ids: frozenset[str] | None = None) -> None:
    """Let kernels be compiled again that could not be, here and in the index."""
    folder = jit_cache.prepare()
    if folder is not None:
        Index(folder).forget_failures(kernel_ids)
    with state.changing():
        left = {
            key: why
            for key, why in state.world.uncompilable.items()
            if kernel_ids is not None and (key if isinstance(key, str) else key[0]) not in kernel_ids
        }
        if len(left) != len(state.world.uncompilable):
            state.publish(uncompilable=MappingProxyType(left))


# -- compiling -----------------------------------------------------------------------------------
def compiling(run: Callable[..., Any], kernel: KernelSpec, ctx: Context, world: World) -> Callable[..., Any]:
    """The run of a kernel whose artifact is missing: compile under the lock that all processes share, and tell."""
    artifact, began = artifact_for(kernel, ctx, world), state.generation
    folder = jit_cache.prepare()  # before the vendor's first compile, which reads the variables

    def first(*args: Any) -> Any:
        if began == state.generation and artifact in state.world.ready:
            return run(*args)
        before, started = jit_cache.snapshot(), time.monotonic()
        try:
            with one_compiler(artifact, folder):
                if ctx.needs_grad:  # the backward pass compiles too, and must not do so in the caller's backward()
                    with torch.random.fork_rng():
                        exercise(run, likeness(args), ctx)
                out = run(*args)
                if ctx.device.device_type == "cuda" and not torch.cuda.is_current_stream_capturing():
                    torch.cuda.current_stream().synchronize()
        except BackendNotAvailableError as error:  # no compiler here: nothing to remember beyond this process
            state.unbindable(kernel.kernel_id, error.reasons[0], began)
            raise RuntimeError(str(error)) from error
        except Exception as error:
            if not _innocent(error):
                not_ready(artifact, f"{type(error).__name__}: {error}", folder, began)
            raise
        _ready(artifact, time.monotonic() - started, jit_cache.new_entries(before), folder, began)
        return out

    return first


def one_compiler(artifact: Artifact, folder: Path | None) -> AbstractContextManager[bool | None]:
    """The lock that all processes share: who comes second finds the artifact in the cache."""
    if folder is None:
        return nullcontext()
    name = hashlib.sha256(repr(artifact).encode()).hexdigest()[:24]
    return jit_cache.locked(folder, name, queue().timeout_s)


def _innocent(error: Exception) -> bool:
    """Whether a failure says nothing about the compiler.

    Bad input, a guard, no memory at the moment, a vendor's warning that this process makes an error, or an error of
    the device, in torch's words or in a vendor's: after one of those every later call fails too, whatever the kernel.
    Or it is what a handler of the caller raised.
    """
    from layerzero.dispatch.bind import GuardFailed
    from layerzero.health.sticky import sticky

    device_errors: type[Exception] = getattr(torch, "AcceleratorError", MemoryError)
    passing = (LayerZeroError, GuardFailed, MemoryError, torch.OutOfMemoryError, Warning, device_errors)
    return isinstance(error, passing) or sticky(error) is not None or from_outside(error)


def blocking(world: World) -> World:
    """The same World, in which a call waits for the compiler."""
    if world.policy.jit == "block":
        return world
    return world.changed(policy=replace(world.policy, jit="block"))


def compile_now(spec: OperationSpec, ctx: Context, kernel_id: str, args: tuple[Any, ...], began: int) -> Reason | None:
    """Compile one kernel for one call and run it once; the reason when it could not be. Runs in any thread.

    `began` is the generation in which it was asked for: after a reset there is nothing to compile for.
    """
    from layerzero.dispatch.bind import bind

    with state.changing():
        if began != state.generation:
            return reason("JIT_NOT_READY", None)
        world = blocking(state.world)
    asked = replace(ctx, backend=kernel_id, capturing=False, switched_off=frozenset())
    decision = select(asked, world)
    if decision.chosen != kernel_id:
        return decision.candidates[0].reasons[0] if decision.candidates else reason("KERNEL_UNKNOWN", kernel_id, "")
    try:
        exercise(bind(spec, decision, world).run, args, ctx)
    except BackendNotAvailableError as error:
        state.unbindable(kernel_id, error.reasons[0], began)
        return error.reasons[0]
    except Exception as error:
        if from_outside(error):
            raise
        kernel = world.registry.kernels[kernel_id]
        known = state.world.uncompilable if began == state.generation else {}
        return known.get(artifact_for(kernel, asked, world)) or reason("JIT_FAILED", str(error)[:300])
    return None


# -- a run for the compiler's sake ---------------------------------------------------------------
def likeness(args: tuple[Any, ...], *, share: bool = True) -> tuple[Any, ...]:
    """Arguments with the same metadata. Small tensors are copied; of large floating ones the storage is shared.

    Results are thrown away, so what the numbers are does not matter; indices are copied, since they must stay valid.
    `share=False` copies everything, for a call that writes into its inputs.
    """
    return tuple(_like(item, share) for item in args)


def _like(item: Any, share: bool) -> Any:
    if isinstance(item, torch.Generator):
        return torch.Generator(item.device)
    if not isinstance(item, Tensor):
        return item
    with torch.no_grad():
        if share and item.is_floating_point() and item.nbytes > _SHARED_BYTES:
            found = item.detach()
        else:
            found = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
            found.copy_(item)
    return found.requires_grad_(item.requires_grad) if item.is_floating_point() else found


def exercise(run: Callable[..., Any], args: tuple[Any, ...], ctx: Context) -> None:
    """Run a kernel once, backward too when the call would, under the call's autocast and on a stream of its own."""
    with ExitStack() as stack:
        if ctx.autocast is not None:
            stack.enter_context(torch.autocast(ctx.device.device_type, getattr(torch, ctx.autocast)))
        stream = None
        if ctx.device.device_type == "cuda":
            stack.enter_context(relaxed_capture())
            where = next(item.device for item in args if isinstance(item, Tensor))
            stack.enter_context(torch.cuda.device(where))  # a thread begins on the first one
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
        if not ctx.needs_grad:
            stack.enter_context(torch.no_grad())
        out = run(*args)
        if ctx.needs_grad:
            results = out if isinstance(out, tuple) else (out,)
            wanted = [item for item in results if isinstance(item, Tensor) and item.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.ones_like(item) for item in wanted])
        if stream is not None:
            stream.synchronize()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate while another captures a CUDA graph; in CUDA's default mode that ends the capture."""
    library = _cudart()
    if library is None:
        yield
        return
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed; the call exchanges it with the thread's own
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _cudart() -> Any:
    """The CUDA runtime that torch has loaded, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next((line.split()[-1] for line in maps if "libcudart.so" in line), None)
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None


_turns = fresh_lock()
_before: list[float] = []  # the interpreter's turns when each one under way began


@contextmanager
def short_turns() -> Iterator[None]:
    """Let waiting threads have the interpreter sooner.

    Some compilers are Python and compute for seconds. A thread that imports a library beside them gives the interpreter
    away at every file and would wait the usual turn to get it back, thousands of times.
    """
    with _turns:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_before[-1], _TURN_S))
    try:
        yield
    finally:
        with _turns:
            usual = _before.pop()
            if not _before:  # the last one to end
                sys.setswitchinterval(usual)


# -- beside the requests -------------------------------------------------------------------------
_queue: Queue | None = None
_making = fresh_lock()


def queue() -> Queue:
    """The process's queue, made at first use."""
    global _queue
    with _making:
        if _queue is None:
            settings = env.read()
            workers = settings.jit_workers or max(1, min(4, (os.cpu_count() or 1) // 4))
            state.compiler = _queue = Queue(workers, settings.jit_timeout, _late)
        return _queue


def _forget() -> None:
    """After a reset: what waits is not begun, what is being compiled is kept on disk and told to nobody."""
    _results.fresh.clear()
    if _queue is not None:
        _queue.forget()


state.on_reset(_forget)


def _late(artifact: Artifact) -> None:
    limit = queue().timeout_s
    _log.warning("%s has not compiled within %.0f s; calls go on without it", words_of(artifact), limit)
    put_failure(artifact, reason("JIT_TIMEOUT", None, f"{limit:g}"), state.generation)
