"""The part of benchmarks/README.md about the CPU kernels, rendered from cpu.json."""

from __future__ import annotations

from typing import Any

from cpu_figures import breadth, goal_words

__all__ = ["cpu_section"]


def cpu_section(name: str, data: dict[str, Any]) -> str:
    """Every case: the kernel chosen, against eager, the best peer and the floor, the goals, and where time goes."""
    machine, found = data["machine"], data["summary"]
    peers = ", ".join(f"{kind} {version}" for kind, version in data["peers"].items() if kind != "torch") or "none"
    share = f"{found['as_fast_as_best_peer']} of {found['cases']}"
    lines = [
        f"## {name}: CPU kernels",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}), {data['threads']} threads, {data['isa']}; "
        f"Python {machine['python']}, torch {machine['torch']}; load before the run {machine['load']}; commit "
        f"`{data['commit']}`. `lz` is {data['lz']}. Peers beside torch's own: {peers}. Repeat: `{data['command']}`.",
        "",
        f"{found['goals_met']} of {found['goals']} goals met; at least as fast as the best peer in {share} cases (goal "
        f"{100 * found['goal_of_peers']:.0f} %), in {found['as_fast_within_noise']} within the noise; slower than "
        f"eager: {', '.join(found['slower_than_eager']) or 'none'}. Of these, {breadth(found)}.",
        "",
        "Goals are the kernel's, and nine tenths of them through `lz.*` with the call's overhead. The floor is what "
        "the same threads take to move the same bytes and do nothing else.",
        "",
        "| case | kernel | µs | × eager | × best peer | of the floor | × eager the floor allows | goals |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in data["rows"]:
        if "us" not in row:
            lines.append(f"| {row['group']}: {row['case']} | failed: {row['error']} | | | | | | |")
            continue
        floor = f"{100 * row['of_floor']:.0f} %" if "of_floor" in row else ""
        allowed = f"{row['us']['eager'] / row['us']['floor']:.2f}" if "of_floor" in row else ""
        goals = ", ".join(f"{'' if goal['met'] else 'missed: '}{_goal(goal)}" for goal in row["goals"])
        lines.append(
            f"| {row['group']}: {row['case']} | `{row['kernel']}` | {row['us']['lz']:,.1f} | {row['speedup']:.2f} | "
            f"{row['against_best_peer']:.2f} ({row['best_peer']}) | {floor} | {allowed} | {goals} |"
        )
    twice = [row for row in data["rows"] if "first_us" in row]
    if twice:
        lines += [
            "",
            "Missed a goal or was behind eager at first, timed once more and longer, which counts (× eager):",
            "",
        ]
        lines += [
            f"- {row['group']}: {row['case']}: {row['first_us']['eager'] / row['first_us']['lz']:.2f} at first, "
            f"{row['us']['eager'] / row['us']['lz']:.2f} then."
            for row in twice
        ]
    missed = [row for row in data["rows"] if row.get("where")]
    if missed:
        lines += ["", "Where the time goes in the cases that miss a goal:", ""]
        lines += [f"- {row['group']}: {row['case']}: {'. '.join(row['where']['words'])}." for row in missed]
    died = [*data.get("died", ())]
    if died:
        lines += ["", f"Interrupted by a peer: {'; '.join(died)}."]
    return "\n".join(lines) + "\n"


def _goal(goal: dict[str, Any]) -> str:
    if "through" not in goal:  # figures of an earlier form, whose goals were asked of the public function
        return f"{goal['reached']:.2f} of {goal['factor']:g} {goal['against']}"
    return goal_words(goal)
