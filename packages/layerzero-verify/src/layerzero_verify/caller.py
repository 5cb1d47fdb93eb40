"""Calls of ops as the ladder makes them: through the real dispatch, with a note of which kernel ran for which stage.

The kernel that selection chooses is then asked for by name, so that a kernel that raises is a finding and not a quiet
change to the next candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from layerzero._ops.signature import dispatch, public_op
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import LayerZeroError
from layerzero.model.op import OperationSpec
from layerzero.selection.engine import refuse
from layerzero_verify.lineup import LineUp
from layerzero_verify.report import StageError

__all__ = ["IDLE", "Caller", "StageError"]

IDLE = "no kernel under test serves a call here"


@dataclass
class Caller:
    """Calls ops within a line-up and remembers the kernels: by stage, and the last one of each op."""

    line_up: LineUp
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
            kernel = _choose(spec, canonical, layout)
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
        """Every kernel that was called, by name."""
        return tuple(sorted(self.used))

    @property
    def idle(self) -> bool:
        """Whether the line-up names kernels and none of them served a call."""
        return bool(self.line_up.kernels) and not self.used & set(self.line_up.kernels)


def _choose(spec: OperationSpec, canonical: tuple[Any, ...], layout: str | None) -> str:
    world = current_world()
    decision = decide(spec, describe(spec, canonical, layout, None, world), world)
    if not decision.chosen:
        raise refuse(decision)
    return decision.chosen
