"""CUDA graphs on a GPU: capture and replay, strict mode, kernels that may not stand in a graph, streams, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import CudaGraphUnsafeError
from layerzero.model.enums import Platform

pytestmark = pytest.mark.gpu


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    draw = torch.Generator("cuda").manual_seed(seed * 7919 + sum(shape))
    return torch.randn(*shape, generator=draw, device="cuda").to(dtype)


def on_cuda(lab: Any, kernel_id: str, function: Any = None, **fields: Any) -> Any:
    given = {
        "platforms": frozenset({Platform.CUDA}),
        "graph_safe": True,
        "priority": 95.0,
        "grid_layout": "library",
        **fields,
    }
    return lab.kernel(kernel_id, function, **given)


def block(weight: Any) -> Any:
    def run(q: Any, k: Any, x: Any) -> Any:
        return lz.attention(q, k, k, is_causal=True), lz.rms_norm(x, weight)

    return run


@pytest.mark.req("R-GRAPH-04", "R-GRAPH-07")
def test_a_thousand_replays_with_changing_inputs_on_two_streams() -> None:
    weight = rand(256)
    run = block(weight)
    graph = lz.capture_graph(run, rand(2, 8, 64, 64), rand(2, 2, 64, 64), rand(32, 256))
    assert [op for op, _ in graph.kernels] == ["attention", "rms_norm"]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(1000):
        with torch.no_grad(), torch.cuda.stream(streams[number % 2]):
            given = rand(2, 8, 64, 64, seed=number), rand(2, 2, 64, 64, seed=number), rand(32, 256, seed=number)
            got = [item.clone() for item in graph(*given)]
            want = run(*given)
            torch.testing.assert_close(tuple(got), want, rtol=1.6e-2, atol=1e-2)


@pytest.mark.req("R-GRAPH-02", "R-GRAPH-03", "R-GRAPH-05")
def test_a_strict_capture_comes_after_a_dummy_and_allocates_nothing() -> None:
    run, captured = block(rand(256)), []

    def watched(q: Any, k: Any, x: Any) -> Any:
        captured.append(torch.cuda.is_current_stream_capturing())
        return run(q, k, x)

    given = rand(2, 8, 512, 64), rand(2, 2, 512, 64), rand(4096, 256)
    report = lz.capture_graph(watched, *given, warmup=4, strict=True, memory_limit=0).report
    assert report.ok and report.dummy and report.memory_delta == 0
    assert report.warmups == 4 and captured[:4] == [False] * 4, "it ran as often as the report says, uncaptured"
    assert captured[-2:] == [True, True], "the dummy, then the capture that is kept"
    cudnn = {"cudnn"} if torch.backends.cudnn.is_available() else set()  # type: ignore[no-untyped-call]
    assert {"cublas", "cublaslt", *cudnn} == set(report.initialised)


@pytest.mark.req("R-GRAPH-02")
def test_handles_and_workspaces_exist_on_the_stream_of_a_capture_before_the_first_warm_up() -> None:
    square, image = rand(64, 64), rand(1, 4, 16, 16)
    kernel = rand(4, 4, 3, 3)
    grown: list[int] = []

    def taken() -> int:
        return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])

    def products(x: Any) -> Any:
        before = taken()
        out = torch.mm(x, square), torch.nn.functional.linear(x, square, square[0])
        out = *out, torch.nn.functional.conv2d(image, kernel)
        grown.append(taken() - before)
        return out

    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        products(square), products(square)
    first, second = grown
    assert first > second, "a stream's first calls allocate what the libraries keep for it"
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    grown.clear()
    report = lz.capture_graph(products, square).report
    assert report.warmups == 3 and grown[:3] == [second] * 3


@pytest.mark.req("R-GRAPH-03")
def test_a_strict_capture_that_takes_more_memory_than_its_dummy_is_refused_with_how_much() -> None:
    x, more = rand(64, 256), 64 << 20
    kept: list[Any] = []

    def grows(x: Any) -> Any:
        out = lz.rms_norm(x)
        if torch.cuda.is_current_stream_capturing():
            kept.append(torch.empty(len(kept) * more, dtype=torch.uint8, device="cuda"))  # none in the dummy
        return out

    with pytest.raises(CudaGraphUnsafeError) as caught:
        lz.capture_graph(grows, x, strict=True)
    (why,) = caught.value.reasons
    assert len(kept) == 2 and caught.value.code == "GRAPH_MEMORY_GROWS"
    assert isinstance(why.value, int) and why.value >= more and why.limit == 1 << 20
    kept.clear()
    report = lz.capture_graph(grows, x, strict=True, memory_limit=2 * more).report
    assert report.ok and more <= report.memory_delta <= 2 * more
    kept.clear()


def pool_of(place: int) -> tuple[int, int]:
    """The memory pool of an address, by what the allocator itself says; (0, 0) is the one of all tensors."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["address"] <= place < segment["address"] + segment["total_size"]:
            owner, number = segment["segment_pool_id"]
            return owner, number
    raise AssertionError("the allocator does not know this address")


@pytest.mark.req("R-GRAPH-03")
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_graph_computes_lies_in_its_pool_and_what_it_is_given_does_not(strict: bool) -> None:
    weight = rand(256)
    between: list[int] = []  # where the captures, the dummy's among them, put what they need halfway

    def run(x: Any) -> Any:
        halfway = lz.rms_norm(x, weight)
        if torch.cuda.is_current_stream_capturing():
            between.append(halfway.data_ptr())
        return lz.rms_norm(halfway, weight)

    x, pool = rand(64, 256), torch.cuda.graph_pool_handle()
    mine = lz.capture_graph(run, x, pool=pool, strict=strict)
    assert len(between) == 1 + strict
    assert tuple(mine.pool) == tuple(pool)
    assert {pool_of(place) for place in (*between, mine.outputs.data_ptr())} == {tuple(pool)}
    between.clear()
    own = lz.capture_graph(run, x, strict=strict)
    assert tuple(own.pool) not in {tuple(pool), (0, 0)}, "without one given a graph has a pool of its own"
    assert {pool_of(place) for place in (*between, own.outputs.data_ptr())} == {tuple(own.pool)}
    shared = lz.capture_graph(run, x, pool=own.pool, strict=strict)
    assert pool_of(shared.outputs.data_ptr()) == tuple(own.pool)
    for tensor in (x, weight, *mine.inputs.tensors, *own.inputs.tensors, *shared.inputs.tensors):
        assert pool_of(tensor.data_ptr()) == (0, 0)
    for graph in (mine, own, shared):
        torch.testing.assert_close(graph(x), run(x), rtol=1.6e-2, atol=1e-2)


@pytest.mark.req("R-GRAPH-05")
def test_the_policy_makes_every_capture_strict() -> None:
    lz.configure(graph_strict_mode=True)
    try:
        assert lz.capture_graph(lambda x: lz.rms_norm(x), rand(8, 64)).report.dummy
    finally:
        lz.reset()


KEPT: list[Any] = []


def leaks(x: Any, weight: Any, eps: float) -> Any:
    KEPT.append(torch.empty(1 << 20, device=x.device))  # a "workspace", a new one at every call
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def synchronises(x: Any, weight: Any, eps: float) -> Any:
    torch.cuda.synchronize()
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def reads(x: Any, weight: Any, eps: float) -> Any:
    return torch.rms_norm(x, (x.shape[-1],), weight, eps) * (1.0 if x.sum().item() is not None else 2.0)


@pytest.mark.req("R-API-29", "R-GRAPH-06", "R-FAIL-05")
@pytest.mark.parametrize(
    ("function", "code"),
    [(leaks, "GRAPH_MEMORY_GROWS"), (synchronises, "GRAPH_CAPTURE_FAILED"), (reads, "GRAPH_CAPTURE_FAILED")],
)
def test_a_planted_kernel_that_lies_about_itself_is_refused(lab: Any, function: Any, code: str) -> None:
    lab.use(on_cuda(lab, "planted.rms_norm.liar", function))
    x, weight = rand(16, 128), rand(128)
    assert lz.which("rms_norm", x, weight) == "planted.rms_norm.liar"
    assert lz.is_graph_safe("planted.rms_norm.liar")  # so it says
    report = lz.validate_graph_capture("rms_norm", x, weight)
    assert report, str(report)
    assert report.refused["planted.rms_norm.liar"].code == code
    assert [kernel_id for _, kernel_id in report.kernels] == ["torch.rms_norm.native"]
    graph = lz.capture_graph(lambda x: lz.rms_norm(x, weight), x, strict=True)
    other = rand(16, 128, seed=3)
    torch.testing.assert_close(graph(other), torch.rms_norm(other, (128,), weight, 1e-6), rtol=1.6e-2, atol=1e-2)
    # A capture that was spoilt on the way leaves nothing behind: random numbers and new captures work.
    torch.rand(8, device="cuda")
    assert lz.validate_graph_capture("layer_norm", x, weight)
    torch.cuda.synchronize()
    KEPT.clear()


@pytest.mark.req("R-API-29", "R-GRAPH-05", "R-GRAPH-06")
def test_where_no_kernel_is_safe_the_error_names_them_all(lab: Any) -> None:
    lab.use(on_cuda(lab, "planted.rms_norm.liar", synchronises), on_cuda(lab, "vendor.rms_norm.old", graph_safe=False))
    lz.configure(allow=["planted", "vendor"], fallback_enabled=False)
    x, weight = rand(16, 128), rand(128)
    with pytest.raises(CudaGraphUnsafeError) as caught:
        lz.capture_graph(lambda x: lz.rms_norm(x, weight), x, strict=True)
    assert "planted.rms_norm.liar" in str(caught.value) and "vendor.rms_norm.old" in str(caught.value)
    report = lz.validate_graph_capture("rms_norm", x, weight)
    assert not report and report.reasons
    assert torch.rand(4, device="cuda").sum().item() > 0  # the process goes on


@pytest.mark.req("R-GRAPH-01", "R-GRAPH-06")
def test_an_unsafe_kernel_is_passed_over_from_the_first_warm_up_on(lab: Any) -> None:
    lab.use(on_cuda(lab, "vendor.rms_norm.old", graph_safe=False))
    x, weight = rand(16, 128), rand(128)
    assert lz.which("rms_norm", x, weight) == "vendor.rms_norm.old"
    lab.clear()
    graph = lz.capture_graph(lambda x: lz.rms_norm(x, weight), x)
    assert set(lab.ran()) == {"torch.rms_norm.native"} == {kernel_id for _, kernel_id in graph.kernels}
    assert not lz.is_graph_safe("vendor.rms_norm.old")


@pytest.mark.req("R-GRAPH-07")
def test_the_selection_is_pinned_from_the_warm_up_to_the_last_replay(lab: Any) -> None:
    lab.use()
    x, weight = rand(16, 128), rand(128)
    runs = []

    def run(x: Any) -> Any:
        runs.append(len(runs))
        if len(runs) == 2:
            lz.lock("rms_norm", "reference.rms_norm.plain")  # somebody changes the policy in the middle
        return lz.rms_norm(x, weight)

    graph = lz.capture_graph(run, x)
    assert graph.kernels == (("rms_norm", "torch.rms_norm.native"),)
    assert lz.which("rms_norm", x, weight) == "reference.rms_norm.plain"
    other = rand(16, 128, seed=5)
    torch.testing.assert_close(graph(other), lz.rms_norm(other, weight), rtol=1.6e-2, atol=1e-2)


@pytest.mark.req("R-GRAPH-07")
def test_the_stream_can_be_named_but_not_be_the_default_one() -> None:
    stream = torch.cuda.Stream()
    x = rand(16, 128)
    graph = lz.capture_graph(lambda x: lz.rms_norm(x), x, stream=stream)
    torch.testing.assert_close(graph(x), lz.rms_norm(x), rtol=1.6e-2, atol=1e-2)
    with pytest.raises(CudaGraphUnsafeError, match="default stream"):
        lz.capture_graph(lambda x: lz.rms_norm(x), x, stream=torch.cuda.default_stream())


@pytest.mark.req("R-API-29")
def test_code_of_the_caller_that_synchronises_is_named_and_the_process_goes_on() -> None:
    x = rand(16, 128)
    report = lz.validate_graph_capture(lambda x: lz.rms_norm(x) * x.sum().item(), x)
    assert not report
    assert report.reasons[0].code == "GRAPH_CAPTURE_FAILED"
    assert lz.validate_graph_capture(lambda x: lz.rms_norm(x), x)


@pytest.mark.req("R-API-29")
def test_a_result_that_depends_on_something_else_is_found_out() -> None:
    count = []

    def run(x: Any) -> Any:
        count.append(1)
        return lz.rms_norm(x) + float(len(count))  # a number of the host: the graph has the one of the capture

    report = lz.validate_graph_capture(run, rand(16, 128))
    assert not report and report.reasons[0].code == "GRAPH_RESULT_DIFFERS"


def test_inputs_of_another_shape_are_refused() -> None:
    graph = lz.capture_graph(lambda x: lz.rms_norm(x), rand(16, 128))
    with pytest.raises(CudaGraphUnsafeError) as caught:
        graph(rand(17, 128))
    assert caught.value.code == "GRAPH_INPUT_CHANGED"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_paged_decode_in_a_graph_follows_its_batch(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("layerzero_triton")
    lz.configure(jit="block")
    pages, page, lens = 32, 16, [17, 40, 9, 64]
    cache = rand(pages, page, 2, 64)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(4, 8)
    batch = lz.paged_batch(tables, torch.tensor(lens, dtype=torch.int32, device="cuda"), capture=True)
    query = rand(4, 8, 64)
    with torch.no_grad():
        graph = lz.capture_graph(lambda q: lz.paged_attention(q, cache, cache, batch, backend=backend), query)
        for step in range(20):
            fresh = torch.tensor([n + step for n in lens], dtype=torch.int32, device="cuda")
            batch.update(tables, fresh)
            given = rand(4, 8, 64, seed=step)
            want = lz.paged_attention(given, cache, cache, lz.paged_batch(tables, fresh))
            torch.testing.assert_close(graph(given), want, rtol=1.6e-2, atol=1e-2)
    lz.reset()
