"""Binding: import the adapter a decision names, wrap it in its transforms and guards, ready to be called."""

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from layerzero.dispatch.adapt import adapt
from layerzero.dispatch.hot import HOT_LIMIT
from layerzero.dispatch.modes import SWITCHES, stream_capturing
from layerzero.errors import (
    BackendNotAvailableError,
    InvalidInputError,
    KernelExecutionError,
    from_outside,
    import_reason,
    importing,
    invalid,
)
from layerzero.forking import fresh_lock
from layerzero.model.decision import Decision, ExecutionPlan
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.shapes import overlapping
from layerzero.runtime.crashes import first_run
from layerzero.runtime.state import state
from layerzero.selection.filter import artifact_for
from layerzero.selection.transforms import apart
from layerzero.selection.world import World


class GuardFailed(Exception):
    """A bound plan does not fit this call after all (an unaligned pointer); the call is selected again."""


@dataclass(slots=True, eq=False, repr=False)
class Bound:
    """A kernel ready to run. `run` takes canonical arguments; `guard`, when set, must be true at each call."""

    run: Callable[..., Any]
    guard: Callable[[], bool] | None
    kernel: KernelSpec
    plan: ExecutionPlan
    rng: bool
    calls: Any = None  # a counter, only while traffic is recorded
    decision: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.decision = self.plan.debug_info

    @property
    def kernel_id(self) -> str:
        return self.kernel.kernel_id


# One vendor at a time: two threads that import libraries which import each other may each see the other's half done.
_one_at_a_time = fresh_lock(threading.RLock)
_OF_MODULE = re.compile(r"(partially initialized )?module '[\w.]+' has no attribute")
_TRIES, _PAUSE_S = 4, 0.25
# Backends that do as torch does: negated views are resolved where pointers are taken, and the gradient of a gradient
# is right or an error. Of the others neither is known.
_AS_TORCH = frozenset({"reference", "torch", "sdpa", "inductor", "cpu"})
_NUMBERS_AND_WORDS = frozenset({type(None), float, int, bool, str})


@functools.lru_cache(maxsize=4096)
def _import(path: str) -> Callable[..., Any]:
    with _one_at_a_time, importing():
        _whole(path.partition(":")[0])
    found: Callable[..., Any] = resolve_name(path)
    if not callable(found):
        raise TypeError(f"{path} is not callable")
    return found


def _whole(module: str) -> Any:
    """Import a module; again, where a library it needs was being imported by another thread and was seen half done.

    Python gives out such a half where two threads would otherwise wait for each other for ever (Inductor, compiling
    beside a request, imports Triton too).
    """
    for _ in range(_TRIES - 1):
        try:
            return importlib.import_module(module)
        except (AttributeError, ImportError) as error:
            half = isinstance(error, AttributeError) and _OF_MODULE.match(str(error))
            if not (half or "partially initialized" in str(error)):
                raise
            time.sleep(_PAUSE_S)
    return importlib.import_module(module)


def resolve(kernel: KernelSpec) -> Callable[..., Any]:
    """Import a kernel's adapter by its string; a failure is one clear error with the cause attached."""
    try:
        return _import(kernel.function)
    except (Exception, SystemExit) as error:  # some vendors exit when they dislike the machine
        if from_outside(error):  # a timeout during a long import, say, after which it may be tried again
            raise
        why = import_reason(kernel.function, error)
        raise BackendNotAvailableError(f"{kernel.kernel_id}: {why.message}", reasons=(why,)) from error


def bind(
    spec: OperationSpec, decision: Decision, world: World, kernel_id: str | None = None, *, rng: bool = False
) -> Bound:
    """Bind one accepted candidate of a decision (the chosen one by default)."""
    plan = ExecutionPlan.of(decision, kernel_id)
    memo_key = (decision.context, plan.kernel_id, tuple(plan.transforms), rng)
    memo: dict[Any, Bound] = world.memo.setdefault("bound", {})
    found = memo.get(memo_key)
    if found is not None and found.decision is decision:
        return found
    kernel = world.registry.kernels.get(plan.kernel_id)
    if kernel is None:  # a plan outlived the plugin it was made with
        raise BackendNotAvailableError(code="KERNEL_UNKNOWN", value=plan.kernel_id, limit="a registered kernel")
    if kernel.jit:
        from layerzero.jit.cache import prepare

        prepare()  # some vendors read where their cache is when they are imported
    if kernel.backend in world.enclosed:
        from layerzero.isolation.worker import isolated

        kernel = apart(kernel)
        fn = isolated(kernel, world, rng=rng)
    else:
        markers, slot = first_run(kernel, decision.context.device)  # a vendor may crash at its import
        try:
            fn = resolve(kernel)
        finally:
            if markers is not None:
                markers.leave(slot)
    state.counters.binds += 1
    if len(kernel.layouts) > 1 and "layout" not in spec.arguments:
        fn = functools.partial(fn, layout=own_layout(kernel, decision))
    if kernel.backend not in _AS_TORCH and kernel.backend not in world.enclosed:
        fn = _signed(fn, spec)
        if decision.context.needs_grad and "double_backward" not in kernel.features:
            fn = _derived_once(fn, kernel.kernel_id)
    run = adapt(fn, decision.context, plan.transforms, spec.autocast)
    if spec.mutates is not None and "inplace" in decision.context.needs:
        run = _apart(run)
    if (
        kernel.pointer_alignment is not None
        and "aligned_copy" not in plan.transforms
        and decision.context.aligned_pointers
    ):
        run = _aligned(run, kernel.pointer_alignment)
    if world.health.watches(kernel.kernel_id, kernel.backend):
        run = _watched(run, kernel)
    if kernel.jit and artifact_for(kernel, decision.context, world) not in world.ready:
        from layerzero.dispatch.compiling import compiling

        run = compiling(run, kernel, decision.context, world)
    if world.policy.breaker.deadline_s is not None:
        from layerzero.runtime.timers import watchdog

        run = watchdog.watched(run, kernel, world.policy.breaker.deadline_s)
    if decision.shadow and not rng and plan.kernel_id == decision.chosen:
        from layerzero.dispatch.canary import shadowed

        run = shadowed(run, spec, decision, world)
    if rng:
        run = _restorable(run)
    guard = _guard(kernel, decision)
    if state.counting is not None:
        guard = state.counting.guard(spec.op_id, kernel.kernel_id, guard)
    bound = Bound(run, guard, kernel, plan, rng)
    if len(memo) >= HOT_LIMIT:
        memo.clear()
    memo[memo_key] = bound
    return bound


def own_layout(kernel: KernelSpec, decision: Decision) -> str:
    """The layout that a kernel of several is called with."""
    wanted = decision.context.layout
    if wanted is not None and wanted in kernel.layouts:
        return wanted.value
    return sorted(item.value for item in kernel.layouts)[0]


def _guard(kernel: KernelSpec, decision: Decision) -> Callable[[], bool] | None:
    """What must still hold at each call: the kernel's own switches, no capture for graph-unsafe kernels.

    A decision made while some switch was off holds only while exactly those are off.
    """
    checks: list[Callable[[], bool]] = []
    off = decision.context.switched_off
    if off:
        relevant = {name: name not in off for name in SWITCHES}
        checks.append(lambda: all(SWITCHES[name]() is on for name, on in relevant.items()))
    else:
        checks.extend(SWITCHES[name] for name in sorted(kernel.guards) if name in SWITCHES)
    if decision.context.device.device_type == "cuda":
        if not kernel.graph_safe:
            checks.append(lambda: not stream_capturing())
        elif decision.context.capturing:
            checks.append(stream_capturing)
    if not checks:
        return None
    if len(checks) == 1:
        return checks[0]
    return lambda: all(check() for check in checks)


def _aligned(run: Callable[..., Any], bytes_: int) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        for item in args:
            if isinstance(item, Tensor) and item.data_ptr() % bytes_:
                raise GuardFailed
        return run(*args)

    return checked


def twice_in_place() -> InvalidInputError:
    """The error for two arguments that lie in the same memory and would both be written."""
    told = "q and k share memory, so both cannot be rotated in place"
    return invalid("INPLACE_UNSUPPORTED", "q and k share memory", "tensors that lie apart", told)


def _apart(run: Callable[..., Any]) -> Callable[..., Any]:
    """Where tensors lie is no part of a key: a call that writes into both looks each time."""

    def checked(first: Any, second: Any, *rest: Any) -> Any:
        if second is not None and overlapping(first, second):
            raise twice_in_place()
        return run(first, second, *rest)

    return checked


def _signed(run: Callable[..., Any], spec: OperationSpec) -> Callable[..., Any]:
    """Resolve views that stand for their negative (torch's negative bit): a vendor reads a tensor's memory as it is."""

    def resolving(*args: Any, **words: Any) -> Any:
        for item in args:
            kind = type(item)
            if (kind is Tensor or kind is Parameter) and item.is_neg():
                break
        else:
            return run(*args, **words)
        given = [item.resolve_neg() if isinstance(item, Tensor) else item for item in args]
        out = run(*given, **words)
        if spec.mutates is None or not spec.mutates(args):
            return out
        theirs = {id(new): old.copy_(new) for new, old in zip(given, args, strict=True) if new is not old}
        return tuple(theirs.get(id(item), item) for item in out) if isinstance(out, tuple) else theirs.get(id(out), out)

    return resolving


def _derived_once(run: Callable[..., Any], kernel_id: str) -> Callable[..., Any]:
    """Refuse to derive a vendor's backward once more: its kernels are none of autograd's, and terms would be lost.

    Who asks for such gradients (create_graph=True) is known only when the backward runs, with gradients recorded.
    """

    def refuse(grads: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            raise KernelExecutionError(code="DOUBLE_BACKWARD_UNSUPPORTED", value=kernel_id)

    def recording(*args: Any, **words: Any) -> Any:
        out = run(*args, **words)
        for item in out if isinstance(out, tuple) else (out,):
            if isinstance(item, Tensor) and item.grad_fn is not None:
                item.grad_fn.register_prehook(refuse)
        return out

    return recording


def _watched(run: Callable[..., Any], kernel: KernelSpec) -> Callable[..., Any]:
    """A half-open kernel tells the breaker when it succeeds; the swap that follows drops this wrapper."""

    def watched(*args: Any) -> Any:
        out = run(*args)
        state.health.kernel_succeeded(kernel.kernel_id)
        if state.health.snapshot().watches("", kernel.backend):
            state.health.backend_succeeded(kernel.backend)
        return out

    return watched


def _restorable(run: Callable[..., Any]) -> Callable[..., Any]:
    """Put the random state back when the kernel raises, so that the next candidate draws the same numbers."""

    def restoring(*args: Any) -> Any:
        generator = _generator(args)
        before = generator.get_state()
        try:
            return run(*args)
        except BaseException:
            generator.set_state(before)
            raise

    return restoring


def _generator(args: tuple[Any, ...]) -> torch.Generator:
    """The generator a call draws from: the one it is given, else the default one of its first tensor's device."""
    first: Tensor | None = None
    for item in args:
        kind = type(item)
        if kind is Tensor:
            first = item if first is None else first
        elif kind in _NUMBERS_AND_WORDS:
            continue
        elif issubclass(kind, torch.Generator):  # isinstance() runs a page of Python in torch for everything else
            return item  # type: ignore[no-any-return]
        elif first is None and isinstance(item, Tensor):
            first = item
    assert first is not None, "an op that draws takes a tensor"
    return torch.cuda.default_generators[first.get_device()] if first.is_cuda else torch.default_generator
