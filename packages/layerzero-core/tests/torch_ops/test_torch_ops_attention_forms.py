"""torch's attention kernels in a traced graph: the aten op of the kernel that was selected, adapted as in eager."""

from __future__ import annotations

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.backends.sdpa.kernels import _full_bias
from layerzero.backends.sdpa.traced import _bias
from layerzero.device.catalogue import named_device
from layerzero.dispatch import modes
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state

BUILTIN = load_plugins(entry_points=()).registry
CUDA = {name: f"aten._scaled_dot_product_{name}_attention.default" for name in ("flash", "efficient", "cudnn")}


@pytest.fixture(autouse=True)
def fresh():
    lz.reset()
    state.use(BUILTIN)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    lz.reset()


@pytest.fixture
def fake(monkeypatch):
    """Makes fake tensors that lie on an H200."""
    monkeypatch.setitem(modes._devices, torch.device("cuda:0"), named_device("h200"))
    with FakeTensorMode(), torch.no_grad():
        yield lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="cuda:0")


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def targets(counter, which=-1):
    return [str(node.target) for node in counter.graphs[which].graph.nodes if node.op == "call_function"]


def compiled(function, backend="eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


# -- CUDA, on fake tensors ---------------------------------------------------------------------------
@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("name", CUDA)
def test_the_graph_holds_the_aten_op_of_the_kernel_that_is_locked(fake, name, layout):
    lz.lock("attention", f"sdpa.attention.{name}")
    heads, seq = (1, 2) if layout == "BHSD" else (2, 1)
    q, k = [2, 0, 0, 64], [2, 0, 0, 64]
    q[heads], k[heads], q[seq], k[seq] = 8, 8 if name == "efficient" else 2, 128, 128
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        call, counter = compiled(lambda q, k: lz.attention(q, k, k, is_causal=True, layout=layout), backend)
        out = call(fake(*q), fake(*k))
        found = targets(counter)
        assert CUDA[name] in found and not [
            word for word in found if "layerzero" in word or "scaled_dot_product_attention" in word
        ]
        assert (out.shape, out.dtype, out.device.type) == (torch.Size(q), torch.bfloat16, "cuda")
        assert out.stride(-1) == 1


@pytest.mark.parametrize("name", CUDA)
def test_options_are_those_of_the_eager_kernel(fake, name):
    """A negative scale turns the query; the log-sum-exp is [B, H, Sq] in float32, whatever the kernel pads."""
    q, k = fake(2, 8, 100, 64), fake(2, 8, 128, 64)
    call, counter = compiled(
        lambda q, k: lz.attention(q, k, k, scale=-0.5, return_lse=True, backend=f"sdpa.attention.{name}")
    )
    out, lse = call(q, k)
    assert (lse.shape, lse.dtype) == ((2, 8, 100), torch.float32)
    assert out.shape == (2, 8, 100, 64)
    node = next(n for n in counter.graphs[0].graph.nodes if str(n.target) == CUDA[name])
    assert node.kwargs["scale"] == 0.5 and "neg" in str(targets(counter)[0])


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("name", CUDA)
def test_an_open_length_is_neither_specialised_nor_left_opaque(fake, name):
    def block(x):
        q = x.unflatten(-1, (8, 64)).transpose(1, 2)
        return lz.attention(q, q, q, is_causal=True, backend=f"sdpa.attention.{name}")

    call, counter = compiled(block)
    for batch, seq in ((2, 128), (3, 77), (5, 96)):
        assert call(fake(batch, seq, 512)).shape == (batch, 8, seq, 64)
    assert counter.frame_count == 2  # the first is static
    assert CUDA[name] in targets(counter)


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_bias_of_open_length_guards_no_multiple(fake, name):
    def block(x):
        q = x.unflatten(-1, (8, 64)).transpose(1, 2)
        bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        return lz.attention(q, q, q, bias, backend=f"sdpa.attention.{name}")

    call, counter = compiled(block)
    for batch, seq in ((2, 128), (3, 77), (5, 96), (3, 41)):
        call(fake(batch, seq, 512))
    assert counter.frame_count == 2
    assert CUDA[name] in targets(counter)


# -- the bias, by numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (7, 1), (2, 1, 7, 9), (2, 4, 7, 16), (1, 1, 1, 9), (16,), (9,)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_bias_in_a_graph_is_that_of_the_eager_kernel(shape, kind):
    cols = shape[-1] if shape[-1] > 1 else 9
    query, key = rand(2, 4, 7, 8).bfloat16(), rand(2, 4, cols, 8).bfloat16()
    mask = rand(*shape) > 0 if kind == "bool" else rand(*shape)
    found = _bias(mask, query, key)
    torch.testing.assert_close(found, _full_bias(mask, query, key), rtol=0, atol=0)
    assert found.dtype == query.dtype and found.stride(-1) == 1
    assert all(step % 8 == 0 for step in found.stride()[:-1])  # 16 bytes


# -- the CPU, by numbers -----------------------------------------------------------------------------
Q, K = rand(2, 4, 6, 16), rand(2, 2, 9, 16)
ADAPTED = {
    "window": {"window": (3, 0), "is_causal": "bottom_right"},
    "bool": {"attn_mask": rand(6, 9) > 0},
    "float": {"attn_mask": rand(2, 1, 6, 9)},
    "lower_right": {"is_causal": "bottom_right"},
    "alibi": {"alibi_slopes": rand(4).abs()},
    "negative": {"scale": -0.3},
}


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("kernel", ["flash_cpu", "math"])
@pytest.mark.parametrize("options", ADAPTED)
def test_what_adapts_the_inputs_is_written_out_with_the_kernel(kernel, options):
    def call(q, k):
        return lz.attention(q, k, k, backend=f"sdpa.attention.{kernel}", **ADAPTED[options])

    with torch.no_grad():
        want = call(Q, K)
        graph, counter = compiled(call)
        torch.testing.assert_close(graph(Q, K), want, rtol=1e-5, atol=1e-5)
    found = str(targets(counter))
    assert "layerzero" not in found
    assert ("flash_attention_for_cpu" if kernel == "flash_cpu" else "attention_math") in found


def test_one_graph_holds_kernels_with_different_adaptations():
    def call(q, k):
        flat = lz.attention(q[:, 0], k[:, 0], k[:, 0])
        turned = lz.attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), layout="BSHD")
        return lz.attention(q, k, k, is_causal="bottom_right"), flat, turned

    with torch.no_grad():
        graph, counter = compiled(call)
        torch.testing.assert_close(graph(Q, K), call(Q, K), rtol=1e-5, atol=1e-5)
    assert "layerzero" not in str(targets(counter)) and counter.frame_count == 1


@pytest.mark.skipif(not os.environ.get("LAYERZERO_PROVE"), reason="long: run by make prove NAME=compile")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.req("R-PT-02", "R-PT-04")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernel", ["flash_cpu", "math"])
@pytest.mark.parametrize("options", ADAPTED)
def test_inductor_computes_adapted_attention_as_eager_does(kernel, options, grad):
    lz.lock("attention", f"sdpa.attention.{kernel}")

    def call(q, k):
        return lz.attention(q, k, k, **ADAPTED[options])

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        given = [item.clone().requires_grad_(grad) for item in (Q, K)]
        out = function(*given)
        found.append((out, torch.autograd.grad(out.square().sum(), given) if grad else ()))
    torch.testing.assert_close(found[1], found[0], check_stride=False, rtol=1e-4, atol=1e-4)
