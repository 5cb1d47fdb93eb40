"""Code of a definition that hangs or crashes: ended, named, and the other workloads go on."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero_verify.definitions import Options, open_dataset
from layerzero_verify.definitions.run import check_definition
from layerzero_verify.definitions.trace import Status, Workload

_MISCHIEF = (
    "import os, time\ndef run(A, B):\n    if A.shape[0] == 1:\n        time.sleep(600)\n"
    "    if A.shape[0] == 2:\n        os.kill(os.getpid(), 9)\n    return A @ B.T\n"
)


def isolated(sets: Any, *sizes: int, timeout: float = 2.0) -> dict[str, Any]:
    """The outcome of the definition's code by workload, each in a process of its own with so many seconds."""
    dataset = open_dataset(sets.only("gemm_n24_k64", lambda item: item.update(reference=_MISCHIEF)))
    work = [Workload(f"m{size}", {"M": size}) for size in sizes]
    options = Options(backends=("reference",), trust=(str(dataset.root),), repeats=1, truths=False)
    found = check_definition(dataset.definitions["gemm_n24_k64"], work, options, timeout=timeout)
    return {outcome.workload.uuid: outcome for outcome in found if outcome.solution == "reference"}


def test_a_solution_that_hangs_is_ended_and_named(sets: Any) -> None:
    found = isolated(sets, 1)
    assert found["m1"].status is Status.TIMEOUT and "2 s" in found["m1"].log


@pytest.mark.slow
def test_a_solution_that_crashes_is_named_and_the_other_workloads_go_on(sets: Any) -> None:
    found = isolated(sets, 1, 2, 3, timeout=20.0)
    assert found["m1"].status is Status.TIMEOUT
    assert found["m2"].status is Status.RUNTIME_ERROR and "signal 9" in found["m2"].log
    assert found["m3"].passed
