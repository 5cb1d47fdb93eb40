"""The choice inside a compiled graph: what can be written out is, unless somebody asks for more or it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero.dispatch.run import current_world, describe
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.model.op import OperationSpec
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.current import builtin_ops
from layerzero.runtime.state import state
from layerzero.selection.compiled import in_graph
from layerzero.selection.engine import select
from layerzero.selection.world import Measurements

BUILTIN = load_plugins(entry_points=()).registry
FAST, PRODUCT = "vendor.rms_norm.fast", "vendor.linear.fast"


@pytest.fixture(autouse=True)
def fresh(lab):
    state.use(BUILTIN.add([lab.kernel(FAST, priority=90.0), lab.kernel(PRODUCT, priority=90.0)]))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    lz.reset()


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, WEIGHT, MATRIX = rand(3, 8), rand(8), rand(6, 8)


def compiled(function):
    counter = CompileCounterWithBackend("eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def opaque(counter):
    return [str(n.target) for n in counter.graphs[-1].graph.nodes if "layerzero" in str(n.target)]


def notes(report):
    return [note.code.value for note in report.decision.notes]


def test_every_op_that_is_fused_has_a_kernel_that_can_be_written_out():
    fused = {name for name, op in builtin_ops.items() if op.fusable}
    assert fused >= {"rms_norm", "add_rms_norm", "layer_norm", "rope", "silu_and_mul", "relu_and_mul", "cast"}
    assert {kernel.op for kernel in BUILTIN.kernels.values() if kernel.traceable} >= fused


@pytest.mark.req("R-PT-02")
def test_a_norm_is_written_out_where_a_foreign_kernel_would_win_by_itself(lab):
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w) * 2)
    with torch.no_grad():
        got, ran = lab.run(call, X, WEIGHT)
        torch.testing.assert_close(got, lz.rms_norm(X, WEIGHT) * 2)
    assert ran == [] and opaque(counter) == []
    assert lz.which("rms_norm", X, WEIGHT) == FAST


@pytest.mark.req("R-PT-02")
def test_explain_says_what_stands_in_the_graph_and_why():
    report = lz.explain("rms_norm", X, WEIGHT, compiled=True)
    assert report.chosen == lz.which("rms_norm", X, WEIGHT, compiled=True) == "torch.rms_norm.native"
    assert notes(report) == ["FUSED_IN_GRAPH"] and FAST in str(report)
    assert report.decision.candidates[0].kernel_id == "torch.rms_norm.native"
    assert report.decision.ranking[:2] == ("torch.rms_norm.native", FAST)
    assert lz.explain("rms_norm", X, WEIGHT).chosen == FAST
    assert lz.which("linear", X, MATRIX) == PRODUCT
    assert lz.which("linear", X, MATRIX, compiled=True) == "torch.linear.native"


def test_a_product_that_nobody_measured_is_written_out(lab):
    call, counter = compiled(lambda x, w: lz.linear(x, w))
    with torch.no_grad():
        _, ran = lab.run(call, X, MATRIX)
    assert ran == [] and opaque(counter) == []


NATIVE = "torch.linear.native"


@pytest.mark.parametrize(
    ("device", "eager", "graph", "chosen"),
    [
        # On a CPU the opaque op itself costs 30 µs.
        ("cpu", {PRODUCT: 100.0, NATIVE: 200.0}, {}, PRODUCT),
        ("cpu", {PRODUCT: 10.0, NATIVE: 30.0}, {}, NATIVE),
        ("cpu", {PRODUCT: 100.0}, {}, NATIVE),
        # On a GPU a short eager call may be nothing but its launch.
        ("cuda", {PRODUCT: 10.0, NATIVE: 30.0}, {}, NATIVE),
        ("cuda", {PRODUCT: 100.0, NATIVE: 200.0}, {}, PRODUCT),
        ("cuda", {PRODUCT: 10.0, NATIVE: 30.0}, {PRODUCT: 5.0, NATIVE: 6.0}, PRODUCT),
        ("cuda", {PRODUCT: 100.0, NATIVE: 200.0}, {PRODUCT: 6.0, NATIVE: 5.0}, NATIVE),
    ],
)
def test_a_foreign_product_stands_in_a_graph_where_it_was_measured_to_win_there(lab, device, eager, graph, chosen):
    platforms = frozenset({Platform.CPU, Platform.CUDA})
    state.use(BUILTIN.add([lab.kernel(PRODUCT, priority=90.0, platforms=platforms, grid_layout="library")]))
    world = current_world()
    spec: OperationSpec = world.ops["linear"]
    times = Measurements(lambda name, ctx: (graph if ctx.capturing else eager).get(name), "some")
    world = world.changed(measurements=times)
    ctx = describe(spec, (X, MATRIX, None, None), None, None, world)
    if device == "cuda":
        ctx = replace(ctx, device=DeviceSpec.for_sm(90))
    first = select(ctx, world)
    decision = in_graph(first, world, lambda kernel: bool(kernel.traceable))
    assert first.chosen == PRODUCT and decision.chosen == chosen
    assert decision.notes[-1].code.value == ("OPAQUE_IN_GRAPH" if chosen == PRODUCT else "FUSED_IN_GRAPH")


def test_no_kernel_of_last_resort_is_written_out_in_place_of_one_that_computes(lab):
    """The reference of attention holds all scores at once."""
    kernel = lab.kernel("vendor.attention.fast", priority=90.0)
    state.use(BUILTIN.add([kernel]))
    q = rand(1, 2, 4, 8)
    assert lz.which("attention", q, q, q, softcap=5.0, compiled=True) == "vendor.attention.fast"


ASKED = {
    "lock": lambda: lz.lock("rms_norm", FAST),
    "prefer": lambda: lz.configure(prefer=["vendor"]),
    "boost": lambda: lz.configure(boosts={FAST: 5.0}),
}


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("how", [*ASKED, "backend"])
def test_what_is_asked_for_is_obeyed(lab, how):
    backend = "vendor" if how == "backend" else None
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w, backend=backend))
    with torch.no_grad():
        if backend is None:
            call(X, WEIGHT)
            assert opaque(counter) == []
            ASKED[how]()
        _, ran = lab.run(call, X, WEIGHT)
    assert ran == [FAST] and opaque(counter) == ["layerzero.rms_norm.call"]
    assert notes(lz.explain("rms_norm", X, WEIGHT, compiled=True, backend=backend)) == ["OPAQUE_IN_GRAPH"]


def test_a_kernel_that_the_policy_avoids_is_not_written_out_in_place_of_one_it_does_not(lab):
    lz.configure(avoid=["torch", "reference", "inductor"])
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        _, ran = lab.run(call, X, WEIGHT)
    assert ran == [FAST] and opaque(counter) == ["layerzero.rms_norm.call"]


def _in_graph(times):
    """The decision in a World with these measurements."""
    world = current_world()
    spec: OperationSpec = world.ops["rms_norm"]
    world = world.changed(measurements=Measurements(lambda name, ctx: times.get(name), "some"))
    ctx = describe(spec, (X, WEIGHT, 1e-6), None, None, world)
    return in_graph(select(ctx, world), world, lambda kernel: bool(kernel.traceable))


@pytest.mark.parametrize(
    ("foreign", "alone", "chosen"),
    [(4.0, 10.0, FAST), (6.0, 10.0, "torch.rms_norm.native"), (4.0, None, "torch.rms_norm.native")],
)
def test_only_a_clear_win_over_the_compiled_form_keeps_a_foreign_kernel(foreign, alone, chosen):
    """Times of torch's own kernel say nothing: fused into what is around it, it is another one."""
    decision = _in_graph({FAST: foreign, "inductor.rms_norm.compiled": alone, "torch.rms_norm.native": 100.0})
    assert decision.chosen == chosen
    assert decision.notes[-1].code.value == ("OPAQUE_IN_GRAPH" if chosen == FAST else "FUSED_IN_GRAPH")


def test_without_a_kernel_that_can_be_written_out_the_foreign_one_stays(lab):
    lz.configure(allow=["vendor"], fallback_enabled=False)
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        _, ran = lab.run(call, X, WEIGHT)
    assert ran == [FAST] and opaque(counter) == ["layerzero.rms_norm.call"]


def test_a_decision_inside_a_graph_is_made_of_the_same_candidates():
    world = current_world()
    spec = world.ops["rms_norm"]
    plain = select(describe(spec, (X, WEIGHT, 1e-6), None, None, world), world)
    moved = in_graph(plain, world, lambda kernel: bool(kernel.traceable))
    assert {c.kernel_id for c in moved.candidates} == {c.kernel_id for c in plain.candidates}
    assert sorted(moved.ranking) == sorted(plain.ranking)
    assert moved == replace(moved) and moved.to_json()["chosen"] == "torch.rms_norm.native"
