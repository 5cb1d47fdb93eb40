"""Selection while a graph is traced: what is written out, what stays opaque, and what makes Dynamo trace again."""

from __future__ import annotations

import os
import pkgutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state
from layerzero.torch_ops.functions import functions

BUILTIN = load_plugins(entry_points=()).registry


@pytest.fixture(autouse=True)
def fresh():
    lz.reset()
    state.use(BUILTIN)  # whatever else is installed
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    lz.reset()


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def targets(counter, which=-1):
    return [str(node.target) for node in counter.graphs[which].graph.nodes if node.op == "call_function"]


def opaque(counter, which=-1):
    return [name for name in targets(counter, which) if "layerzero" in name]


def compiled(function, **options):
    counter = CompileCounterWithBackend("eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


X, WEIGHT, BIAS = rand(3, 4, 8), rand(8) + 1, rand(8)
COS, SIN = rand(5, 4).cos(), rand(5, 4).sin()
CALLS = {
    "attention": (lambda q, k: lz.attention(q, k, k, is_causal=True), (rand(2, 4, 5, 8), rand(2, 2, 5, 8))),
    "rms_norm": (lambda x, w: lz.rms_norm(x, w), (X, WEIGHT)),
    "add_rms_norm": (lambda x, w: lz.add_rms_norm(x, x * 2, w), (X, WEIGHT)),
    "layer_norm": (lambda x, w, b: lz.layer_norm(x, w, b), (X, WEIGHT, BIAS)),
    "rope": (lambda q, k: lz.rope(q, k, COS, SIN), (rand(2, 4, 5, 8), rand(2, 2, 5, 8))),
    "silu_and_mul": (lambda x: lz.silu_and_mul(x), (X,)),
    "gelu_and_mul": (lambda x: lz.gelu_and_mul(x, "tanh"), (X,)),
    "relu_and_mul": (lambda x: lz.relu_and_mul(x), (X,)),
    "linear": (lambda x, w: lz.linear(x, w, None, "gelu"), (X, rand(6, 8))),
    "embedding": (lambda i, w: lz.embedding(i, w, 0), (torch.tensor([[1, 0, 3]]), rand(5, 8))),
    "mlp": (lambda x, a, b: lz.mlp(x, a, b), (X, rand(12, 8), rand(8, 6))),
    "xpos": (lambda q, k: lz.xpos(q, k, COS, SIN), (rand(2, 4, 5, 8), rand(2, 2, 5, 8))),
    "gemma_rms_norm": (lambda x, w: lz.gemma_rms_norm(x, w), (X, WEIGHT)),
    "gemma_add_rms_norm": (lambda x, w: lz.gemma_add_rms_norm(x, x * 2, w), (X, WEIGHT)),
    "cross_entropy": (lambda x, y: lz.cross_entropy(x, y), (rand(5, 9), torch.tensor([1, 0, -100, 8, 3]))),
    "cast": (lambda x: lz.cast(x, torch.bfloat16), (X,)),
    "topk_gate": (lambda x: lz.topk_gate(x, 2), (rand(20, 8),)),
}


def test_every_op_with_a_kernel_that_can_be_written_out_is_tried_here():
    kernels = [kernel for kernel in BUILTIN.kernels.values() if kernel.traceable]
    assert {kernel.op for kernel in kernels} == set(CALLS)
    named = [k.function if k.traceable == "itself" else k.traceable for k in kernels if k.traceable != "plain"]
    assert all(callable(pkgutil.resolve_name(name)) for name in named) and len(named) > 30


DOUBLED = """
import torch

def norm(x, weight, eps):
    return torch.rms_norm(x, (x.shape[-1],), weight, eps) * 2
"""


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("traceable", ["itself", "vendor_doubled:norm", "plain", "", "no_such_module:norm"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_stands_in_a_graph_for_a_plugins_kernel_is_what_it_declares(traceable, grad, tmp_path, monkeypatch):
    (tmp_path / "vendor_doubled.py").write_text(DOUBLED)
    monkeypatch.syspath_prepend(tmp_path)
    native = BUILTIN.kernels["torch.rms_norm.native"]
    ours = replace(
        native, kernel_id="vendor.rms_norm.doubled", backend="vendor", function="vendor_doubled:norm", priority=90.0,
        traceable=traceable,
    )  # fmt: skip
    state.use(BUILTIN.add([ours]))
    lz.lock("rms_norm", ours.kernel_id)
    x, weight = rand(3, 8).requires_grad_(grad), rand(8)
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    unfound = traceable == "no_such_module:norm"  # what cannot be imported is not derived either
    opaque_op = not traceable or (unfound and not grad)
    factor = 1 if traceable == "plain" or (grad and unfound) else 2
    torch.testing.assert_close(call(x, weight), torch.rms_norm(x, (8,), weight, 1e-6) * factor)
    found = [str(n.target) for n in counter.graphs[-1].graph.nodes if "layerzero" in str(n.target)]
    assert bool(found) == opaque_op


def test_every_op_on_tensors_has_a_traced_form():
    assert set(PUBLIC) - {op.op_id for op in functions.ops()} == set()


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_of_plain_torch_is_written_into_the_graph(op):
    function, inputs = CALLS[op]
    call, counter = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), function(*inputs), check_stride=False)
    assert opaque(counter) == []


# The kernels of inductor wait for their compiled programs.
OWN = [k.kernel_id for k in BUILTIN.kernels.values() if k.traceable and k.backend != "inductor"]


@pytest.mark.parametrize("kernel_id", OWN)
def test_what_is_written_computes_what_the_kernel_computes(kernel_id):
    op = kernel_id.split(".")[1]
    function, inputs = CALLS[op]
    lz.lock(op, kernel_id)  # by the lock alone
    try:
        want = function(*inputs)
    except lz.errors.LockedKernelError:
        pytest.skip(f"{kernel_id} cannot run this call here")
    call, counter = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), want, check_stride=False, rtol=1e-5, atol=1e-5)
    assert opaque(counter) == []


def test_a_foreign_kernel_is_one_opaque_op_and_runs(lab):
    lab.use(lab.kernel("vendor.rms_norm.fast", priority=90.0))
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w) * 2)
    with torch.no_grad():
        _, ran = lab.run(call, X, WEIGHT)
    assert ran == ["vendor.rms_norm.fast"]
    assert opaque(counter) == ["layerzero.rms_norm.call"]


def test_a_kernel_registered_with_another_function_is_not_taken_for_the_built_in_one(lab):
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        _, ran = lab.run(call, X, WEIGHT)
    assert ran == ["torch.rms_norm.native"]  # the laboratory's recorder around it
    assert opaque(counter) == ["layerzero.rms_norm.call"]


# -- a World that changes --------------------------------------------------------------------------
@pytest.mark.req("R-PT-02")
def test_a_lock_makes_dynamo_trace_again_and_unlocking_finds_the_old_graph():
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        call(X, WEIGHT)
        assert targets(counter)[-1].startswith("<built-in method rms_norm")
        lz.lock("rms_norm", "reference.rms_norm.plain")
        torch.testing.assert_close(call(X, WEIGHT), lz.rms_norm(X, WEIGHT))
        assert counter.frame_count == 2
        assert "rsqrt" in str(targets(counter))
        lz.unlock("rms_norm")
        call(X, WEIGHT)
    assert counter.frame_count == 2


def test_a_policy_scope_is_seen_by_graphs_traced_outside_of_it():
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        call(X, WEIGHT)
        with lz.disabled():
            call(X, WEIGHT)
            assert "rsqrt" in str(targets(counter))
        call(X, WEIGHT)
    assert counter.frame_count == 2


def test_a_change_that_decides_nothing_traces_nothing():
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        call(X, WEIGHT)
        lz.lock("layer_norm", "reference.layer_norm.plain")
        lz.configure(avoid=["reference"])
        call(X, WEIGHT)
    assert counter.frame_count == 1


def test_a_denied_kernel_leaves_the_graph():
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        call(X, WEIGHT)
        lz.configure(deny=["torch.rms_norm.native"])
        torch.testing.assert_close(call(X, WEIGHT), lz.rms_norm(X, WEIGHT))
    assert counter.frame_count == 2
    assert "rsqrt" in str(targets(counter))


def test_a_kernel_that_appears_later_is_used(lab):
    state.use(BUILTIN)
    weight = rand(6, 8)
    call, counter = compiled(lambda x, w: lz.linear(x, w))
    with torch.no_grad():
        call(X, weight)
        assert opaque(counter) == []
        lz.configure(prefer=["vendor"])
        state.use(BUILTIN.add([lab.kernel("vendor.linear.fast", priority=90.0)]))
        _, ran = lab.run(call, X, weight)
    assert ran == ["vendor.linear.fast"]
    assert opaque(counter) == ["layerzero.linear.call"]


def test_a_vendor_that_fails_is_replaced_without_another_trace(lab):
    lab.use(lab.kernel("vendor.rms_norm.fast", priority=90.0))
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        call(X, WEIGHT)
        lab.faults["vendor.rms_norm.fast"] = RuntimeError("it broke")
        for _ in range(8):  # until its breaker is open, and after
            _, ran = lab.run(call, X, WEIGHT)
            assert ran == ["torch.rms_norm.native"]
    assert counter.frame_count == 1


def test_the_switches_of_sdpa_are_part_of_the_choice():
    q, k = CALLS["attention"][1]
    call, counter = compiled(lambda q, k: lz.attention(q, k, k, is_causal=True))
    with torch.no_grad():
        call(q, k)
        assert "flash_attention_for_cpu" in str(targets(counter))
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(call(q, k), lz.attention(q, k, k, is_causal=True))
        assert "attention_math" in str(targets(counter))
    assert counter.frame_count == 2


# -- sizes that are left open ----------------------------------------------------------------------
@pytest.mark.req("R-PT-02")
def test_open_sizes_are_not_specialised_and_the_kernel_is_still_written_out():
    def block(q, k, x, w):
        return lz.attention(q, k, k, is_causal=True), lz.silu_and_mul(lz.rms_norm(x, w)), lz.rope(q, k, COS, SIN)[0]

    call, counter = compiled(block)
    with torch.no_grad():
        for batch, seq in ((3, 4), (4, 5), (7, 3), (2, 2)):
            args = rand(batch, 4, seq, 8), rand(batch, 2, seq, 8), rand(batch, seq, 8), WEIGHT
            for tensor in args[:2]:
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 2)
            torch._dynamo.mark_dynamic(args[2], 0)
            torch._dynamo.mark_dynamic(args[2], 1)
            torch.testing.assert_close(call(*args), block(*args), check_stride=False)
    assert counter.frame_count == 1
    assert opaque(counter) == []


def test_where_open_sizes_could_change_the_choice_the_op_decides_when_it_runs():
    limit = {"match": {"op": "rms_norm", "when": {"rows": ">100"}}, "deny": ["torch"]}
    lz.configure(rules=[limit])
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        for rows in (4, 90, 101, 300):
            x = rand(rows, 8)
            torch._dynamo.mark_dynamic(x, 0)
            state.ran.clear()
            torch.testing.assert_close(call(x, WEIGHT), lz.rms_norm(x, WEIGHT))
            wanted = "reference.rms_norm.plain" if rows > 100 else "torch.rms_norm.native"
            assert set(state.ran.values()) <= {wanted} and lz.which("rms_norm", x, WEIGHT) == wanted
    assert counter.frame_count == 1
    assert opaque(counter) == ["layerzero.rms_norm.call"]


# Sizes that are equal by chance are one symbol to Dynamo, so none are.
OPEN_EVERYWHERE = {
    "rope": (lambda q, cos, sin: lz.rope(q, q + 1, cos, sin), lambda n: (rand(n, 4, n + 1, 6), *rand(2, n + 1, 3))),
    "cast": (lambda x: lz.cast(x, torch.bfloat16), lambda n: (rand(n, n + 1, 5, 8),)),
    "embedding": (lambda x, w: lz.embedding(x.int().abs() % 7, w), lambda n: (rand(n, 3, n + 1, 5), rand(7, 6))),
    "topk_gate": (lambda x: lz.topk_gate(x.flatten(0, 2), 2), lambda n: (rand(n, 3, n + 1, 8),)),
    "float64": (lambda x: lz.cast(x, torch.float32), lambda n: (rand(n, n + 1, 8).double(),)),
}


@pytest.mark.fault(4)
@pytest.mark.parametrize("name", sorted(OPEN_EVERYWHERE))
def test_all_sizes_may_be_open_at_once_though_no_tensor_could_have_the_largest_of_each(name):
    function, inputs = OPEN_EVERYWHERE[name]
    call, counter = compiled(function, dynamic=True)
    with torch.no_grad():
        for size in (9, 11):
            torch.testing.assert_close(call(*inputs(size)), function(*inputs(size)), check_stride=False)
    assert counter.frame_count == 1  # whether written out or, with very many open sizes, as one opaque op


def test_a_limit_on_a_fixed_size_is_no_hindrance():
    lz.configure(rules=[{"match": {"op": "rms_norm", "when": {"hidden": ">100"}}, "deny": ["torch"]}])
    call, counter = compiled(lambda x, w: lz.rms_norm(x, w))
    with torch.no_grad():
        for rows in (4, 9):
            x = rand(rows, 8)
            torch._dynamo.mark_dynamic(x, 0)
            call(x, WEIGHT)
    assert counter.frame_count == 1 and opaque(counter) == []


def test_a_size_that_only_the_data_knows_is_left_to_the_op():
    def picked(x, w):
        return lz.rms_norm(x[x[:, 0] > 0], w)

    x = rand(6, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        call, counter = compiled(picked)
        torch.testing.assert_close(call(x, WEIGHT), picked(x, WEIGHT))
    assert opaque(counter) == ["layerzero.rms_norm.call"]


def test_a_number_that_changes_is_not_made_a_constant():
    call, counter = compiled(lambda x, w, eps: lz.rms_norm(x, w, eps), dynamic=True)
    with torch.no_grad():
        for eps in (1e-6, 1e-5, 1e-3, 0.5):
            torch.testing.assert_close(call(X, WEIGHT, eps), lz.rms_norm(X, WEIGHT, eps))
    assert counter.frame_count <= 2


# -- modes -----------------------------------------------------------------------------------------
@pytest.mark.req("R-PT-06")
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_means_the_same_written_out(inside):
    weight, q, up, down = rand(6, 8), rand(2, 4, 5, 8), rand(12, 8), rand(8, 6)

    def block(x, q, w, gain):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return lz.linear(x, w), lz.rms_norm(x, gain), lz.attention(q, q, q), lz.mlp(x, up, down)

    call, counter = compiled(block)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        want, got = block(X, q, weight, WEIGHT), call(X, q, weight, WEIGHT)
    assert [item.dtype for item in got] == [item.dtype for item in want]
    assert [item.dtype for item in got] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2, check_stride=False)
    assert opaque(counter) == []


@pytest.mark.req("R-PT-04", "R-PT-06")
def test_a_training_step_under_autocast_has_eager_gradients():
    def step(x, gain, up, down):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lz.mlp(lz.rms_norm(x, gain), up, down).float().square().sum()

    found = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (X, WEIGHT, rand(12, 8), rand(8, 6))]
        call(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[1], found[0], rtol=3e-2, atol=3e-2)


def test_with_a_gradient_the_best_kernel_that_can_be_differentiated_is_written(lab):
    state.use(BUILTIN.add([lab.kernel("vendor.linear.fast", priority=90.0)]))
    x, weight = rand(3, 8).requires_grad_(), rand(6, 8)
    call, counter = compiled(lambda x, w: lz.linear(x, w))
    _, ran = lab.run(call, x, weight)
    assert ran == [] and opaque(counter) == []
    assert "linear" in str(targets(counter))


@pytest.mark.needs_tool("g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.req("R-PT-02")
def test_inductor_fuses_across_what_is_written_out():
    from torch._inductor.utils import run_and_get_code

    def chain(x, r, w):
        normed, stream = lz.add_rms_norm(x * 2, r, w)
        return lz.silu_and_mul(normed + 1) * stream[..., :4]

    with torch.no_grad():
        got, sources = run_and_get_code(torch.compile(chain, fullgraph=True), X, X + 1, WEIGHT)
        torch.testing.assert_close(got, chain(X, X + 1, WEIGHT), rtol=1e-5, atol=1e-5)
    assert len(sources) == 1 and "layerzero" not in sources[0]
    assert sources[0].count('extern "C"') == 1  # two ops of ours and what stands around them: one function


@pytest.mark.skipif(not os.environ.get("LAYERZERO_PROVE"), reason="long: run by make prove NAME=compile")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("op", CALLS)
def test_inductor_computes_every_op_as_eager_does(op, grad):
    function, inputs = CALLS[op]
    found = []
    for call in (function, torch.compile(function, fullgraph=True)):
        given = [t.clone().requires_grad_(grad and t.is_floating_point()) for t in inputs]
        outs = call(*given)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [t for t in given if t.requires_grad]
        total = sum(o.float().square().sum() for o in outs if o.requires_grad)
        grads = torch.autograd.grad(total, wanted, allow_unused=True) if wanted else ()
        found.append((outs, grads))
    torch.testing.assert_close(found[1], found[0], check_stride=False, rtol=1e-4, atol=1e-4)


def test_nothing_about_this_torch_makes_the_tracing_give_up(caplog):
    """The opaque op is always right: a torch that names things differently shows in the log alone, and as slow."""
    torch._dynamo.reset()
    with caplog.at_level("DEBUG", logger="layerzero"), torch.no_grad():
        torch.compile(lambda x: lz.rms_norm(x, WEIGHT, backend="torch") + 1, fullgraph=True, backend="eager")(X)
    said = [record.getMessage() for record in caplog.records]
    assert not [words for words in said if "cannot be decided" in words or "guards on our own" in words]
