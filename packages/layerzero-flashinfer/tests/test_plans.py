"""Plans: once per batch, shared by layers, recycled, and refused where a graph is being captured."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.errors import CudaGraphUnsafeError
from layerzero.numerics import assert_close, tolerance
from layerzero_flashinfer import batched, mla, paged, plans, ragged, workspace
from layerzero_verify.testing.kit import operation

DECODE = "flashinfer.BatchDecodeWithPagedKVCacheWrapper"
PAGED = "flashinfer.BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"


def pages(contexts=(33, 5, 16), page=16, width=64, kv_heads=2, seed=0):
    torch.manual_seed(seed)
    per_row = 4
    tables = torch.randperm(len(contexts) * per_row + 1)[: len(contexts) * per_row].reshape(len(contexts), -1).int()
    caches = [torch.randn(len(contexts) * per_row + 1, page, kv_heads, width).half() for _ in range(2)]
    return tables, torch.tensor(contexts, dtype=torch.int32), torch.randn(len(contexts), 8, width).half(), caches


def attend(kernel, query, caches, batch, **options):
    args = (query, *caches, batch, options.get("scale"), options.get("window"), None, None, True, "NHD")
    found = kernel(*args)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
    assert_close(
        found, operation("paged_attention").fallback_impl(*wide), tolerance("paged_attention", "float16", k=64)
    )


@pytest.mark.req("R-BK-FI-02")
def test_all_layers_of_a_step_share_one_plan(vendor):
    tables, lens, query, caches = pages()
    batch = lz.paged_batch(tables, lens)
    for layer in range(5):
        attend(paged.decode_tc, query, [cache + layer / 10 for cache in caches], batch)
    assert (vendor.count(f"{DECODE}.plan"), vendor.count(f"{DECODE}.run"), len(batch.plans)) == (1, 5, 1)
    attend(paged.decode_tc, query, caches, batch, window=(7, 0))  # another question is another plan
    attend(paged.decode_tc, query, caches, batch, scale=0.5)
    assert len(batch.plans) == 3


@pytest.mark.req("R-KV-04")
def test_planning_reads_no_length_from_the_device(vendor, monkeypatch):
    tables, lens, query, caches = pages()
    batch = lz.paged_batch(tables, lens, host_lens=(33, 5, 16))
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda *_: pytest.fail("the host would wait"))
    paged.decode(query, *caches, batch, None, None, None, None, False, "NHD")
    planned = dict(vendor.calls)[f"{DECODE}.plan"]
    assert planned["indptr"].tolist() == [0, 3, 4, 5]
    assert planned["last_page_len"].tolist() == [1, 5, 16]
    assert all(planned[name].is_cpu for name in ("indptr", "last_page_len"))


def test_a_wrapper_goes_back_when_its_batch_is_gone(vendor):
    tables, lens, query, caches = pages()
    for _ in range(20):
        batch = lz.paged_batch(tables, lens)
        attend(paged.decode, query, caches, batch)
        del batch
    assert vendor.count(DECODE) == 1
    kept = [lz.paged_batch(tables, lens) for _ in range(3)]  # batches that live side by side have wrappers of their own
    for batch in (*kept, *kept):
        attend(paged.decode, query, caches, batch)
    assert (vendor.count(DECODE), vendor.count(f"{DECODE}.plan")) == (3, 23)


@pytest.mark.req("R-GRAPH-06")
@pytest.mark.parametrize("kernel", [paged.decode, paged.decode_tc, paged.prefill_fa2, paged.prefill_fa3])
def test_inside_a_capture_only_planned_batches_made_for_it_run(vendor, monkeypatch, kernel):
    tables, lens, query, caches = pages()
    plain, made = lz.paged_batch(tables, lens), lz.paged_batch(tables, lens, capture=True)
    attend(kernel, query, caches, plain)
    monkeypatch.setattr(plans, "capturing", lambda: True)
    monkeypatch.setattr(paged, "capturing", lambda: True)
    for batch in (plain, made, lz.paged_batch(tables, lens)):
        with pytest.raises(CudaGraphUnsafeError) as caught:
            kernel(query, *caches, batch, None, None, None, None, False, "NHD")
        assert caught.value.code == "BATCH_NOT_PLANNED" and "capture=True" in str(caught.value)
    monkeypatch.setattr(plans, "capturing", lambda: False)
    attend(kernel, query, caches, made)
    monkeypatch.setattr(plans, "capturing", lambda: True)
    attend(kernel, query, caches, made)


@pytest.mark.parametrize("kernel", [paged.decode, paged.decode_tc, paged.prefill_fa2])
def test_an_updated_batch_is_planned_again_in_the_same_buffers(vendor, kernel):
    tables, lens, query, caches = pages()
    batch = lz.paged_batch(tables, lens, capture=True)
    attend(kernel, query, caches, batch)
    name, made = next((n, a) for n, a in vendor.calls if n in (DECODE, PAGED))
    assert made["use_cuda_graph"] is True
    buffer = made.get("paged_kv_indices_buffer", made.get("paged_kv_indices_buf"))
    assert buffer.numel() == tables.numel()
    (plan,) = batch.plans.values()
    batch.update(tables.flip(0), torch.tensor([64, 1, 7], dtype=torch.int32))
    assert batch.plans and next(iter(batch.plans.values())) is plan
    attend(kernel, query, caches, batch)
    assert (vendor.count(name), vendor.count(f"{name}.plan")) == (1, 2)


def test_lengths_that_need_another_launch_than_the_captured_one_are_refused(vendor):
    tables, lens, query, caches = pages()
    batch = lz.paged_batch(tables, lens, capture=True)
    attend(paged.decode, query, caches, batch)
    batch.update(tables, lens)
    vendor.launch[1] = 2
    with pytest.raises(CudaGraphUnsafeError, match="capture again") as caught:
        batch.update(tables, lens + 1)
    assert caught.value.code == "GRAPH_CAPTURE_FAILED"
    plain = lz.paged_batch(tables, lens)
    attend(paged.decode, query, caches, plain)  # without a graph every plan is as good


def test_graph_plans_do_not_share_scratch_memory(vendor):
    tables, lens, query, caches = pages()
    batches = [lz.paged_batch(tables, lens, capture=made) for made in (False, False, True, True)]
    for batch in batches:
        attend(paged.decode, query, caches, batch)
    first, second, third, fourth = (next(iter(batch.plans.values())).scratch for batch in batches)
    assert first is second and len({id(first), id(third), id(fourth)}) == 3


def test_dense_batches_share_plans_by_shape_and_keep_few(vendor):
    def call(rows, cols, kernel=batched.decode_tc):
        q, k, v = (torch.randn(2, n, h, 64).half() for n, h in ((rows, 4), (cols, 2), (cols, 2)))
        kernel(q, k, v, None, 0.0, False, None, None, None, None, False)

    for _ in range(3):
        call(1, 40)
    assert vendor.count(f"{DECODE}.plan") == 1
    for cols in range(1, 40):
        call(1, cols)
    assert len(batched._plans) <= 16 and vendor.count(DECODE) <= 18
    call(5, 40, batched.prefill_fa2)
    assert vendor.count(f"{RAGGED}.plan") == 1  # without gaps it is packed sequences, not pages


def test_packed_offsets_are_read_once_and_again_when_they_change(vendor):
    offsets = torch.tensor([0, 7, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, h, 64).half() for h in (4, 2, 2))

    def call(cu):
        args = (q, k, v, cu, cu, 8, 8, "bottom_right", None, None, None, None, False)
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        wanted = operation("varlen_attention").fallback_impl(*wide)
        assert_close(ragged.varlen_fa2(*args), wanted, tolerance("varlen_attention", "float16", k=64))

    for _ in range(4):
        call(offsets)
    assert vendor.count(f"{RAGGED}.plan") == 1
    offsets[1] = 4
    call(offsets)
    call(offsets.clone())
    assert vendor.count(f"{RAGGED}.plan") == 3
    with torch.inference_mode():
        fresh = torch.tensor([0, 3, 12], dtype=torch.int32)
        call(fresh)
        call(fresh)  # no count of writes: read anew
    assert vendor.count(f"{RAGGED}.plan") == 5


def test_latent_batches_plan_once_and_again_after_an_update(vendor):
    torch.manual_seed(0)
    tables, lens = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.tensor([50, 9], dtype=torch.int32)
    tensors = [torch.randn(2, 4, n).half() for n in (512, 64)] + [torch.randn(8, 16, n).half() for n in (512, 64)]
    batch = lz.paged_batch(tables, lens, capture=True)

    def call():
        args = (*tensors, batch, 0.1, True)
        wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
        wanted = operation("mla_paged_attention").fallback_impl(*wide)
        assert_close(mla.mla_fa3(*args), wanted, tolerance("mla_paged_attention", "float16", k=512))

    for _ in range(3):
        call()
    assert vendor.count("flashinfer.mla.BatchMLAPagedAttentionWrapper.plan") == 1
    batch.update(tables.flip(1), torch.tensor([3, 64], dtype=torch.int32))
    call()
    assert vendor.count("flashinfer.mla.BatchMLAPagedAttentionWrapper.plan") == 2


def test_latent_wrappers_go_back_too(vendor):
    tables, lens = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.tensor([50, 9], dtype=torch.int32)
    tensors = [torch.randn(2, 4, n).half() for n in (512, 64)] + [torch.randn(8, 16, n).half() for n in (512, 64)]
    for _ in range(5):
        mla.mla_fa2(*tensors, lz.paged_batch(tables, lens), 0.1, False)
    assert vendor.count("flashinfer.mla.BatchMLAPagedAttentionWrapper") == 1


def test_a_plan_that_needs_more_scratch_memory_gets_it(vendor, monkeypatch):
    """FlashInfer says so by a RuntimeError of its allocator."""
    wrapper = vendor.module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    real = wrapper.plan

    def short(self, *args, **kwargs):
        if self.room < 4 * workspace.BATCH:
            raise RuntimeError("Failed to allocate memory for batch_decode_tmp_v in AlignedAllocator")
        real(self, *args, **kwargs)

    def reset(self, floats, ints):
        self.room = floats.numel()

    monkeypatch.setattr(wrapper, "plan", short)
    monkeypatch.setattr(wrapper, "room", 0, raising=False)
    monkeypatch.setattr(wrapper, "reset_workspace_buffer", reset, raising=False)
    monkeypatch.setattr(wrapper, "_int_workspace_buffer", None, raising=False)
    tables, lens, query, caches = pages()
    attend(paged.decode, query, caches, lz.paged_batch(tables, lens))
    monkeypatch.setattr(workspace, "MOST", 8 * workspace.BATCH)
    monkeypatch.setattr(wrapper, "plan", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("AlignedAllocator")))
    with pytest.raises(RuntimeError, match="AlignedAllocator"):
        paged.decode_tc(query, *caches, lz.paged_batch(tables, lens), None, None, None, None, False, "NHD")


def test_each_stream_has_scratch_memory_of_its_own(monkeypatch):
    device = torch.device("cpu")
    found = [workspace.workspace((7, stream), device) for stream in (1, 2, 1)]
    assert found[0] is found[2] is not found[1]
    monkeypatch.setattr(workspace, "SINGLE", 64)
    fresh = workspace.Workspace(device)
    assert fresh.single is fresh.single and fresh.single.numel() == 64
    for key in [key for key in workspace._known if key[0] == 7]:
        del workspace._known[key]
