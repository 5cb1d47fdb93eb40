"""CUDA graphs as far as no GPU is needed: who may stand in one, how a capture is rehearsed, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import CudaGraphUnsafeError, InvalidInputError, UnknownNameError
from layerzero.graphs.capture import Inputs
from layerzero.graphs.rehearsal import CaptureReport, Watch, rehearsal
from layerzero.model.enums import Platform
from layerzero.reasons import reason
from layerzero.runtime.state import state

X, WEIGHT = torch.randn(3, 8), torch.rand(8)


def norm() -> Any:
    return lz.rms_norm(X, WEIGHT)


# -- who may stand in a graph ----------------------------------------------------------------------
@pytest.mark.req("R-GRAPH-01", "R-API-28")
def test_a_kernel_is_safe_when_its_backend_says_so(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.silent"), lab.kernel("vendor.rms_norm.safe", graph_safe=True))
    assert lz.is_graph_safe("vendor.rms_norm.safe")
    assert not lz.is_graph_safe("vendor.rms_norm.silent")  # unknown is not safe
    with pytest.raises(UnknownNameError):
        lz.is_graph_safe("vendor.rms_norm.none")


@pytest.mark.req("R-GRAPH-01", "R-POL-13")
def test_in_strict_mode_the_whitelist_decides(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.safe", graph_safe=True))
    lz.configure(graph_strict_mode=True, graph_whitelist=["torch.*"])
    assert not lz.is_graph_safe("vendor.rms_norm.safe")
    assert lz.is_graph_safe("torch.rms_norm.native")
    assert not lz.is_graph_safe("vendor.rms_norm.safe", X, WEIGHT)
    lz.configure(graph_whitelist=["torch.*", "vendor"])
    assert lz.is_graph_safe("vendor.rms_norm.safe")
    assert lz.is_graph_safe("vendor.rms_norm.safe", X, WEIGHT)  # a call that was answered under the list of before
    with lz.scoped(graph_whitelist=["torch.*"]):
        assert not lz.is_graph_safe("vendor.rms_norm.safe", X, WEIGHT)


@pytest.mark.req("R-API-28")
def test_a_call_is_safe_when_some_kernel_may_run_it_in_a_capture(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.old", priority=90.0))
    assert lz.is_graph_safe("rms_norm", X, WEIGHT)
    assert not lz.is_graph_safe("vendor.rms_norm.old", X, WEIGHT)
    assert lz.is_graph_safe("torch.rms_norm.native", X, WEIGHT)
    context = lz.select("rms_norm", X, WEIGHT).context
    assert lz.is_graph_safe("rms_norm", context)
    lz.lock("rms_norm", "vendor.rms_norm.old")
    assert not lz.is_graph_safe("rms_norm", X, WEIGHT)


# -- the rehearsal ---------------------------------------------------------------------------------
@pytest.mark.req("R-GRAPH-01", "R-GRAPH-06")
def test_a_rehearsal_passes_over_unsafe_kernels_and_sees_every_call(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.old", priority=90.0))
    assert lab.run(norm)[1] == ["vendor.rms_norm.old"]
    watch = Watch()
    with rehearsal(watch, kind="cpu"):
        for _ in range(3):
            assert lab.run(norm)[1] == ["torch.rms_norm.native"]
    seen = watch.take()
    assert [item.bound.kernel_id for item in seen] == ["torch.rms_norm.native"] * 3
    assert [bool(item.args) for item in seen] == [True, False, False]  # arguments hold memory: the first alone
    assert lab.run(norm)[1] == ["vendor.rms_norm.old"]


@pytest.mark.req("R-GRAPH-07")
def test_a_rehearsal_keeps_its_world_whatever_is_published(lab: Any) -> None:
    lab.use()
    with rehearsal(Watch(), kind="cpu"):
        assert lab.run(norm)[1] == ["torch.rms_norm.native"]
        other = threading.Thread(target=lz.lock, args=("rms_norm", "reference.rms_norm.plain"))
        other.start()
        other.join()
        assert lab.run(norm)[1] == ["torch.rms_norm.native"]
    assert lab.run(norm)[1] == ["reference.rms_norm.plain"]


def test_a_kernel_that_cannot_be_imported_is_set_aside_inside_a_rehearsal_too(lab: Any) -> None:
    from dataclasses import replace

    missing = replace(lab.kernel("vendor.rms_norm.gone", priority=90.0, graph_safe=True), function="no.such:thing")
    lab.use(missing)
    with rehearsal(Watch(), kind="cpu"):
        assert lab.run(norm)[1] == ["torch.rms_norm.native"]


@pytest.mark.req("R-GRAPH-06", "R-EXC-03")
def test_a_kernel_that_raises_in_a_rehearsal_is_named_and_can_be_refused(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.liar", priority=90.0, graph_safe=True))
    lab.faults["vendor.rms_norm.liar"] = RuntimeError("operation not permitted when stream is capturing")
    watch = Watch()
    with rehearsal(watch, kind="cpu"), pytest.raises(CudaGraphUnsafeError) as caught:
        norm()
    assert caught.value.code == "GRAPH_CAPTURE_FAILED" and "liar" in str(caught.value)
    assert watch.seen[-1].bound.kernel_id == "vendor.rms_norm.liar"
    assert state.health.snapshot().blocked_by("vendor.rms_norm.liar", "vendor") is None  # no breaker for a capture
    with rehearsal(Watch(), {"vendor.rms_norm.liar": reason("GRAPH_CAPTURE_FAILED", "tried")}, kind="cpu"):
        assert lab.run(norm)[1] == ["torch.rms_norm.native"]


@pytest.mark.req("R-GRAPH-06", "R-EXC-03")
def test_where_none_is_left_the_error_names_each_with_its_reason(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.liar", graph_safe=True), lab.kernel("vendor.rms_norm.old"))
    lz.configure(allow=["vendor"], fallback_enabled=False)
    refused = {"vendor.rms_norm.liar": reason("GRAPH_MEMORY_GROWS", 4096, 512)}
    with rehearsal(Watch(), refused, kind="cpu"), pytest.raises(CudaGraphUnsafeError) as caught:
        norm()
    text = str(caught.value)
    assert "vendor.rms_norm.liar: GRAPH_MEMORY_GROWS" in text and "4096" in text
    assert "vendor.rms_norm.old: CUDA_GRAPH_UNSAFE" in text


@pytest.mark.req("R-FAIL-05", "R-GRAPH-01")
def test_strict_mode_refuses_what_is_not_on_the_list_with_that_reason(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.safe", priority=90.0, graph_safe=True))
    lz.configure(graph_strict_mode=True, graph_whitelist=["torch", "reference"])
    with rehearsal(Watch(), kind="cpu"):
        assert lab.run(norm)[1] == ["torch.rms_norm.native"]
        objection = lz.explain("rms_norm", X, WEIGHT).decision.candidate("vendor.rms_norm.safe").reasons[0]
    assert objection.code == "GRAPH_NOT_WHITELISTED"


def test_a_rehearsal_on_one_kind_of_device_leaves_the_others_alone(lab: Any) -> None:
    lab.use(lab.kernel("vendor.rms_norm.old", priority=90.0))
    with rehearsal(Watch(), kind="cuda"):
        assert lab.run(norm)[1] == ["vendor.rms_norm.old"]


# -- inputs, reports, machines without a GPU -------------------------------------------------------
def test_inputs_are_copied_in_and_keep_their_places() -> None:
    given = torch.ones(2, 3)
    inputs = Inputs((given, {"deep": [torch.zeros(4), 7]}), {"word": "x"})
    places = [item.data_ptr() for item in inputs.tensors]
    assert given.data_ptr() not in places
    inputs.fill((given * 5, {"deep": [torch.arange(4.0), 7]}), {"word": "x"})
    assert [item.data_ptr() for item in inputs.tensors] == places
    assert torch.equal(inputs.args[0], given * 5) and torch.equal(inputs.args[1]["deep"][0], torch.arange(4.0))


@pytest.mark.parametrize(
    "other", [(torch.ones(3, 2), 7), (torch.ones(2, 3, dtype=torch.float64), 7), (torch.ones(2, 3), 8), (1, 7), (1,)]
)
def test_inputs_that_the_graph_was_not_captured_for_are_refused_before_anything_is_written(other: Any) -> None:
    inputs = Inputs((torch.zeros(2, 3), 7), {})
    with pytest.raises(CudaGraphUnsafeError) as caught:
        inputs.fill(other, {})
    assert caught.value.code == "GRAPH_INPUT_CHANGED"
    assert not inputs.tensors[0].any()


@pytest.mark.req("R-API-29", "R-EXC-03")
def test_what_lies_on_the_cpu_cannot_be_captured_and_the_report_says_so() -> None:
    report = lz.validate_graph_capture("rms_norm", X, WEIGHT)
    assert not report and report.reasons[0].code == "GRAPH_NO_DEVICE"
    assert "GRAPH_NO_DEVICE" in str(report) and report.to_json()["ok"] is False
    with pytest.raises(CudaGraphUnsafeError) as caught:
        lz.capture_graph(lz.rms_norm, X, WEIGHT)
    assert caught.value.code == "GRAPH_NO_DEVICE"


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        lz.capture_graph(lz.rms_norm, X, warmup=0)
    with pytest.raises(InvalidInputError):
        lz.validate_graph_capture(lz.rms_norm, X, memory_limit=-1)
    with pytest.raises(UnknownNameError):
        lz.validate_graph_capture("rms_nrom", X)


def test_a_report_tells_all_of_it() -> None:
    report = CaptureReport(
        True, (("rms_norm", "torch.rms_norm.native"),), {"vendor.rms_norm.liar": reason("CUDA_GRAPH_UNSAFE")},
        warmups=3, initialised=("cublas",), memory_delta=512, dummy=True, replays=2,
    )  # fmt: skip
    text = str(report)
    for part in (
        "ok",
        "rms_norm: torch.rms_norm.native",
        "refused vendor.rms_norm.liar",
        "3 warm-up",
        "cublas",
        "+512",
    ):
        assert part in text
    assert report.to_json()["refused"]["vendor.rms_norm.liar"]["code"] == "CUDA_GRAPH_UNSAFE"


def test_the_declared_platform_is_part_of_the_answer(lab: Any) -> None:
    fields = {"platforms": frozenset({Platform.CUDA}), "graph_safe": True, "grid_layout": "library"}
    lab.use(lab.kernel("vendor.rms_norm.gpu", **fields))
    assert lz.is_graph_safe("vendor.rms_norm.gpu")
    assert not lz.is_graph_safe("vendor.rms_norm.gpu", X, WEIGHT)  # not on this device


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 5.0, "scale": 0.3}, {"alibi": True}])
def test_the_reference_reads_a_batch_for_capture_where_a_graph_can(layout: str, chunked: bool, options: Any) -> None:
    keys, values = torch.randn(8, 4, 2, 8), torch.randn(8, 4, 2, 8)
    if layout == "HND":
        keys, values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    tables = torch.tensor([[0, 5, -1], [7, 1, 3], [2, -1, -1], [6, 4, 0]], dtype=torch.int32)
    counts = torch.tensor([2, 3, 1, 4], dtype=torch.int32) if chunked else None
    first, later = (torch.tensor(item, dtype=torch.int32) for item in ([5, 9, 1, 8], [7, 12, 3, 4]))
    query = torch.randn(10 if chunked else 4, 4, 8)
    given = {name: value for name, value in options.items() if name != "alibi"}
    if "alibi" in options:
        given["alibi_slopes"] = torch.rand(4)
    given.update(layout=layout, return_lse=True, backend="reference")
    batch = lz.paged_batch(tables, first, query_lens=counts, capture=True)
    for lens in (first, later):
        batch.update(tables, lens, query_lens=counts)
        object.__setattr__(batch, "context_lens_host", (1, 1, 1, 1))  # what a graph would have kept of the host
        want = lz.paged_attention(query, keys, values, lz.paged_batch(tables, lens, query_lens=counts), **given)
        torch.testing.assert_close(lz.paged_attention(query, keys, values, batch, **given), want)
