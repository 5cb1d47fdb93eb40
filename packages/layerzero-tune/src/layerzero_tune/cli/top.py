"""`lz top`: what another process is doing, live."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, is_plain
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, verb

if TYPE_CHECKING:
    from layerzero_tune.telemetry.reading import Reading


@verb(cli, "top")
@click.argument("source", required=False)
@click.option("--interval", type=click.FloatRange(min=0.05), default=1.0, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look twice, print once.")
@click.option("--rows", type=click.IntRange(min=1), default=20, help="Kernels to show.")
def top(source: str | None, interval: float, once: bool, rows: int) -> Answer:
    """Watch a running process: calls a second by kernel, misses, failovers, breakers, compiles.

    \b
    lz top 9464                    a process that runs with LAYERZERO_METRICS=9464
    lz top metrics.prom --once

    SOURCE is what the process was given as LAYERZERO_METRICS or lz.observe(metrics=...): a port, an address or a
    file. Default: this shell's LAYERZERO_METRICS.
    """
    from layerzero.env import read_one
    from layerzero.errors import ConfigurationError
    from layerzero_tune.telemetry.reading import read

    where = source or read_one("metrics")
    if not where:
        raise ConfigurationError(
            "which process?", value="no source", limit="a port, an address or a file",
            hint="lz top 9464, where the process runs with LAYERZERO_METRICS=9464",
        )  # fmt: skip
    before = read(where)
    live = not once and "--json" not in sys.argv and sys.__stdout__ is not None and not is_plain(sys.__stdout__)
    if live:
        _live(where, before, interval, rows)
        return Answer({})
    time.sleep(interval)
    after = read(where)
    return Answer(summary(before, after), frame(before, after, rows), OK)


def summary(before: Reading, after: Reading) -> dict[str, Any]:
    """Two readings as data: rates by kernel, and the numbers beside them."""
    from layerzero_tune.telemetry.reading import difference

    seconds = max(after.time - before.time, 1e-3)
    kernels = [
        {**labels, "calls": value, "per_s": difference(before, after, "layerzero_kernel_calls_total", labels) / seconds}
        for labels, value in after.rows("layerzero_kernel_calls_total")
    ]
    kernels.sort(key=lambda row: (-float(str(row["per_s"])), -float(str(row["calls"])), str(row["kernel"])))
    totals = {
        name: {
            "total": after.value(f"layerzero_{name}_total") or 0.0,
            "per_s": difference(before, after, f"layerzero_{name}_total") / seconds,
        }
        for name in ("misses", "selections", "failovers", "world_swaps")
    }
    breakers = [{**labels, "state": value} for labels, value in after.rows("layerzero_breaker_state")]
    return {
        "source": after.source,
        "pid": after.pid,
        "seconds": seconds,
        "counting": bool(after.value("layerzero_counting")),
        "hit_ratio": after.value("layerzero_hot_hit_ratio"),
        "kernels": kernels,
        "totals": totals,
        "breakers": [row for row in breakers if row["state"]],
        "jit": {labels["state"]: value for labels, value in after.rows("layerzero_jit_artifacts")},
        "ranks": after.value("layerzero_ranks"),
    }


def frame(before: Reading, after: Reading, rows: int = 20) -> list[Block]:
    """One screen."""
    data = summary(before, after)
    kernels, totals = data["kernels"], data["totals"]
    total = sum(row["per_s"] for row in kernels)
    ratio = "-" if data["hit_ratio"] is None else f"{data['hit_ratio']:.1%}"
    process = "" if data["pid"] is None else f"  pid {data['pid']}"
    head = f"{data['source']}{process}  {_rate(total)} calls/s  hot {ratio}"
    told = (f"{name.replace('_', ' ')} {item['total']:.0f} ({_rate(item['per_s'])}/s)" for name, item in totals.items())
    blocks: list[Block] = [Line(head, "bold"), Line("  ".join(told))]
    jit = data["jit"]
    if any(jit.values()):
        blocks.append(Line("compiled: " + ", ".join(f"{count:.0f} {word}" for word, count in jit.items())))
    if data["ranks"]:
        blocks.append(Line(f"ranks: {data['ranks']:.0f}"))
    if not data["counting"]:
        blocks.append(Line("calls are not counted there: lz.observe(counters=True) counts them", STYLES["warn"]))
    blocks.append(Line())
    shown = []
    for row in kernels[:rows]:
        share = f"{row['per_s'] / total:.0%}" if total else "-"
        shown.append((row["kernel"], row["op"], _rate(row["per_s"]), f"{row['calls']:.0f}", share))
    blocks.append(Table(("kernel", "op", "calls/s", "calls", "share"), shown, right=frozenset({2, 3, 4})))
    if data["breakers"]:
        words = {1.0: "half-open", 2.0: "open"}
        bad = [(Cell(words[row["state"]], STYLES["fail"]), row["kind"], row["name"]) for row in data["breakers"]]
        blocks += [Line(), Line("breakers", "bold"), Table(("", "", ""), bad, indent=2)]
    return blocks


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _live(where: str, before: Reading, interval: float, rows: int) -> None:
    """Redraw until interrupted or the process is gone."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from layerzero_cli.output import show
    from layerzero_tune.telemetry.reading import read

    def drawn(old: Reading, new: Reading) -> Text:
        page = Text()
        for block in frame(old, new, rows):
            kept = io.StringIO()
            show([block], kept)
            page.append(kept.getvalue(), style=block.style if isinstance(block, Line) else "")
        return page

    console = Console(file=sys.__stdout__)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                after = read(where)
                live.update(drawn(before, after), refresh=True)
                before = after
        except KeyboardInterrupt:
            return
