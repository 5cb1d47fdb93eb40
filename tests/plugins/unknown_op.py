"""Drives `lz.ops.rms_norm_gated`, an op that only an installed wheel brings, through everything LayerZero does with an
op. Run by `test_unknown_op_wheel.py` in a process of its own; prints one JSON object: what was tried, and what came.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import layerzero as lz

FOLDER = Path(sys.argv[1])
OP, FUSED, SPLIT = "rms_norm_gated", "gatednorm.rms_norm_gated.fused", "gatednorm.rms_norm_gated.split"
X, GATE, WEIGHT = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
FOUND: dict[str, Any] = {}


def formula(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The op, written apart from the wheel."""
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()
    return (normed * (gate.double() / (1 + torch.exp(-gate.double())))).to(x.dtype)


def right(out: torch.Tensor, *args: Any) -> bool:
    """Whether a result is the formula's."""
    return bool(torch.allclose(out, formula(*args), atol=1e-5, rtol=1e-4))


def tried(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it now; what it returns, or how it failed, is printed under its name."""
    try:
        FOUND[function.__name__] = function()
    except Exception:
        FOUND[function.__name__] = traceback.format_exc()[-1500:]
    return function


@tried
def call() -> bool:
    """Called by its name in `lz.ops`, with and without its options."""
    assert OP in dir(lz.ops) and lz.ops.rms_norm_gated.__doc__.startswith(("rms_norm(x)", "rms_norm_gated("))
    return right(lz.ops.rms_norm_gated(X, GATE, WEIGHT, eps=1e-3), X, GATE, WEIGHT, 1e-3)


@tried
def hot() -> list[int]:
    """A second call of a kind misses nothing; one of another kind does."""
    from layerzero.runtime.state import state

    for _ in range(3):
        lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    before = state.counters.misses
    for _ in range(5):
        lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    same = state.counters.misses - before
    lz.ops.rms_norm_gated(X[:3], GATE[:3], WEIGHT)
    return [same, state.counters.misses - before]


@tried
def overhead() -> list[int]:
    """How many functions, of Python and of C, a hot call enters: its own, and one of `lz.rms_norm`."""
    from layerzero.runtime.state import state

    lz.rms_norm(X, WEIGHT)
    for bound in state.world.hot.values():
        object.__setattr__(bound, "run", lambda *args: None)

    def entered(function: Any, *args: Any) -> int:
        events: list[str] = []
        sys.setprofile(lambda frame, event, arg: events.append(event))
        function(*args)
        sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    found = [entered(lz.ops.rms_norm_gated, X, GATE, WEIGHT), entered(lz.rms_norm, X, WEIGHT)]
    lz.reset()
    return found


@tried
def gradient() -> bool:
    """Of every kernel, against the formula's."""
    answers = []
    for backend in (FUSED, SPLIT, "reference", "torch"):
        leaves = [item.clone().requires_grad_() for item in (X, GATE, WEIGHT)]
        wanted = [item.clone().requires_grad_() for item in (X, GATE, WEIGHT)]
        lz.ops.rms_norm_gated(*leaves, backend=backend).sum().backward()
        formula(*wanted).sum().backward()
        answers += [torch.allclose(a.grad, b.grad, atol=1e-4) for a, b in zip(leaves, wanted, strict=True)]
    return all(answers)


@tried
def plan() -> list[Any]:
    """Bound once."""
    planned = lz.plan(OP, X, GATE, WEIGHT)
    return [planned.kernel_id, right(planned(X, GATE, WEIGHT), X, GATE, WEIGHT)]


@tried
def explain() -> dict[str, Any]:
    """With every candidate and its reason, after the first call without a weight has been checked."""
    lz.ops.rms_norm_gated(X, GATE)
    report = lz.explain(OP, X, GATE)
    return {item.kernel_id: [why.code.value for why in item.reasons] for item in report.decision.candidates}


@tried
def lock_and_policy() -> list[str]:
    """A lock, a preference and a scope decide."""
    lz.lock(OP, SPLIT)
    locked = lz.which(OP, X, GATE, WEIGHT)
    lz.unlock(OP)
    with lz.scoped(deny=["gatednorm"]):
        without = lz.which(OP, X, GATE, WEIGHT)
    return [locked, without, lz.which(OP, X, GATE, WEIGHT)]


@tried
def measured() -> dict[str, Any]:
    """Recorded, tuned, solved into a table, and the table obeyed; warmed up from the same traffic."""
    from layerzero_tune.timing import host_load

    host_load.ticks, host_load._PAUSES = (lambda path="": None), ()  # the host of a test serves others
    traffic, database, table = (FOLDER / name for name in ("traffic.json", "perf.db", "table.json"))
    with lz.record(traffic):
        for _ in range(3):
            lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    tuned = lz.tune(traffic, database=database, budget=0.2)
    solved = lz.solve(traffic, table, database=database)
    lz.use_table(table)
    report = lz.explain(OP, X, GATE, WEIGHT)
    lz.use_table(None)
    trial = tuned.outcomes[0].trial
    return {
        "recorded": json.loads(traffic.read_text())["calls"][0]["context"]["op"],
        "timed": sorted(trial.times),
        "refused": dict(trial.refused),
        "solved": [entry.op for entry in solved.entries],
        "followed": [note.code.value for note in report.decision.notes],
        "warmed": lz.warmup(traffic, background=False).calls,
    }


@tried
def verified() -> list[Any]:
    """`lz verify` checks each kernel against the op's truth."""
    report = lz.verify(op=OP, level=(1, 2))
    return [report.ok, sorted(report.kernels), [str(item) for item in report.failures]]


@tried
def compiled() -> list[bool]:
    """One graph, with and without a gradient."""
    double = torch.compile(lambda *args: lz.ops.rms_norm_gated(*args) * 2, fullgraph=True, backend="aot_eager")
    plain = right(double(X, GATE, WEIGHT) / 2, X, GATE, WEIGHT)
    leaf = X.clone().requires_grad_()
    out = double(leaf, GATE, WEIGHT)
    out.sum().backward()
    return [plain, right(out.detach() / 2, X, GATE, WEIGHT), leaf.grad is not None]


@tried
def exported() -> list[Any]:
    """A saved program selects where it runs."""

    class Module(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return lz.ops.rms_norm_gated(*args)

    program = torch.export.export(Module(), (X, GATE, WEIGHT))
    torch.export.save(program, FOLDER / "program.pt2")
    again = torch.export.load(FOLDER / "program.pt2").module()(X, GATE, WEIGHT)
    return [f"layerzero.{OP}.default" in str(program.graph), right(again, X, GATE, WEIGHT)]


@tried
def failover() -> list[Any]:
    """A kernel that raises in a hot call is replaced."""
    from layerzero.runtime.state import state

    lz.reset()
    lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    lz.ops.rms_norm_gated(X, GATE, WEIGHT)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no")

    for bound in state.world.hot.values():
        object.__setattr__(bound, "run", broken)
    out = lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    failed = state.counters.failovers
    lz.reset()
    return [right(out, X, GATE, WEIGHT), failed]


@tried
def telemetry() -> bool:
    """Counted by op and kernel."""
    with lz.observe() as watching:
        for _ in range(3):
            lz.ops.rms_norm_gated(X, GATE, WEIGHT)
    return OP in str(vars(watching) if hasattr(watching, "__dict__") else watching) + str(lz.metrics())


@tried
def listed() -> list[Any]:
    """Among the ops and the kernels."""
    (op,) = (item for item in lz.list_ops() if item.op_id == OP)
    return [list(op.arguments), [kernel.kernel_id for kernel in lz.list_kernels(OP)]]


@tried
def bad_input() -> str:
    """A wrong call is refused in words."""
    try:
        lz.ops.rms_norm_gated(X, GATE[:2], WEIGHT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


print("FOUND " + json.dumps(FOUND))
