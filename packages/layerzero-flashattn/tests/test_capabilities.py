"""What the descriptors say about GPUs, sizes and features, asked as selection asks it; and who comes first where."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from layerzero.model.context import Context, Strides
from layerzero.model.enums import Causal, InstructionFamily, Layout
from layerzero.registry.capabilities import load_capabilities
from layerzero_flashattn import plugin
from layerzero_verify.testing import fakes


@lru_cache
def kernels(op="attention"):
    files = (plugin.FA2, plugin.FA3, plugin.FA4, plugin.QUACK)
    return [spec for file in files for spec in load_capabilities(file).kernels if spec.op == op]


def call(
    sm, *, dtype="bfloat16", dim=128, dim_v=None, heads=8, kv_heads=2, seq=1024, needs=(), layout=Layout.BSHD, **given
):
    needed = {"causal_bottom_right", *({"gqa"} if heads != kv_heads else ()), *needs}
    sizes = (
        ("batch", 1), ("num_heads", heads), ("num_kv_heads", kv_heads), ("seq_len_q", seq), ("seq_len_k", seq),
        ("head_dim", dim), ("head_dim_v", dim if dim_v is None else dim_v),
    )  # fmt: skip
    return Context(
        op="attention", device=fakes.gpu(sm), dtype=dtype, dims=sizes, needs=frozenset(needed), dtypes=(dtype,),
        layout=layout, causal=Causal.BOTTOM_RIGHT, strides=Strides(), **given,
    )  # fmt: skip


def fitting(ctx):
    """Backends with a kernel that takes the call, best prior first."""
    found = [spec for spec in kernels() if not spec.check(ctx)]
    return list(dict.fromkeys(spec.backend for spec in sorted(found, key=lambda spec: -spec.priority)))


def codes(backend, ctx):
    return {item.code.value for spec in kernels() if spec.backend == backend for item in spec.check(ctx)}


@pytest.mark.req("R-BK-FA-02", "R-GEN-03")
@pytest.mark.req("R-BK-FA4-03")
@pytest.mark.parametrize(
    ("sm", "order"),
    [
        (70, []),
        (75, []),
        (80, ["flashattn2", "flashattn4"]),
        (89, ["flashattn2", "flashattn4"]),
        (90, ["flashattn3", "flashattn4", "flashattn2"]),
        (100, ["flashattn4", "flashattn2"]),
        (103, ["flashattn4", "flashattn2"]),
        (110, ["flashattn4", "flashattn2"]),
        (120, ["flashattn2", "flashattn4"]),
        (121, ["flashattn2", "flashattn4"]),
    ],
)
def test_each_gpu_gets_the_generation_made_for_it(sm, order):
    """Blackwell 4, Hopper 3, Ampere 2; consumer Blackwell has the instructions of Ampere."""
    assert fitting(call(sm)) == order


@pytest.mark.req("R-GEN-03")
@pytest.mark.parametrize("sm", [100, 103, 110, 120, 121])
def test_no_kernel_of_flash_attention_3_takes_any_blackwell_whatever_the_op(sm):
    found = load_capabilities(plugin.FA3).kernels
    assert {"attention", "varlen_attention", "paged_attention"} <= {spec.op for spec in found}
    for spec in found:
        assert not spec.check_device(fakes.gpu(90)), spec.kernel_id
        assert "SM_TOO_NEW" in {why.code for why in spec.check_device(fakes.gpu(sm))}, spec.kernel_id


@pytest.mark.req("R-GEN-03")
@pytest.mark.parametrize("op", ["attention", "varlen_attention", "paged_attention"])
@pytest.mark.parametrize("sm", [100, 103, 110])
def test_of_the_flash_attentions_4_comes_first_on_blackwell_for_packed_and_paged_calls_too(op, sm):
    here = [spec for spec in kernels(op) if not spec.check_device(fakes.gpu(sm))]
    mine, others = ([spec for spec in here if (spec.backend == "flashattn4") is made] for made in (True, False))
    assert mine and {spec.backend for spec in others} == {"flashattn2"}
    assert min(spec.priority for spec in mine) > max(spec.priority for spec in others)


@pytest.mark.req("R-BK-FA-03")
def test_head_dim_and_dtype_limits():
    assert fitting(call(90, dim=256)) == ["flashattn3", "flashattn4", "flashattn2"]
    assert fitting(call(90, dim=320)) == []
    assert "HEAD_DIM_TOO_LARGE" in codes("flashattn2", call(90, dim=320))
    assert "HEAD_DIM_NOT_MULTIPLE" in codes("flashattn4", call(90, dim=100))
    for dtype in ("float16", "bfloat16"):
        assert len(fitting(call(90, dtype=dtype))) == 3
    assert fitting(call(90, dtype="float32")) == []
    assert "DTYPE_UNSUPPORTED" in codes("flashattn3", call(90, dtype="float32"))


@pytest.mark.req("R-BK-FA-03")
@pytest.mark.parametrize(("file", "sm"), [(plugin.FA2, 80), (plugin.FA2, 90), (plugin.FA2, 120), (plugin.FA3, 90)])
@pytest.mark.parametrize("op", ["attention", "varlen_attention", "paged_attention"])
def test_packed_and_paged_kernels_have_the_same_limits(file, sm, op):
    mine = [spec for spec in load_capabilities(file).kernels if spec.op == op and not spec.check_device(fakes.gpu(sm))]

    def wrong(**given):
        limits = {"HEAD_DIM_TOO_LARGE", "HEAD_DIM_NOT_MULTIPLE", "HEAD_DIM_UNSUPPORTED", "DTYPE_UNSUPPORTED"}
        ctx = replace(call(sm, **given), op=op)
        return [{why.code.value for why in spec.check(ctx)} & limits for spec in mine]

    assert mine
    for dtype in ("float16", "bfloat16"):
        assert not any(found for dim in range(8, 257, 8) for found in wrong(dim=dim, dtype=dtype))
        assert all(found == {"HEAD_DIM_TOO_LARGE"} for found in wrong(dim=320, dtype=dtype))
    assert all(found == {"DTYPE_UNSUPPORTED"} for found in wrong(dtype="float32"))


@pytest.mark.req("R-SEL-15", "R-BK-FA-03")
@pytest.mark.parametrize(("sm", "backend"), [(80, "flashattn2"), (90, "flashattn3")])
def test_the_head_dims_that_the_descriptors_of_2_and_3_take_end_at_256_in_steps_of_8(sm, backend):
    for dim in (32, 64, 128, 256):
        assert backend in fitting(call(sm, dim=dim)), dim
    for dim, code, limit in ((84, "HEAD_DIM_NOT_MULTIPLE", 8), (320, "HEAD_DIM_TOO_LARGE", 256)):
        ctx = call(sm, dim=dim)
        assert backend not in fitting(ctx)
        usual = [spec for spec in kernels() if spec.backend == backend and not spec.check(call(sm))]
        for spec in usual:
            assert (code, dim, limit) in {(why.code.value, why.value, why.limit) for why in spec.check(ctx)}
        assert usual


@pytest.mark.req("R-BK-FA4-04")
@pytest.mark.parametrize(
    ("sm", "dim", "dim_v", "fits"),
    [
        (90, 256, 256, True),
        (90, 192, 128, True),
        (100, 128, 128, True),
        (100, 192, 128, True),
        (100, 256, 256, True),
        (100, 192, 192, False),
        (100, 160, 160, False),
        (120, 128, 128, True),
        (120, 256, 256, False),
        (80, 64, 64, True),
    ],
)
def test_the_head_dims_of_flash_attention_4_follow_the_instruction_family(sm, dim, dim_v, fits):
    assert ("flashattn4" in fitting(call(sm, dim=dim, dim_v=dim_v))) is fits


@pytest.mark.req("R-BK-FA4-04")
@pytest.mark.parametrize("sm", [80, 90, 100, 110, 120])
def test_flash_attention_4_takes_fp16_and_bf16_everywhere_and_float32_nowhere(sm):
    for dtype in ("float16", "bfloat16"):
        assert "flashattn4" in fitting(call(sm, dtype=dtype)), dtype
    assert "flashattn4" not in fitting(call(sm, dtype="float32"))
    assert "DTYPE_UNSUPPORTED" in codes("flashattn4", call(sm, dtype="float32"))


@pytest.mark.req("R-BK-FA4-02")
def test_datacenter_blackwell_is_served_by_its_tensor_core_instruction_and_by_nothing_without_it():
    def mine(device):
        ctx = replace(call(100), device=device)
        return [spec for spec in kernels() if spec.backend == "flashattn4" and not spec.check(ctx)]

    blackwell = mine(fakes.gpu(100))
    assert {spec.kernel_id for spec in blackwell} == {
        "flashattn4.attention.sm100", "flashattn4.attention.sm100_deterministic",
    }  # fmt: skip
    for spec in blackwell:
        assert spec.instruction_families == {InstructionFamily.TCGEN05}
    without = fakes.gpu(100).instruction_families - {InstructionFamily.TCGEN05}
    maimed = replace(fakes.gpu(100), instruction_families=without)
    assert mine(maimed) == []
    for spec in blackwell:
        assert [item.code.value for item in spec.check_device(maimed)] == ["INSTRUCTION_FAMILY_MISSING"]
    for sm, family in ((80, "mma"), (90, "wgmma"), (110, "tcgen05"), (120, "mma")):
        others = mine(fakes.gpu(sm))
        assert others and {name for spec in others for name in spec.instruction_families} == {family}, sm


@pytest.mark.req("R-SEL-18")
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_every_generation_refuses_a_last_axis_that_skips(sm):
    ctx = call(sm)
    taking = [spec for spec in kernels() if not spec.check(ctx)]
    assert taking
    for spec in taking:
        found = [item.code.value for item in spec.check(replace(ctx, strides=Strides(last=2)))]
        assert found == ["STRIDE_LAST_DIM"], spec.kernel_id
        against = spec.check(replace(ctx, strides=Strides(order="swapped")))
        assert not against, spec.kernel_id  # heads and sequence exchanged is no matter: rows are whole


@pytest.mark.req("R-BK-FA4-04", "R-QUANT-02")
def test_fp8_is_for_datacenter_blackwell():
    assert fitting(call(100, dtype="float8_e4m3fn")) == ["flashattn4"]
    for sm in (90, 110, 120):
        assert fitting(call(sm, dtype="float8_e4m3fn")) == []


def test_what_the_kernels_cannot_do_is_said():
    assert fitting(call(90, needs={"alibi"})) == ["flashattn2"]
    assert fitting(call(90, needs={"mask_bool"})) == []
    assert fitting(call(90, needs={"backward", "softcap"})) == ["flashattn3", "flashattn4", "flashattn2"]
    assert fitting(call(90, needs={"backward", "lse", "lse_backward"})) == ["flashattn4"]
    assert "flashattn4" not in fitting(call(80, needs={"backward"}))
    assert "flashattn4" not in fitting(call(120, needs={"softcap"}))


def test_a_deterministic_call_gets_a_deterministic_kernel():
    ctx = call(90, needs={"backward"}, deterministic=True)
    chosen = [spec.kernel_id for spec in kernels() if not spec.check(ctx)]
    assert sorted(chosen) == [
        "flashattn2.attention.sm90_deterministic",
        "flashattn3.attention.sm90_deterministic",
        "flashattn4.attention.sm90_deterministic",
    ]


@pytest.mark.req("R-BK-FA-04")
def test_bhsd_costs_a_view_and_no_copy():
    from layerzero.selection.transforms import adaptations

    ctx, tried = call(90, layout=Layout.BHSD), set()
    for spec in kernels():
        against = spec.check(ctx)
        if spec.check_device(ctx.device) or "float8_e4m3fn" in spec.dtypes:
            continue
        tried.add(spec.backend)
        assert {item.code.value for item in against} == {"LAYOUT_UNSUPPORTED"}, spec.kernel_id
        standing, steps = adaptations(spec, ctx, against)
        assert [step.name for step in steps] == ["layout:BHSD->BSHD"] and not standing
    assert tried == {"flashattn2", "flashattn3", "flashattn4"}


@pytest.mark.req("R-BK-FA-04")
def test_shared_heads_causal_and_captured_calls_in_their_own_layout_are_taken_as_they_are():
    """Eight query heads over two of keys, inside a graph; a kernel whose features are crossed out refuses the call."""
    ctx = call(90, capturing=True)
    taking = [spec for spec in kernels() if not spec.check(ctx)]
    assert {spec.backend for spec in taking} == {"flashattn2", "flashattn3", "flashattn4"}
    for spec in taking:
        for fields, code in (
            ({"features": spec.features - {"gqa"}}, "GQA_UNSUPPORTED"),
            ({"features": spec.features - {"causal_bottom_right"}}, "CAUSAL_ALIGNMENT_UNSUPPORTED"),
            ({"graph_safe": False}, "CUDA_GRAPH_UNSAFE"),
        ):
            assert code in {item.code.value for item in replace(spec, **fields).check(ctx)}, spec.kernel_id


def test_flash_attention_2_says_what_it_cannot_do_under_dropout():
    from layerzero_flashattn.fa2.limits import attention

    assert attention(call(80)) == []
    assert attention(call(80, dropout=True)) == []
    for need in ("softcap", "lse"):
        assert [item.code.value for item in attention(call(80, dropout=True, needs={need}))] == ["DROPOUT_UNSUPPORTED"]


def test_pages_of_one_tile_are_left_out():
    """FlashAttention 4 reads such a page whole, past the end of the sequence, where a fresh cache may hold NaN."""
    for spec in kernels("paged_attention"):
        if spec.backend == "flashattn4":
            limit = dict(spec.limits)["page_size"]
            assert limit.one_of is not None and not {80, 96, 112, 128, 144} & limit.one_of
            assert dict(spec.limits)["head_dim"].max == 128  # wider heads have tiles of 64 keys under a window
