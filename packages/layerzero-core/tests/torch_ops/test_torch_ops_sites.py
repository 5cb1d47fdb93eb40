"""The overloads `call` of compiled graphs: what they run, what they remember, and that they cost no copy."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero.model.enums import Layout
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state
from layerzero.torch_ops import library, sites

BUILTIN = load_plugins(entry_points=()).registry
FAST, OTHER = "vendor.attention.fast", "rival.attention.fast"


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K = rand(2, 6, 4, 8), rand(2, 6, 2, 8)


@pytest.fixture
def vendor(lab):
    own = frozenset({Layout.BSHD})
    made = [lab.kernel(FAST, priority=95.0, layouts=own), lab.kernel(OTHER, priority=90.0, layouts=own)]
    state.use(BUILTIN.add(made))
    sites._sites.clear()
    torch._dynamo.reset()
    yield lab
    torch._dynamo.reset()
    lz.reset()


def attend(q, k):
    return lz.attention(q, k, k, is_causal=True, layout="BSHD")


def compiled(function, backend="eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def opaque(counter):
    return [str(n.target) for n in counter.graphs[-1].graph.nodes if "layerzero" in str(n.target)]


@pytest.mark.req("R-PT-02")
def test_the_second_run_of_a_graph_describes_and_selects_nothing(vendor, monkeypatch):
    lz.configure(prefer=["vendor"])
    call, counter = compiled(attend)
    with torch.no_grad():
        torch.testing.assert_close(call(Q, K), attend(Q, K))
        firsts = []
        monkeypatch.setattr(sites, "_first", lambda *args: firsts.append(args))
        before = (state.counters.misses, state.counters.selections)
        for _ in range(3):
            got, ran = vendor.run(call, Q, K)
            assert ran == [FAST]
    assert firsts == [] and (state.counters.misses, state.counters.selections) == before
    assert opaque(counter) == ["layerzero.attention.call"] and counter.frame_count == 1
    monkeypatch.undo()
    torch.testing.assert_close(got, attend(Q, K))


@pytest.mark.req("R-PT-02")
def test_a_lock_a_scope_and_a_fault_are_seen_without_another_trace(vendor):
    lz.configure(prefer=["vendor"])
    call, counter = compiled(attend)
    with torch.no_grad():
        want = attend(Q, K)
        assert [vendor.run(call, Q, K)[1] for _ in range(2)] == [[FAST]] * 2
        with lz.prefer(OTHER):
            assert [vendor.run(call, Q, K)[1] for _ in range(2)] == [[OTHER]] * 2
        assert vendor.run(call, Q, K)[1] == [FAST]
        vendor.faults[FAST] = RuntimeError("it broke")
        for _ in range(8):  # until its breaker is open, and after
            got, ran = vendor.run(call, Q, K)
            assert ran == [OTHER]
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_a_switch_of_torch_is_seen_by_a_kernel_that_is_kept(vendor):
    lz.lock("attention", FAST)
    call, _ = compiled(attend)
    with torch.no_grad():
        call(Q, K)
        site = next(iter(sites._sites.values()))
        assert site.bound.kernel_id == FAST and site.world is state.world
        site.bound = type(site.bound)(site.bound.run, lambda: False, site.bound.kernel, site.bound.plan, False)
        _, ran = vendor.run(call, Q, K)  # its guard says no: chosen again
        assert ran == [FAST] and site.bound.guard is None


def test_the_string_of_a_call_says_everything_by_itself(vendor):
    """A process that has only the graph, from a cache, knows what to run."""
    call, counter = compiled(lambda q, k: lz.attention(q, k, k, scale=0.25, window=(2, 0), softcap=3.0, layout="BSHD"))
    with torch.no_grad():
        want = call(Q, K)
        node = next(n for n in counter.graphs[0].graph.nodes if "layerzero" in str(n.target))
        sites._sites.clear()
        found = torch.ops.layerzero.attention.call(Q, K, K, None, None, node.args[5])
        torch.testing.assert_close(found, want)
        # Other tensors under the same words: right, and never kept.
        longer, shorter = rand(1, 9, 4, 8), rand(1, 9, 2, 8)
        wide = torch.ops.layerzero.attention.call(
            longer, shorter, shorter, None, None, node.args[5].replace("[2, 6", "[7, 7")
        )
        torch.testing.assert_close(
            wide, lz.attention(longer, shorter, shorter, scale=0.25, window=(2, 0), softcap=3.0, layout="BSHD")
        )
        assert [site.world for site in sites._sites.values()].count(None) == 1


def test_open_sizes_and_open_numbers_are_right_too(vendor):
    call, counter = compiled(lambda q, k, s: lz.attention(q, k, k, scale=s, layout="BSHD"))
    with torch.no_grad():
        for seq, scale in ((6, 0.5), (7, 0.25), (9, 0.75), (11, 0.1)):
            q, k = rand(2, seq, 4, 8), rand(2, seq, 2, 8)
            torch.testing.assert_close(call(q, k, scale), lz.attention(q, k, k, scale=scale, layout="BSHD"))
    assert counter.frame_count <= 3


@pytest.mark.req("R-PT-06")
def test_autocast_around_the_graph_is_obeyed(vendor):
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        call, _ = compiled(attend, backend)
        with torch.no_grad():
            plain = call(Q, K)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(2):
                    got = call(Q, K)
                    torch.testing.assert_close(got, attend(Q, K), rtol=1.6e-2, atol=1e-2)
                    assert got.dtype == torch.bfloat16
            assert call(Q, K).dtype == plain.dtype == torch.float32


def test_a_call_that_names_its_backend_keeps_its_gradient(vendor):
    q, k = (item.clone().requires_grad_() for item in (Q, K))

    def named(q, k):
        return lz.attention(q, k, k, layout="BSHD", backend="vendor")

    call, counter = compiled(named, "aot_eager")
    grads = [torch.autograd.grad(f(q, k).square().sum(), (q, k)) for f in (call, named)]
    torch.testing.assert_close(*grads)
    assert opaque(counter) == ["layerzero.attention.default"]


@pytest.mark.req("R-PT-01")
def test_every_op_has_an_overload_for_graphs_that_traces_like_the_op():
    namespace = library.namespace()
    for op in library.opaque_ops():
        packet = getattr(namespace, op.name)
        assert set(packet.overloads()) == {"default", "call"}, op.name
        assert [str(r.type) for r in packet.call._schema.returns] == [
            str(r.type) for r in packet.default._schema.returns
        ]
    x, w = rand(3, 8), rand(8)
    call = sites.spelled((Q, K, K, None, None), "top_left", None, "BSHD", None, None, None)
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(namespace.attention.call, (Q, K, K, None, None, call), test_utils=checked)
    torch.library.opcheck(namespace.rms_norm.call, (x, w, 1e-6), test_utils=checked)
    torch.library.opcheck(namespace.linear.call, (x, rand(6, 8), None, "silu"), test_utils=checked)


@pytest.mark.needs_tool("g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.req("R-PT-02")
def test_inductor_copies_nothing_around_an_opaque_attention(vendor):
    """The fused kernels around a foreign attention on [B, S, H, D] are as many as around torch's own."""
    from torch._inductor.utils import run_and_get_code

    # scores of a usual size: large ones multiply the last bits of the sums before them
    x, gain, w = rand(2, 20, 32), rand(32), rand(64, 32) / 8
    cos, sin = rand(20, 4).cos(), rand(20, 4).sin()

    def block(x, backend):
        q, k = lz.linear(lz.rms_norm(x, gain), w, backend="torch").split((32, 32), dim=-1)
        q, k = lz.rope(q.unflatten(-1, (4, 8)), k.unflatten(-1, (4, 8)), cos, sin, layout="BSHD")
        return lz.attention(q, k, k, layout="BSHD", backend=backend).flatten(-2) + x

    counts = []
    for backend in ("sdpa", "vendor"):
        torch._dynamo.reset()
        with torch.no_grad():
            got, (source,) = run_and_get_code(torch.compile(block, fullgraph=True), x, backend)
            torch.testing.assert_close(got, block(x, backend), rtol=1e-5, atol=1e-5)
        body = source[source.index("def call(") :]
        assert ("layerzero.attention.call" in body) is (backend == "vendor")
        assert "clone" not in body and ".contiguous(" not in body
        counts.append(len(re.findall(r"^\s+\w*cpp_fused\w*\(", body, re.MULTILINE)))
    assert counts[1] <= counts[0] and counts[0] > 0
