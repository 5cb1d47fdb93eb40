"""What `lz verify --hostile` shows."""

from __future__ import annotations

from typing import Any

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, progress_bar
from layerzero_cli.verbs import OK, PROBLEM
from layerzero_hostile.gate import find_cheats


def answer(
    *, lane: str = "quick", backend: str | None = None, kernel: str | None = None, op: str | None = None,
    device: str | None = None, seed: int = 0, **_: Any,
) -> Answer:  # fmt: skip
    """The findings, kernel by kernel; exit code 1 when one is refused, or when none could be looked at."""
    named = backend is not None or kernel is not None
    with progress_bar():
        found = find_cheats(
            backend=backend, kernel=kernel, op=op, device=device, seed=seed, compiles=named or lane != "quick"
        )  # fmt: skip
    looked = [item for item in found if not item["skipped"]]
    refused = [item for item in looked if item["code"]]
    rows = [
        (Cell("refused" if item["code"] else "passed", STYLES["fail" if item["code"] else "ok"]), item["kernel"],
         item["code"] or "", item["message"])
        for item in looked
    ]  # fmt: skip
    seeded = f", seed {looked[0]['seed']}" if looked else ""
    text = f"{len(looked)} kernels looked at, {len(refused)} refused, {len(found) - len(looked)} cannot be tried here"
    blocks: list[Block] = [Table(("", "kernel", "cheat", ""), rows), Line()] if rows else []
    ok = bool(looked) and not refused
    blocks.append(Line(text + seeded, STYLES["ok" if ok else "fail"]))
    return Answer({"ok": ok, "kernels": found}, blocks, OK if ok else PROBLEM)
