"""The plan of a grouped call, the bytes it spares, what is refused, and how dispatch sees it."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.model.grouped import KvTraffic
from layerzero.runtime.state import state

Q_OFFSETS, K_OFFSETS, KV_LENS = [0, 2, 5, 5, 6], [0, 4, 7], [[3, 2], [4, 3]]


def ints(values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def batch(q=Q_OFFSETS, k=K_OFFSETS, lens=KV_LENS, **options):
    return lz.grouped_batch(ints(q), ints(k), ints(lens), **options)


def tensors(tokens=6, keys=7, heads=4, kv_heads=2, dim=8, **options):
    gen = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim))
    return tuple(torch.randn(shape, generator=gen).to(**options) for shape in shapes)


# -- the plan --------------------------------------------------------------------------------------
def test_a_plan_knows_its_segments_group_major():
    made = batch()
    assert (made.num_groups, made.batch_size, made.total_q, made.total_k) == (2, 2, 6, 7)
    assert (made.max_query_len, made.max_kv_len) == (3, 4)
    assert [tuple(segment) for segment in made.segments()] == [
        (0, 0, 0, 2, 0, 3), (0, 1, 2, 3, 4, 2), (1, 1, 5, 1, 4, 3),
    ]  # fmt: skip


def test_host_lens_save_the_copy_from_the_device():
    on_meta = [ints(item, device="meta") for item in (Q_OFFSETS, K_OFFSETS, KV_LENS)]
    made = lz.grouped_batch(*on_meta, host_lens=(Q_OFFSETS, K_OFFSETS, KV_LENS))
    assert made.segments() == batch().segments()


BAD_PLANS = {
    "float offsets": (lambda: lz.grouped_batch(torch.zeros(5), ints(K_OFFSETS), ints(KV_LENS)), "TYPE_INVALID"),
    "a list": (lambda: lz.grouped_batch(Q_OFFSETS, ints(K_OFFSETS), ints(KV_LENS)), "TYPE_INVALID"),
    "kv_lens of rank 1": (lambda: lz.grouped_batch(ints(Q_OFFSETS), ints(K_OFFSETS), ints([3, 2])), "RANK_INVALID"),
    "offsets of rank 2": (lambda: lz.grouped_batch(ints([Q_OFFSETS]), ints(K_OFFSETS), ints(KV_LENS)), "RANK_INVALID"),
    "one offset too few": (lambda: batch(q=Q_OFFSETS[:-1]), "SHAPE_INVALID"),
    "sequences that differ": (lambda: batch(k=[0, 4, 7, 9]), "SHAPE_INVALID"),
    "descending queries": (lambda: batch(q=[0, 5, 2, 5, 6]), "VALUE_INVALID"),
    "queries not from 0": (lambda: batch(q=[1, 2, 5, 5, 6]), "VALUE_INVALID"),
    "descending keys": (lambda: batch(k=[0, 4, 3]), "VALUE_INVALID"),
    "a prefix longer than its sequence": (lambda: batch(lens=[[3, 4], [4, 3]]), "VALUE_INVALID"),
    "a negative prefix": (lambda: batch(lens=[[3, 2], [-1, 3]]), "VALUE_INVALID"),
    "two devices": (
        lambda: lz.grouped_batch(ints(Q_OFFSETS), ints(K_OFFSETS, device="meta"), ints(KV_LENS)),
        "DEVICE_MIXED",
    ),
    "host numbers of another length": (lambda: batch(host_lens=(Q_OFFSETS, K_OFFSETS, [[3, 2]])), "SHAPE_INVALID"),
    "host numbers that are none": (lambda: batch(host_lens=(Q_OFFSETS, K_OFFSETS)), "TYPE_INVALID"),
    "host words": (lambda: batch(host_lens=("a", "b", ["c"])), "TYPE_INVALID"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_refused(name):
    call, code = BAD_PLANS[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code


def call(q=None, k=None, v=None, plan=None, **options):
    given = tensors()
    args = [own if own is not None else usual for own, usual in zip((q, k, v), given, strict=True)]
    return lambda: lz.grouped_attention(*args, batch() if plan is None else plan, **options)


Q, K, V = tensors()
BAD_CALLS = {
    "query of rank 4": (call(q=Q[None]), "RANK_INVALID"),
    "text for a tensor": (call(q="query"), "TYPE_INVALID"),
    "integers": (call(k=K.int()), "DTYPE_UNSUPPORTED"),
    "heads that do not divide": (call(q=Q[:, :3]), "GQA_RATIO_INVALID"),
    "head dims": (call(q=Q[..., :4]), "HEAD_DIM_MISMATCH"),
    "value of other heads": (call(v=V[:, :1]), "SHAPE_INVALID"),
    "value of other tokens": (call(v=V[:3]), "SHAPE_INVALID"),
    "no heads": (call(q=Q[:, :0], k=K[:, :0], v=V[:, :0]), "SHAPE_INVALID"),
    "queries that do not fit the plan": (call(q=Q[:5]), "SHAPE_INVALID"),
    "keys that do not fit the plan": (call(k=K[:6], v=V[:6]), "SHAPE_INVALID"),
    "plan elsewhere": (call(q=Q.to("meta"), k=K.to("meta"), v=V.to("meta")), "DEVICE_MIXED"),
    "keys elsewhere": (call(k=K.to("meta")), "DEVICE_MIXED"),
    "causal as a word": (call(causal="top_left"), "VALUE_INVALID"),
    "causal as a number": (call(causal=1), "VALUE_INVALID"),
    "NaN scale": (call(scale=float("nan")), "SCALE_INVALID"),
    "scale as text": (call(scale="1"), "TYPE_INVALID"),
    "tensors without kv_lens": (
        lambda: lz.grouped_attention(Q, K, V, ints(Q_OFFSETS), ints(K_OFFSETS)),
        "TYPE_INVALID",
    ),
    "tensors without offsets of keys": (lambda: lz.grouped_attention(Q, K, V, ints(Q_OFFSETS)), "TYPE_INVALID"),
    "unknown backend": (call(backend="nobody"), "BACKEND_UNKNOWN"),
    "backend as a list": (call(backend=["torch"]), "TYPE_INVALID"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_hot_and_cold(name):
    bad, code = BAD_CALLS[name]
    call()()  # the good call of the same kind is hot
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            bad()
        assert caught.value.code == code


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    with pytest.raises(InvalidInputError) as caught:
        call(q=torch.nested.nested_tensor([Q, Q]))()
    assert caught.value.code == "RAGGED_UNSUPPORTED"


# -- bytes -----------------------------------------------------------------------------------------
def prefixes(lens, queries=1):
    """One sequence, one group for each prefix."""
    offsets = list(range(0, queries * len(lens) + 1, queries))
    return lz.grouped_batch(ints(offsets), ints([0, max(lens)]), ints([[n] for n in lens]))


@pytest.mark.req("R-GRP-12")
def test_65536_tokens_of_llama3_8b_read_268_instead_of_403_megabytes():
    traffic = prefixes([32_768, 65_536]).kv_traffic(num_kv_heads=8, head_dim=128, element_bytes=2)
    assert traffic == (402_653_184, 268_435_456)
    assert round(traffic.separate / 1e6, 1) == 402.7 and round(traffic.grouped / 1e6, 1) == 268.4
    assert round(traffic.saved / 1e6) == 134 and traffic.share == pytest.approx(1 / 3)


@pytest.mark.req("R-GRP-12")
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_rank_r_of_a_zigzag_saves_its_own_share(world):
    for rank in range(world):
        chunk = 16
        traffic = prefixes([(rank + 1) * chunk, (2 * world - rank) * chunk]).kv_traffic(2, 64, 2)
        assert traffic.share == pytest.approx((rank + 1) / (2 * world + 1))


@pytest.mark.req("R-GRP-12")
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 16])
def test_equal_steps_save_n_minus_1_of_n_plus_1(groups):
    traffic = prefixes([32 * (g + 1) for g in range(groups)]).kv_traffic(2, 64, 2)
    assert traffic.share == pytest.approx((groups - 1) / (groups + 1))


def test_traffic_counts_each_sequence_for_itself_and_no_group_without_queries():
    # Sequence 0: 3 keys (group 1 asks nothing there). Sequence 1: 2 and 3 keys, 3 of them unique.
    assert batch().kv_traffic(num_kv_heads=1, head_dim=1, element_bytes=1) == KvTraffic(16, 12)
    assert KvTraffic(0, 0).share == 0.0


# -- dispatch --------------------------------------------------------------------------------------
@pytest.fixture
def fresh(clean):
    return state.counters


def test_a_training_loop_stays_hot(fresh):
    for tokens in (6, 6, 6):
        lz.grouped_attention(*tensors(tokens), batch())
    assert fresh.misses == 1


def test_lengths_inside_a_bucket_share_a_key_and_the_next_bucket_has_its_own(fresh):
    q, k, v = tensors(4, 40)
    for kv_len in (17, 20, 32, 33):  # buckets end at powers of two
        lz.grouped_attention(q, k, v, lz.grouped_batch(ints([0, 4]), ints([0, 40]), ints([[kv_len]])))
    assert fresh.misses == 2


def test_causal_lse_and_gradient_are_part_of_the_key(fresh):
    q, k, v = tensors()
    lz.grouped_attention(q, k, v, batch())
    full = lz.grouped_attention(q, k, v, batch(), causal=False)
    assert not torch.equal(full, lz.grouped_attention(q, k, v, batch()))
    assert len(lz.grouped_attention(q, k, v, batch(), return_lse=True)) == 2
    assert lz.grouped_attention(q.requires_grad_(), k, v, batch()).requires_grad
    assert fresh.misses == 4


@pytest.mark.req("R-QUANT-08")
def test_mixed_dtypes_and_autocast_are_understood():
    q, k, v = tensors()
    mixed = lz.grouped_attention(q, k.double(), v, batch())
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, lz.grouped_attention(q, k, v, batch()))
    for words in ({"allow_adaptation": False}, {"strict_mode": True}):
        with lz.scoped(**words), pytest.raises(lz.errors.LayerZeroError) as caught:
            lz.grouped_attention(q, k.double(), v, batch())
        assert {"DTYPE_MIXED", "ADAPTATION_NOT_ALLOWED"} & {caught.value.code, *(r.code for r in caught.value.reasons)}
    with torch.autocast("cpu", torch.bfloat16):
        out = lz.grouped_attention(q, k, v, batch())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, lz.grouped_attention(*(t.bfloat16() for t in (q, k, v)), batch()))


def test_explain_and_plan_take_the_same_arguments():
    q, k, v = tensors()
    report = lz.explain("grouped_attention", q, k, v, batch(), backend="torch")
    assert report.chosen == "torch.grouped_attention.flash_cpu"
    bound = lz.plan("grouped_attention", q, k, v, batch())
    assert torch.equal(bound(q, k, v, batch()), lz.grouped_attention(q, k, v, batch()))


def test_values_of_another_width_go_to_a_kernel_that_takes_them():
    q, k, v = tensors()
    out = lz.grouped_attention(q, k, v[..., :3], batch())
    assert out.shape == (6, 4, 3)
    assert torch.equal(out, lz.grouped_attention(q, k, v, batch(), backend="reference")[..., :3])
