"""Every op, drawn, under torch's other machinery: forward mode, checkpoints, tracers, gradients of gradients.

A few calls of each, always the same ones; with LAYERZERO_PROVE=1 many (`make prove NAME=correctness`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero.runtime.state import state
from tests.property.drawn import agree, flat, gradients, others, wanting, weighted, wide
from tests.property.drawn_ops import CASES, TOKENS, calls

pytestmark = pytest.mark.correctness
EVERY = pytest.mark.parametrize("op", sorted(CASES))
SMOOTH = pytest.mark.parametrize("op", sorted(set(CASES) - TOKENS))
CURVED = pytest.mark.parametrize("op", sorted(set(CASES) - TOKENS - {"cast", "embedding"}))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """None of these calls is wrong, so none may count as a kernel's fault."""
    lz.reset()
    before = state.counters.failovers
    yield
    assert state.counters.failovers == before
    lz.reset()


def listed(run: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The same function with its results as a tuple of tensors."""
    return lambda *tensors: tuple(flat(run(*tensors)))


@pytest.mark.fault(1)
@SMOOTH
def test_forward_mode(op: str) -> None:
    for call in calls(op, 2):
        directions = tuple(torch.linspace(-1, 1, t.numel()).view(t.shape) for t in call.tensors)

        def tangents(function: Callable[..., Any], tensors: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> list[Any]:
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, along, strict=True)]
                return [forward_ad.unpack_dual(item).tangent for item in flat(function(*duals))]

        found = tangents(call.run, call.tensors, directions)
        right = tangents(call.formula, wide(call.tensors), wide(directions))
        assert all(item is not None for item in found), f"{call}: the tangent is lost"
        agree(call, found, right, loosely=30)


@pytest.mark.fault(2)
@pytest.mark.parametrize("reentrant", [False, True])
@SMOOTH
def test_checkpointed(op: str, reentrant: bool) -> None:
    for call in calls(op):
        right = gradients(call.formula, wanting(wide(call.tensors)))

        leaves = wanting(call.tensors)
        weighted(checkpoint(listed(call.run), *leaves, use_reentrant=reentrant)).backward()
        agree(call, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves], right, loosely=30)


@pytest.mark.fault(3)
@EVERY
def test_traced_by_jit(op: str) -> None:
    for call in calls(op):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the tracer's own
                traced = torch.jit.trace(listed(call.run), call.tensors, check_trace=False)
        except RuntimeError as error:
            # Torch's tracer cannot write down a list of sizes. It says so, and no graph comes of it.
            if "isIntList" not in str(error) or not ("window" in call.words or op in ("quantize", "dequantize")):
                raise
            continue
        agree(call, traced(*others(call)), call.formula(*wide(others(call))))


@pytest.mark.fault(3)
@EVERY
def test_traced_by_make_fx(op: str) -> None:
    for call in calls(op):
        graph = make_fx(listed(call.run))(*call.tensors)
        agree(call, graph(*others(call)), call.formula(*wide(others(call))))


# Torch's own attention kernels on the CPU, whose backward torch cannot derive: it says so where that is asked for.
ONCE = frozenset({"attention", "varlen_attention", "grouped_attention", "paged_attention"})


def twice(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradient of the squares of the gradients."""
    return gradients(lambda *given: tuple(g * g for g in gradients(function, given, create_graph=True)), tensors)


@pytest.mark.fault(8)
@CURVED
def test_gradients_of_gradients_are_right_or_refused(op: str) -> None:
    for call in calls(op):
        try:
            found = twice(call.run, wanting(call.tensors))
        except RuntimeError as error:
            if op not in ONCE or "not implemented" not in str(error):
                raise
            continue
        agree(call, found, twice(call.formula, wanting(wide(call.tensors))), loosely=200)
