"""`lz.explain(model, example_inputs)`: which kernels a model runs, part by part, and why.

The model runs once. Meanwhile no call is hot, so that each comes by the place where it is decided. The module that
made it is found among the callers: hooks would tell as well, but a patched model leaves its fused paths for them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from layerzero.dispatch.bind import Bound
from layerzero.model.context import Context
from layerzero.telemetry.report import SelectionReport


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Calls of an op with the same sizes in one part of the model, or in parts that differ by a number alone.

    part    name of the module as `named_modules` says it, numbers replaced by *; "" where there is none
    ran     the kernel that ran, `count` how often; `report` says why it and not another
    """

    part: str
    ran: str
    count: int
    report: SelectionReport

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "ran": self.ran, "count": self.count, **self.report.to_dict()}

    @property
    def why(self) -> str:
        """The time it is expected to take, or what it was ranked by."""
        winner = self.report.decision.candidate(self.ran)
        return winner.speed or f"ranked by {winner.source}"

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.report.context.dims)
        return f"{self.count:5} × {self.ran}  {self.why}\n        {self.part or 'the model'}: {self.report.op} {sizes}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `lz.explain` returns for a model; `calls` in the order in which they were first made."""

    calls: tuple[ModelCall, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel id → how many calls it ran, the most first."""
        counts: Counter[str] = Counter()
        for call in self.calls:
            counts[call.ran] += call.count
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        return {"kernels": self.kernels, "calls": [call.to_json() for call in self.calls]}

    def __str__(self) -> str:
        if not self.calls:
            return "no op of LayerZero was called: lz.patch(model) lets a model call them"
        return "\n".join((f"{sum(self.kernels.values())} calls of {len(self.kernels)} kernels", *map(str, self.calls)))


class _Watch:
    """Stands where a World keeps its tally; forgets every call that was made hot, so that the next comes by as well."""

    def __init__(self, model: Any) -> None:
        modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        self._names: dict[int, str] = {id(module): name for name, module in modules}
        self.met_calls: Counter[tuple[str, Context, str]] = Counter()

    def table(self) -> dict[Any, Any]:
        return {}

    def met(
        self, hot: dict[Any, Any], keys: tuple[Any, Any], ctx: Context, bound: Bound, args: tuple[Any, ...]
    ) -> None:
        """A call was decided and is about to run."""
        for key in keys:
            hot.pop(key, None)
        part = re.sub(r"(?<![^.])\d+(?![^.])", "*", self._part(sys._getframe(1)))
        self.met_calls[part, ctx, bound.kernel_id] += 1

    def _part(self, frame: FrameType | None) -> str:
        """The name of the nearest module whose method, or function of it, is being called."""
        while frame is not None and self._names:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            name = self._names.get(id(frame.f_locals.get(first[0]))) if first else None
            if name is not None:
                return name
            frame = frame.f_back
        return ""


def explain_model(model: Callable[..., Any], inputs: Any) -> ModelReport:
    """Run a model or a function once, without gradients, and report its calls.

    `inputs` are a tuple of positional arguments, a mapping of named ones, or the only argument.
    """
    from layerzero.public.inspection import explain
    from layerzero.runtime.state import state

    watch, before = _Watch(model), state.tally
    _ = state.world
    state.record(watch)
    try:
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    finally:
        state.record(before)
    found = watch.met_calls.items()
    return ModelReport(tuple(ModelCall(part, ran, n, explain(ctx.op, ctx)) for (part, ctx, ran), n in found))
