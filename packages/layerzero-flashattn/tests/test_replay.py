"""Calling a compiled kernel again without the library's Python: only when the recorded call is what we think it is.

The stand-in keeps what the real forward of FlashAttention 4 does: it looks its kernels up in `compile_cache`, by the
global name of the function itself, and calls them with out and lse it has made.
"""

from __future__ import annotations

import contextlib
import math
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from layerzero.backends.reference.attention import attention as reference
from layerzero_flashattn.fa4 import replay

SOURCE = """
import torch
behaviour = {"copy": False, "calls": 1, "rest": None}

def _flash_attn_fwd(*args, **kwargs):
    given = bind(*args, **kwargs)
    q, k, v = given["q"], given["k"], given["v"]
    scale, causal = given["softmax_scale"], given.get("causal", False)
    sides = tuple(-1 if given.get(f"window_size_{s}") is None else given[f"window_size_{s}"] for s in ("left", "right"))
    if behaviour["copy"]:
        q = q.clone()
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if given["return_lse"] else None
    key = (q.shape[-1], causal, sides, lse is None)
    log.append("library")
    if key not in _flash_attn_fwd.compile_cache:
        log.append("compile")
        _flash_attn_fwd.compile_cache[key] = compiled(causal, sides)
    for _ in range(behaviour["calls"]):
        kernel = _flash_attn_fwd.compile_cache[key]
        kernel(q.detach(), k.detach(), v.detach(), out.detach(), lse, scale, None, behaviour["rest"])
    return out, lse, None, None, None

_flash_attn_fwd.compile_cache = {}
"""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.fixture
def fa4(monkeypatch, recorded):
    """FlashAttention 4's adapters over the stand-in: `.kernels`, `.library` (a module), `.log` of what happened."""
    log: list[str] = []

    def bound(name):
        signature = recorded("flash_attn.json", f"flash_attn.cute.interface.{name}")
        return lambda *args, **kwargs: dict(signature.bind(*args, **kwargs).arguments)

    def compiled(causal, sides):
        def kernel(q, k, v, out, lse, scale, *rest):
            log.append("kernel")
            assert not any(t.requires_grad for t in (q, k, v))
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            mask = "bottom_right" if causal else False
            found = reference(*heads_first, None, 0.0, mask, scale, sides, None, None, True)
            out.copy_(found[0].transpose(1, 2))
            if lse is not None:
                lse.copy_(found[1])

        return kernel

    library = ModuleType("flash_attn.cute.interface")
    library.__dict__.update(bind=bound("_flash_attn_fwd"), log=log, compiled=compiled)
    exec(SOURCE, library.__dict__)

    def through_autograd(name):
        binding = bound(name)

        def call(*args, **kwargs):
            given = binding(*args, **kwargs)
            log.append(name)
            assert "score_mod" not in given
            heads_first = (given[n].transpose(1, 2) for n in "qkv")
            sides = tuple(-1 if s is None else s for s in given["window_size"])
            causal = "bottom_right" if given["causal"] else False
            out, lse = reference(*heads_first, None, 0.0, causal, given["softmax_scale"], sides, None, None, True)
            library.deterministic = given["deterministic"]
            return out.transpose(1, 2), lse

        return call

    library.flash_attn_func = through_autograd("flash_attn_func")
    library.flash_attn_varlen_func = through_autograd("flash_attn_varlen_func")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", library)
    monkeypatch.delitem(sys.modules, "layerzero_flashattn.fa4.kernels", raising=False)
    kernels = import_module("layerzero_flashattn.fa4.kernels")
    monkeypatch.setattr(kernels, "_is_current", lambda tensor: True)
    monkeypatch.setattr(kernels, "_on_device", lambda device: contextlib.nullcontext())
    yield SimpleNamespace(kernels=kernels, library=library, log=log)
    sys.modules.pop("layerzero_flashattn.fa4.kernels", None)


def call(fa4, q, k, v, causal="bottom_right", scale=None, window=None, lse=False, **options):
    return fa4.kernels.attention(q, k, v, None, 0.0, causal, scale, window, None, None, lse, **options)


def right(q, k, v, causal="bottom_right", scale=None, window=None):
    out, lse = reference(*(t.transpose(1, 2) for t in (q, k, v)), None, 0.0, causal, scale, window, None, None, True)
    return out.transpose(1, 2), lse


def qkv(q_len=6, k_len=6, seed=0):
    return randn(2, q_len, 4, 8, seed=seed), randn(2, k_len, 2, 8, seed=seed + 1), randn(2, k_len, 2, 8, seed=seed + 2)


def test_the_second_call_goes_straight_to_the_kernel(fa4):
    for seed in (0, 10):
        tensors = qkv(seed=seed)
        torch.testing.assert_close(call(fa4, *tensors), right(*tensors)[0])
    assert [word for word in fa4.log if word != "kernel"] == ["library", "compile", "library", "library"]
    assert fa4.log[-1] == "kernel"


def test_short_and_long_queries_are_compiled_together_and_only_once(fa4, monkeypatch):
    """What is compiled later would be compiled inside a request."""
    lengths = []
    plain = fa4.kernels.plain_forward

    def noted(q, *rest, **options):
        lengths.append(q.shape[1])
        return plain(q, *rest, **options)

    monkeypatch.setattr(fa4.kernels, "plain_forward", noted)
    for q_len in (6, 7, 300):
        call(fa4, *qkv(q_len=q_len))
    assert lengths == [1, 256]
    call(fa4, *qkv(), causal=False)  # without a mask one kernel serves every length
    assert lengths == [1, 256]
    call(fa4, *qkv(), window=(3, 0))
    assert lengths == [1, 256, 1, 256]


def test_other_values_and_more_keys_need_no_new_recording(fa4):
    call(fa4, *qkv())
    fa4.log.clear()
    for k_len, scale in ((7, None), (8, 0.3), (100, 2.0)):
        tensors = qkv(k_len=k_len, seed=k_len)
        torch.testing.assert_close(call(fa4, *tensors, scale=scale), right(*tensors, scale=scale)[0])
    assert fa4.log == ["kernel"] * 3


@pytest.mark.parametrize(
    "other",
    [{"causal": False}, {"window": (2, 1)}, {"window": (2, -1), "causal": False}, {"lse": True}],
)
def test_other_options_are_recorded_by_themselves(fa4, other):
    tensors = qkv()
    call(fa4, *tensors)
    fa4.log.clear()
    for _ in range(2):
        found = call(fa4, *tensors, **other)
        options = {name: value for name, value in other.items() if name != "lse"}
        expected = right(*tensors, **options)
        torch.testing.assert_close(found[0] if other.get("lse") else found, expected[0])
    masked = other.get("causal", True) or "window" in other
    assert fa4.log[0] == "library" and fa4.log[-1] == "kernel" and fa4.log.count("library") == (3 if masked else 1)


def test_a_row_without_keys_has_no_lse(fa4):
    tensors = qkv(q_len=6, k_len=3)
    for _ in range(2):
        out, lse = call(fa4, *tensors, lse=True)
        expected, expected_lse = right(*tensors)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert (lse[..., :3] == -math.inf).all()


def test_a_negative_and_a_zero_scale(fa4):
    tensors = qkv()
    for scale in (-0.7, 0.0):
        for _ in range(2):
            torch.testing.assert_close(call(fa4, *tensors, scale=scale), right(*tensors, scale=scale)[0])


def test_expanded_tensors_are_copied_so_that_nothing_is_compiled_for_them(fa4):
    q, k, v = qkv()
    call(fa4, q, k, v)
    fa4.log.clear()
    shared = [t[:1].expand(2, -1, -1, -1) for t in (k, v)]
    torch.testing.assert_close(call(fa4, q, *shared), right(q, *shared)[0])
    assert fa4.log == ["kernel"]


def test_a_parameter_without_a_gradient_to_record_is_detached(fa4):
    tensors = [t.requires_grad_() for t in qkv()]
    with torch.no_grad():
        for _ in range(2):
            found = call(fa4, *tensors)
    assert not found.requires_grad


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_goes_through_the_librarys_autograd_function(fa4, deterministic):
    tensors = [t.requires_grad_() for t in qkv()]
    call(fa4, *tensors, deterministic=deterministic).sum().backward()
    # Once for the call, and once for short and for long queries, whose backward is compiled in the same go.
    assert fa4.log == ["flash_attn_func"] * 3 and fa4.library.deterministic is deterministic
    assert all(t.grad is not None for t in tensors)
    call(fa4, *tensors, deterministic=deterministic)
    assert fa4.log == ["flash_attn_func"] * 4


def test_the_backward_of_short_and_long_queries_is_compiled_with_the_first_call_that_needs_one(fa4, monkeypatch):
    lengths = []
    real = fa4.kernels._with_gradient

    def watched(function, query, *rest, **options):
        out, lse = real(function, query, *rest, **options)
        out.register_hook(lambda grad: lengths.append(query.shape[1]))
        return out, lse

    monkeypatch.setattr(fa4.kernels, "_with_gradient", watched)
    tensors = [t.requires_grad_() for t in qkv()]
    call(fa4, *tensors)
    assert lengths == [fa4.kernels.SHORT, fa4.kernels.LONG] and all(t.grad is None for t in tensors)


def test_a_length_whose_backward_the_library_does_not_take_costs_no_other_call(fa4, monkeypatch):
    real = fa4.kernels._func

    def picky(query, *rest, **options):
        if query.shape[1] == fa4.kernels.SHORT:
            raise RuntimeError("too short")
        return real(query, *rest, **options)

    monkeypatch.setattr(fa4.kernels, "_func", picky)
    tensors = [t.requires_grad_() for t in qkv()]
    torch.testing.assert_close(call(fa4, *tensors), right(*tensors)[0])


@pytest.mark.parametrize(
    "oddity", [{"copy": True}, {"calls": 2}, {"rest": torch.zeros(1)}, {"rest": (1, [torch.zeros(1)])}]
)
def test_a_call_that_went_another_way_is_not_trusted(fa4, oddity):
    """A copied input, two kernels or a tensor among the options: every call then goes through the library."""
    fa4.library.behaviour.update(oddity)
    for seed in (0, 10, 20):
        tensors = qkv(seed=seed)
        torch.testing.assert_close(call(fa4, *tensors, causal=False), right(*tensors, causal=False)[0])
    assert fa4.log.count("library") == 3


def test_a_forward_of_another_shape_is_not_touched():
    assert not replay.replayable(len)
    assert not replay.replayable(lambda q: q)


def test_shapes_without_end_do_not_fill_the_memory(fa4, monkeypatch):
    monkeypatch.setattr(fa4.kernels, "_RECORDED_LIMIT", 4)
    for q_len in range(1, 12):
        call(fa4, *qkv(q_len=q_len))
        assert len(fa4.kernels._recorded) <= 4
