"""Grouped attention under stress: long sequences, many groups, large batches, repeated calls; and what is never held.

Results of long calls are checked at picked rows and keys, by the formula in float64: no score matrix is made here
either. The long lanes run on a GPU; smaller ones of the same kind run everywhere.
"""

from __future__ import annotations

import ast
import gc
import itertools
import math
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.dispatch.compiling import queue
from layerzero.model.device import DeviceSpec
from layerzero.numerics import Tolerance, assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
GPU = torch.cuda.is_available()
GIB = 2**30


def blocked(device):
    """Every implementation that holds no score matrix and runs on this kind of device."""
    if device == "cuda" and not GPU:
        return [pytest.param(None, id="no-gpu")]
    spec = DeviceSpec.detect(device)
    kernels = [k for k in lz.list_kernels("grouped_attention", available=True) if not k.check_device(spec)]
    return [pytest.param(k.kernel_id, id=k.kernel_id) for k in kernels if k.backend != "reference"]


def missing_room(needed, free):
    """Why a test of this size cannot run, or None."""
    return None if free >= needed else f"needs {needed / GIB:.1f} GiB of memory, {free / GIB:.1f} are free"


def need_room(gib):
    why = missing_room(gib * GIB, torch.cuda.mem_get_info()[0])
    if why:
        pytest.skip(why)


# What these compile takes seconds, so it is compiled here; others take part where their artifacts are there already.
COMPILED_HERE = ("triton", "flashattn4")


def need_kernel(kernel, args):
    """Skip unless dispatch takes this very call; then have the kernel compiled on a small one of the same kind."""
    spec = next(k for k in lz.list_kernels("grouped_attention") if k.kernel_id == kernel)
    with lz.scoped(jit="block" if spec.backend in COMPILED_HERE else "background"):
        found = lz.explain("grouped_attention", *args, backend=kernel).candidates
        mine = next(item for item in found if item.kernel_id == kernel)
        if not mine.accepted:
            pytest.skip(f"{kernel}: " + "; ".join(map(str, mine.reasons)))
        if spec.jit:
            like = [t[:256].detach().clone().requires_grad_(t.requires_grad) for t in args[:3]]
            lens = ([0, 128, 256], [0, 256], [[128], [256]])
            parts = (torch.tensor(item, dtype=torch.int32, device=args[0].device) for item in lens)
            out = lz.grouped_attention(*like, lz.grouped_batch(*parts, host_lens=lens), backend=kernel)
            if out.requires_grad:
                out.sum().backward()
            torch.cuda.synchronize()  # a fault shows here, in the test that made it


def scene(q_lens, seq_lens, kv_lens, *, heads, kv_heads, dim, dtype, device, scale=1.0):
    gen = torch.Generator(device).manual_seed(0)
    shapes = (sum(map(sum, q_lens)), heads, dim), *[(sum(seq_lens), kv_heads, dim)] * 2
    tensors = [torch.randn(shape, generator=gen, device=device, dtype=dtype) * scale for shape in shapes]
    parts = [0, *itertools.accumulate(itertools.chain(*q_lens))], [0, *itertools.accumulate(seq_lens)], kv_lens
    batch = lz.grouped_batch(*(torch.tensor(item, dtype=torch.int32, device=device) for item in parts), host_lens=parts)
    return *tensors, batch


def steps(groups, tokens):
    """One sequence in equal steps: group g asks with step g and attends everything up to its end."""
    step = tokens // groups
    return [[step]] * groups, [tokens], [[step * (g + 1)] for g in range(groups)]


def picked(batch, count=3):
    """Some rows of every segment, its first and last among them, with the segment."""
    for s in batch.segments():
        for row in {0, s.q_len // 3, s.q_len - 1} if count == 3 else {0, s.q_len - 1}:
            yield s, row


def weights_of(q, k, s, row, head):
    """Softmax weights of one query row over the keys it sees, and those keys."""
    keys = slice(s.k_start, s.k_start + s.kv_len - s.q_len + row + 1)
    scores = k[keys, head * k.shape[1] // q.shape[1]].double() @ q[s.q_start + row, head].double()
    return torch.softmax(scores / math.sqrt(q.shape[2]), dim=0), keys


def check_forward(q, k, v, batch, out, count=3):
    for s, row in picked(batch, count):
        for head in (0, q.shape[1] - 1):
            weights, keys = weights_of(q, k, s, row, head)
            want = weights @ v[keys, head * k.shape[1] // q.shape[1]].double()
            assert_close(out[s.q_start + row, head], want, tolerance("grouped_attention", q.dtype))


def check_backward(q, k, v, batch, out, lse, grad, grads):
    """dQ of picked rows, dK and dV of picked keys, from their definitions; `out` and `lse` are those of the forward."""
    limit = Tolerance(1e-4, 1e-4) if q.dtype is torch.float32 else Tolerance(1e-2, 1e-2)
    scale, ratio = 1 / math.sqrt(q.shape[2]), q.shape[1] // k.shape[1]
    for s, row in picked(batch, 2):
        weights, keys = weights_of(q, k, s, row, 0)
        share = v[keys, 0].double() @ grad[s.q_start + row, 0].double()
        want = scale * ((share - weights @ share) * weights) @ k[keys, 0].double()
        assert_close(grads[0][s.q_start + row, 0], want, limit)
    out = out.double()
    for key in (0, k.shape[0] // 2, k.shape[0] - 1):
        want_k, want_v = torch.zeros(2, q.shape[2], dtype=torch.float64, device=q.device)
        for s in batch.segments():
            position = torch.arange(s.q_len, device=q.device) + s.kv_len - s.q_len + s.k_start
            rows = (torch.arange(s.q_start, s.q_start + s.q_len, device=q.device))[position >= key]
            if key >= s.k_start + s.kv_len or key < s.k_start:
                continue
            for head in range(ratio):
                queries, given = q[rows, head].double(), grad[rows, head].double()
                weights = torch.exp(scale * queries @ k[key, 0].double() - lse[rows, head].double())
                want_v += weights @ given
                want_k += scale * (weights * (given @ v[key, 0].double() - (given * out[rows, head]).sum(1))) @ queries
        assert_close(grads[1][key, 0], want_k, limit)
        assert_close(grads[2][key, 0], want_v, limit)


def leaves_of(args):
    return [t.detach().requires_grad_() for t in args[:3]]


def train(args, kernel, weight):
    leaves = leaves_of(args)
    out = lz.grouped_attention(*leaves, args[3], backend=kernel)
    return out.detach(), torch.autograd.grad(out, leaves, weight)


# -- everywhere ------------------------------------------------------------------------------------
class Largest(TorchDispatchMode):
    """Remembers the largest tensor any op made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple) else (out,):
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


@pytest.mark.req("R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cpu"))
def test_no_score_matrix_is_ever_made(kernel):
    """The largest tensor of forward and backward is an input, not queries times keys."""
    args = scene(*steps(2, 512), heads=1, kv_heads=1, dim=8, dtype=torch.float32, device="cpu")
    largest, leaves = Largest(), leaves_of(args)
    # Planned: under a dispatch mode the public function is one op, inside of which no mode looks.
    planned = lz.plan("grouped_attention", *leaves, args[3], backend=kernel)
    with largest:
        torch.autograd.grad(planned(*leaves, args[3]), leaves, torch.ones_like(args[0]))
    assert 0 < largest.numel <= 512 * 8 < 256 * 512


@pytest.mark.req("R-GRP-06", "R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cpu"))
@pytest.mark.parametrize("tokens", [2048, pytest.param(32_768, marks=pytest.mark.stress)])
def test_backward_of_a_long_sequence(kernel, tokens):
    args = scene(*steps(4, tokens), heads=2, kv_heads=1, dim=8, dtype=torch.float32, device="cpu")
    weight = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1))
    out, grads = train(args, kernel, weight)
    check_forward(*args, out)
    _, lse = lz.grouped_attention(*args, return_lse=True)
    check_backward(*args, out, lse, weight, grads)


@pytest.mark.req("R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cpu"))
def test_ten_calls_leave_nothing_behind(kernel):
    args = scene(*steps(3, 96), heads=4, kv_heads=2, dim=8, dtype=torch.float32, device="cpu")
    counts, seen = [], []
    for turn in range(10):
        leaves = [t.detach().requires_grad_() for t in args[:3]]
        out = lz.grouped_attention(*leaves, args[3], backend=kernel)
        out.sum().backward()
        seen.append(weakref.ref(out))
        del out, leaves
        if turn in (2, 9):
            counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
    assert all(item() is None for item in seen), "a result is kept alive"  # freed without the collector's help
    assert counts[0] == counts[1]


def test_a_second_backward_needs_the_graph_to_be_kept():
    args = scene(*steps(2, 32), heads=2, kv_heads=1, dim=8, dtype=torch.float64, device="cpu")
    leaves = [t.requires_grad_() for t in args[:3]]
    out = lz.grouped_attention(*leaves, args[3]).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


@pytest.mark.req("R-GRP-15")
def test_a_test_without_room_says_how_much_it_needs():
    assert missing_room(2 * GIB, 3 * GIB) is None
    assert missing_room(12 * GIB, 3 * GIB) == "needs 12.0 GiB of memory, 3.0 are free"


@pytest.mark.req("R-GRP-14")
def test_the_suite_is_as_large_as_it_was_asked_to_be(request):
    """9 unit, 4 integration and 9 stress tests, 50 executions and more; ours are counted where they stand."""
    packages = Path(__file__).parents[3]
    files = {
        packages / "layerzero-core/tests/ops/test_grouped_attention.py": 9,
        packages / "layerzero-models/tests/test_zigzag.py": 4,
        packages / "layerzero-core/tests/ops/test_grouped_stress.py": 9,
    }
    for file, least in files.items():
        names = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
        assert sum(name.startswith("test_") for name in names) >= least, file.name
    collected = [item for item in request.session.items if item.path in files]
    if {item.path for item in collected} != set(files) or request.config.option.keyword:
        pytest.skip("only a part of the suite was collected")
    assert len(collected) >= 50


# -- on a GPU --------------------------------------------------------------------------------------
LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}


@pytest.mark.gpu
@pytest.mark.req("R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cuda"))
@pytest.mark.parametrize("tokens", [65_536, 131_072])
def test_64k_and_128k_tokens(kernel, tokens):
    need_room(12)
    args = scene(*steps(2, tokens), **LLAMA, dtype=torch.bfloat16, device="cuda")
    need_kernel(kernel, args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out = lz.grouped_attention(*args, backend=kernel)
    # One output, its log-sum-exp and pieces of them; a score matrix would take hundreds of GiB.
    assert torch.cuda.max_memory_allocated() - before < 4 * args[0].nbytes
    check_forward(*args, out)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-02", "R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cuda"))
@pytest.mark.parametrize("groups", [8, 16])
def test_many_groups_of_a_long_sequence(kernel, groups):
    need_room(4)
    args = scene(*steps(groups, 32_768), **LLAMA, dtype=torch.bfloat16, device="cuda")
    need_kernel(kernel, args)
    with torch.no_grad():
        check_forward(*args, lz.grouped_attention(*args, backend=kernel), 2)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cuda"))
def test_32_long_sequences_in_a_batch(kernel):
    need_room(4)
    lens = [512 + 96 * b for b in range(32)]
    half = [n // 2 for n in lens]
    args = scene([half, half], lens, [half, lens], **LLAMA, dtype=torch.bfloat16, device="cuda")
    need_kernel(kernel, args)
    with torch.no_grad():
        check_forward(*args, lz.grouped_attention(*args, backend=kernel), 2)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-07")
@pytest.mark.parametrize("kernel", blocked("cuda"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_16k_tokens_in_half_precision(kernel, dtype, scale):
    need_room(2)
    args = scene(*steps(2, 16_384), **LLAMA, dtype=dtype, device="cuda", scale=scale)
    need_kernel(kernel, args)
    with torch.no_grad():
        out = lz.grouped_attention(*args, backend=kernel)
    assert out.isfinite().all()
    if scale == 1.0:
        check_forward(*args, out)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-06")
@pytest.mark.parametrize("kernel", blocked("cuda"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_backward_of_32k_tokens(kernel, dtype):
    need_room(12)
    args = scene(*steps(2, 32_768), **LLAMA, dtype=dtype, device="cuda")
    need_kernel(kernel, (*leaves_of(args), args[3]))
    weight = torch.randn(args[0].shape, device="cuda", dtype=dtype) / 16
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, grads = train(args, kernel, weight)
    assert torch.cuda.max_memory_allocated() - before < 16 * args[0].nbytes
    check_forward(*args, out, 2)
    with torch.no_grad():
        with lz.scoped(jit="block"):  # the kernel was compiled for gradients, here its log-sum-exp is asked for
            _, lse = lz.grouped_attention(*args, return_lse=True, backend=kernel)
        check_backward(*args, out, lse, weight, grads)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-05")
@pytest.mark.parametrize("kernel", blocked("cuda"))
def test_imbalance_of_100_against_9900_tokens_with_gradients(kernel):
    need_room(2)
    args = scene([[100], [9900]], [9900], [[100], [9900]], **LLAMA, dtype=torch.float16, device="cuda")
    need_kernel(kernel, (*leaves_of(args), args[3]))
    out, grads = train(args, kernel, torch.ones_like(args[0]))
    check_forward(*args, out)
    assert all(grad.isfinite().all() for grad in grads)


def settling():
    """Bytes held, looked at several times: the thread of a backward lets go of its last tensors when it gets to it."""
    for _ in range(20):
        yield torch.cuda.memory_allocated()
        time.sleep(0.005)


@pytest.mark.gpu
@pytest.mark.req("R-GRP-08")
@pytest.mark.parametrize("kernel", blocked("cuda"))
def test_ten_calls_on_a_gpu_leave_nothing_behind(kernel):
    args = scene(*steps(2, 4096), **LLAMA, dtype=torch.bfloat16, device="cuda")
    need_kernel(kernel, (*leaves_of(args), args[3]))
    queue().wait(timeout_s=60)  # a compile that an earlier test left running makes tensors of its own
    held = []
    for _ in range(10):
        train(args, kernel, torch.ones_like(args[0]))
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left in cycles may be freed at any time
        held.append(min(settling()))
    assert len(set(held[1:])) == 1, held
