"""Devices stay apart: no kernel crosses to another device, and mixed inputs are refused by name."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero.runtime.state import state

NAMES = ("sapphire-rapids", "neoverse-n1", "t4", "a100", "h100", "b200", "mi300x", "gaudi2", "apple-m2")
SIZES = {
    "batch": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "seq_len_q": 16,
    "seq_len_k": 16,
    "head_dim": 64,
    "head_dim_v": 64,
}


@pytest.mark.req("R-DEV-10")
@pytest.mark.parametrize("name", NAMES)
def test_only_kernels_of_the_device_are_accepted_and_the_others_say_why(name):
    device = named_device(name)
    for dtype in ("float16", "float32"):
        ctx = Context(op="attention", device=device, dtype=dtype, dims=tuple(SIZES.items()), needs=frozenset({"gqa"}))
        for candidate in lz.explain("attention", ctx).candidates:
            kernel = state.world.registry.get(candidate.kernel_id)
            if candidate.accepted:
                assert device.platform in kernel.platforms
            if device.platform not in kernel.platforms:
                (why,) = [reason for reason in candidate.reasons if reason.code == "PLATFORM_MISMATCH"]
                assert str(device.platform) in why.message


@pytest.mark.req("R-DEV-10")
def test_a_descriptor_for_cuda_is_never_offered_to_the_cpu():
    q = torch.randn(1, 2, 8, 16)
    for candidate in lz.explain("attention", q, q, q).candidates:
        if candidate.accepted:
            assert Platform.CPU in state.world.registry.get(candidate.kernel_id).platforms


@pytest.mark.req("R-DEV-10")
def test_no_kernel_of_any_op_takes_a_device_that_its_backend_is_not_for():
    kernels, both = list(state.world.registry.kernels.values()), set()
    for device in map(named_device, NAMES):
        for kernel in kernels:
            codes = {item.code.value for item in kernel.check_device(device)}
            assert ("PLATFORM_MISMATCH" in codes) is (device.platform not in kernel.platforms), (kernel, device)
            both.add("PLATFORM_MISMATCH" in codes)
    assert both == {True, False}


@pytest.mark.req("R-DEV-10")
@pytest.mark.parametrize("name", ["sdpa.attention.efficient", "sdpa.attention.flash", "sdpa.attention.cudnn"])
def test_a_kernel_of_gpus_that_is_asked_for_by_name_does_not_run_on_cpu_tensors(name):
    q = torch.randn(1, 2, 8, 16)
    for settings, asked in (({}, {"backend": name}), ({"locks": {"attention": name}}, {})):
        with lz.scoped(**settings), pytest.raises(LayerZeroError) as caught:
            lz.attention(q, q, q, **asked)
        assert f"{name}: PLATFORM_MISMATCH" in str(caught.value)
    with lz.prefer(name):
        assert lz.which("attention", q, q, q) != name


@pytest.mark.req("R-DEV-09")
def test_inputs_on_two_devices_are_refused_and_each_is_named():
    q, elsewhere = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16, device="meta")
    lz.attention(q, q, q)  # hot: the check must not be lost behind the table
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(q, elsewhere, q)
    assert caught.value.code == "DEVICE_MIXED"
    assert "query on cpu" in str(caught.value) and "key on meta" in str(caught.value)


def _t(*shape, at="cpu", dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=at)


_OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
_PAGES, _LENS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
_COS = _t(5, 4)
# An op, and which input of it lies elsewhere: the call with that input on a device, and the first input that stays.
APART = {
    "attention: value": (lambda at: lz.attention(_t(1, 2, 5, 8), _t(1, 2, 5, 8), _t(1, 2, 5, 8, at=at)), "query"),
    "attention: attn_mask": (lambda at: lz.attention(*[_t(1, 2, 5, 8)] * 3, attn_mask=_t(5, 5, at=at)), "query"),
    "varlen_attention: key": (
        lambda at: lz.varlen_attention(_t(5, 2, 8), _t(5, 2, 8, at=at), _t(5, 2, 8), _OFFSETS, _OFFSETS), "query",
    ),
    "paged_attention: value_cache": (
        lambda at: lz.paged_attention(
            _t(2, 2, 8), _t(4, 4, 2, 8), _t(4, 4, 2, 8, at=at), lz.paged_batch(_PAGES, _LENS)
        ), "query",
    ),
    "rms_norm: weight": (lambda at: lz.rms_norm(_t(3, 8), _t(8, at=at)), "input"),
    "add_rms_norm: residual": (lambda at: lz.add_rms_norm(_t(3, 8), _t(3, 8, at=at), _t(8)), "input"),
    "layer_norm: bias": (lambda at: lz.layer_norm(_t(3, 8), _t(8), _t(8, at=at)), "input"),
    "linear: weight": (lambda at: lz.linear(_t(3, 8), _t(4, 8, at=at)), "input"),
    "linear: bias": (lambda at: lz.linear(_t(3, 8), _t(4, 8), _t(4, at=at)), "input"),
    "embedding: weight": (lambda at: lz.embedding(_t(3, dtype=torch.int64), _t(4, 8, at=at)), "ids"),
    "rope: sin": (lambda at: lz.rope(_t(1, 2, 5, 8), None, _COS, _t(5, 4, at=at)), "q"),
}  # fmt: skip


@pytest.mark.req("R-DEV-09")
@pytest.mark.parametrize("name", APART)
def test_every_op_refuses_inputs_that_lie_apart_and_says_which_lies_where(name):
    call, stays = APART[name]
    moved = name.partition(": ")[2]
    for _ in range(2):
        call("cpu")  # hot the second time: the check must not be lost behind the table
        with pytest.raises(InvalidInputError) as caught:
            call("meta")
        assert caught.value.code == "DEVICE_MIXED" and caught.value.hint
        assert f"{moved} on meta" in str(caught.value) and f"{stays} on cpu" in str(caught.value)


@pytest.mark.req("R-POL-10")
def test_plan_mode_is_a_toggle_of_every_level(monkeypatch, tmp_path):
    assert lz.get_config().plan_mode is False
    path = tmp_path / "layerzero.yaml"
    path.write_text("plan_mode: true\n")
    try:
        assert lz.load_config(path).plan_mode is True
        before = lz.get_config().policy_hash
        lz.configure(plan_mode=False)
        assert lz.get_config().plan_mode is False and lz.get_config().policy_hash != before
        with lz.scoped(plan_mode=True):
            assert lz.get_config().plan_mode is True
    finally:
        lz.reset()
