"""`lz.block_mask` and `lz.chunk_mask`: what they mean, who takes them as they are, and what everyone else gets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.model.masks import BlockMask, ChunkMask
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero.runtime.state import state

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CPU_KERNELS = ["reference.attention.plain", "sdpa.attention.flash_cpu", "sdpa.attention.math"]
CUDA_KERNELS = ["reference.attention.plain", "sdpa.attention.flash", "sdpa.attention.efficient", "sdpa.attention.math"]
PLACES = [("cpu", k) for k in CPU_KERNELS] + [("cuda", k) for k in CUDA_KERNELS if "cuda" in DEVICES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(13, 13), (9, 29), (1, 29), (17, 6)]


def qkv(rows, cols, *, heads=4, kv_heads=2, dim=16, dtype=torch.float32, device="cpu", batch=2, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(count, length):
        return torch.randn(batch, count, length, dim, generator=gen).to(device, dtype)

    return draw(heads, rows), draw(kv_heads, cols), draw(kv_heads, cols)


def blocks(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def in_words(grid, rows, cols, size_q, size_k):
    """The dense form, entry by entry."""
    full = torch.zeros(*grid.shape[:-2], rows, cols, dtype=torch.bool)
    for i in range(rows):
        for j in range(cols):
            full[..., i, j] = grid[..., i // size_q, j // size_k]
    return full


def chunk_table(rows, cols, size):
    """Causal within chunks, pair by pair; queries stand at the end."""
    full = torch.zeros(rows, cols, dtype=torch.bool)
    for i in range(rows):
        at = i + cols - rows
        for j in range(cols):
            full[i, j] = 0 <= j <= at and at // size == j // size
    return full


def takes(kernel, *args, **options):
    verdict = lz.explain("attention", *args, backend=kernel, **options).decision.candidate(kernel)
    assert verdict.accepted or verdict.reasons
    return verdict.accepted


# -- what they compute --------------------------------------------------------------------------------
@pytest.mark.req("R-OP-09", "R-SEL-19")
@pytest.mark.parametrize(("device", "kernel"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 8, 100])
def test_chunks_on_every_kernel(oracle, device, kernel, dtype, size):
    accepted = 0
    for rows, cols in SHAPES:
        args = qkv(rows, cols, dtype=dtype, device=device)
        mask = lz.chunk_mask(size)
        if not takes(kernel, *args, mask):
            continue
        accepted += 1
        out = lz.attention(*args, mask, backend=kernel)
        want, _ = oracle.attention(*args, mask=chunk_table(rows, cols, size).to(device))
        assert out.dtype is dtype
        assert_close(out, want, tolerance("attention", dtype), path=f"{kernel} {rows}x{cols} chunks of {size}")
    assert accepted == len(SHAPES) or device == "cuda"


@pytest.mark.req("R-OP-09", "R-SEL-19")
@pytest.mark.parametrize(("device", "kernel"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (2, 1), (2, 4)], ids=str)
def test_blocks_on_every_kernel(oracle, device, kernel, dtype, lead):
    for (rows, cols), size in zip(SHAPES, [4, (4, 8), (1, 16), 5], strict=True):
        size_q, size_k = (size, size) if isinstance(size, int) else size
        grid = blocks(*lead, -(-rows // size_q), -(-cols // size_k))
        grid[..., 0, :] = False  # the first rows attend nothing
        args = qkv(rows, cols, dtype=dtype, device=device)
        mask = lz.block_mask(grid.to(device), size)
        if not takes(kernel, *args, mask):
            assert device == "cuda"
            continue
        out = lz.attention(*args, mask, backend=kernel)
        want, _ = oracle.attention(*args, mask=in_words(grid, rows, cols, size_q, size_k).to(device))
        assert_close(out, want, tolerance("attention", dtype), path=f"{kernel} {rows}x{cols} blocks of {size}")
        assert torch.count_nonzero(out[:, :, :size_q]) == 0


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_layout_lse_and_options_go_along(oracle, layout, kernel):
    rows, cols = 9, 29
    args = qkv(rows, cols)
    given = args if layout == "BHSD" else tuple(t.transpose(1, 2) for t in args)
    grid = blocks(2, 4, 3, 4)
    slopes = lz.alibi_slopes(4)
    for mask, table in (
        (lz.chunk_mask(8), chunk_table(rows, cols, 8)),
        (lz.block_mask(grid, (4, 8)), in_words(grid, rows, cols, 4, 8)),
    ):
        options = {"layout": layout, "scale": 0.3, "alibi_slopes": slopes, "return_lse": True}
        if takes(kernel, *given, mask, **options):
            out, lse = lz.attention(*given, mask, backend=kernel, **options)
            want, want_lse = oracle.attention(*args, mask=table, scale=0.3, slopes=slopes)
            assert_close(out if layout == "BHSD" else out.transpose(1, 2), want, tolerance("attention", "float32"))
            assert_close(lse, want_lse, tolerance("attention", "float32"))
        else:
            assert kernel == "sdpa.attention.math"  # it has no log-sum-exp


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_window_narrows_blocks(oracle, kernel):
    args, grid = qkv(13, 29), blocks(4, 8)
    out = lz.attention(*args, lz.block_mask(grid, 4), window=(6, 2), backend=kernel)
    want, _ = oracle.attention(*args, mask=in_words(grid, 13, 29, 4, 4), window=(6, 2))
    assert_close(out, want, tolerance("attention", "float32"))


def test_three_axes_take_a_mask_per_batch(oracle):
    q, k, v = (t[:, 0] for t in qkv(9, 14))
    grid = blocks(2, 3, 4)
    for mask, table in ((lz.block_mask(grid, (4, 4)), in_words(grid, 9, 14, 4, 4)), (lz.chunk_mask(5), None)):
        table = chunk_table(9, 14, 5) if table is None else table[:, None]
        for backend in (None, "reference", "sdpa.attention.math"):
            want, _ = oracle.attention(q[:, None], k[:, None], v[:, None], mask=table)
            out = lz.attention(q, k, v, mask, backend=backend)
            assert_close(out, want[:, 0], tolerance("attention", "float32"))


@pytest.mark.req("R-OP-09")
def test_decode_with_a_cache_sees_the_chunks_of_prefill():
    q, k, v = qkv(23, 23)
    full = lz.attention(q, k, v, lz.chunk_mask(6))
    for step in (4, 5, 6, 11, 12, 22):
        one = lz.attention(q[:, :, step : step + 1], k[:, :, : step + 1], v[:, :, : step + 1], lz.chunk_mask(6))
        assert_close(one, full[:, :, step : step + 1], tolerance("attention", "float32"))


@pytest.mark.req("R-OP-09", "R-OP-05")
def test_nothing_leaks_between_chunks_or_from_the_future():
    q, k, v = qkv(20, 20)
    for backend in CPU_KERNELS:
        before = lz.attention(q, k, v, lz.chunk_mask(8), backend=backend)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, 10] += 50.0
        v2[:, :, 10] -= 50.0
        after = lz.attention(q, k2, v2, lz.chunk_mask(8), backend=backend)
        same = (before == after).all(dim=-1).all(dim=0).all(dim=0)
        assert same.tolist() == [not 10 <= i < 16 for i in range(20)], backend


@pytest.mark.req("R-OP-09")
def test_it_is_the_mask_of_llama_4():
    masking = pytest.importorskip("transformers.masking_utils")
    chunk = masking.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    place = torch.arange(21)
    table = chunk(0, 0, place[:, None], place[None])
    assert torch.equal(lz.chunk_mask(8).dense(21, 21), table)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("kind", ["chunk", "block"])
def test_gradients_are_those_of_the_formula(oracle, kernel, kind):
    rows, cols = 11, 19
    args = [t.requires_grad_() for t in qkv(rows, cols)]
    grid = blocks(3, 5)
    grid[1] = False
    mask = lz.chunk_mask(4) if kind == "chunk" else lz.block_mask(grid, 4)
    table = chunk_table(rows, cols, 4) if kind == "chunk" else in_words(grid, rows, cols, 4, 4)
    out = lz.attention(*args, mask, backend=kernel)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad(out, args, weight)
    wide = [t.detach().double().requires_grad_() for t in args]
    want = torch.autograd.grad(oracle.attention(*wide, mask=table)[0], wide, weight.double())
    for name, a, b in zip("qkv", got, want, strict=True):
        assert_close(a, b, tolerance("attention", "float32"), path=f"{kernel} d{name}")


@pytest.mark.gpu
def test_gradients_of_chunks_on_the_gpu(oracle):
    args = [t.requires_grad_() for t in qkv(40, 100, dim=64, dtype=torch.float16, device="cuda")]
    out = lz.attention(*args, lz.chunk_mask(32), backend="sdpa.attention.flash")
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    got = torch.autograd.grad(out, args, weight)
    wide = [t.detach().double().requires_grad_() for t in args]
    table = chunk_table(40, 100, 32).cuda()
    want = torch.autograd.grad(oracle.attention(*wide, mask=table)[0], wide, weight.double())
    for a, b in zip(got, want, strict=True):
        assert_close(a.double(), b, Tolerance(1e-2, 1e-2))  # what R-GRP-10 asks of gradients in 16 bits


# -- who takes what -----------------------------------------------------------------------------------
@pytest.mark.req("R-OP-09", "R-SEL-19", "R-SEL-05")
def test_a_kernel_that_declares_the_mask_gets_the_value_all_others_get_it_written_out(lab):
    seen = []

    def spy(*args):
        seen.append(args[3])
        return lab.reference("attention")(*args)

    common = {"gqa", "mask_bool", "backward"}
    taker = lab.kernel("a.attention.taker", spy, features=frozenset({*common, "block_mask", "chunk_mask"}))
    writer = lab.kernel("b.attention.writer", spy, features=frozenset(common), adapt=frozenset({"mask"}))
    added = lab.kernel(
        "c.attention.added", spy, features=frozenset({"gqa", "mask_float", "backward"}), adapt=frozenset({"mask"})
    )
    stiff = lab.kernel("d.attention.stiff", spy, features=frozenset(common))
    lab.use(taker, writer, added, stiff)
    args = qkv(9, 29)
    grid = blocks(2, 1, 3, 4)
    cases = (
        (lz.chunk_mask(8), chunk_table(9, 29, 8), "CHUNK_MASK_UNSUPPORTED", 8, "mask:chunk"),
        (lz.block_mask(grid, (4, 8)), in_words(grid, 9, 29, 4, 8), "BLOCK_MASK_UNSUPPORTED", "4x8", "mask:block"),
    )
    for mask, table, code, shown, step in cases:
        report = lz.explain("attention", *args, mask)
        trace = report.decision
        assert trace.candidate("a.attention.taker").transforms == ()
        assert step in [t.name for t in trace.candidate("b.attention.writer").transforms]
        adapted = trace.candidate("b.attention.writer").reasons[0]
        assert adapted.code == "ADAPTED" and step in adapted.message
        refused = trace.candidate("d.attention.stiff")
        assert [(r.code, r.value) for r in refused.reasons] == [(code, shown)]
        assert refused.reasons[0].hint == "use a dense mask"
        results = []
        for kernel in ("a.attention.taker", "b.attention.writer", "c.attention.added"):
            seen.clear()
            for _ in range(2):
                results.append(lz.attention(*args, mask, backend=kernel))
            assert len(seen) == 2
            for given in seen:
                if kernel == "a.attention.taker":
                    assert given is mask
                elif kernel == "b.attention.writer":
                    assert torch.equal(given, table.expand_as(given))
                else:
                    assert torch.equal(given == 0.0, table.expand_as(given)) and given.dtype is torch.float32
        for other in results[1:]:
            assert_close(other, results[0], tolerance("attention", "float32"))


def test_limits_may_name_the_sizes_of_a_mask(lab):
    from layerzero.model.kernel import Limit

    tiles = lab.kernel(
        "a.attention.tiles",
        features=frozenset({"gqa", "block_mask"}),
        limits=(("mask_block_q", Limit(one_of=frozenset({64}))), ("mask_block_k", Limit(multiple_of=16))),
        priority=99,
    )
    lab.use(tiles)
    args = qkv(9, 29)
    for size, accepted in (((64, 32), True), ((4, 8), False)):
        mask = lz.block_mask(blocks(-(-9 // size[0]), -(-29 // size[1])), size)
        assert lz.explain("attention", *args, mask).decision.candidate("a.attention.tiles").accepted is accepted
        lz.attention(*args, mask)


@pytest.mark.req("R-POL-09")
def test_strict_mode_leaves_only_kernels_that_take_the_value(lab):
    args = qkv(9, 29)
    with lz.scoped(strict_mode=True):
        assert lz.which("attention", *args, lz.chunk_mask(8)) == "sdpa.attention.flash_cpu"
        assert lz.which("attention", *args, lz.block_mask(blocks(3, 4), (4, 8))) == "reference.attention.plain"


# -- keys ---------------------------------------------------------------------------------------------
def test_a_mask_value_has_a_hot_key_of_its_own(lab, oracle):
    args = qkv(9, 29)
    grids = [blocks(3, 4, seed=seed) for seed in range(3)]
    calls = [(lz.chunk_mask(8), chunk_table(9, 29, 8)), (lz.chunk_mask(5), chunk_table(9, 29, 5))]
    calls += [(lz.block_mask(grid, (4, 8)), in_words(grid, 9, 29, 4, 8)) for grid in grids]
    for mask, _ in calls:
        lz.attention(*args, mask)
    state.counters.reset()
    for _ in range(3):
        for mask, table in calls:
            want, _ = oracle.attention(*args, mask=table)
            assert_close(lz.attention(*args, mask), want, tolerance("attention", "float32"))
    assert (state.counters.misses, state.counters.selections) == (0, 0)
    assert lz.chunk_mask(8).hot_key() != lz.chunk_mask(5).hot_key()
    assert lz.block_mask(grids[0], 4).hot_key() != lz.block_mask(grids[0], 8).hot_key()
    assert lz.block_mask(grids[0], 4).hot_key() == lz.block_mask(grids[1], 4).hot_key()


def test_hot_calls_still_check_what_the_key_does_not_hold(lab):
    args, mask = qkv(9, 29), lz.chunk_mask(8)
    for _ in range(2):
        lz.attention(*args, mask, softcap=2.0, backend="reference")
        lz.attention(*args, mask, dropout_p=0.5, backend="reference")
    for bad in ({"softcap": -1.0}, {"dropout_p": float("nan")}, {"dropout_p": 1.5}):
        with pytest.raises(InvalidInputError) as caught:
            lz.attention(*args, mask, backend="reference", **bad)
        assert caught.value.code == "VALUE_INVALID"
    everything = lz.attention(*args, mask, dropout_p=1.0, backend="reference")
    assert torch.equal(everything, torch.zeros_like(everything))


def test_dropout_is_not_lost_on_a_hot_key(lab):
    args, mask = qkv(9, 29), lz.chunk_mask(8)
    for backend in ("reference", "sdpa.attention.math"):
        quiet = [lz.attention(*args, mask, backend=backend) for _ in range(2)]
        torch.manual_seed(0)
        loud = [lz.attention(*args, mask, dropout_p=0.5, backend=backend) for _ in range(2)]
        assert torch.equal(*quiet)
        assert not torch.equal(loud[0], quiet[0]) and not torch.equal(*loud)


def test_a_failing_kernel_hands_the_value_on(lab, oracle):
    args = qkv(9, 29)
    lz.attention(*args, lz.chunk_mask(8))
    lab.faults["sdpa.attention.flash_cpu"] = RuntimeError("out of order")
    out, ran = lab.run(lz.attention, *args, lz.chunk_mask(8))
    assert ran == ["sdpa.attention.math"]
    want, _ = oracle.attention(*args, mask=chunk_table(9, 29, 8))
    assert_close(out, want, tolerance("attention", "float32"))


def test_a_plan_reads_the_mask_at_each_call(oracle):
    args = qkv(9, 29)
    grids = [blocks(3, 4, seed=seed) for seed in range(2)]
    plan = lz.plan("attention", *args, attn_mask=lz.block_mask(grids[0], (4, 8)))
    for grid in grids:
        want, _ = oracle.attention(*args, mask=in_words(grid, 9, 29, 4, 8))
        assert_close(plan(*args, attn_mask=lz.block_mask(grid, (4, 8))), want, tolerance("attention", "float32"))
    chunked = lz.plan("attention", *args, attn_mask=lz.chunk_mask(8))
    assert torch.equal(chunked(*args), chunked(*args, attn_mask=lz.chunk_mask(8)))


@pytest.mark.req("R-PT-02", "R-PT-04")
@pytest.mark.parametrize("grad", [False, True])
def test_in_one_compiled_graph(grad):
    args = [t.requires_grad_(grad) for t in qkv(9, 29)]
    grid = blocks(3, 4)

    def layer(q, k, v, on):
        made_inside = lz.attention(q, k, v, lz.block_mask(on, (4, 8)))
        return made_inside + lz.attention(q, k, v, lz.chunk_mask(8))

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    got, want = compiled(*args, grid), layer(*args, grid)
    assert_close(got, want, tolerance("attention", "float32"))
    if grad:
        slope = torch.linspace(-1.0, 1.0, want.numel()).view(want.shape)
        found, expected = (torch.autograd.grad(out, args, slope) for out in (got, want))
        assert_close(list(found), list(expected), tolerance("gradient", "float32"))
        assert all(item.abs().max() > 0 for item in expected)


def test_under_vmap_and_in_a_fake_mode():
    q, k, v = (t[:, None] for t in qkv(9, 9))
    mask = lz.chunk_mask(4)
    want = torch.stack([lz.attention(*(t[i] for t in (q, k, v)), mask) for i in range(2)])
    assert_close(torch.vmap(lambda *t: lz.attention(*t, mask))(q, k, v), want, tolerance("attention", "float32"))
    plain = [t[0] for t in (q, k, v)]
    with FakeTensorMode() as mode:
        assert lz.attention(*map(mode.from_tensor, plain), mask).shape == plain[0].shape


# -- the values themselves ------------------------------------------------------------------------------
def test_they_are_frozen_values():
    chunk, block = lz.chunk_mask(8), lz.block_mask(blocks(2, 2), 4)
    assert chunk == ChunkMask(8) and hash(chunk) == hash(ChunkMask(8))
    assert isinstance(block, BlockMask) and block.block_size == (4, 4)
    for item, name in ((chunk, "size"), (block, "block_size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, name, 3)


def test_spans_cover_every_query_that_has_keys():
    for rows, cols, size in ((13, 13, 4), (9, 29, 8), (1, 29, 8), (17, 6, 4), (5, 64, 64), (3, 64, 32)):
        table = torch.zeros(rows, cols, dtype=torch.bool)
        for first, last, start, stop in lz.chunk_mask(size).spans(rows, cols):
            count, keys = last - first, stop - start
            assert 0 < count <= keys <= size
            table[first:last, start:stop] = torch.ones(count, keys).tril(keys - count).bool()
        assert torch.equal(table, chunk_table(rows, cols, size))


Q, K, V = qkv(9, 29)
GRID, KEEP = blocks(3, 4), torch.ones(9, 29, dtype=torch.bool)
BAD = {
    "blocks and is_causal": (
        lambda: lz.attention(Q, K, V, lz.block_mask(GRID, (4, 8)), is_causal=True), "MASK_WITH_CAUSAL"),
    "blocks and bottom right": (
        lambda: lz.attention(Q, K, V, lz.block_mask(GRID, (4, 8)), is_causal="bottom_right"), "MASK_WITH_CAUSAL"),
    "chunks and is_causal": (lambda: lz.attention(Q, K, V, lz.chunk_mask(4), is_causal=True), "MASK_WITH_CAUSAL"),
    "chunks and window": (lambda: lz.attention(Q, K, V, lz.chunk_mask(4), window=4), "MASK_WITH_WINDOW"),
    "a mask and is_causal": (lambda: lz.attention(Q, K, V, KEEP, is_causal=True), "MASK_WITH_CAUSAL"),
    "a bias and bottom right": (
        lambda: lz.attention(Q, K, V, KEEP.float(), is_causal="bottom_right"), "MASK_WITH_CAUSAL"),
    "a mask of other sizes": (lambda: lz.attention(Q, K, V, KEEP[:, 1:]), "MASK_NOT_BROADCASTABLE"),
    "a bias of integers": (lambda: lz.attention(Q, K, V, KEEP.int()), "MASK_DTYPE_INVALID"),
    "too few blocks": (lambda: lz.attention(Q, K, V, lz.block_mask(GRID, (4, 4))), "MASK_NOT_BROADCASTABLE"),
    "too many blocks": (lambda: lz.attention(Q, K, V, lz.block_mask(GRID, (8, 8))), "MASK_NOT_BROADCASTABLE"),
    "one block for all": (lambda: lz.attention(Q, K, V, lz.block_mask(GRID[:1, :1], (4, 8))), "MASK_NOT_BROADCASTABLE"),
    "blocks of another batch": (
        lambda: lz.attention(Q, K, V, lz.block_mask(blocks(3, 1, 3, 4), (4, 8))), "MASK_NOT_BROADCASTABLE"),
    "blocks of other heads": (
        lambda: lz.attention(Q, K, V, lz.block_mask(blocks(2, 2, 3, 4), (4, 8))), "MASK_NOT_BROADCASTABLE"),
    "blocks elsewhere": (lambda: lz.attention(Q, K, V, lz.block_mask(GRID.to("meta"), (4, 8))), "DEVICE_MIXED"),
    "blocks of floats": (lambda: lz.block_mask(GRID.float(), 4), "MASK_DTYPE_INVALID"),
    "blocks as a list": (lambda: lz.block_mask([[True]], 4), "TYPE_INVALID"),
    "blocks of rank 1": (lambda: lz.block_mask(GRID[0], 4), "SHAPE_INVALID"),
    "blocks of rank 5": (lambda: lz.block_mask(GRID[None, None, None], 4), "SHAPE_INVALID"),
    "no blocks": (lambda: lz.block_mask(GRID[:0], 4), "SHAPE_INVALID"),
    "size zero": (lambda: lz.block_mask(GRID, 0), "VALUE_INVALID"),
    "size as flag": (lambda: lz.block_mask(GRID, True), "VALUE_INVALID"),
    "size of three": (lambda: lz.block_mask(GRID, (4, 4, 4)), "VALUE_INVALID"),
    "size of floats": (lambda: lz.block_mask(GRID, (4.0, 4)), "VALUE_INVALID"),
    "chunk of zero": (lambda: lz.chunk_mask(0), "VALUE_INVALID"),
    "chunk as text": (lambda: lz.chunk_mask("8"), "VALUE_INVALID"),
}  # fmt: skip


@pytest.mark.req("R-OP-09", "R-CTX-14")
@pytest.mark.parametrize("name", BAD)
def test_what_means_nothing_is_refused(name):
    call, code = BAD[name]
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.code == code and caught.value.hint


def test_what_means_nothing_is_refused_in_a_graph_too():
    compiled = torch.compile(
        lambda q: lz.attention(q, K, V, lz.chunk_mask(4), is_causal=True), fullgraph=True, backend="eager"
    )
    with pytest.raises(InvalidInputError) as caught:
        compiled(Q)
    assert caught.value.code == "MASK_WITH_CAUSAL"
