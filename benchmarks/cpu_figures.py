"""Figures of the CPU benchmark: ratios of one case, its line in the table, and what all cases say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpu_case import Goal, others

__all__ = ["NOISE", "PEER_SHARE", "breadth", "goal_words", "line", "ratios", "summary", "verdict"]

NOISE = 0.05  # what two medians of one run may differ by without meaning anything
PEER_SHARE = 0.75  # of the cases in which LayerZero shall be at least as fast as the best peer


def ratios(us: Mapping[str, float], goals: Sequence[Goal]) -> dict[str, Any]:
    """From median µs by contestant: against eager, the floor, the best peer, and the goals.

    A goal is met where the kernel reaches it and the public function reaches its share of it. The kernel's time is that
    of "direct", or of "lz" where that is shorter: it is the kernel and a call around it.
    """
    row: dict[str, Any] = {"speedup": round(us["eager"] / us["lz"], 3)}
    if "floor" in us:
        row["of_floor"] = round(us["floor"] / us["lz"], 3)
        row["allowed_by_floor"] = round(us["eager"] / us["floor"], 3)  # × eager that moving the bytes alone would be
    best = min(others(us), key=lambda name: us[name])
    row["best_peer"], row["against_best_peer"] = best, round(us[best] / us["lz"], 3)
    row["goals"] = []
    for goal in goals:
        if goal.against in us:
            row["goals"].append(_reached(goal, us))
    return row


def _reached(goal: Goal, us: Mapping[str, float]) -> dict[str, Any]:
    kernel = round(us[goal.against] / min(us["lz"], us.get("direct", us["lz"])), 3)
    through = round(us[goal.against] / us["lz"], 3)
    found: dict[str, Any] = {
        "against": goal.against,
        "factor": goal.factor,
        "reached": kernel,
        "through": through,
        "through_factor": round(goal.through * goal.factor, 3),
        "met": kernel >= goal.factor and through >= goal.through * goal.factor,
    }
    if goal.against == "eager" and "floor" in us:
        # where nothing but moving the bytes would be too slow, no kernel reaches the goal
        found["above_floor"] = us["eager"] / us["floor"] < goal.factor
    return found


def goal_words(goal: Mapping[str, Any]) -> str:
    """What a goal asks for and what was reached, by the kernel and through the public function."""
    return (
        f"{goal['reached']:.2f} of {goal['factor']:g} {goal['against']}, "
        f"through lz {goal['through']:.2f} of {goal['through_factor']:g}"
    )


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    times = "  ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    goals = " ".join(f"[{'ok' if goal['met'] else 'MISSED'} {goal_words(goal)}]" for goal in row["goals"])
    floor = ""
    if "of_floor" in row:
        floor = f", {100 * row['of_floor']:.0f} % of the floor (which is {row['allowed_by_floor']:.1f}× eager)"
    peer = f", {row['against_best_peer']:.2f}× {row['best_peer']}" if row["best_peer"] != "eager" else ""
    refused = "".join(f"  ({name} {why.splitlines()[0][:60]})" for name, why in row.get("refused", {}).items())
    return (
        f"{row['group']:<10} {row['case']:<44} {row['speedup']:6.2f}× eager{peer}{floor}  {goals}  {row['kernel']}  "
        f"µs: {times}{refused}" + "".join(f"\n    {words}" for words in row.get("where", {}).get("words", ()))
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all cases say: goals, who is slower than eager beyond the noise, and how often nobody is faster."""
    good = [row for row in rows if "us" in row]
    goals = [goal for row in good for goal in row["goals"]]
    as_fast = sum(row["against_best_peer"] >= 1.0 for row in good)
    met = [row for row in good if len(others(row["us"])) > 1]  # another took part beside eager
    behind = {
        f"{row['group']} {row['case']}": f"{row['against_best_peer']:.2f} of {row['best_peer']}"
        for row in good
        if row["against_best_peer"] < 1.0 - NOISE
    }
    refused: dict[str, int] = {}
    for row in good:
        for name in row.get("refused", {}):
            refused[name] = refused.get(name, 0) + 1
    return {
        "cases": len(good),
        "failed": [f"{row['group']} {row['case']}" for row in rows if "us" not in row],
        "goals": len(goals),
        "goals_met": sum(goal["met"] for goal in goals),
        "goals_missed": {
            f"{row['group']} {row['case']}": goal_words(goal)
            for row in good
            for goal in row["goals"]
            if not goal["met"]
        },
        "goals_above_floor": [
            f"{row['group']} {row['case']}" for row in good for goal in row["goals"] if goal.get("above_floor")
        ],
        "slower_than_eager": [f"{row['group']} {row['case']}" for row in good if row["speedup"] < 1.0 - NOISE],
        "as_fast_as_best_peer": as_fast,
        "as_fast_within_noise": len(good) - len(behind),
        "cases_with_others": len(met),
        "as_fast_as_others": sum(row["against_best_peer"] >= 1.0 for row in met),
        "tuned": sum("untuned_kernel" in row and "not_tuned" not in row for row in good),
        "not_tuned_for_time": sum("budget" in row.get("not_tuned", "") for row in good),
        "goal_of_peers": PEER_SHARE,
        "goal_of_peers_met": bool(good) and as_fast >= PEER_SHARE * len(good),
        "behind_best_peer": behind,
        "peers_not_timed": refused,
    }


def breadth(found: Mapping[str, Any]) -> str:
    """How much stands behind the figures: whom a case met, and whether it was tuned."""
    return (
        f"with another library than eager in the race: {found['as_fast_as_others']} of {found['cases_with_others']} "
        f"cases as fast; tuned before: {found['tuned']}, and the time did not suffice for "
        f"{found['not_tuned_for_time']} more"
    )


def verdict(found: Mapping[str, Any]) -> str:
    """The summary in a few lines."""
    count = found["cases"]
    lines = [
        f"{count} cases, {found['goals_met']} of {found['goals']} goals met; slower than eager by more than "
        f"{100 * NOISE:.0f} %: {', '.join(found['slower_than_eager']) or 'none'}",
        f"at least as fast as the best peer in {found['as_fast_as_best_peer']} of {count} "
        f"({'met' if found['goal_of_peers_met'] else 'MISSED'}: three quarters), in {found['as_fast_within_noise']} "
        "within the noise",
        breadth(found),
    ]
    lines += [f"  missed: {name}: {how}" for name, how in found["goals_missed"].items()]
    lines += [f"  above what memory allows: {name}" for name in found["goals_above_floor"]]
    lines += [f"  behind: {name}: {how}" for name, how in found["behind_best_peer"].items()]
    lines += [f"  failed: {name}" for name in found["failed"]]
    if found["peers_not_timed"]:
        words = ", ".join(f"{name} in {number}" for name, number in found["peers_not_timed"].items())
        lines.append(f"  peers not timed, being wrong, broken or too late (reasons in the JSON): {words}")
    return "\n".join(lines)
