"""The pyramid rule: where the lowest fault lies, and what it means that everything below it is sound."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero_verify.lineup import Target
from layerzero_verify.report import LEVELS, Check, Level, Status, Verdict

__all__ = ["judge"]


def judge(levels: Sequence[Level], target: Target) -> Verdict:
    """The verdict on a run: the first failure of the lowest failing level speaks for all above it."""
    if not target.kernels:
        why = f" ({target.absent[0][1]})" if target.absent else ""
        return Verdict(False, "nothing", None, f"nothing was verified: no kernel of {target.name} can run here{why}")
    broken = next((level for level in levels if level.failures), None)
    passed = [level for level in levels if level.status is Status.OK]
    if broken is None:
        count = sum(level.passed for level in levels)
        left = [f"level {level.number} ({level.skipped})" for level in levels if level.skipped]
        text = f"{target.name}: all {count} checks pass at levels {_numbers(passed)}"
        return Verdict(True, "pass", None, text + (f"; left out: {'; '.join(left)}" if left else ""))
    # Of several failures the one that shows a wrong number says more than one that only raised.
    first = next((item for item in broken.failures if item.first is not None), broken.failures[0])
    below = [level for level in passed if 0 < level.number < broken.number]
    kind = _kind(broken.number, below)
    return Verdict(
        False,
        kind,
        broken.number,
        f"{_headline(broken.number, kind, first)}. {_meaning(broken.number, below, levels)}",
        component=first.component or first.op,
        op=first.op,
        kernel=first.kernel,
        stage=first.stage,
    )


def _kind(number: int, below: list[Level]) -> str:
    if number == 0:
        return "contract"
    if number == 1:
        return "kernel"
    # The rule needs its premise: without the lower levels nobody knows whether the kernels are sound.
    return "integration" if any(level.number == 1 for level in below) else "unplaced"


def _headline(number: int, kind: str, first: Check) -> str:
    component = f"{first.component}, " if first.component and first.component != first.op else ""
    words = {
        "contract": "contract fault",
        "kernel": "kernel fault",
        "integration": "integration fault",
        "unplaced": "fault",
    }
    where = " ".join(part for part in (first.op, first.kernel) if part) or first.name
    place = f" at {first.stage}" if first.stage else ""
    return f"{words[kind]} at level {number} ({LEVELS[number]}): {component}{where}{place}"


def _meaning(number: int, below: list[Level], levels: Sequence[Level]) -> str:
    if number == 0:
        return "The declaration and the kernel do not fit together, so nothing heavy was run"
    if number == 1:
        above = [level for level in levels if level.number > 1 and level.status is not Status.SKIP]
        more = f"; levels {_numbers(above)} were run without it" if above else ""
        return f"The kernel alone gives another result than the reference{more}"
    if below:
        return (
            f"Levels {_numbers(below)} pass: the parts are right by their own measure, "
            "what joins them (a convention, a layout, an alignment) is not"
        )
    return "The levels below were not run; run them to see whether a kernel or the integration is at fault"


def _numbers(levels: Sequence[Level]) -> str:
    return ", ".join(str(level.number) for level in levels)
