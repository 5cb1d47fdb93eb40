"""`SelectionReport`: a Decision with what really ran, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.model.context import Context
from layerzero.model.decision import Candidate, Decision
from layerzero.reasons import Reason


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """What `lz.explain` returns. It renders the very Decision that dispatch uses.

    decision   the decision, shared with dispatch
    context    the call as given; the decision's own context has growing sizes at the end of their bucket
    ran        kernel id of the last cold run or failover with this context; None when it never ran
    """

    decision: Decision
    context: Context
    ran: str | None = None

    @property
    def op(self) -> str:
        return self.decision.op

    @property
    def chosen(self) -> str:
        """Kernel id of the choice; empty when nothing may run."""
        return self.decision.chosen

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Every kernel of the op, in rank order, the rejected ones last."""
        return self.decision.candidates

    @property
    def is_fallback(self) -> bool:
        """Whether only the reference was left."""
        return self.decision.is_fallback

    @property
    def transform_cost_total(self) -> float:
        """Estimated µs spent adapting inputs."""
        return self.decision.transform_cost_total

    @property
    def fused_ops(self) -> tuple[str, ...]:
        """Ops the chosen kernel computes in one go."""
        return self.decision.fused_ops

    @property
    def reasons(self) -> dict[str, tuple[Reason, ...]]:
        return {item.kernel_id: item.reasons for item in self.decision.candidates}

    def to_dict(self) -> dict[str, Any]:
        return {**self.decision.to_json(), "ran": self.ran, "call": self.context.to_json()}

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Plain text: the choice first, then why each other kernel did not run."""
        decision, ctx = self.decision, self.context
        sizes = " ".join(f"{name}={value}" for name, value in ctx.dims)
        lines = [f"{decision.op} on {ctx.device.name or ctx.device.device_type} [{ctx.dtype}] {sizes}"]
        if ctx.needs:
            lines.append(f"  asks for: {', '.join(sorted(ctx.needs))}")
        if decision.chosen:
            winner = decision.winner
            lock = "  (locked)" if decision.locked else ""
            lines.append(f"  chosen: {decision.chosen}  score {winner.score:.1f}{_time(winner)}{lock}")
            lines.append(f"    ranked by {winner.expected or winner.source}")
            for step in winner.transforms:
                words = "isolated, in a process of its own" if step.name == "isolated" else f"after {step.name}"
                lines.append(f"    {words} (~{step.cost_us:.1f} us)")
        else:
            lines.append(f"  nothing may run: {decision.refusal}")
        if self.ran is not None and self.ran != decision.chosen:
            lines.append(f"  last ran: {self.ran}")
        for bucket in decision.buckets:
            if bucket.low != bucket.high:
                lines.append(f"  holds for {bucket.name} {bucket.low}..{bucket.high}")
        lines.extend(f"  note: {note}" for note in decision.notes)
        lines.append("  the others:" if len(decision.candidates) > 1 else "  no other kernel is registered")
        for item in decision.candidates:
            if item.kernel_id == decision.chosen:
                continue
            mark = f"score {item.score:.1f}{_time(item)}" if item.accepted and item.score is not None else "rejected"
            lines.append(f"    {item.kernel_id}  {mark}")
            lines.extend(f"      {reason}" for reason in item.reasons)
            if item.flip:
                lines.append(f"      -> {item.flip}")
        return "\n".join(lines)


def _time(item: Candidate) -> str:
    if item.measured_us is None:
        return "" if item.expected is None else f", expected {item.expected.ratio:.2f} x torch's time"
    return f", measured {item.measured_us:.1f} us"
