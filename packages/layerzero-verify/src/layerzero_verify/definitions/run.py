"""Check many definitions and put everything into one report; write it down as traces.

With a time limit a check runs in a process of its own, which says what it starts before it starts it: a limit or a
crash falls on the solution that caused it, and the other workloads go on in a fresh process.
"""

from __future__ import annotations

import datetime
import functools
import multiprocessing
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from layerzero.plugin.discovery import dist_version
from layerzero_verify.definitions.check import Started, check_workloads, default_device, known_backends
from layerzero_verify.definitions.dataset import Dataset
from layerzero_verify.definitions.schema import Definition
from layerzero_verify.definitions.sizes import DEFAULT, workloads_for
from layerzero_verify.definitions.trace import (
    REFERENCE,
    Options,
    Outcome,
    Report,
    Status,
    Trace,
    Workload,
    append_traces,
)

_END = "end"
_READY = "ready"
_START_LIMIT_S = 120.0  # importing torch and the backends is not the solution's time
_LIBRARIES = ("torch", "layerzero-core", "flashinfer-python", "sgl-kernel", "sglang", "triton")


def check_isolated(
    definition: Definition, workloads: Iterable[Workload], options: Options, root: Path | None = None, *, timeout: float
) -> Iterator[Started | Outcome]:
    """`check_workloads` with a limit: every solution has `timeout` seconds for a workload."""
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the parent's CUDA context and threads
    left = list(workloads)
    while left:
        ours, theirs = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_work, args=(theirs, definition, left, options, root), daemon=True)
        child.start()
        theirs.close()
        current = Started(REFERENCE, left[0])
        limit = _START_LIMIT_S
        try:
            while left:
                event, why = _next(ours, child, limit)
                limit = timeout
                if event == _END:
                    left = left[1:]
                elif isinstance(event, Status):
                    yield Outcome(definition.name, current.workload, current.solution, status=event, log=why)
                    left = left[1:]  # the rest of this workload went down with the child
                    break
                elif event != _READY:
                    current = event if isinstance(event, Started) else current
                    yield event
        finally:
            if child.is_alive():
                child.kill()
            child.join()
            ours.close()


def _next(ours: Connection, child: Any, limit: float) -> tuple[Any, str]:
    """The child's next word; where there will be none a Status, and why."""
    ready = wait([ours, child.sentinel], timeout=limit)
    if not ready:
        return Status.TIMEOUT, f"did not finish within {limit:g} s"
    if ours in ready:
        with suppress(EOFError):
            return ours.recv(), ""
    child.join()
    code = child.exitcode
    return Status.RUNTIME_ERROR, f"its process died with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def _work(
    out: Connection, definition: Definition, workloads: list[Workload], options: Options, root: Path | None
) -> None:
    """In the child: everything goes to the parent as it happens."""
    out.send(_READY)
    for workload in workloads:
        for event in check_workloads(definition, [workload], options, root):
            out.send(event)
        out.send(_END)


def check(
    dataset: Dataset,
    definitions: Iterable[Definition],
    options: Options | None = None,
    *,
    sizes: Iterable[str] = DEFAULT,
    stored: bool = True,
    force: bool = False,
    seed: int = 0,
    timeout: float | None = None,
    watch: Callable[[str], None] = lambda line: None,
) -> Report:
    """Check definitions of a dataset: on the workloads that come with them (`stored`), and on made-up ones of `sizes`.

    Those with a test already (see `Dataset.tested`) are left out unless forced. With a `timeout` every workload runs
    in a process of its own that is ended after so many seconds. `watch` hears what is being done.
    """
    options = options or Options()
    known_backends(options.backends)
    chosen = list(definitions)
    kinds = {definition.op_type for definition in chosen}
    outcomes: list[Outcome] = []
    left_out: dict[str, str] = {}
    notes: list[str] = [] if chosen else [f"no definition of those asked for is in {dataset.root / 'definitions'}"]
    # A file that cannot be read concerns those who asked for its kind, which its folder tells; without one, everybody.
    folders = {"definitions", *kinds}
    problems = [str(problem) for problem in dataset.problems if problem.path.parent.name in folders]
    for definition in chosen:
        where = None if force else dataset.tested(definition)
        if where is not None:
            left_out[definition.name] = f"already tested, see {where}"
            continue
        given, bad = dataset.workloads(definition) if stored else ([], [])
        problems += [str(problem) for problem in bad]
        work = [*given, *workloads_for(definition, sizes, seed=seed)]
        if stored and not given:
            instead = f"checked on {len(work)} made-up sizes" if work else "and no sizes were asked for: not checked"
            place = dataset.root / "workloads" / "**" / "*.jsonl"
            notes.append(f"{definition.name}: no workload of it in {place}, {instead}")
        outcomes += check_definition(definition, work, options, root=dataset.root, timeout=timeout, watch=watch)
    return Report(tuple(outcomes), left_out, tuple(problems), str(options.device or default_device()), tuple(notes))


def check_definition(
    definition: Definition,
    workloads: Iterable[Workload],
    options: Options | None = None,
    *,
    root: Path | None = None,
    timeout: float | None = None,
    watch: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Check one definition on these workloads."""
    options = options or Options()
    run = check_workloads if timeout is None else functools.partial(check_isolated, timeout=timeout)
    outcomes = []
    for event in run(definition, workloads, options, root):
        if isinstance(event, Started):
            sizes = " ".join(f"{axis}={size}" for axis, size in event.workload.axes.items())
            watch(f"{definition.name} {sizes}: {event.solution}")
        else:
            outcomes.append(event)
    return outcomes


def traces_of(outcomes: Iterable[Outcome], device: str | torch.device) -> list[Trace]:
    """Everything that was tried, as traces; a skip leaves none."""
    hardware, libs = environment(torch.device(device))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [outcome.trace(hardware, libs, now) for outcome in outcomes if not outcome.skipped]


def write_traces(report: Report, out: Path) -> int:
    """Append the report's traces to a file; returns how many."""
    return append_traces(out, traces_of(report.outcomes, report.device or "cpu"))


def environment(device: torch.device) -> tuple[str, dict[str, str]]:
    """The hardware by name, and the versions of the libraries that may have computed."""
    libs = {name: version for name in _LIBRARIES if (version := dist_version(name)) is not None}
    libs["torch"] = torch.__version__
    if torch.version.cuda:
        libs["cuda"] = torch.version.cuda
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), libs
    return platform.processor() or platform.machine() or device.type, libs
