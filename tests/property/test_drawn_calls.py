"""Every op, drawn: as it is, with views that stand for their negative, with gradients, under vmap and compiled.

A few calls of each, always the same ones; with LAYERZERO_PROVE=1 many (`make prove NAME=correctness`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
import torch

import layerzero as lz
from layerzero.model.enums import Platform
from layerzero.runtime.state import state
from tests.property.drawn import agree, flat, gradients, laid_out, negated, others, wanting, wide
from tests.property.drawn_ops import CASES, TOKENS, calls

pytestmark = pytest.mark.correctness
EVERY = pytest.mark.parametrize("op", sorted(CASES))
SMOOTH = pytest.mark.parametrize("op", sorted(set(CASES) - TOKENS))
NO_TENSORS = frozenset({"tokenize", "detokenize"})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """None of these calls is wrong, so none may count as a kernel's fault."""
    lz.reset()
    before = state.counters.failovers
    yield
    assert state.counters.failovers == before
    lz.reset()


def test_every_op_is_drawn() -> None:
    """But for those whose package draws its own calls."""
    ops = {op.op_id for op in lz.list_ops() if not op.function.__module__.startswith("layerzero_linear_attention")}
    assert set(CASES) == ops - NO_TENSORS


@EVERY
def test_as_it_is_with_any_dtype_and_strides(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for number, call in enumerate(calls(op, 2, dtype)):
            given = [laid_out(random.Random(number), t) for t in call.tensors]
            agree(call, call.run(*given), call.formula(*wide(call.tensors)))


OF_GPUS = frozenset({"cutlass", "flash_attn", "flashinfer", "liger_kernel", "quack", "triton", "xformers"})
ASKING = ("_lazy_init", "current_device", "current_stream", "get_device_properties", "mem_get_info", "synchronize")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks torch for something of a GPU where there is none fails the test."""
    for name in ASKING if not torch.cuda.is_available() else ():
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, **__: pytest.fail(f"torch.cuda.{name} was called"))


@pytest.mark.req("R-BK-CPU-05")
@pytest.mark.usefixtures("no_gpu")
@EVERY
def test_on_a_cpu_the_choice_and_the_last_fallback_are_right_and_nothing_of_a_gpu_is_touched(op: str) -> None:
    """The reference alone may serve every second call: it is what is left when every other kernel is out."""
    known, kernels = set(sys.modules), state.world.registry.kernels
    with lz.observe() as seen:
        for number, call in enumerate(calls(op, 2)):
            allowed = ["reference"] if number % 2 else None
            before = seen.calls()
            with lz.scoped(allow=allowed):
                found = call.run(*call.tensors)
            agree(call, found, call.formula(*wide(call.tensors)))
            ran = {key for key, count in seen.calls().items() if count > before.get(key, 0)}
            assert op in {name for name, _ in ran}, "somebody served it"
            for _, kernel_id in ran:
                assert Platform.CPU in kernels[kernel_id].platforms, kernel_id
                assert allowed is None or kernels[kernel_id].backend == "reference", kernel_id
    assert not OF_GPUS & {name.partition(".")[0] for name in set(sys.modules) - known}


@pytest.mark.fault(6)
@EVERY
def test_with_views_that_stand_for_their_negative(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for number, call in enumerate(calls(op, 2, dtype)):
            dice = random.Random(number)
            given = [negated(dice, t) if number % 2 or dice.random() < 0.5 else t for t in call.tensors]
            agree(call, call.run(*given), call.formula(*wide(call.tensors)))


@SMOOTH
def test_gradients(op: str) -> None:
    for call in calls(op, 2):
        found = gradients(call.run, wanting(call.tensors))
        agree(call, found, gradients(call.formula, wanting(wide(call.tensors))), loosely=30)


@SMOOTH
def test_vmap(op: str) -> None:
    for call in calls(op, 2):
        pairs = list(zip(call.tensors, others(call), strict=True))
        found = torch.vmap(call.run)(*(torch.stack(pair) for pair in pairs))
        for at in range(2):
            agree(call, [item[at] for item in flat(found)], call.formula(*wide([pair[at] for pair in pairs])))


# Of these `make check` compiles one call each: tracing takes a second.
COMPILED = frozenset({"rope", "topk_gate"})


@pytest.mark.fault(4)
@pytest.mark.parametrize(
    "op", [op if op in COMPILED else pytest.param(op, marks=pytest.mark.slow) for op in sorted(set(CASES) - TOKENS)]
)
def test_compiled_with_open_sizes(op: str) -> None:
    for number, call in enumerate(calls(op)):
        if number >= 6:
            break
        torch._dynamo.reset()
        compiled = torch.compile(call.run, dynamic=True, backend="aot_eager" if op not in COMPILED else "eager")
        agree(call, compiled(*call.tensors), call.formula(*wide(call.tensors)))
        agree(call, compiled(*others(call)), call.formula(*wide(others(call))))
    torch._dynamo.reset()
