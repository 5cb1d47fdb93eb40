"""The gates before anything heavy: do the kernels keep their contract on paper, and do three models run at all?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import LayerZeroError
from layerzero.model.context import Context
from layerzero.model.enums import Layout
from layerzero.model.kernel import KernelSpec
from layerzero_verify.kernels import Bench
from layerzero_verify.report import Check, Status, failed, skipped
from layerzero_verify.testing.cases import Group, cases_of, dtypes_of, load_cases

__all__ = ["contract", "sound"]


def sound(kernel: KernelSpec) -> str:
    """Why a kernel cannot be put on the bench at all; empty when it can."""
    if current_world().ops.get(kernel.op) is None:
        return f"no op {kernel.op!r} is known: register it with registrar.op, or correct the name"
    try:
        resolve(kernel)
    except LayerZeroError as error:
        return str(error)
    return ""


def contract(kernel: KernelSpec, device: torch.device) -> Iterator[Check]:
    """What can be said of a kernel without comparing a number."""
    where: dict[str, Any] = {"op": kernel.op, "kernel": kernel.kernel_id, "stage": "contract"}
    why = sound(kernel)
    if why:
        yield failed(0, "contract", why, **where)
        return
    if kernel.op == "attention" and kernel.layouts not in ({Layout.BHSD}, {Layout.BSHD}):
        yield failed(0, "contract", "an attention kernel cannot see the layout: declare BHSD or BSHD", **where)
        return
    bench = Bench(kernel, device)
    case = bench.plain()
    if case is None:
        if kernel.op in PUBLIC and dtypes_of(kernel):
            yield failed(0, "contract", f"the conformance kit has no plain case for {kernel.op}", **where)
        else:
            words = ", ".join(sorted(kernel.dtypes))
            yield skipped(0, "contract", f"nothing to try it with: no case for {kernel.op} in {words}", **where)
        return
    try:
        with bench.locked():
            decision = decide(bench.op, bench.described(bench.arguments(case)), current_world())
    except LayerZeroError as error:
        yield failed(0, "contract", error, **where)
        return
    if not decision.chosen:
        text = decision.refusal.message if decision.refusal is not None else "refused"
        yield failed(0, "contract", f"its own constraints refuse a plain call: {text}", **where)
        return
    for group in _undeclared(bench):
        if not _refuses(bench, group):
            missing = ", ".join(sorted(group.requires - kernel.features))
            yield failed(0, "contract", f"{missing} is not declared, yet a call that needs it is accepted", **where)
            return
    yield Check(0, "contract", Status.OK, **where)


def _undeclared(bench: Bench) -> Iterator[Group]:
    wanted = {bench.op.op_id, bench.op.stands_for}
    for name, groups in load_cases().items():
        for group in groups:
            # On equal lengths both causal triangles agree, so those calls are rightly accepted.
            if group.op in wanted and group.requires - bench.spec.features and not name.startswith("causal"):
                yield group


def _refuses(bench: Bench, group: Group) -> bool:
    for case in cases_of(group, bench.spec):
        return bool(bench.spec.check(_own_layout(bench, bench.arguments(case))))
    return True


def _own_layout(bench: Bench, args: tuple[Any, ...]) -> Context:
    """The call as selection would describe it, in the kernel's own layout."""
    if bench.op.op_id == "attention" and bench.spec.layouts == {Layout.BSHD}:
        swapped = tuple(item.transpose(1, 2).contiguous() for item in args[:3])
        return describe(bench.op, (*swapped, *args[3:]), "BSHD", None, current_world())
    return bench.described(args)
