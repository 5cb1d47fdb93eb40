"""The scratch memory that the kernels declare is what they take: measured here tensor by tensor, on a GPU by torch."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world, describe
from layerzero.numerics import assert_close, tolerance
from layerzero.selection.engine import select

# torch says so once, on a CPU without bfloat16 instructions
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

ROUTES = ("spread", "one expert", "one slot", "elsewhere")


class Peak(TorchDispatchMode):
    """Bytes of all storages that ops made inside the block and that are alive at once, at the most."""

    def __init__(self):
        super().__init__()
        self.live = 0
        self.most = 0
        self.known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, torch.Tensor):
                self.count(item.untyped_storage())
        return out

    def count(self, storage):
        if storage in self.known:
            return
        size = storage.nbytes()
        self.known[storage] = size
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.free, size)

    def free(self, size):
        self.live -= size

    def given(self, *tensors):
        """What was there before does not count."""
        for item in tensors:
            self.known[item.untyped_storage()] = 0


def layer(tokens, route, dtype, *, experts=8, top_k=2, hidden=64, inner=96, device="cpu"):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator).mul(0.1).to(device, dtype)

    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :top_k].to(device)
    if route == "one expert":
        ids = torch.full_like(ids, 3)
    elif route == "one slot":
        ids[:, 0] = 5
    elif route == "elsewhere":
        ids = ids + 100
    weights = torch.rand(tokens, top_k, generator=generator).to(device)
    return normal(tokens, hidden), normal(experts, 2 * inner, hidden), normal(experts, hidden, inner), weights, ids


def kernel_named(kernel_id):
    return current_world().registry.kernels[kernel_id]


def context(args, backend=None):
    """What selection sees of a call of `lz.moe`, with the very number of tokens."""
    return describe(
        public_op("moe"), (*args, "silu", 0, None, None, 1.702, None, False), None, backend, current_world()
    )


@pytest.mark.parametrize("kernel_id", ["torch.moe.segments", "torch.moe.grouped_cpu", "reference.moe.plain"])
@pytest.mark.parametrize(("dtype", "counts"), [(torch.float32, (1, 40, 96)), (torch.float16, (8,))])
@pytest.mark.req("R-MOE-02")
def test_the_declared_workspace_bounds_what_a_forward_takes(kernel_id, dtype, counts):
    spec = kernel_named(kernel_id)
    run = resolve(spec)
    for tokens in counts:
        taken = {}
        for route in ROUTES:
            args = layer(tokens, route, dtype)
            declared = spec.workspace_bytes(context(args))
            with torch.no_grad(), Peak() as peak:
                peak.given(*args)
                run(*args, "silu", 0, None, None, 1.702, None, False)
            taken[route] = peak.most
            assert peak.most <= declared, f"{route}, {tokens} tokens: {peak.most} bytes, declared {declared}"
        # and the bound is near what the worst routing takes; a single token drowns in the indices
        assert tokens == 1 or max(taken.values()) * 1.6 >= declared, f"{tokens}: {taken}, declared {declared}"


def block(kernel_id, dtype):
    """Canonical arguments of `mlp`, all its forms, and of `grouped_gemm`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).mul(0.1).to(dtype)

    if ".grouped_gemm." in kernel_id:
        for sizes in ([0, 7, 0, 9], [16, 0, 0, 0], [2, 3, 4, 0]):
            yield normal(16, 48), normal(4, 56, 48), torch.tensor(sizes)
        return
    x, down = normal(16, 48), normal(40, 64)
    yield x, normal(128, 48), down, None, "silu", None, None, None
    yield x, normal(64, 48), down, normal(64, 48), "gelu", normal(64), normal(64), normal(40)
    yield x, normal(64, 48), down, None, "relu", normal(64), None, None


@pytest.mark.parametrize(
    "kernel_id",
    [
        "reference.mlp.plain", "torch.mlp.native", "reference.grouped_gemm.plain", "torch.grouped_gemm.segments",
        "torch.grouped_gemm.grouped_cpu",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_and_grouped_products_keep_to_what_they_declare(kernel_id, dtype):
    spec = kernel_named(kernel_id)
    most = 0
    for args in block(kernel_id, dtype):
        with torch.no_grad(), Peak() as peak:
            peak.given(*(item for item in args if isinstance(item, torch.Tensor)))
            out = resolve(spec)(*args)
        ctx = describe(public_op(spec.op), args, None, None, current_world())
        room = spec.workspace_bytes(ctx) + out.nbytes
        assert peak.most <= room, f"{peak.most} bytes, declared {room} with the result"
        most = max(most, peak.most)
    assert most * 2 >= room


@pytest.mark.req("R-MOE-02")
def test_a_kernel_that_would_not_fit_is_left_out():
    """Between what the two kernels need, the smaller runs; below both, the reference; the reason names both numbers."""
    args = layer(256, "spread", torch.float32, top_k=6)  # the end of a bucket: selection looks at that
    ctx = context(args)
    with lz.scoped(deny=["cpu"]):
        world = current_world()
    need = {name: kernel_named(name).workspace_bytes(ctx) for name in ("torch.moe.grouped_cpu", "torch.moe.segments")}
    assert need["torch.moe.segments"] < need["torch.moe.grouped_cpu"]
    room = need["torch.moe.segments"]
    chosen = {free: select(ctx, replace(world, free_memory=free)) for free in (2 * sum(need.values()), room, room - 1)}
    assert [d.chosen for d in chosen.values()] == [*need, "reference.moe.plain"]
    refused = next(c for c in chosen[room].candidates if c.kernel_id == "torch.moe.grouped_cpu")
    assert refused.reasons[0].code == "MEMORY_HEADROOM_EXCEEDED"
    assert (refused.reasons[0].value, refused.reasons[0].limit) == (need["torch.moe.grouped_cpu"], room)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_id", ["torch.moe.segments", "torch.moe.grouped"])
@pytest.mark.req("R-MOE-02")
def test_the_declared_workspace_bounds_what_a_gpu_takes(kernel_id):
    spec = kernel_named(kernel_id)
    run = resolve(spec)
    for route in ROUTES:
        args = layer(4096, route, torch.bfloat16, hidden=512, inner=768, device="cuda")
        ctx = context(args, kernel_id)
        assert not spec.check(ctx), [str(item) for item in spec.check(ctx)]
        with torch.no_grad():
            run(*args, "silu", 0, None, None, 1.702, None, False)  # the BLAS takes a workspace of its own, once
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = run(*args, "silu", 0, None, None, 1.702, None, False)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= spec.workspace_bytes(ctx) + out.numel() * out.element_size()


@pytest.mark.gpu
@pytest.mark.req("R-MOE-02")
def test_the_grouped_kernel_is_right_on_a_gpu_and_inside_a_graph():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("declared from SM 9.0 on")
    for route in ROUTES:
        args = layer(96, route, torch.bfloat16, device="cuda")
        want = lz.moe(*(t.double() if t.is_floating_point() else t for t in args), backend="reference")
        with torch.no_grad():
            got = lz.moe(*args, backend="torch.moe.grouped")
            assert_close(got, want, tolerance("moe", torch.bfloat16))
            run = resolve(kernel_named("torch.moe.grouped"))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run(*args, "silu", 0, None, None, 1.702, None, False)
            args[4].copy_(args[4].flip(0))  # another routing, the same graph
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, run(*args, "silu", 0, None, None, 1.702, None, False))
