"""Where the ladder draws its lines: a result just within a bound passes, one just beyond it is found and named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero_verify import training
from layerzero_verify.block import CONFIGS
from layerzero_verify.kernels import Bench
from layerzero_verify.ladder import verify
from layerzero_verify.layers import check_layer
from layerzero_verify.lineup import Caller, LineUp
from layerzero_verify.report import Check, Status
from layerzero_verify.training import check_training

CPU = torch.device("cpu")
SELECTED = LineUp("as selected")
SMALL = replace(CONFIGS["tiny"], hidden=16, layers=1, vocab=11)
WITHIN_AND_BEYOND = pytest.mark.parametrize(("part", "status"), [(0.7, Status.OK), (1.3, Status.FAIL)])


@pytest.fixture(autouse=True)
def one_thread(clean: None) -> Iterator[None]:
    """Small tensors: a second thread only gets in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- one kernel -------------------------------------------------------------------------------------------
@pytest.mark.req("R-PAR-01", "R-PAR-10")
@WITHIN_AND_BEYOND
@pytest.mark.parametrize("op", ["attention", "cross_entropy"])
def test_a_kernel_may_be_off_by_1e_5_in_float32_and_not_by_more(lab: Any, op: str, part: float, status: Status) -> None:
    plain = lab.reference(op)

    def off(*args: Any) -> Any:
        out = plain(*args)
        return out + part * 1e-5 * (1 + out.abs()) if isinstance(out, Tensor) else out

    spec = lab.kernel(f"toy.{op}.off", off)
    lab.use(spec)
    bench = Bench(spec, CPU, dtype="float32")
    with bench.locked():
        checks = [check for check in bench.forward() if check.stage.startswith("result")]
    assert checks and {check.status for check in checks} == {status}
    assert {check.threshold for check in checks} == {1e-5}


class Leaning(torch.autograd.Function):
    """Passes a tensor on; its gradient is moved by a part of what the ladder allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: float) -> Tensor:
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad + ctx.part * 1e-5 * (max(1.0, grad.abs().max().item()) + grad.abs()), None


@pytest.mark.req("R-PAR-01", "R-PAR-10")
@WITHIN_AND_BEYOND
def test_a_gradient_of_a_kernel_may_be_off_by_1e_5_and_not_by_more(lab: Any, part: float, status: Status) -> None:
    plain = lab.reference("silu_and_mul")
    leaning: Any = Leaning
    spec = lab.kernel("toy.silu_and_mul.leaning", lambda x: plain(leaning.apply(x, part)))
    lab.use(spec)
    bench = Bench(spec, CPU, dtype="float32")
    with bench.locked():
        assert [str(check) for check in bench.forward() if check.status is not Status.OK] == []
        checks = list(bench.backward())
    assert checks and {check.status for check in checks} == {status}


@pytest.mark.req("R-PAR-01")
def test_every_kernel_under_test_is_compared_forward_and_where_it_has_one_backward(lab: Any) -> None:
    lab.use(
        lab.kernel("toy.silu_and_mul.both"),
        lab.kernel("toy.silu_and_mul.forward", features=frozenset()),
        lab.kernel("toy.gelu_and_mul.both"),
    )
    report = verify(backend="toy", level=1, device="cpu", dtype="float32")
    assert report.ok, report.verdict.text
    found: dict[str, dict[str, set[Status]]] = {}
    for check in report.levels[1].checks:
        found.setdefault(check.kernel, {}).setdefault(check.name, set()).add(check.status)
    assert set(found) == set(report.kernels) and len(found) == 3
    assert all(names["forward"] == {Status.OK} for names in found.values())
    assert {kernel: names["backward"] for kernel, names in found.items()} == {
        "toy.silu_and_mul.both": {Status.OK},
        "toy.silu_and_mul.forward": {Status.SKIP},
        "toy.gelu_and_mul.both": {Status.OK},
    }


# -- a layer ----------------------------------------------------------------------------------------------
def layer_with(lab: Any, change: Callable[[Tensor], None], call: int) -> list[Check]:
    """A layer's checks where one call of the gated activation, counted from 0, has its result changed."""
    plain = lab.reference("silu_and_mul")
    calls: list[int] = []

    def wrong(x: Tensor) -> Any:
        out = plain(x)
        if len(calls) == call:
            out = out.clone()
            change(out)
        calls.append(1)
        return out

    lab.use(lab.kernel("toy.silu_and_mul.k", wrong))
    return list(check_layer(CONFIGS["tiny"], LineUp("toy", ("toy.silu_and_mul.k",)), CPU))


@pytest.mark.req("R-PAR-03", "R-PAR-10")
@WITHIN_AND_BEYOND
def test_a_stage_of_a_layer_may_be_off_by_1e_4_and_not_by_more(lab: Any, part: float, status: Status) -> None:
    def change(out: Tensor) -> None:
        out[1, 3, 5] += part * 1e-4 * (1 + out[1, 3, 5].abs())

    forward = layer_with(lab, change, 0)[0]
    assert forward.name == "forward" and forward.status is status
    assert [row.stage for row in forward.stages if not row.ok] == ["layer 0 swiglu_out"] * (status is Status.FAIL)


@pytest.mark.req("R-PAR-11")
def test_the_red_flags_of_a_layer_stand_in_its_check_and_name_the_component(lab: Any) -> None:
    def change(out: Tensor) -> None:
        out[1, 3, 5] += 1.5

    forward = layer_with(lab, change, 1)[0]
    assert forward.status is Status.FAIL and forward.component == "MLP"
    assert forward.kernel == "toy.silu_and_mul.k" and forward.stage == "layer 1 swiglu_out"
    bug, worse = forward.flags
    assert bug.startswith("layer 1 swiglu_out differs by 1.5") and "a bug, not rounding" in bug
    assert worse.startswith("layer 1 swiglu_out is far worse")


STAGES = (
    "ln1_out q_proj k_proj v_proj q_rope k_rope scores attn_out proj_out residual ln2_out fc1_out swiglu_out mlp_out"
)
LEAVES = "ln1 wq wk wv wo ln2 w1 w2"


@pytest.mark.req("R-PAR-03")
def test_every_intermediate_of_every_layer_is_compared_forward_and_backward() -> None:
    forward, backward = list(check_layer(CONFIGS["tiny"], SELECTED, CPU))[:2]
    stages = [f"layer {number} {name}" for number in (0, 1) for name in (*STAGES.split(), "output")]
    assert sorted(row.stage for row in forward.stages) == sorted(stages)
    leaves = ["input", *(f"layer {number} {name}" for number in (0, 1) for name in LEAVES.split())]
    through = [stage for stage in stages if not stage.endswith("scores")]  # nothing passes through these
    assert sorted(row.stage for row in backward.stages) == sorted([*leaves, *through])
    ops = {row.stage: row.op for row in forward.stages}
    order = ("ln1_out", "q_proj", "q_rope", "attn_out", "proj_out", "residual", "ln2_out", "fc1_out", "swiglu_out")
    assert [ops[f"layer 0 {name}"] for name in (*order, "mlp_out")] == [
        "rms_norm", "linear", "rope", "attention", "linear", "add_rms_norm", "add_rms_norm", "linear", "silu_and_mul",
        "linear",
    ]  # fmt: skip


# -- decode -----------------------------------------------------------------------------------------------
def decode_checks(lab: Any, op: str, function: Callable[..., Any]) -> dict[str, Check]:
    lab.use(lab.kernel(f"toy.{op}.k", function))
    found = check_layer(CONFIGS["tiny"], LineUp("toy", (f"toy.{op}.k",)), CPU)
    return {check.name: check for check in found}


@pytest.mark.req("R-PAR-04")
def test_a_decode_step_that_forgets_the_last_key_is_found_at_its_token(lab: Any) -> None:
    plain = lab.reference("attention")

    def forgetful(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        kept = key.shape[2] - (query.shape[2] == 1)  # a decode step alone: everything else is right
        return plain(query, key[:, :, :kept], value[:, :, :kept], *rest)

    found = decode_checks(lab, "attention", forgetful)
    wrong = found.pop("prefill + decode, contiguous")
    assert wrong.status is Status.FAIL and (wrong.kernel, wrong.stage) == ("toy.attention.k", "decode token 6 output")
    assert wrong.component == "KV cache or attention alignment" and wrong.threshold == 1e-4
    assert found["forward"].status is found["backward"].status is Status.OK


@pytest.mark.req("R-PAR-04")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_that_are_read_wrongly_in_decode_are_found_in_their_layout_alone(lab: Any, layout: str) -> None:
    plain = lab.reference("paged_attention")

    def off(query: Tensor, keys: Tensor, values: Tensor, batch: Any, *rest: Any) -> Any:
        wrong = rest[5] == layout and query.shape[0] == 2  # one token of each of the two rows
        return plain(query, keys, values.flip(-1) if wrong else values, batch, *rest)

    found = decode_checks(lab, "paged_attention", off)
    kinds = {name: check.status for name, check in found.items() if name.startswith("prefill + decode, paged")}
    other = "HND" if layout == "NHD" else "NHD"
    assert kinds == {
        f"prefill + decode, paged {layout}": Status.FAIL, f"prefill + decode, paged {other}": Status.OK
    }  # fmt: skip
    wrong = found[f"prefill + decode, paged {layout}"]
    assert (wrong.kernel, wrong.stage) == ("toy.paged_attention.k", "decode token 6 output")


# -- training ---------------------------------------------------------------------------------------------
def planted(monkeypatch: pytest.MonkeyPatch, at: int, *, weight: float = 0.0, loss: float = 0.0) -> None:
    """After step `at` one weight of ours is off by `weight`, as bounds are counted, and the loss by `loss`."""
    real = training._Both.note

    def note(self: Any, ours: float, theirs: float) -> None:
        if len(self.losses) + 1 == at:
            with torch.no_grad():
                place = self.ours.parameters()["layer 0 wv"][3:4, 4:5]
                place += weight * (1 + place.abs())
            ours += loss
        real(self, ours, theirs)

    monkeypatch.setattr(training._Both, "note", note)


BOUNDS = pytest.mark.parametrize(
    ("steps", "weights", "losses"), [(1, 1e-5, 1e-5), (5, 1e-3, 1e-2), (20, 1e-2, 1e-1)], ids=["1", "5", "20"]
)


@pytest.mark.req("R-PAR-09", "R-PAR-10")
@WITHIN_AND_BEYOND
@BOUNDS
def test_weights_and_loss_are_held_to_the_bounds_of_their_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, weights: float, losses: float, part: float, status: Status
) -> None:
    for which in ({"weight": part * weights}, {"loss": part * losses}):
        with monkeypatch.context() as patch:
            planted(patch, steps, **which)
            *before, check = check_training(SMALL, SELECTED, CPU, steps=steps)
        assert {item.status for item in before} == {Status.OK}
        assert (check.name, check.threshold) == (f"weights after {steps} steps", weights)
        assert check.status is status, check
        if status is Status.FAIL and "weight" in which:
            assert check.stage == "layer 0 wv" and check.first is not None and check.first.index == (3, 4)
        if status is Status.FAIL and "loss" in which:
            assert "loss differs by" in check.detail and f"limit {losses:g}" in check.detail


@pytest.mark.req("R-PAR-10")
@WITHIN_AND_BEYOND
@pytest.mark.parametrize(("name", "bound"), [("embedding", 1e-2), ("head", 1e-5), ("layer 0 wq", 1e-5)])
def test_gradients_of_the_first_step_have_1e_5_and_the_token_embeddings_1e_2(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: float, part: float, status: Status
) -> None:
    real, calls = training._gradients, []

    def moved(model: Any, loss: Tensor) -> Any:
        value, grads = real(model, loss)
        calls.append(1)
        if len(calls) == 1:  # ours; the truth's come second
            grads[name] = grads[name] + part * bound * (1 + grads[name].abs())
        return value, grads

    monkeypatch.setattr(training, "_gradients", moved)
    found = [check for check in check_training(SMALL, SELECTED, CPU, steps=1) if check.name.startswith("gradient")]
    check = next(check for check in found if check.stage == name)
    assert check.status is status and check.threshold == bound
    assert {other.status for other in found if other is not check} <= {Status.OK}


def curve_of(losses: list[tuple[float, float]], gaps: list[float] | None = None) -> Check:
    ours, theirs = (training._Model(SMALL, CPU, 0) for _ in range(2))
    caller = Caller(SELECTED, 5, "small", "float32")
    return training._Both(ours, theirs, caller, losses, gaps or [1e-6] * len(losses)).curve()


@pytest.mark.req("R-PAR-09")
def test_beyond_twenty_steps_curves_that_part_or_go_other_ways_are_found() -> None:
    falling = [2.0 / (1 + step / 10) for step in range(100)]
    assert curve_of([(loss + 0.05, loss) for loss in falling]).status is Status.OK
    parted = curve_of([*((loss, loss) for loss in falling[:-1]), (falling[-1] + 0.11, falling[-1])])
    assert parted.status is Status.FAIL and "largest difference 0.11" in parted.detail
    other = [0.04 * math.sin(step) for step in range(100)]  # never further apart than 0.08, and no trend in common
    crossed = curve_of([(2.0 + off, 2.0 - off) for off in other])
    assert crossed.status is Status.FAIL and "correlation -1" in crossed.detail
    assert curve_of([*((loss, loss) for loss in falling[:-1]), (math.nan, 0.1)]).status is Status.FAIL


@pytest.mark.req("R-PAR-11")
def test_differences_that_grow_exponentially_are_told_as_instability(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = [(2.0 / (1 + step / 10),) * 2 for step in range(30)]
    growing = curve_of(falling, [1e-9 * 2.0**step for step in range(30)])
    assert growing.status is Status.FAIL and "numerical instability" in growing.flags[0]
    assert curve_of(falling, [1e-7 * step for step in range(30)]).flags == ()

    real = training._Both.note

    def note(self: Any, ours: float, theirs: float) -> None:
        with torch.no_grad():  # one weight parts by twice as much at each step
            step = len(self.losses)
            self.ours.parameters()["layer 0 wv"][3, 4] += 1e-7 * 2.0**step
        real(self, ours, theirs)

    monkeypatch.setattr(training._Both, "note", note)
    check = list(check_training(SMALL, SELECTED, CPU, steps=20))[-1]
    assert check.name == "weights after 20 steps" and check.status is Status.FAIL
    assert any("grows exponentially" in flag and "instability" in flag for flag in check.flags)


@pytest.mark.req("R-PAR-11")
def test_a_weight_that_is_off_by_more_than_one_is_told_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, 5, weight=1.2)
    check = list(check_training(SMALL, SELECTED, CPU, steps=5))[-1]
    assert check.status is Status.FAIL
    assert check.flags[0].startswith("layer 0 wv differs by") and "a bug, not rounding" in check.flags[0]


# -- the preflight ----------------------------------------------------------------------------------------
@pytest.mark.needs_package("transformers")
@pytest.mark.req("R-PAR-14")
def test_a_model_that_does_not_run_in_the_preflight_stops_everything_heavy(lab: Any) -> None:
    """The declaration is sound, so only the three models can show it; the report says so as JSON."""
    lab.use(lab.kernel("toy.rms_norm.k", lambda x, weight, eps: torch.full_like(x, math.nan)))
    data = verify(backend="toy", level=(3, 4, 5), device="cpu").to_json()
    preflight, *heavy = data["levels"]
    assert not data["ok"] and (data["verdict"]["kind"], data["verdict"]["level"]) == ("contract", 0)
    gates = {check["subject"].split()[0]: check for check in preflight["checks"] if check["name"] == "model runs"}
    assert {name: check["status"] for name, check in gates.items()} == {"llama": "fail", "gpt2": "ok", "t5": "fail"}
    assert "not finite" in gates["llama"]["detail"]
    assert [check["status"] for check in preflight["checks"] if check["name"] == "contract"] == ["ok"]
    assert [(level["level"], level["status"], level["checks"]) for level in heavy] == [
        (3, "skip", []), (4, "skip", []), (5, "skip", [])
    ]  # fmt: skip
    assert all(level["reason"].startswith("the preflight failed") for level in heavy)
