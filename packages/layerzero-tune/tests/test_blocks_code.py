"""A planned block as one function: what it says, what it keeps alive, what happens where a line raises."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.errors import KernelExecutionError
from layerzero.runtime.state import state
from layerzero_tune.blocks.block import Block, Ref, Step, decoder_layer
from layerzero_tune.blocks.code import written
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.plan import BlockPlan, BlockReport
from layerzero_tune.blocks.search import per_op
from tests.decoder import BLOCK, HEADS, HIDDEN, KV, WIDTH, inputs, layer, truth


@pytest.fixture(autouse=True)
def fresh() -> Any:
    lz.reset()
    yield
    lz.reset()


def files() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<layerzero block")}


def test_the_text_says_what_runs_in_the_blocks_own_names() -> None:
    t = layer()
    with torch.no_grad():
        plan = lz.plan_block(BLOCK, t)
    assert "def decoder_layer(x, cos, sin):" in plan.code and "return out" in plan.code
    places = [plan.code.index(f" {kernel.replace('.', '_')}(") for kernel in dict.fromkeys(plan.kernels)]
    assert places == sorted(places)


def test_inputs_go_by_name_too_and_any_name_will_do() -> None:
    steps = (
        Step("add", (Ref("class"), Ref("b.0")), ("a sum",)),
        Step("add", (Ref("a sum"), Ref("error")), ("bind",)),
        Step("rms_norm", (Ref("bind"), Ref("b_0"), 1e-6), ("1",)),
        Step("heads", (Ref("1"), 2), ("Exception",)),
        Step("merge", (Ref("Exception"),), ("mine",)),
    )
    block = Block("mine", ("class", "b.0", "error"), steps, ("mine", "a sum"))
    a, b, c, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    plan = lz.plan_block(block, {"class": a, "b.0": b, "error": c, "b_0": w})
    wanted = torch.nn.functional.rms_norm(a + b + c, (8,), w, 1e-6)
    for found, total in (plan(a, b, c), plan(a, **{"error": c, "b.0": b}), plan(**{"b.0": b, "class": a, "error": c})):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(total, a + b)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "BHSD copied"])
def test_heads_first_is_turned_back_also_where_another_kernel_has_to_step_in(lab: Any, layout: str) -> None:
    turned = (Ref("q"), Ref("k"), Ref("cos"), Ref("sin"), False, layout[:4], None, False)
    args = (Ref("q2"), Ref("k2"), Ref("v"), None, 0.0, True, None, None, None, None, False)
    steps = (
        Step("rope", turned, ("q2", "k2"), layout=layout[:4]),
        Step("attention", args, ("out",), layout=layout),
    )
    block = Block("turned", ("q", "k", "v", "cos", "sin"), steps, ("out", "k2"))
    lab.use(lab.kernel("new.attention.fast", priority=99.0))
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 5, heads, WIDTH, generator=draw) for heads in (HEADS, KV, KV))
    angles = torch.arange(5)[:, None] * torch.linspace(1, 0.1, WIDTH // 2)
    t = {"q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin()}
    path = per_op(block, t, state.world, Meter(state.world, measure=False))
    plan = BlockPlan(block, t, BlockReport(block, path, path, measured=False))
    q2, k2 = lz.rope(q, k, t["cos"], t["sin"], layout="BSHD")
    wanted = lz.attention(q2, k2, v, is_causal=True, layout="BSHD")
    for fault in (None, RuntimeError("broken")):
        if fault is not None:
            lab.faults["new.attention.fast"] = fault
        found, rotated = plan(*t.values())
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(rotated, k2)


def test_a_step_of_several_results_hands_over_too(lab: Any) -> None:
    lab.use(lab.kernel("new.add_rms_norm.fast", priority=99.0), lab.kernel("new.rope.fast", priority=99.0))
    t = layer()
    plan = lz.plan_block(BLOCK, t)
    for kernel_id in ("new.add_rms_norm.fast", "new.rope.fast"):
        assert kernel_id in plan.kernels
        lab.faults[kernel_id] = RuntimeError("broken")
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)


def test_where_nobody_can_step_in_the_traceback_shows_the_line(lab: Any) -> None:
    lab.use(lab.kernel("only.rms_norm.fast", priority=99.0), locks={"rms_norm": "only.rms_norm.fast"})
    t = layer()
    plan = lz.plan_block(BLOCK, t)
    lab.faults["only.rms_norm.fast"] = RuntimeError("broken")
    with pytest.raises(KernelExecutionError) as caught:
        plan(*inputs(t))
    assert "normed = only_rms_norm_fast(x, ln1, 1e-06)" in "".join(traceback.format_exception(caught.value))


def test_what_no_later_step_reads_is_let_go_and_results_are_not() -> None:
    alive: list[set[str]] = []
    known: dict[str, weakref.ref[Tensor]] = {}

    def watching(name: str) -> Any:
        def run(x: Tensor, *rest: Any) -> Tensor:
            alive.append({other for other, ref in known.items() if ref() is not None})
            out = x + 1
            known[name] = weakref.ref(out)
            return out

        return run

    class Stand:
        def __init__(self, name: str) -> None:
            self.kernel_id, self.run = f"lab.step.{name}", watching(name)

    steps = [Step("rms_norm", (Ref(a),), (b,)) for a, b in (("x", "a"), ("a", "b"), ("b", "c"), ("c", "d"))]
    block = Block("chain", ("x",), tuple(steps), ("d", "b"))
    spec: Any = object()
    run = written(block, [(step, spec, Stand(step.outputs[0])) for step in steps]).bind({})  # type: ignore[misc]
    x = torch.zeros(2)
    d, b = run(x)
    assert alive == [set(), {"a"}, {"b"}, {"b", "c"}]
    assert d.tolist() == [4.0, 4.0] and b.tolist() == [2.0, 2.0] and x.tolist() == [0.0, 0.0]


def test_a_plan_that_is_gone_leaves_no_text_and_no_weights() -> None:
    gc.collect()
    before = files()
    t = layer()
    plan = lz.plan_block(BLOCK, t)
    assert len(files() - before) == 1
    weight = weakref.ref(t["wo"])
    lz.reset()
    del plan, t
    gc.collect()
    assert files() == before and weight() is None


class Wordless(float):
    """A number whose repr() is no Python."""

    def __repr__(self) -> str:
        return "<a number>"


def test_numbers_that_have_no_literal_and_objects_are_passed_as_they_are(lab: Any) -> None:
    seen: list[Any] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        seen.append(eps)
        return lab.reference("rms_norm")(x, weight, 1e-6)

    lab.use(lab.kernel("lab.rms_norm.seeing", rms_norm, priority=99.0))
    x, w = torch.randn(2, HIDDEN), torch.ones(HIDDEN)
    for eps in (1e-6, Wordless(1e-3), 3):
        block = Block("one", ("x",), (Step("rms_norm", (Ref("x"), Ref("w"), eps), ("out",)),), ("out",))
        plan = lz.plan_block(block, {"x": x, "w": w})
        seen.clear()
        plan(x)
        assert seen == [eps] and type(seen[0]) is type(eps)


def test_a_plan_inside_a_compiled_function_gives_the_same() -> None:
    t = layer()
    with torch.no_grad():
        plan = lz.plan_block(decoder_layer(HEADS, KV), t)
        wanted = plan(*inputs(t))
        found = torch.compile(lambda x: plan(x, t["cos"], t["sin"]) + 1, backend="eager")(t["x"])
    torch.testing.assert_close(found, wanted + 1)
