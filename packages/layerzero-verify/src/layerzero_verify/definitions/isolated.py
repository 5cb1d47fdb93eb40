"""Checks in a process of their own, one workload at a time: one that hangs is ended, one that crashes is named.

The child says what it starts before it starts it, so that a time limit or a crash falls on the solution that caused
it; the other workloads go on in a fresh child.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from layerzero_verify.definitions.bench import Started
from layerzero_verify.definitions.check import check_workloads
from layerzero_verify.definitions.outcome import REFERENCE, Options, Outcome
from layerzero_verify.definitions.schema import Definition
from layerzero_verify.definitions.trace import Status, Workload

_END = "end"
_READY = "ready"
_START_LIMIT_S = 120.0  # importing torch and the backends is not the solution's time


def check_isolated(
    definition: Definition, workloads: Iterable[Workload], options: Options, root: Path | None = None, *, timeout: float
) -> Iterator[Started | Outcome]:
    """`check_workloads` with a limit: every solution has `timeout` seconds for a workload."""
    left = list(workloads)
    while left:
        done = 0
        for event in _one_child(definition, left, options, root, timeout):
            if event == _END:
                done += 1
            else:
                yield event
        left = left[done:] if done else left[1:]


def _one_child(
    definition: Definition, workloads: list[Workload], options: Options, root: Path | None, timeout: float
) -> Iterator[Any]:
    """Events of one child until it is through, hangs or dies; `_END` after each workload."""
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the parent's CUDA context and threads
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_work, args=(theirs, definition, workloads, options, root), daemon=True)
    child.start()
    theirs.close()
    current = Started(REFERENCE, workloads[0])
    limit, done = _START_LIMIT_S, 0
    try:
        while done < len(workloads):
            event = _next(ours, child, limit)
            if isinstance(event, Status):
                yield _ended(definition, current, event, child, limit)
                yield _END  # the rest of this workload went down with the child
                return
            limit = timeout
            if event == _READY:
                continue
            if isinstance(event, Started):
                current = event
            if event == _END:
                done += 1
            yield event
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()


def _next(ours: Connection, child: Any, limit: float) -> Any:
    """The child's next word; a Status where there will be none."""
    ready = wait([ours, child.sentinel], timeout=limit)
    if not ready:
        return Status.TIMEOUT
    if ours in ready:
        try:
            return ours.recv()
        except EOFError:
            pass
    return Status.RUNTIME_ERROR


def _ended(definition: Definition, current: Started, status: Status, child: Any, limit: float) -> Outcome:
    if status is Status.TIMEOUT:
        log = f"did not finish within {limit:g} s"
    else:
        child.join()
        code = child.exitcode
        log = f"its process died with {f'signal {-code}' if code is not None and code < 0 else f'exit code {code}'}"
    return Outcome(definition.name, current.workload, current.solution, status=status, log=log)


def _work(
    out: Connection, definition: Definition, workloads: list[Workload], options: Options, root: Path | None
) -> None:
    """In the child: everything goes to the parent as it happens."""
    out.send(_READY)
    for workload in workloads:
        for event in check_workloads(definition, [workload], options, root):
            out.send(event)
        out.send(_END)
