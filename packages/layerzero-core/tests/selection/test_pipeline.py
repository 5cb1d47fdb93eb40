"""From all kernels of an op to one choice: filtered, scored, the best taken, and kept; the same every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.model.enums import Platform
from layerzero.model.formula import Formula
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from tools.threads import run_threads

X, W = torch.randn(3, 8), torch.ones(8)
UNFIT, LESSER, BEST = "a.rms_norm.half", "b.rms_norm.lesser", "c.rms_norm.best"


@pytest.fixture
def three(lab: Any) -> Any:
    """One that its author expects most of and that does not fit, and two that fit."""
    lab.use(
        lab.kernel(UNFIT, priority=99.0, dtypes=frozenset({"float16"})),
        lab.kernel(LESSER, priority=70.0),
        lab.kernel(BEST, priority=80.0),
    )
    return lab


@pytest.mark.req("R-SEL-01", "R-SEL-05")
def test_kernels_are_filtered_then_scored_the_best_is_taken_and_the_choice_is_kept(three: Any) -> None:
    state.counters.reset()
    decision = lz.select("rms_norm", X, W)
    left_out = decision.candidate(UNFIT)
    assert (left_out.accepted, left_out.score) == (False, None)
    assert [why.code for why in left_out.reasons] == ["DTYPE_UNSUPPORTED"]
    scores = {item.kernel_id: item.score or 0.0 for item in decision.candidates if item.accepted}
    assert (scores[BEST], scores[LESSER]) == (80.0, 70.0)
    assert [scores[name] for name in decision.ranking] == sorted(scores.values(), reverse=True)
    assert decision.chosen == decision.ranking[0] == BEST
    assert state.counters.selections == 1
    assert lz.select("rms_norm", X, W) is decision and three.run(lz.rms_norm, X, W)[1] == [BEST]
    assert state.counters.selections == 1, "a kept choice is not made again"
    lz.configure(avoid=[BEST])
    assert three.run(lz.rms_norm, X, W)[1] == [LESSER] and state.counters.selections == 2


@pytest.mark.req("R-SEL-06")
def test_a_fused_kernel_says_what_it_fuses(lab: Any) -> None:
    lab.use(lab.kernel("fused.add_rms_norm.k", fuses=("add", "rms_norm"), priority=99))
    x = torch.randn(2, 8)
    report = lz.explain("add_rms_norm", x, x, torch.ones(8))
    assert report.fused_ops == ("add", "rms_norm") and report.to_dict()["fused_ops"] == ["add", "rms_norm"]


@pytest.mark.req("R-SEL-12")
def test_a_hundred_threads_select_at_once_and_no_decision_is_lost(three: Any) -> None:
    """Each asks for all of forty calls in an order of its own: every call is decided once, and rightly."""
    weight = torch.ones(8)
    calls = [(torch.randn(rows, 8), BEST if rows % 2 else LESSER) for rows in range(1, 41)]
    lz.configure(rules=[{"match": {"op": "rms_norm", "when": {"rows": list(range(2, 41, 2))}}, "deny": [BEST]}])
    state.counters.reset()
    found: list[list[Any]] = [[] for _ in range(100)]

    def work(number: int) -> None:
        for step in range(40):
            x, wanted = calls[(number + 7 * step) % 40]
            decision = lz.select("rms_norm", x, weight)
            assert decision.chosen == wanted
            found[number].append(decision)

    run_threads(100, work)
    assert {len(each) for each in found} == {40}
    assert len({id(decision) for each in found for decision in each}) == 40
    assert state.counters.selections == 40


# Calls on GPUs that are not here, and everything that is said about them: `told`.
PROGRAM = """
import torch, layerzero as lz
from layerzero.device.catalogue import named_device
told = []
q, k = (torch.empty(2, heads, 300, 64, dtype=torch.float16, device="meta") for heads in (8, 2))
for name, options in (("h100", {}), ("t4", {"is_causal": True}), ("rtx5090", {"softcap": 3.0, "return_lse": True})):
    ctx = lz.Context.from_tensors(q, k, k, layout="BHSD", device=named_device(name), **options)
    told.append(lz.explain("attention", ctx).to_dict() | {"fingerprint": ""})  # of what the process has run before
"""


@pytest.mark.req("R-SEL-10")
@pytest.mark.usefixtures("built_in")
def test_another_process_with_other_hashes_decides_and_explains_alike() -> None:
    here: dict[str, Any] = {}
    exec(PROGRAM, here)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{PROGRAM}\nimport json\nprint(json.dumps(told))"],
        env={**os.environ, "PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(here["told"]) == 3 and all(item["chosen"] and len(item["candidates"]) > 5 for item in here["told"])
    assert json.loads(done.stdout) == json.loads(json.dumps(here["told"]))


@pytest.mark.req("R-SEL-16")
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_axis_of_a_grid_is_held_against_the_limits_of_the_device(lab: Any, axis: int) -> None:
    grid = [Formula("1")] * 3
    grid[axis] = Formula("rows")
    cuda = frozenset({Platform.CUDA})
    lab.use(lab.kernel("mine.rms_norm.grid", platforms=cuda, grid_layout=tuple(grid), priority=99.0))
    ctx = replace(lz.select("rms_norm", X, W).context, device=named_device("h100"))
    for device, limit in (
        (ctx.device, (2**31 - 1, 65_535, 65_535)[axis]),
        (replace(ctx.device, max_grid=(1_000, 200, 30)), (1_000, 200, 30)[axis]),
    ):
        for rows in (limit, limit + 1):
            verdict = select(replace(ctx, device=device).with_dims(rows=rows), state.world).candidate(
                "mine.rms_norm.grid"
            )
            refused = [(why.code.value, why.value, why.limit) for why in verdict.reasons if not verdict.accepted]
            assert refused == ([] if rows == limit else [("CUDA_BLOCK_LIMIT_EXCEEDED", rows, limit)])
