"""What part of a spread is the machine's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping


def without_common_mode(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The samples of each kernel without what the kernels have in common in a turn; all have one in every turn.

    When the machine slows down it does so for all of them. That would count as spread of each, and a kernel that is a
    tenth behind in every single turn could not be told from the first. Of two kernels, how they differ stays.
    """
    if len(found) < 2:
        return dict(found)
    usual = {name: statistics.median(turns) for name, turns in found.items()}
    turns = zip(*([us / usual[name] for us in taken] for name, taken in found.items()), strict=True)
    common = [statistics.median(shares) for shares in turns]
    return {name: [us / share for us, share in zip(taken, common, strict=True)] for name, taken in found.items()}
