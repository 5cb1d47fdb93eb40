"""What is told of a selection: the report, `lz.which`, `lz.validate`, `lz.list_kernels`, `lz.explain`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.errors import UnknownNameError
from layerzero.model.context import Context
from layerzero.model.kernel import Limit


@pytest.mark.req("R-SEL-05", "R-SEL-06", "R-API-17")
def test_the_report_holds_every_candidate_with_reasons_scores_and_costs(lab: Any) -> None:
    q = torch.randn(1, 2, 5, 16)
    report = lz.explain("attention", q, q, q, is_causal=True)
    assert report.chosen == "sdpa.attention.flash_cpu"
    assert {item.kernel_id for item in report.candidates} == {k.kernel_id for k in lab.registry.by_op("attention")}
    for item in report.candidates:
        assert item.accepted is (item.score is not None)
        if item.kernel_id != report.chosen:
            assert item.reasons
            assert all(why.code and why.message for why in item.reasons)
            assert item.flip
    assert report.reasons["sdpa.attention.flash"][0].code == "PLATFORM_MISMATCH"
    data = json.loads(report.to_json())
    assert data["chosen"] == report.chosen
    assert {"transform_cost_total", "fused_ops", "candidates", "context", "ran", "policy_hash"} <= data.keys()
    assert report.fused_ops == ()
    shown = {one["kernel_id"]: (one["score"], [why["code"] for why in one["reasons"]]) for one in data["candidates"]}
    known = [(one.kernel_id, pytest.approx(one.score), [why.code for why in one.reasons]) for one in report.candidates]
    assert shown == {kernel_id: (score, found) for kernel_id, score, found in known}
    text = str(report)
    assert report.chosen in text
    assert "PLATFORM_MISMATCH" in text


@pytest.mark.req("R-SEL-05")
def test_a_kernel_is_rejected_for_everything_that_speaks_against_it_and_the_report_says_it_all(lab: Any) -> None:
    lab.use(
        lab.kernel("odd.rms_norm.k", priority=99, dtypes=frozenset({"float16"}), limits=(("hidden", Limit(max=4)),)),
        lab.kernel("fine.rms_norm.k", priority=98),
        deny=["odd"],
    )
    report = lz.explain("rms_norm", torch.randn(2, 8), torch.ones(8))
    wanted = {"POLICY_DENIED", "DTYPE_UNSUPPORTED", "DIM_OUT_OF_RANGE"}
    (shown,) = (item for item in report.to_dict()["candidates"] if item["kernel_id"] == "odd.rms_norm.k")
    told = str(report).partition("odd.rms_norm.k  rejected\n")[2].partition("      ->")[0].splitlines()
    assert {why.code.value for why in report.reasons["odd.rms_norm.k"]} == wanted
    assert {why["code"] for why in shown["reasons"]} == wanted and shown["score"] is None
    assert {line.strip().partition(":")[0] for line in told} == wanted
    assert (report.chosen, report.candidates[0].score) == ("fine.rms_norm.k", 98.0)
    assert "chosen: fine.rms_norm.k  score 98.0" in str(report)


@pytest.mark.req("R-API-16", "R-API-17", "R-API-18", "R-API-24", "R-API-30", "R-CORE-23")
def test_select_which_and_dry_run_agree_and_run_nothing(lab: Any) -> None:
    q = torch.randn(1, 5, 2, 16)
    decision = lz.select("attention", q, q, q, layout="BSHD")
    plan = lz.dry_run("attention", q, q, q, layout="BSHD")
    assert decision.chosen == lz.which("attention", q, q, q, layout="BSHD") == plan.kernel_id
    assert plan.transforms == ["layout:BSHD->BHSD"]
    report = lz.explain("attention", q, q, q, layout="BSHD")
    assert type(report).__name__ == "SelectionReport" and report.decision is plan.debug_info is decision
    assert lab.tries == []
    _, ran = lab.run(lz.attention, q, q, q, layout="BSHD")
    assert ran == [decision.chosen]


@pytest.mark.req("R-API-19")
def test_list_kernels_filters_by_op_backend_and_availability(lab: Any) -> None:
    names = [kernel.kernel_id for kernel in lz.list_kernels("attention")]
    assert "sdpa.attention.math" in names
    assert "torch.rms_norm.native" not in names
    assert {kernel.backend for kernel in lz.list_kernels(backend="torch")} == {"torch"}
    assert len(lz.list_kernels()) == len(lab.registry)
    assert lz.list_kernels("attention", available=False) == []
    with pytest.raises(UnknownNameError):
        lz.list_kernels("attentoin")


@pytest.mark.req("R-API-20")
def test_validate_lists_every_objection_or_none(lab: Any) -> None:
    q = torch.randn(1, 2, 5, 16)
    assert lz.validate("sdpa.attention.math", q, q, q) == []
    found = lz.validate("sdpa.attention.math", q, q, q, softcap=2.0, return_lse=True)
    assert {why.code for why in found} == {"SOFTCAP_UNSUPPORTED", "LSE_UNSUPPORTED"}
    with pytest.raises(UnknownNameError) as caught:
        lz.validate("torch.rms_norm.native", q, q, q, op="attention")
    assert caught.value.code == "KERNEL_UNKNOWN"


def test_a_context_may_stand_for_a_call_but_only_of_its_own_op(lab: Any) -> None:
    ctx = Context.from_tensors(torch.randn(1, 2, 5, 16), layout="BHSD")
    assert lz.which("attention", ctx) == "sdpa.attention.flash_cpu"
    with pytest.raises(ValueError, match="VALUE_INVALID"):
        lz.which("rms_norm", ctx)


def test_explain_answers_for_a_device_that_is_not_here(lab: Any) -> None:
    meta = [torch.empty(1, 8, 128, 64, dtype=torch.float16, device="meta") for _ in range(3)]
    chosen = {}
    for name in ("h100", "t4", "cpu"):
        ctx = Context.from_tensors(*meta, layout="BHSD", device=named_device(name) if name != "cpu" else None)
        chosen[name] = lz.explain("attention", ctx).chosen
    assert chosen["h100"] == "sdpa.attention.cudnn"
    assert chosen["t4"] == "sdpa.attention.efficient"
