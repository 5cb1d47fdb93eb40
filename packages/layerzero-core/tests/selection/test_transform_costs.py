"""What adapting costs: estimated per step, added up, in the score and in the report."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.model.enums import Layout
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements

EVERY = frozenset({"layout", "contiguous", "dtype", "gqa", "mask"})


def narrow(lab: Any, **fields: Any) -> None:
    given: dict[str, Any] = {"adapt": EVERY, "priority": 99}
    lab.use(lab.kernel("narrow.attention.k", **{**given, **fields}), lab.kernel("easy.attention.k", priority=1))


def winner(args: list[Any], **kwargs: Any) -> Any:
    return lz.explain("attention", *args, **kwargs).decision.candidate("narrow.attention.k")


def tensors(seq: int = 32, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.randn(1, n, seq, 16).to(dtype) for n in (heads, kv_heads, kv_heads)]


CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "layout": ({"layouts": frozenset({Layout.BSHD})}, tensors, {}, "layout:BHSD->BSHD"),
    "contiguous": (
        {"contiguous": True},
        lambda: [torch.randn(1, 4, 32, 32)[..., ::2] for _ in range(3)],
        {},
        "contiguous",
    ),
    "dtype": (
        {"dtypes": frozenset({"float32"})},
        lambda: tensors(dtype=torch.float16),
        {},
        "cast:float16->float32",
    ),
    "gqa": ({"features": frozenset()}, lambda: tensors(kv_heads=2), {}, "expand_kv"),
    "mask": ({"features": frozenset({"mask_bool"})}, tensors, {"is_causal": "bottom_right"}, "mask:causal"),
}


@pytest.mark.req("R-SEL-08", "R-POL-09", "R-SEL-06")
@pytest.mark.parametrize("name", CASES)
def test_each_transform_has_a_price_that_enters_the_score(lab: Any, name: str) -> None:
    fields, build, kwargs, step = CASES[name]
    narrow(lab, **fields)
    item = winner(build(), **kwargs)
    assert step in {part.name for part in item.transforms}
    assert item.transform_cost_us == pytest.approx(sum(part.cost_us for part in item.transforms))
    assert item.transform_cost_us > 0
    parts = dict(item.score_parts)
    assert parts["transforms"] == pytest.approx(-min(30.0, 0.5 * item.transform_cost_us))
    assert item.score == pytest.approx(99 + parts["transforms"])
    report = lz.explain("attention", *build(), **kwargs)
    assert report.chosen == item.kernel_id
    assert report.transform_cost_total == pytest.approx(item.transform_cost_us)
    assert report.to_dict()["transform_cost_total"] == pytest.approx(item.transform_cost_us, abs=1e-3)
    assert any(why.code == "ADAPTED" for why in item.reasons)
    assert step in str(report)


@pytest.mark.req("R-SEL-03")
def test_a_score_is_priority_and_bonus_and_measured_speed_less_the_price_of_transforms(lab: Any) -> None:
    narrow(lab, contiguous=True, priority=60)
    lz.configure(boosts={"narrow.*": 7.0})
    strided = [torch.randn(1, 4, 32, 32)[..., ::2] for _ in range(3)]
    alone = winner([t.contiguous() for t in strided])
    assert alone.score == 67.0
    copied = winner(strided)
    price = 0.5 * copied.transform_cost_us
    assert 0.0 < price < 30.0
    assert copied.score == pytest.approx(60 + 7 - price)
    times = {"narrow.attention.k": 150.0, "easy.attention.k": 100.0}
    state.publish(measurements=Measurements(lambda kernel_id, ctx: times.get(kernel_id), "made up"))
    # Half as long again costs five points; the measurement holds the copies, which are not paid for twice.
    assert winner(strided).score == pytest.approx(60 + 7 - 5)
    assert lz.explain("attention", *strided).decision.candidate("easy.attention.k").score == 60.0


def test_more_data_costs_more_and_a_view_costs_the_same(lab: Any) -> None:
    narrow(lab, dtypes=frozenset({"float32"}), layouts=frozenset({Layout.BSHD}))
    small, large = winner(tensors(32, dtype=torch.float16)), winner(tensors(4096, dtype=torch.float16))
    assert large.transform_cost_us > 10 * small.transform_cost_us
    price = {part.name: part.cost_us for item in (small, large) for part in item.transforms}
    assert price["layout:BHSD->BSHD"] < price["cast:float16->float32"]


@pytest.mark.req("R-SEL-08")
def test_a_kernel_that_needs_no_transform_wins_when_the_transform_costs_more_than_it_gains(lab: Any) -> None:
    def build(priority: float) -> None:
        lab.use(
            lab.kernel("narrow.attention.k", priority=priority, contiguous=True, adapt=EVERY),
            lab.kernel("easy.attention.k", priority=70),
        )

    strided = [torch.randn(1, 4, 256, 64)[..., ::2] for _ in range(3)]
    dense = [t.contiguous() for t in strided]
    build(75)
    assert lab.run(lz.attention, *dense)[1] == ["narrow.attention.k"]
    assert lab.run(lz.attention, *strided)[1] == ["easy.attention.k"]
    build(105)
    assert lab.run(lz.attention, *strided)[1] == ["narrow.attention.k"]


def test_the_total_is_logged_with_the_decision(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    narrow(lab, layouts=frozenset({Layout.BSHD}))
    with caplog.at_level(logging.INFO, logger="layerzero.selection"):
        lz.attention(*tensors())
    assert "transform_cost_total=4.0 us" in caplog.text


@pytest.mark.req("R-POL-09")
@pytest.mark.parametrize("setting", [{"strict_mode": True}, {"allow_adaptation": False}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_strict_mode_forbids_every_transform_and_names_it(lab: Any, name: str, setting: dict[str, bool]) -> None:
    fields, build, kwargs, step = CASES[name]
    narrow(lab, **fields)
    assert lz.validate("narrow.attention.k", *build(), **kwargs) == []
    with lz.scoped(**setting):
        (why,) = lz.validate("narrow.attention.k", *build(), **kwargs)
        assert (why.code, why.value) == ("ADAPTATION_NOT_ALLOWED", step)
        report = lz.explain("attention", *build(), **kwargs)
        assert report.chosen == f"sdpa.attention.{'math' if name == 'contiguous' else 'flash_cpu'}"
        assert report.transform_cost_total == 0.0
        assert lab.run(lz.attention, *build(), **kwargs)[1] == [report.chosen]
        assert all(item.transforms == () for item in report.candidates if item.accepted)
    assert lz.validate("narrow.attention.k", *build(), **kwargs) == []
