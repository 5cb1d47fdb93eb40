"""The first answer of a kernel that nothing vouches for: held against the baseline before it is used (docs/health.md).

The caller gets the result of the baseline; the kernel runs beside it on copies and is compared, with one
vector-Jacobian product where a gradient is asked for. A kernel that is right is remembered and runs the next call; one
that is wrong goes into quarantine. Where the numbers of a call show nothing, its baseline is too dear, or hooks on
saved tensors (a checkpoint) want forward and recomputation by one kernel, a drawn example is checked instead. One check
at a time; meanwhile other calls are served by what is proven. A check that found out nothing is made again after two
calls of its kind, then four …
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.device.memory import free_bytes
from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, GuardFailed, bind
from layerzero.dispatch.example_calls import example, price_us
from layerzero.dispatch.failover import charge_memory, excuse, out_of_memory, running, untold
from layerzero.errors import KernelExecutionError, LayerZeroError
from layerzero.forking import fresh_lock
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.model.situation import kind_of
from layerzero.numerics import compare, tolerance
from layerzero.reasons import reason
from layerzero.runtime.crashes import put
from layerzero.runtime.proof_registry import BASELINES, proof_registry
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.memory import device_name, estimate
from layerzero.selection.world import World, measurement_settings, unchecked
from layerzero.tuning.inputs import Call, conditions
from layerzero.tuning.truth import Gate, Verdict, flat, gradients, reduction

_log = logging.getLogger("layerzero.health")

LONGEST_US = 20_000.0
"""A baseline that is estimated to take longer is not run for a check."""

_MIB = 1 << 20
_MOST_DECLARED = 0.25  # of the error a kernel declares itself no more is believed
_TIMES_TORCHS = 3  # as far from float64 as torch's kernel is on the same numbers is never wrong

_one = fresh_lock()
_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class Served(NamedTuple):
    """What the caller gets, and which kernel computed it."""

    result: Any
    kernel_id: str


class BaselineFailed(Exception):
    """The baseline raised: a fault like any other, for the dispatcher to deal with."""

    def __init__(self, bound: Bound, error: Exception) -> None:
        super().__init__(str(error))
        self.bound, self.error = bound, error


class _Case(NamedTuple):
    """A kernel to check, bound for a call."""

    spec: OperationSpec
    ctx: Context
    world: World
    bound: Bound
    args: tuple[Any, ...] = ()

    @property
    def grouped(self) -> bool:
        return self.world.ranks is not None and len(self.world.ranks.group) > 1

    @property
    def asked(self) -> bool:
        """Whether the caller wants this kernel or an error, no other in its place."""
        wanted = self.bound.decision.locked or self.ctx.backend is not None
        return wanted and self.world.policy.on_fault != "fallback"


def check(spec: OperationSpec, ctx: Context, world: World, bound: Bound, args: tuple[Any, ...]) -> Served | None:
    """Check the kernel of a cold call. None: the World has changed, and the call is to be selected again."""
    args = modes.as_on_device(args)
    case = _Case(spec, ctx, world, bound, args)
    base = _baseline(case)
    if not _one.acquire(blocking=ctx.batch_invariant):
        return _served(base, args)
    try:
        if case.grouped:
            return _together(case, base)
        if not case.asked and proof_registry.waits(bound.kernel, ctx):
            return _served(base, args)
        own, served = _own(case, base)
        if own.ok is None:
            proof_registry.wait(bound.kernel, ctx)
        return _settled(case, own, served, base)
    finally:
        _one.release()


def ahead(spec: OperationSpec, ctx: Context, world: World, bound: Bound) -> bool:
    """Check a kernel on a drawn example, before any call is made (`lz.plan`, `lz.warmup`). False: it is not proven."""
    case = _Case(spec, ctx, world, bound)
    with _one:
        own = _on_example(case)
        if case.grouped:
            own = _agreed(case, own)
        _settled(case, own, None, None)
    return own.ok is True


# -- who serves meanwhile ------------------------------------------------------------------------------------------
class _Base(NamedTuple):
    spec: OperationSpec
    decision: Decision
    world: World
    kernel_id: str  # the baseline; empty: none may run
    proven: str  # the best kernel that is proven; empty: none

    def bound(self, kernel_id: str) -> Bound:
        return bind(self.spec, self.decision, self.world, kernel_id)

    def served(self, kernel_id: str, args: tuple[Any, ...]) -> Served:
        bound = self.bound(kernel_id)
        try:
            return Served(bound.run(*args), kernel_id)
        except Exception as error:
            raise BaselineFailed(bound, error) from error


def _baseline(case: _Case) -> _Base:
    """What may stand in: under no wish, lock or table, but never what the policy forbids."""
    spec, ctx, world, bound, _ = case
    measuring = measurement_settings(world, jit="off")
    decision = select(replace(ctx, backend=None), measuring)
    kernels = world.registry.kernels
    named = (name for name in decision.ranking if name != bound.kernel_id)
    others = [name for name in named if not unchecked(spec, kernels[name], ctx, world)]
    if ctx.batch_invariant:  # another kernel's bits in its place would break the promise: an example is checked instead
        others = []
    base = next((name for name in others if name == spec.fallback_id or kernels[name].backend in BASELINES), "")
    return _Base(spec, decision, measuring, base, others[0] if others else "")


def _served(base: _Base, args: tuple[Any, ...]) -> Served:
    """The call as the best proven kernel answers it."""
    if not base.proven:
        why = reason("FIRST_USE_UNCHECKED", kind_of(base.decision.context))
        raise KernelExecutionError(
            f"{base.spec.op_id}: no kernel that may run is proven, and none can be checked on this call",
            reasons=(why,),
        )
    return base.served(base.proven, args)


# -- one check -----------------------------------------------------------------------------------------------------
def _own(case: _Case, base: _Base) -> tuple[Verdict, Served | None]:
    """This process's verdict; with it what the caller gets, where the call itself was compared."""
    affordable = bool(base.kernel_id) and not _hooks(True) and _affordable(case, base)
    if affordable and _telling(case.args):
        return _on_call(case, base)
    own = _on_example(case)
    return own, base.served(base.kernel_id, case.args) if own.ok is None and affordable else None


def _on_call(case: _Case, base: _Base) -> tuple[Verdict, Served]:
    """Run both on this very call and compare. What the baseline raises is the caller's own."""
    spec, ctx, world, bound, args = case
    writes = spec.mutates is not None and spec.mutates(args)
    mine, theirs = _copied(args, ctx.needs_grad), _copied(args, ctx.needs_grad) if ctx.needs_grad else ()
    before = _copied(args, ctx.needs_grad) if writes else args
    served = base.served(base.kernel_id, args)
    try:
        with _undisturbed(ctx):
            with running(bound, world, ctx):
                got = bound.run(*mine)
            wrong, error = _differs(ctx, got, served.result, args)
            if wrong is None and ctx.needs_grad:
                wanted = gradients(base.bound(base.kernel_id).run(*theirs), theirs)
                wrong, _ = _differs(ctx, tuple(gradients(got, mine)), tuple(wanted), args, gradient=True)
            if wrong is None:
                wrong = _left(mine, args, written=writes)
                return Verdict(wrong is None, error, wrong or ""), served
            # Two results of sixteen bits may differ by the error of both: the reference in float64 says who is wrong.
            judged = _judged(spec, ctx, bound, before)
            if judged.why.startswith("off"):  # the table is for numbers of usual size: how far off is torch on these?
                most = _TIMES_TORCHS * _judged(spec, ctx, base.bound(base.kernel_id), before).max_error
                judged = Verdict(True, judged.max_error) if judged.max_error <= most else judged
            return (judged if judged.ok is not None else Verdict(False, error, wrong)), served
    except Exception as raised:
        return _raised(ctx, bound, raised, args), served


def _on_example(case: _Case) -> Verdict:
    """Check the kernel on a call of this kind that was made up."""
    try:
        made = example(case.spec, case.ctx, case.world, case.bound.kernel)
    except (LayerZeroError, RuntimeError) as error:
        return Verdict(None, why=f"no example can be drawn: {error}")
    if made is None:
        return Verdict(None, why="no example can be drawn")
    bound, call, described = made
    try:
        with _undisturbed(case.ctx), running(bound, case.world, described):
            return _judged(case.spec, described, bound, call)
    except Exception as raised:
        return _raised(described, bound, raised, call)


def _judged(spec: OperationSpec, ctx: Context, bound: Bound, args: tuple[Any, ...]) -> Verdict:
    """The kernel's answer against the reference in float64. Raises what the kernel raised."""
    raised: list[Exception] = []
    used: list[Any] = []

    def run(*given: Any) -> Any:
        used[:] = given
        try:
            return bound.run(*given)
        except Exception as error:
            raised.append(error)
            raise

    layout = None if ctx.layout is None else ctx.layout.value
    # Whoever declares a large error is not thereby right.
    modest = tuple((name, min(declared, _MOST_DECLARED)) for name, declared in bound.kernel.error_bounds)
    try:
        with conditions(ctx):
            gate = Gate(spec, ctx, lambda: Call(_copied(args, ctx.needs_grad), {}, layout))
            found = gate.check(replace(bound.kernel, error_bounds=modest), run)
    except Exception as error:  # the reference itself cannot, or not so much of it at once
        return Verdict(None, why=f"the reference cannot be asked: {error}")
    if raised:
        raise raised[0]
    writes = spec.mutates is not None and spec.mutates(args)
    changed = "" if writes or not found.ok else _left(tuple(used), args, written=False)
    return Verdict(found.ok and not changed, found.max_error, changed or found.why)


def _raised(ctx: Context, bound: Bound, error: Exception, args: tuple[Any, ...]) -> Verdict:
    """A kernel that raises is not proven; the breaker hears of it as of any other failure."""
    if isinstance(error, GuardFailed):
        return Verdict(None, why="it does not fit this call after all")
    excuse(bound, args, error)
    words = f"{type(error).__name__}: {error}"[:300]
    _log.error("%s raised when it was checked: %s", bound.kernel_id, words, exc_info=untold(bound.kernel_id, error))
    if out_of_memory(error):
        charge_memory(bound.kernel_id, bound.kernel.backend, ctx)
    else:
        state.health.kernel_failed(bound.kernel_id, error, bound.kernel.backend)
    return Verdict(None, why=words)


# -- the verdict ---------------------------------------------------------------------------------------------------
def _settled(case: _Case, own: Verdict, served: Served | None, base: _Base | None) -> Served | None:
    """Act on a verdict: remember, quarantine, or leave it open. Returns what the caller gets."""
    _, ctx, _, bound, args = case
    if own.ok:
        _log.info("%s agrees with the baseline for %s (%s)", bound.kernel_id, ctx.op, kind_of(ctx))
        proof_registry.learn(bound.kernel, ctx, own.max_error, agreed=case.grouped)
    elif own.ok is False:
        allowed = own.why.partition("(allowed: ")[2].removesuffix(")")
        detail = "at its first use" if allowed else f"at its first use: {own.why}"
        why = reason("NUMERICS_MISMATCH", f"{own.max_error:.3g}", allowed or "the tolerance of the op", detail=detail)
        put(bound.kernel, ctx.device, why)
        if case.asked and base is not None:
            raise KernelExecutionError(
                f"{bound.kernel_id} was asked for by name, and its first answer is wrong: {why.message}",
                reasons=(why,),
            )
    elif case.asked and base is not None and served is not None and own.why and not own.why.startswith("no example"):
        raise KernelExecutionError(
            f"{bound.kernel_id} was asked for by name and could not be checked: {own.why}",
            reasons=(reason("FIRST_USE_UNCHECKED", kind_of(ctx), detail=own.why),),
        )
    if served is not None or base is None:
        return served
    # Nothing was computed for the caller yet. Ranks go on with the kernel together, at their next call.
    return None if own.ok is not None and not case.grouped else _served(base, args)


# -- ranks ---------------------------------------------------------------------------------------------------------
def _together(case: _Case, base: _Base) -> Served | None:
    """A kernel is trusted when every rank of the group found it right, and by none when one found it wrong."""
    ctx, world, kernel = case.ctx, case.world, case.bound.kernel
    served: Served | None = None
    own = _combined(world.ranks.verdicts(kernel, kind_of(ctx)))  # what the group has found already
    if own.ok is None:
        error = proof_registry.error_of(kernel, ctx, state.world)
        if error is not None or world.measurements.lookup(kernel.kernel_id, ctx) is not None:
            own = Verdict(True, error or 0.0)
        else:
            own, served = _own(case, base)
        own = _agreed(case, own)
    elif own.ok:  # all others went on with it at their last call
        proof_registry.learn(kernel, ctx, own.max_error, agreed=True)
        return None
    return _settled(case, own, served, base)


def _agreed(case: _Case, own: Verdict) -> Verdict:
    """Say what was found here and wait a little for the others."""
    if own.ok is None:
        return own
    word = f"ok {own.max_error:.6g}" if own.ok else f"wrong {own.max_error:.6g} {own.why}"
    return _combined(case.world.ranks.verdicts(case.bound.kernel, kind_of(case.ctx), word), own)


def _combined(words: list[str | None], own: Verdict | None = None) -> Verdict:
    """The verdict of all ranks; open where one has not spoken."""
    for rank, word in enumerate(words):
        if word is not None and word.startswith("wrong"):
            _, error, why = (*word.split(" ", 2), "")[:3]
            return Verdict(False, float(error), f"rank {rank}: {why}" if own is None or own.ok else own.why)
    if any(word is None for word in words):
        return Verdict(None, why="no example: not every rank has checked it yet")
    return Verdict(True, max((float(word.split()[1]) for word in words if word), default=0.0))


# -- what can be compared ------------------------------------------------------------------------------------------
def _affordable(case: _Case, base: _Base) -> bool:
    """Whether the baseline takes neither long nor more memory than the policy leaves free."""
    _, ctx, world, _, args = case
    times = 4 if ctx.needs_grad else 1
    measured = world.measurements.lookup(base.kernel_id, ctx)
    if (price_us(world.ops[ctx.op], ctx, args) if measured is None else measured) * times > LONGEST_US:
        return False
    free = free_bytes(device_name(ctx))
    if free is None:
        return True
    held = sum(item.numel() * item.element_size() for item in modes.tensors_of(args))
    takes = estimate(world.registry.kernels[base.kernel_id], ctx, base.decision.transforms(base.kernel_id)).total
    return takes + 4 * times * held <= free - int((world.policy.memory_headroom_mb or 0) * _MIB)


def _telling(args: tuple[Any, ...]) -> bool:
    """Whether the numbers of a call would show a wrong kernel: zeros, constants and NaN do not."""
    for item in modes.tensors_of(args):
        if not item.is_floating_point() or item.numel() < 2:
            continue
        wide = item.detach().float() if item.element_size() < 4 else item.detach()
        low, high = wide.aminmax()
        if not bool(torch.isfinite(low) & torch.isfinite(high) & (low != high)):
            return False
    return True


def _copied(args: tuple[Any, ...], grad: bool) -> tuple[Any, ...]:
    """The arguments with tensors of their own that lie in memory as the given ones do; leaves where gradients are."""
    made: dict[int, Any] = {}

    def copy(item: Any) -> Any:
        if type(item) not in (Tensor, torch.nn.Parameter):
            return item  # what a call holds beside tensors (pages, packed weights) no kernel may write to
        if id(item) not in made:
            made[id(item)] = _as_it_lies(item).requires_grad_(grad and item.requires_grad)
        return made[id(item)]

    return tuple(copy(item) for item in args)


def _as_it_lies(item: Tensor) -> Tensor:
    plain = item.detach()
    steps = [(size - 1, step) for size, step in zip(item.shape, item.stride(), strict=True)]
    span = 1 + sum(last * step for last, step in steps)
    if item.numel() and (span < item.numel() or any(last and not step for last, step in steps)):  # places in common
        return plain.as_strided((span,), (1,)).clone().as_strided(item.shape, item.stride())
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device).copy_(plain)


def _differs(
    ctx: Context, mine: Any, base: Any, args: tuple[Any, ...], *, gradient: bool = False
) -> tuple[str | None, float]:
    """What is wrong with a result, and how far it is off at most."""
    ours, theirs = flat(mine), flat(base)
    if not theirs:  # text, lists of ids
        return (None if mine == base else "another result"), 0.0
    if len(ours) != len(theirs):
        return f"{len(ours)} results, expected {len(theirs)}", 0.0
    worst = 0.0
    for left, right in zip(ours, theirs, strict=True):
        left, right = left.detach(), right.detach()
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{left.dtype} {list(left.shape)}, expected {right.dtype} {list(right.shape)}", worst
        if not left.is_floating_point():
            if not torch.equal(left, right):
                return "other values", worst
            continue
        row = tolerance(ctx.op, left.dtype, k=reduction(args))
        found = compare(left, right, tolerance("gradient", left.dtype) if gradient and row.exact else row)
        worst = max(worst, found.max_abs)
        if not found.ok:
            what = "gradient off" if gradient else "off"
            return f"{what} by {found.max_abs:.3g}, {found.used:.3g} times what is allowed", worst
    return None, worst


def _left(mine: tuple[Any, ...], expected: tuple[Any, ...], *, written: bool) -> str | None:
    """What is wrong with the inputs a kernel leaves behind: as they were, or written as the baseline writes them."""
    for place, (ours, theirs) in enumerate(zip(mine, expected, strict=True)):
        if type(ours) not in (Tensor, torch.nn.Parameter):
            continue
        ours, theirs = ours.detach(), theirs.detach()
        if written and ours.is_floating_point():
            if not compare(ours, theirs, tolerance("rope", ours.dtype)).ok:
                return f"tensor argument {place} was written otherwise"
        elif not torch.equal(ours, theirs):
            return f"tensor argument {place} was changed"
    return None


@contextmanager
def _undisturbed(ctx: Context) -> Iterator[None]:
    """The generators are afterwards what they were, and the caller's hooks on saved tensors see nothing of a check."""
    on_gpu = ctx.device.device_type == "cuda"
    unseen = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach) if _hooks(True) else nullcontext()
    with torch.random.fork_rng(devices=[ctx.device.index or 0] if on_gpu else [], device_type="cuda"), unseen:
        yield
