"""`lz tune`: measure the kernels for the calls that matter, and let selection know."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.completion import complete_device
from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, progress_bar
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb
from layerzero_tune.timing.host_load import BUSY, LIMIT

if TYPE_CHECKING:
    from layerzero_tune.tuning_run import Outcome, Progress, Tuned

PATH = click.Path(path_type=Path)
_PLAIN_EVERY_S = 10.0
_NAMED = 3  # of many, so many are named
INTERRUPTED = 130


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """SOURCE, --grid, --config and --traffic: the one file that says which calls are meant comes as `source`."""

    @click.argument("source", type=PATH, required=False)
    @click.option("--grid", type=PATH, help="Grid file of cases (.toml).")
    @click.option("--config", type=PATH, help="config.json of a model, or its folder.")
    @click.option("--traffic", type=PATH, help="Calls recorded by lz.record or LAYERZERO_RECORD.")
    @functools.wraps(function)
    def run(source: Path | None, grid: Path | None, config: Path | None, traffic: Path | None, **rest: Any) -> Any:
        given = [item for item in (source, grid, config, traffic) if item is not None]
        if len(given) > 1:
            raise click.UsageError("give one of SOURCE, --grid, --config and --traffic")
        return function(source=given[0] if given else None, **rest)

    return run


def measured_or(source: Path | None, database: Path | None, otherwise: str) -> Path:
    """The source, else the calls that `lz tune` has measured; a mistake, in these words, where there are none."""
    from layerzero_tune.tuning import calls_path

    chosen = calls_path(database) if source is None else source
    if source is None and not chosen.exists():
        raise click.UsageError(otherwise)
    return chosen


@verb(cli, "tune")
@source_options
@click.option("--database", type=PATH, help="Where the times go; default: the policy's, else the user's own.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for all calls together.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of timing for one call, at most; default 2, on a GPU 0.1, with --thorough 0.3.",
)
@click.option("--device", help="cpu, cuda, cuda:1; default: the first accelerator.", shell_complete=complete_device)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the made-up inputs.")
@click.option(
    "--drift",
    is_flag=True,
    help="Only look whether measured kernels still are as fast; re-tune those that are not.",
)
@click.option("--no-compile", is_flag=True, help="Leave out kernels that would have to be compiled first.")
@click.option(
    "--compile-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that compilers may take; default 90, with --thorough until all are done.",
)
@click.option("--thorough", is_flag=True, help="Race kernels expected to be far behind, too, and close ones again.")
@click.option("--graphs", is_flag=True, help="Measure calls on a GPU also as replayed CUDA graphs.")
@click.option("--fresh", is_flag=True, help="Begin anew instead of going on with an interrupted tuning run.")
def tune(source: Path | None, database: Path | None, drift: bool, no_compile: bool, **options: Any) -> Answer:
    """Time every kernel for the given calls; selection uses the times from then on.

    \b
    lz tune traffic.json                     calls recorded with lz.record() or LAYERZERO_RECORD=traffic.json
    lz tune --config path/to/model           prefill and decode of a transformers model
    lz tune --grid benchmarks/grid.toml --budget 600
    lz tune --drift                          check whether stored times still hold

    A kernel is timed only after its result agreed with the reference. Kernels that shipped measurements or the roofline
    expect to be far behind are left out, and named; --thorough races them all. So are those that are not compiled
    within --compile-seconds: they are left for a later run. A tuning run that was interrupted (Ctrl-C, exit code
    130) keeps what is done and goes on where it stopped. Under torchrun the calls are split over the ranks. Exit
    code 1 when a call could not be measured.
    """
    import layerzero as lz
    from layerzero_tune.tuning_run import Interrupted

    chosen = measured_or(source, database, "say what to tune: a traffic file, --config or --grid")
    try:
        with _watched() as progress:
            found = lz.tune(
                chosen, database=database, check=drift, compile=not no_compile, progress=progress, **options
            )
    except Interrupted as error:
        return Answer(error.tuned.to_json(), _blocks(error.tuned, drift, "interrupted"), INTERRUPTED)
    return Answer(found.to_json(), _blocks(found, drift), PROBLEM if found.skipped and not drift else OK)


@contextlib.contextmanager
def _watched() -> Iterator[Callable[[Progress], None]]:
    """A bar with the time left in a terminal; a line every ten seconds elsewhere."""
    with progress_bar() as bar:
        if bar is None:
            yield _Lines()
        else:
            click.echo("Ctrl-C keeps what is done; the same command goes on from there", err=True)
            yield lambda now: bar(now.done, now.total, _doing(now), _left(now.seconds_left))


class _Lines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last >= _PLAIN_EVERY_S and (doing := _doing(progress)):
            self._last = now
            left = f", {_left(progress.seconds_left)}" if progress.seconds_left is not None else ""
            click.echo(f"{progress.done} of {progress.total}{left}: {doing}", err=True)


def _doing(progress: Progress) -> str:
    if not progress.to_compile:
        return progress.name
    compiling = f"compiling {_some(progress.compiling) or '...'} ({progress.to_compile} left)"
    return f"{progress.name}; {compiling}" if progress.name else compiling


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d} left"


def _blocks(found: Tuned, drift: bool, why_left: str = "the budget is spent") -> list[Block]:
    timed = [item for item in found.outcomes if item.trial is not None]
    what = "drifted" if drift else "tuned"
    head = f"{_count(len(timed), 'call')} {what} in {found.seconds:.1f} s, {found.rows} times written to {found.path}"
    blocks: list[Block] = [Line(head, "bold")]
    if drift and not timed:
        blocks.append(Line("every measured kernel takes what it took", STYLES["ok"], indent=2))
    if found.resumed:
        blocks.append(Line(f"{len(found.resumed)} were done before the interruption", "dim", indent=2))
    if timed:
        rows = [_row(item.name, item.trial) for item in timed]
        columns = ("call", "median", "×torch", "fastest", "next", "refused")
        blocks.append(Table(columns, rows, indent=2, right=frozenset({1, 2})))
    blocks += [Line(line, "dim", indent=2, hang=2) for line in _ruled_out(timed)]
    moved = [f"{item.name}: {item.why}" for item in timed if drift]
    skipped = [f"{name}: {why}" for name, why in found.skipped.items()]
    warnings = (*moved, *_late(timed), *_lost(timed), *_shared(timed), *_threads(timed), *skipped)
    blocks += [Line(line, STYLES["warn"], indent=2, hang=2) for line in warnings]
    if found.left:
        blocks.append(Line(f"{len(found.left)} calls are left: {why_left}; run it again", STYLES["warn"], indent=2))
    if timed and not drift:
        torch = "" if found.against_torch is None else f"{found.against_torch:.2g}× torch, "
        won = f"{_count(len(timed), 'call')}: {torch}{_count(len(found.changed), 'choice')} changed"
        blocks.append(Line(won, "bold"))
    return blocks


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _ruled_out(timed: Sequence[Outcome]) -> list[str]:
    """Kernels that did not race, with the calls and what is expected of them."""
    calls: dict[str, list[tuple[float, str, str]]] = {}
    for item in timed:
        for name, expected in () if item.trial is None else item.trial.ruled_out.items():
            calls.setdefault(name, []).append((expected.ratio, item.name, f"{expected.source} of {expected.machine}"))
    lines = []
    for name, found in sorted(calls.items()):
        low, high = min(found)[0], max(found)[0]
        ratio = f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
        which = _some([call for _, call, _ in found])
        told = f"{ratio} × torch's time is expected ({', '.join(sorted({source for *_, source in found}))})"
        lines.append(f"{name} was not raced for {which}: {told}; --thorough races it")
    return lines


def _late(timed: Sequence[Outcome]) -> list[str]:
    """Kernels that were still compiling when the calls were raced."""
    calls: dict[str, list[str]] = {}
    for item in timed:
        for name in () if item.trial is None else item.trial.late:
            calls.setdefault(name, []).append(item.name)
    later = "run it again, or with --thorough, which waits"
    return [f"{name} was not measured for {_some(found)}: still compiling; {later}" for name, found in calls.items()]


def _lost(timed: Sequence[Outcome]) -> list[str]:
    """Calls of which nothing was stored, since torch's own code was faster than what would have been chosen."""
    return [
        f"{item.name}: torch default took {trial.torch.median_us:.1f} µs, {trial.choice} "
        f"{trial.times[trial.choice].median_us:.1f}: no time was stored, and what was known before stays"
        for item in timed
        if (trial := item.trial) is not None and trial.lost and trial.torch is not None
    ]


def _shared(timed: Sequence[Outcome]) -> Iterator[str]:
    """Which calls were timed while the machine's host served others, or other programs used it; the worst first."""
    stolen = "stolen", LIMIT, "the host gave up to {:.0%} of the time to others"
    busy = "busy", BUSY, "other programs used up to {:.0%} of the cores"
    for kind, most, what in (stolen, busy):
        shares = {item.name: share for item in timed if (share := getattr(item.trial, kind, 0.0)) > most}
        if shares:
            told = f"{what.format(max(shares.values()))}: {_some(sorted(shares, key=lambda name: -shares[name]))}"
            yield f"{len(shares)} of {len(timed)} calls were timed while {told}; tune again when the machine is quiet"


def _threads(timed: Sequence[Outcome]) -> list[str]:
    """That calls were recorded with another number of threads than they were timed with."""
    both = {(item.recorded.threads, row.platform.threads) for item in timed if item.trial for row in item.trial.rows}
    told = "the calls were recorded with {0} and timed with {1}, which counts with {1} only: OMP_NUM_THREADS={2}"
    return [told.format(_count(a, "thread"), b, a) for a, b in sorted(both) if a and b and a != b]


def _row(name: str, trial: Any) -> tuple[str | Cell, ...]:
    best = trial.times[trial.winner]
    others = sorted((t.median_us, name) for name, t in trial.times.items() if name != trial.winner)
    second = f"{others[0][1]} {others[0][0] / best.median_us:.2f}×" if others else ""
    refused = Cell(", ".join(sorted(trial.refused)), STYLES["warn"])
    plain = "" if trial.torch is None else f"{trial.torch.median_us / best.median_us:.2f}"
    times = Cell(plain, STYLES["warn"] if trial.lost else "")
    return name, f"{best.median_us:.1f} µs", times, trial.winner, second, refused
