"""What the vendors' compiler remarks while it compiles is no error, whoever makes warnings errors; all else stays one.

The sentences are those of FlashAttention 4.0.0b36 and QuACK 0.6.5 on an H200, as its logs have them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from layerzero_flashattn import quiet
from layerzero_flashattn.quiet import hush, hush_backward, quietly

SENTENCES = [
    (
        UserWarning,
        "Argument aux_data (position 17) cannot be converted to a JitArgument for function "
        "'cutlass___call___flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__Tensorgmemoi64i641_0125'. "
        "Its type `<class 'flash_attn.cute.utils.AuxData'>` is not supported.",
    ),
    (
        UserWarning,
        "Argument aux_data (position 21) cannot be converted to a JitArgument for function "
        "'cutlass___call___flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__Tensorgmem'.",
    ),
    (
        DeprecationWarning,
        "cutlass.utils.smem_allocator.SmemAllocator is deprecated; use cutlass.memory.SmemAllocator instead.",
    ),
    (DeprecationWarning, "warpgroup.OperandMajorMode is deprecated, use cute.nvgpu.OperandMajorMode instead"),
    (DeprecationWarning, "tcgen05.OperandMajorMode is deprecated, use cute.nvgpu.OperandMajorMode instead"),
    (
        DeprecationWarning,
        "cutlass.utils.LayoutEnum is deprecated; use cutlass.tensor_utils.LayoutEnum instead. It will be removed.",
    ),
]
OTHERS = [
    (
        UserWarning,
        "Argument aux_data (position 3) cannot be converted to a JitArgument for function 'mine'",
    ),
    (DeprecationWarning, "something of the caller's is deprecated"),
]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Warnings are errors, set after our filter, and so in front of it."""
    with warnings.catch_warnings():
        hush()
        warnings.simplefilter("error")
        yield


def compiling(category: type[Warning], text: str) -> Callable[[], str]:
    def vendor() -> str:
        warnings.warn(text, category, stacklevel=2)
        return "compiled"

    return vendor


@pytest.mark.parametrize(("category", "text"), SENTENCES)
def test_their_remarks_are_ignored(category: type[Warning], text: str) -> None:
    vendor = compiling(category, text)
    with pytest.raises(category):
        vendor()
    assert quietly(vendor)() == "compiled"


@pytest.mark.parametrize(("category", "text"), OTHERS)
def test_other_warnings_stay_errors(category: type[Warning], text: str) -> None:
    calls = []

    def vendor() -> None:
        calls.append(1)
        warnings.warn(text, category, stacklevel=2)

    with pytest.raises(category, match=r"mine|caller"):
        quietly(vendor)()
    assert len(calls) == 1


def test_one_filter_is_added_however_often_it_is_asked_for() -> None:
    hush()
    before = list(warnings.filters)
    for _ in range(100):
        hush()
    assert warnings.filters == before
    warnings.simplefilter("always")
    hush()
    assert len(warnings.filters) == len(before) + 1  # the caller's; ours moved to the front


def test_filters_that_another_thread_sets_during_a_compilation_do_not_end_it() -> None:
    """The other thread's filters are there as long as it wants them, and gone when it has put them back."""
    tries, inside, done = [], threading.Event(), threading.Event()

    def other() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=other)

    def vendor() -> str:
        tries.append(1)
        if len(tries) == 1:
            thread.start()
            inside.wait(60)
        warnings.warn(SENTENCES[0][1], UserWarning, stacklevel=2)
        return "compiled"

    hush()
    before = warnings.filters
    assert quietly(vendor)() == "compiled"
    assert len(tries) == 2
    done.set()
    thread.join()
    assert warnings.filters is before


def test_a_remark_that_cannot_be_silenced_is_raised_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "hush", lambda: None)
    with pytest.raises(UserWarning):
        quietly(compiling(*SENTENCES[0]))()


class Vendor(torch.autograd.Function):
    """Two outputs, and a backward that compiles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2.0, x * 3.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        warnings.warn(SENTENCES[1][1], UserWarning, stacklevel=2)
        return 2.0 * grads[0] + 3.0 * grads[1]


@pytest.mark.parametrize("which", [0, 1])
def test_the_backward_pass_is_quiet_too(which: int) -> None:
    """It runs long after the forward, and the caller may have set filters in between."""
    x = torch.ones(3, requires_grad=True)
    outs = Vendor.apply(x)
    hush_backward(*outs, None)
    warnings.simplefilter("error")
    outs[which].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0 + which] * 3


def test_without_a_graph_there_is_nothing_to_do() -> None:
    hush_backward(torch.ones(2), None)
