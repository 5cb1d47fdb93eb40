"""What the run of tuned.py means: drawn sizes, agreement of two tuning runs, figures and targets. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from layerzero.perfdb.measurement import upper
from layerzero_tune.grid import Case
from layerzero_tune.report.data import FORMAT, figures, from_json

__all__ = ["TARGETS", "agreement", "drawn", "over", "summary", "verdicts"]

SEED = 20261115
# name -> (where it stands in the figures, at most or at least, limit)
TARGETS: Mapping[str, tuple[str, float]] = {
    "chosen ÷ oracle, geomean": ("at most", 1.03),
    "chosen ÷ oracle, worst": ("at most", 1.10),
    "random sizes: chosen ÷ oracle, geomean": ("at most", 1.03),
    "random sizes: chosen ÷ oracle, worst": ("at most", 1.10),
    "× torch default, geomean": ("at least", 1.3),
    "× torch default, geomean of the 34": ("at least", 1.85),
    "of the oracle's speed overall": ("at least", 0.97),
    "nearest single library ÷ LayerZero": ("at least", 1.0),
    "two tuning runs agree": ("at least", 0.98),
    "where they differ, within": ("at most", 1.02),
}


def drawn(
    cases: Sequence[Case], count: int, same_bucket: Callable[[Case, Case], bool], seed: int = SEED
) -> Iterator[Case]:
    """Other sizes of the same calls, each inside the bucket that was tuned for it; the same ones at every run."""
    rng = random.Random(seed)
    growing = [case for case in cases if any(case.values[name] > 1 for name in case.grows)]
    seen: set[str] = set()
    tries = 0
    while growing and len(seen) < count and tries < 200 * count:
        tries += 1
        case = rng.choice(growing)
        sizes = {}
        for name in case.grows:
            last = upper(case.values[name])
            sizes[name] = rng.randint(last // 2 + 1, last)
        made = case.at(**sizes)
        if made.name in seen or made.values == case.values or not same_bucket(case, made):
            continue
        seen.add(made.name)
        yield made


def agreement(
    first: Mapping[str, str], second: Mapping[str, str], times: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """How far two tuning runs chose alike; where not, how far apart the two kernels are in the measured run."""
    shared = [name for name in first if name in second]
    apart = []
    for name in shared:
        one, two = first[name], second[name]
        if one != two:
            found = times.get(name, {})
            ratio = max(found[one], found[two]) / min(found[one], found[two]) if one in found and two in found else None
            apart.append(
                {"case": name, "first": one, "second": two, "ratio": None if ratio is None else round(ratio, 4)}
            )
    known = [item["ratio"] for item in apart if item["ratio"] is not None]
    return {
        "cases": len(shared),
        "agree": round(1.0 - len(apart) / len(shared), 4) if shared else None,
        "worst_difference": max(known, default=1.0 if shared else None),
        "apart": apart,
    }


def over(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over some records."""
    return figures(from_json({"format": FORMAT, "cases": list(records)}, "measured")).to_json()


def summary(cases: Sequence[Mapping[str, Any]], drawn_cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over everything, the 34, each dtype, and the random sizes."""
    tagged = [item for item in cases if "gpu34" in item.get("tags", ())]
    found: dict[str, Any] = {"grid": over(cases)}
    if tagged:
        found["gpu34"] = over(tagged)
    for dtype in sorted({str(item["dtype"]) for item in cases}):
        found[dtype] = over([item for item in cases if item["dtype"] == dtype])
    if drawn_cases:
        found["random"] = over(drawn_cases)
    return found


def verdicts(found: Mapping[str, Any], agreed: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Each target with what was measured; a target whose figure was not taken is left out."""
    grid, drawn_found, page = found["grid"], found.get("random"), found.get("gpu34")
    values: dict[str, float | None] = {}
    if grid["tuned_over_oracle"] is not None:
        values["chosen ÷ oracle, geomean"] = grid["tuned_over_oracle"]["geomean"]
        values["chosen ÷ oracle, worst"] = grid["tuned_over_oracle"]["worst"]
        values["of the oracle's speed overall"] = round(1.0 / grid["tuned_over_oracle"]["geomean"], 4)
    if drawn_found and drawn_found["tuned_over_oracle"] is not None:
        values["random sizes: chosen ÷ oracle, geomean"] = drawn_found["tuned_over_oracle"]["geomean"]
        values["random sizes: chosen ÷ oracle, worst"] = drawn_found["tuned_over_oracle"]["worst"]
    if page is not None:  # the 34 have a target of their own
        values["× torch default, geomean of the 34"] = page["speedup_over_torch"]
    else:
        values["× torch default, geomean"] = grid["speedup_over_torch"]
    against = page or grid
    libraries = [item["geomean"] for item in against["library_over_fastest"].values()]
    if libraries and against["layerzero_over_fastest"] is not None:
        own = against["layerzero_over_fastest"]["geomean"]
        values["nearest single library ÷ LayerZero"] = round(min(libraries) / own, 4)
    if agreed is not None and agreed["agree"] is not None:
        values["two tuning runs agree"] = agreed["agree"]
        values["where they differ, within"] = agreed["worst_difference"]
    told = {}
    for name, value in values.items():
        if value is None:
            continue
        side, limit = TARGETS[name]
        met = value <= limit if side == "at most" else value >= limit
        told[name] = {"value": value, side.replace(" ", "_"): limit, "met": met}
    return told
