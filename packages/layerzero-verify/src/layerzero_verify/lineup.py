"""What is verified: the kernels under test on one device, and the line-ups in which they meet a layer or a model.

At level 1 an op is locked to each kernel in turn. Above it several ops work together, so a line-up names one kernel for
each op that has one under test and leaves the other ops to the reference; a call that such a kernel does not declare is
the reference's too, and the report says which kernels were used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from layerzero._ops.signature import dispatch, public_op
from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import LayerZeroError, UnknownNameError, did_you_mean, nearest
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import ErrorReport
from layerzero.public.control import scoped
from layerzero.public.inspection import list_kernels
from layerzero.selection.engine import refuse
from layerzero_verify.report import Check, StageError, failed, of_error, skipped

# More than any preference, priority or measurement can say.
_BOOST = 1e6
_UNCOMPILED = "compiled at run time: `--lane full`, or naming it or its backend, takes it in"
_IDLE = "no kernel under test serves a call here"


@dataclass(frozen=True)
class LineUp:
    """Kernels that work together; none named means: whatever selection chooses on this machine.

    `stand_ins` are ops of plugins that take the place of a built-in op in a layer, as (built-in op, plugin's op).
    `without` are kernels that were found wrong already.
    """

    name: str
    kernels: tuple[str, ...] = ()
    stand_ins: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Calls inside the block are selected from this line-up."""
        settings: dict[str, Any] = {}
        if self.kernels:
            boosts = dict.fromkeys(self.kernels, _BOOST)
            settings |= {"allow": self.kernels, "boosts": boosts, "jit": "block"}
        if self.without:
            settings["deny"] = self.without
        with scoped(**{"on_first_use": "off", **settings}):  # what is verified here is to be run, right or wrong
            yield


@dataclass(frozen=True)
class Target:
    """The kernels under test, those that cannot run here with the reason, and where they run."""

    name: str
    device: torch.device
    kernels: tuple[KernelSpec, ...]
    absent: tuple[tuple[str, str], ...]
    everything: bool

    def line_ups(self, *, thorough: bool, without: frozenset[str] = frozenset()) -> tuple[LineUp, ...]:
        """One line-up as selected, then, where asked, each backend's kernels in turn; only the latter if restricted.

        Kernels in `without` take part in none: what they would break above is known already.
        """
        found = [LineUp("as selected", without=tuple(sorted(without)))] if self.everything else []
        if thorough or not self.everything:
            kept = [kernel for kernel in self.kernels if kernel.kernel_id not in without]
            for backend in sorted({kernel.backend for kernel in kept}):
                found += _combinations(backend, [kernel for kernel in kept if kernel.backend == backend])
        return tuple(found)


def resolve(
    *,
    op: str | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    compiles: bool = True,
) -> Target:
    """The kernels that a request names, on a device of this machine (the first accelerator unless one is named).

    Without `compiles`, kernels that are compiled at run time are absent: a quick look must not wait for compilers.
    """
    spec = probe_device(device)
    world = current_world()
    known = world.registry.kernels
    if kernel is not None and kernel not in known:
        raise unknown(f"no kernel {kernel!r} is registered", kernel, known, "KERNEL_UNKNOWN")
    backends = {item.backend for item in known.values()} | set(world.registry.backends)
    if backend is not None and backend not in backends:
        raise unknown(f"no backend {backend!r} is registered", backend, backends, "BACKEND_UNKNOWN")
    usable, absent = [], []
    for item in list_kernels(op, backend=backend):
        if kernel not in (None, item.kernel_id):
            continue
        why = _absent(item, spec) or ("" if compiles or not item.jit else _UNCOMPILED)
        if why:
            absent.append((item.kernel_id, why))
        else:
            usable.append(item)
    words = [
        f"{label} {value}"
        for label, value in (("backend", backend), ("kernel", kernel), ("op", op))
        if value is not None
    ]
    return Target(
        ", ".join(words) or "every kernel",
        torch.device(spec.device_type, spec.index) if spec.device_type != "cpu" else torch.device("cpu"),
        tuple(usable),
        tuple(absent),
        everything=not words,
    )


def unknown(message: str, name: str, known: Iterable[str], code: str = "VALUE_INVALID") -> UnknownNameError:
    """The error for a name that nobody here bears; it says which ones are near."""
    names = sorted(known)
    near = ", ".join(nearest(name, names) or names[:8]) or "nothing: there is none"
    hint = did_you_mean(name, names, f"there is {near}")
    return UnknownNameError(message, code=code, value=name, limit=near, hint=hint)


def _absent(kernel: KernelSpec, device: DeviceSpec) -> str:
    world = current_world()
    backend = world.registry.backends.get(kernel.backend)
    if backend is not None and not backend.available:
        return "; ".join(item.message for item in backend.reasons) or "its backend is not available"
    if kernel.kernel_id in world.unbindable:
        return world.unbindable[kernel.kernel_id].message
    blocked = world.health.blocked_by(kernel.kernel_id, kernel.backend)
    if blocked is not None:
        return blocked.message
    found = kernel.check_device(device)
    return found[0].message if found else ""


def _combinations(backend: str, kernels: list[KernelSpec]) -> list[LineUp]:
    """So many line-ups that each kernel is in one: the first of every op, then the second, and so on."""
    by_op: dict[str, list[KernelSpec]] = {}
    for item in kernels:
        by_op.setdefault(item.op, []).append(item)
    ops = current_world().ops
    stand_ins = tuple(
        (spec.stands_for, name) for name in sorted(by_op) if (spec := ops.get(name)) is not None and spec.stands_for
    )
    found = []
    for turn in range(max(map(len, by_op.values()))):
        chosen = tuple(items[min(turn, len(items) - 1)].kernel_id for items in by_op.values())
        found.append(LineUp(backend if turn == 0 else f"{backend} ({turn + 1})", chosen, stand_ins))
    return found


@dataclass
class Caller:
    """Calls ops within a line-up, through the real dispatch, and remembers the kernels: by stage, the last of each op.

    The kernel that selection chooses is then asked for by name, so that a kernel that raises is a finding and not a
    quiet change to the next candidate. Level, subject and dtype are what the checks of its results have in common.
    """

    line_up: LineUp
    level: int = 0
    subject: str = ""
    dtype: str = ""
    stages: dict[str, tuple[str, str]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __call__(self, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the op on public arguments; a plugin's op that stands in for it takes its place."""
        public = public_op(op)
        canonical, layout, _ = public.normalize(args, kwargs)
        standing = dict(self.line_up.stand_ins).get(op)
        spec = public if standing is None else current_world().ops[standing]
        kernel = ""
        try:
            world = current_world()
            decision = decide(spec, describe(spec, canonical, layout, None, world), world)
            if not decision.chosen:
                raise refuse(decision)
            kernel = decision.chosen
            self.stages[stage] = (spec.op_id, kernel)
            self.kernels[op] = kernel
            self.used.add(kernel)
            if standing is None:
                return public.function(*args, **kwargs, backend=kernel)
            return dispatch(spec, canonical, layout, kernel)
        except LayerZeroError as error:
            raise StageError(stage, spec.op_id, kernel, error.__cause__ or error) from error

    @property
    def served(self) -> tuple[str, ...]:
        return tuple(sorted(self.used))

    @property
    def idle(self) -> bool:
        """Whether the line-up names kernels and none of them served a call."""
        return bool(self.line_up.kernels) and not self.used & set(self.line_up.kernels)

    @property
    def where(self) -> dict[str, Any]:
        return {"subject": f"{self.subject} [{self.line_up.name}]", "dtype": self.dtype}

    def compared(self, name: str, report: ErrorReport, **more: Any) -> Check:
        return of_error(self.level, name, report, **self.where, **more)

    def failed(self, name: str, error: BaseException) -> Check:
        return failed(self.level, name, error, **self.where)

    def left_out(self, name: str, why: str = _IDLE) -> Check:
        return skipped(self.level, name, why, **self.where)
