"""What attention kernels take as their own descriptors say it: dtypes by GPU, widths of heads, masks, strides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.model.config import Policy
from layerzero.model.context import Context, Strides
from layerzero.model.enums import Layout, MaskKind, Platform
from layerzero.registry.capabilities import load_capabilities
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import builtin_ops
from layerzero.selection.engine import select
from layerzero.selection.world import World
from layerzero_verify.testing import fakes

# Those of the core, and where the whole workspace is here those of every package.
DESCRIPTORS = sorted(Path(__file__).parents[3].glob("*/src/**/capabilities.json"))
KERNELS = {
    kernel.kernel_id: kernel
    for path in DESCRIPTORS
    for kernel in load_capabilities(path).kernels
    if kernel.op == "attention"
}
ON_GPU = {name: kernel for name, kernel in KERNELS.items() if Platform.CUDA in kernel.platforms}
EIGHT_BITS = [name for name in ON_GPU if name.endswith("_fp8")]
# Of torch operations: they take any dtype, width, mask and stride.
PLAIN = {"reference.attention.plain", "sdpa.attention.math", "sdpa.attention.default", "sdpa.attention.by_group"}
FUSED = [name for name in ON_GPU if name not in PLAIN]
# FlashAttention in all its forms; the other fused kernels are torch's and xFormers' CUTLASS, and one of Triton's.
FLASH = [name for name in FUSED if name.split(".")[0].startswith("flash") or name.split(".")[2] in ("flash", "splitk")]
LIMITED = [name for name in FLASH if ON_GPU[name].backend != "flashinfer" and name not in EIGHT_BITS]


def call(sm: int, dtype: str = "float16", head_dim: int = 64, **more: Any) -> Context:
    dims = (
        ("batch", 2), ("num_heads", 8), ("num_kv_heads", 8), ("seq_len_q", 512), ("seq_len_k", 512),
        ("head_dim", head_dim), ("head_dim_v", head_dim),
    )  # fmt: skip
    given: dict[str, Any] = {"device": fakes.gpu(sm), "dtype": dtype, "dtypes": (dtype,), "layout": Layout.BHSD}
    return Context(op="attention", dims=dims, **{**given, **more})


def own(name: str) -> int:
    """A GPU that the kernel is made for."""
    return ON_GPU[name].min_sm or 80


def codes(name: str, ctx: Context) -> set[str]:
    return {why.code.value for why in ON_GPU[name].check(ctx)}


@pytest.mark.req("R-GEN-03")
@pytest.mark.parametrize("sm", [100, 103])
def test_on_datacenter_blackwell_flash_attention_4_comes_before_the_kernels_of_all_packages(sm: int) -> None:
    calls = [call(sm, "bfloat16", 128, layout=layout) for layout in (Layout.BHSD, Layout.BSHD)]
    fitting = [kernel for kernel in ON_GPU.values() if not all(kernel.check(ctx) for ctx in calls)]
    best = max(fitting, key=lambda kernel: kernel.priority)
    assert best.backend == "flashattn4" and len({kernel.backend for kernel in fitting}) >= 5


def test_the_kernels_are_those_of_the_workspace() -> None:
    assert {"sdpa.attention.flash", "sdpa.attention.efficient", "sdpa.attention.cudnn"} <= set(FUSED)
    assert PLAIN <= set(KERNELS) and "sdpa.attention.flash" in LIMITED


@pytest.mark.req("R-SEL-17")
def test_every_attention_kernel_takes_float16_but_those_of_another_precision() -> None:
    assert {name for name, kernel in KERNELS.items() if "float16" not in kernel.dtypes} == {
        "sdpa.attention.by_group", *EIGHT_BITS,
    }  # fmt: skip
    for name in (name for name in FUSED if name not in EIGHT_BITS):
        assert not codes(name, call(own(name))) & {"DTYPE_UNSUPPORTED", "SM_TOO_OLD"}, name


@pytest.mark.req("R-SEL-17")
def test_bfloat16_needs_ampere_whatever_the_kernel() -> None:
    for name, kernel in ON_GPU.items():
        if "bfloat16" in kernel.dtypes:
            assert codes(name, call(75, "bfloat16")) & {"BF16_UNSUPPORTED", "SM_TOO_OLD"}, name
            assert not codes(name, call(max(80, own(name)), "bfloat16")) & {"BF16_UNSUPPORTED", "DTYPE_UNSUPPORTED"}, (
                name
            )


@pytest.mark.req("R-SEL-17")
def test_float32_goes_past_flash_attention_to_torch() -> None:
    for name in FLASH:
        assert "DTYPE_UNSUPPORTED" in codes(name, call(own(name), "float32")), name
    here = World(registry=KernelRegistry().add(KERNELS.values()), ops=builtin_ops, policy=Policy())
    for sm in (75, 80, 90, 100, 120):
        assert select(call(sm, "float32"), here).chosen.startswith(("sdpa.", "reference.")), sm


@pytest.mark.req("R-SEL-17")
@pytest.mark.parametrize("sm", [75, 80, 86, 89])
def test_eight_bits_run_on_hopper_or_later_alone(sm: int) -> None:
    for name in EIGHT_BITS:
        for dtype in ON_GPU[name].dtypes:
            assert dtype.startswith("float8") and codes(name, call(sm, dtype)) & {"SM_TOO_OLD", "FP8_UNSUPPORTED"}
            assert own(name) >= 90 and not codes(name, call(own(name), dtype)) & {"SM_TOO_OLD", "FP8_UNSUPPORTED"}
    assert [name for name, kernel in ON_GPU.items() if "float8_e4m3fn" in kernel.dtypes] == EIGHT_BITS


@pytest.mark.req("R-SEL-07")
@pytest.mark.parametrize("mask", [MaskKind.BOOL, MaskKind.FLOAT], ids=str)
def test_a_mask_leaves_no_flash_attention(mask: MaskKind) -> None:
    for name in FLASH:
        masked = call(own(name), mask=mask, needs=frozenset({f"mask_{mask}"}))
        assert "MASK_UNSUPPORTED" in codes(name, masked), name
    for name in ("sdpa.attention.efficient", "sdpa.attention.math"):
        assert not codes(name, call(80, mask=mask, needs=frozenset({f"mask_{mask}"}))), name


@pytest.mark.req("R-SEL-07")
def test_a_last_axis_that_skips_leaves_no_fused_kernel() -> None:
    for name in FUSED:
        ctx = call(own(name))
        assert "STRIDE_LAST_DIM" not in codes(name, ctx), name
        assert "STRIDE_LAST_DIM" in codes(name, replace(ctx, strides=Strides(last=2, order="other"))), name
    assert not codes("sdpa.attention.math", call(80, strides=Strides(last=2, order="other")))


@pytest.mark.req("R-SEL-15")
def test_the_widths_of_heads_that_flash_attention_takes() -> None:
    def said(name: str, head_dim: int) -> set[str]:
        return {code for code in codes(name, call(own(name), head_dim=head_dim)) if code.startswith("HEAD_DIM")}

    for name in LIMITED:
        assert [said(name, head_dim) for head_dim in (32, 64, 128)] == [set()] * 3, name
        assert said(name, 320) & {"HEAD_DIM_TOO_LARGE", "HEAD_DIM_UNSUPPORTED", "HEAD_DIM_INVALID"}, name
        assert said(name, 84) & {"HEAD_DIM_NOT_MULTIPLE", "HEAD_DIM_INVALID"}, name
    assert said("sdpa.attention.flash", 256) == set()
    for name, most in (("sdpa.attention.flash", 256), ("sdpa.attention.cudnn", 128)):
        (why,) = [item for item in ON_GPU[name].check(call(80, head_dim=320)) if item.code == "HEAD_DIM_TOO_LARGE"]
        assert (why.value, why.limit) == (320, most)
    assert "HEAD_DIM_NOT_MULTIPLE" in said("sdpa.attention.efficient", 84)
    assert not said("sdpa.attention.math", 84) and not said("sdpa.attention.math", 320)
