"""torch.compile over every public op: one graph, the right numbers, the right gradients, few recompilations."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.trace_rules import is_polyfilled_callable
from torch._dynamo.utils import counters
from torch.nn.attention.bias import causal_lower_right

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.op_tables import LATE_OPS
from layerzero.torch_ops.functions import functions


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def angles(seq, half):
    theta = torch.arange(float(seq))[:, None] * torch.logspace(0, -2, half)
    return theta.cos(), theta.sin()


def qkv(seq_q=5, seq_k=5):
    return rand(2, 4, seq_q, 8), rand(2, 2, seq_k, 8), rand(2, 2, seq_k, 8)


def paged_inputs():
    tables, lens = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    return rand(2, 4, 8), rand(4, 4, 2, 8), rand(4, 4, 2, 8), tables, lens


def public_calls():
    """name -> (function of tensors, tensors): every public op, and its forms that are traced differently."""
    q, k, v = qkv()
    long_k, long_v = rand(2, 2, 9, 8), rand(2, 2, 9, 8)
    x, residual, weight, bias = rand(3, 4, 8), rand(4, 3, 8).view(3, 4, 8), rand(8), rand(8) + 1
    cos, sin = angles(5, 4)
    half_cos, half_sin = angles(5, 2)
    mask = rand(2, 1, 5, 5) > -0.5
    mask[0, 0, 1] = False
    added = torch.where(mask, rand(2, 1, 5, 5), -torch.inf)
    logits = rand(3, 11)
    bsh = tuple(t.transpose(1, 2) for t in (q, k, v))
    paged = paged_inputs()
    batch = lz.paged_batch(*paged[3:])
    stored = lz.quantize(rand(4, 32), "int8", granularity="channel")
    lower_right = causal_lower_right(5, 9)
    return {
        "attention": (lambda q, k, v: lz.attention(q, k, v), (q, k, v)),
        "attention causal": (lambda q, k, v: lz.attention(q, k, v, is_causal=True, scale=0.3), (q, k, v)),
        "attention bottom right": (
            lambda q, k, v: lz.attention(q, k, v, is_causal="bottom_right"), (q, long_k, long_v)),
        "attention bias object": (
            lambda q, k, v: lz.attention(q, k, v, attn_mask=lower_right), (q, long_k, long_v)),
        "attention bool mask": (lambda q, k, v, m: lz.attention(q, k, v, m), (q, k, v, mask)),
        "attention float mask": (lambda q, k, v, m: lz.attention(q, k, v, m), (q, k, v, added)),
        "attention BSHD": (lambda q, k, v: lz.attention(q, k, v, layout="BSHD"), bsh),
        "attention 3-D": (lambda q, k, v: lz.attention(q, k, v), (rand(2, 5, 8), rand(2, 6, 8), rand(2, 6, 8))),
        "attention options": (
            lambda q, k, v: lz.attention(q, k, v, is_causal="bottom_right", window=(2, 0), softcap=5.0,
                                         alibi_slopes=lz.alibi_slopes(4)), (q, k, v)),
        "attention window": (lambda q, k, v: lz.attention(q, k, v, window=q.shape[2] // 2), (q, k, v)),
        "attention lse": (lambda q, k, v: lz.attention(q, k, v, return_lse=True), (q, k, v)),
        "paged_attention": (lambda q, a, b: lz.paged_attention(q, a, b, batch), paged[:3]),
        "paged_attention lse": (
            lambda q, a, b: lz.paged_attention(q, a, b, batch, return_lse=True, window=3), paged[:3]),
        "rms_norm": (lambda x, w: lz.rms_norm(x, w), (x, weight)),
        "rms_norm no weight": (lambda x: lz.rms_norm(x, eps=1e-5), (x,)),
        "add_rms_norm": (lambda x, r, w: lz.add_rms_norm(x, r, w), (x, residual, weight)),
        "layer_norm": (lambda x, w, b: lz.layer_norm(x, w, b), (x, weight, bias)),
        "rope": (lambda q, k: lz.rope(q, k, cos, sin), (q, k)),
        "rope interleaved": (
            lambda q: lz.rope(q, None, half_cos, half_sin, interleaved=True, position_ids=torch.arange(5))[0], (q,)),
        "rope in place": (lambda q, k: lz.rope(q * 2, k * 2, cos, sin, inplace=True), (q, k)),
        "silu_and_mul": (lambda x: lz.silu_and_mul(x), (x,)),
        "gelu_and_mul": (lambda x: lz.gelu_and_mul(x, "tanh"), (x,)),
        "relu_and_mul": (lambda x: lz.relu_and_mul(x), (x,)),
        "linear": (lambda x, w, b: lz.linear(x, w, b, "silu"), (x, rand(6, 8), rand(6))),
        "embedding": (lambda w: lz.embedding(torch.tensor([[1, 0, 3]]), w, 0), (rand(5, 8),)),
        "sample_topk": (lambda x: lz.sample_topk(x, 3), (logits,)),
        "sample_topp": (lambda x, t: lz.sample_topp(x, 0.8, temperature=t), (logits, torch.tensor([0.0, 1.0, 2.0]))),
        "sample": (lambda x, n: lz.sample(x, top_k=n, top_p=0.9, min_p=0.01), (logits, torch.tensor([1, 2, 5]))),
        "quantize": (lambda x: tuple(p for p in lz.quantize(x, "int4", granularity="block").tensors()),
                     (rand(4, 128),)),
        "quantize nvfp4": (lambda x: lz.dequantize(lz.quantize(x, "nvfp4")), (rand(4, 32),)),
        "dequantize": (lambda s: lz.dequantize(stored, torch.bfloat16) * s, (rand(32),)),
        "paged_batch": (
            lambda q, a, b, t, n: lz.paged_attention(q, a, b, lz.paged_batch(t, n, host_lens=[7, 4])), paged),
    }  # fmt: skip


CALLS = public_calls()
WITHOUT_GRADIENT = ("sample_topk", "sample_topp", "sample", "quantize", "quantize nvfp4")


def outs_of(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def test_every_public_op_has_a_traced_form_and_is_tried_here():
    early = set(PUBLIC) - set(LATE_OPS)
    assert early <= {op.op_id for op in functions.ops()}
    assert all(is_polyfilled_callable(functions[name]) for name in early)
    assert early <= {name.split()[0] for name in CALLS}


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_eager_numbers(name):
    function, inputs = CALLS[name]
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    with torch.no_grad():
        torch.manual_seed(0)
        want = function(*inputs)
        torch.manual_seed(0)
        got = compiled(*inputs)
    torch.testing.assert_close(got, want, check_stride=False)
    assert counter.frame_count == 1


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in WITHOUT_GRADIENT])
def test_one_graph_with_eager_gradients(name):
    function, inputs = CALLS[name]
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="eager")):
        leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        outs = outs_of(call(*leaves))
        outs[0].backward(torch.arange(outs[0].numel()).view(outs[0].shape).cos().to(outs[0].dtype))
        # An input that the first output does not depend on has no gradient, or one of zeros.
        results.append((outs, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]))
    torch.testing.assert_close(results[1], results[0], check_stride=False)


AOT = ("attention causal", "attention bool mask", "attention BSHD", "add_rms_norm", "rope in place", "linear",
       "embedding", "layer_norm")  # fmt: skip


@pytest.mark.req("R-PT-02", "R-PT-04")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", AOT)
def test_aot_autograd(name, grad):
    function, inputs = CALLS[name]
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_(grad and t.is_floating_point()) for t in inputs]
        outs = outs_of(call(*leaves))
        if grad:
            sum(o.sum() for o in outs).backward()
        results.append((outs, [t.grad for t in leaves]))
    torch.testing.assert_close(results[1], results[0], check_stride=False)


def graph_of(function, *inputs):
    counter = CompileCounterWithBackend("eager")
    torch.compile(function, fullgraph=True, backend=counter)(*inputs)
    return str([node.target for graph in counter.graphs for node in graph.graph.nodes])


def test_a_foreign_kernel_stands_in_the_graph_as_one_op_unless_a_gradient_is_needed(lab):
    lab.use(lab.kernel("vendor.rms_norm.fast", priority=90.0))
    x, weight = rand(3, 8), rand(8)
    assert "layerzero.rms_norm" in graph_of(lambda a, b: lz.rms_norm(a, b), x, weight)
    x.requires_grad_()
    assert "layerzero" not in graph_of(lambda a, b: lz.rms_norm(a, b), x, weight)
    with torch.no_grad():
        assert "layerzero.rms_norm" in graph_of(lambda a, b: lz.rms_norm(a, b), x, weight)
    named = graph_of(lambda a, b: lz.rms_norm(a, b, backend="vendor"), x, weight)
    assert "layerzero.rms_norm" in named


def test_attention_with_a_gradient_takes_sdpa_where_it_can_and_the_reference_elsewhere():
    q, k, v = (t.requires_grad_() for t in qkv())
    assert "scaled_dot_product" in graph_of(lambda a, b, c: lz.attention(a, b, c, is_causal=True), q, k, v)
    assert "scaled_dot_product" not in graph_of(lambda a, b, c: lz.attention(a, b, c, softcap=3.0), q, k, v)


def test_an_opaque_op_chooses_its_kernel_when_the_graph_runs(lab):
    lab.use(lab.kernel("vendor.rms_norm.fast", priority=90.0))
    x = rand(3, 8)
    counter = CompileCounter()
    compiled = torch.compile(lambda a: lz.rms_norm(a, backend=None) * 2, fullgraph=True, backend=counter)
    assert lab.run(compiled, x)[1] == ["vendor.rms_norm.fast"]
    lz.lock("rms_norm", "reference.rms_norm.plain")
    assert lab.run(compiled, x)[1] == ["reference.rms_norm.plain"]
    assert counter.frame_count == 1


def test_a_public_function_can_be_compiled_itself():
    x, weight = rand(3, 8), rand(8)
    torch.testing.assert_close(
        torch.compile(lz.rms_norm, fullgraph=True, backend="eager")(x, weight), lz.rms_norm(x, weight)
    )


# -- shapes and scalars that change ----------------------------------------------------------------
@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("dynamic", [None, True])
def test_changing_shapes_recompile_at_most_once(dynamic):
    counter = CompileCounter()

    def block(q, k, v, x, weight, eps):
        out = lz.attention(q, k, v, is_causal=True, scale=q.shape[-2] ** -0.5)
        return out.sum() + lz.layer_norm(lz.rms_norm(x, weight, eps), weight).sum()

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=dynamic)
    for seq in range(3, 9):
        args = (*qkv(seq, seq), rand(seq, 8), rand(8), 1e-6 * seq)
        torch.testing.assert_close(compiled(*args), block(*args))
    assert counter.frame_count <= 2


def test_a_dimension_marked_dynamic_compiles_once():
    counter = CompileCounter()
    compiled = torch.compile(lambda a, w: lz.rms_norm(a, w), fullgraph=True, backend=counter)
    for rows in range(2, 6):
        x, weight = rand(rows, 8), rand(8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, weight), lz.rms_norm(x, weight))
    assert counter.frame_count == 1


def test_symbolic_scalars():
    def chosen(logits, k, p):
        return lz.sample(logits, top_k=logits.shape[-1] // k, top_p=p, temperature=0.0)

    counter = CompileCounter()
    compiled = torch.compile(chosen, fullgraph=True, backend=counter, dynamic=True)
    for width, k, p in ((6, 2, 0.5), (8, 3, 0.6), (10, 4, 0.7), (12, 5, 0.8)):
        logits = rand(3, width)
        assert torch.equal(compiled(logits, k, p), chosen(logits, k, p))
    assert counter.frame_count <= 2


def test_a_growing_decode_loop_recompiles_little():
    query, keys, values, tables, _ = paged_inputs()
    counter = CompileCounter()
    compiled = torch.compile(lambda *a: lz.paged_attention(*a), fullgraph=True, backend=counter)
    for step in range(1, 7):
        lens = torch.tensor([step, step + 1], dtype=torch.int32)
        batch = lz.paged_batch(tables, lens)
        torch.testing.assert_close(compiled(query, keys, values, batch), lz.paged_attention(query, keys, values, batch))
    assert counter.frame_count <= 3


def test_the_form_that_plans_at_every_call_is_one_graph():
    inputs = paged_inputs()
    counter = CompileCounter()
    compiled = torch.compile(lambda *a: lz.paged_attention(*a), fullgraph=True, backend=counter)
    for lens in ([7, 4], [3, 8], [1, 1]):
        args = (*inputs[:4], torch.tensor(lens, dtype=torch.int32))
        torch.testing.assert_close(compiled(*args), lz.paged_attention(*args))
    assert counter.frame_count == 1


# -- modes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast(backend, grad):
    q, k, v = (t.requires_grad_(grad) for t in qkv())
    weight = rand(6, 8).requires_grad_(grad)

    def block(q, k, v, weight):
        out = lz.attention(q, k, v, is_causal=True)
        return out, lz.linear(out, weight), lz.rms_norm(q)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = block(q, k, v, weight)
        got = torch.compile(block, fullgraph=True, backend=backend)(q, k, v, weight)
    torch.testing.assert_close(got, want, check_stride=False, rtol=2e-2, atol=2e-2)


def test_dropout_draws_from_the_graphs_random_numbers():
    q, k, v = qkv()
    compiled = torch.compile(lambda a, b, c: lz.attention(a, b, c, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first = compiled(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(compiled(q, k, v), first)


def test_vmap_inside_a_compiled_region():
    x = rand(4, 3, 8)
    compiled = torch.compile(lambda a: torch.vmap(lambda row: lz.rms_norm(row))(a), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.stack([lz.rms_norm(row) for row in x]))


# -- what breaks a graph ---------------------------------------------------------------------------
def test_what_is_no_op_breaks_the_graph_and_runs_natively():
    def explained(x):
        return lz.rms_norm(x) + 1, lz.explain("rms_norm", x).chosen

    x = rand(3, 8)
    counter = CompileCounter()
    out, chosen = torch.compile(explained, backend=counter)(x)
    torch.testing.assert_close(out, lz.rms_norm(x) + 1)
    assert chosen == lz.which("rms_norm", x)
    assert counter.frame_count == 1  # the selection itself was not traced
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(explained, fullgraph=True, backend="eager")(x)


def test_a_planned_call_breaks_the_graph_and_runs():
    x = rand(3, 8)
    planned = lz.plan("rms_norm", x)
    torch.testing.assert_close(torch.compile(lambda a: planned(a) + 1, backend="eager")(x), lz.rms_norm(x) + 1)


def test_a_generator_breaks_the_graph_and_is_used():
    logits = rand(3, 11)

    def drawn(x, generator):
        return lz.sample_topk(x * 2, 5, generator=generator) + 1

    want = drawn(logits, torch.Generator().manual_seed(7))
    counter = CompileCounter()
    got = torch.compile(drawn, backend=counter)(logits, torch.Generator().manual_seed(7))
    assert torch.equal(got, want)
    assert counter.frame_count == 2  # before and after the draw; the kernel itself is not compiled


def test_a_batch_planned_inside_without_host_lengths_breaks_the_graph():
    def planned(q, a, b, tables, lens):
        return lz.paged_attention(q, a, b, lz.paged_batch(tables, lens)) + 1

    inputs = paged_inputs()
    torch.testing.assert_close(torch.compile(planned, backend="eager")(*inputs), planned(*inputs))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="host_lens"):
        torch.compile(planned, fullgraph=True, backend="eager")(*inputs)


def test_a_call_that_means_nothing_is_refused_with_its_reason():
    q, k, v = qkv()
    compiled = torch.compile(lambda a, b, c: lz.attention(a, b, c, scale=float("nan")), fullgraph=True, backend="eager")
    with pytest.raises(lz.errors.InvalidInputError) as caught:
        compiled(q, k, v)
    assert caught.value.code == "SCALE_INVALID"


@pytest.mark.slow
@pytest.mark.needs_tool("g++")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # Inductor's own
@pytest.mark.req("R-PT-02", "R-PT-04")
@pytest.mark.parametrize("grad", [False, True])
def test_inductor(grad):
    def block(q, k, v, x, weight):
        return lz.attention(q, k, v, is_causal=True), lz.layer_norm(lz.rms_norm(x, weight) * 2, weight)

    inputs = [t.requires_grad_(grad) for t in (*qkv(), rand(6, 8), rand(8))]
    compiled = torch.compile(block, fullgraph=True)
    want, got = block(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want, check_stride=False)
    if grad:
        left, right = (torch.autograd.grad(sum(o.sum() for o in outs), inputs) for outs in (got, want))
        torch.testing.assert_close(left, right, check_stride=False)
