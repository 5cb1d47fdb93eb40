"""Blocks planned jointly: the path is the cheapest, the result is right, a failing step falls back by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor

import layerzero as lz
from layerzero.errors import InvalidInputError, PlanMismatchError
from layerzero.jit import cache as jit_cache
from layerzero.model.enums import Layout
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero_cli.root import cli
from layerzero_tune.blocks import cost as blocks_cost
from layerzero_tune.blocks import plan as public_blocks
from layerzero_tune.blocks import search as blocks_place
from layerzero_tune.blocks.block import Block, Ref, Step, attention_input, attention_output, decoder_layer
from layerzero_tune.blocks.cost import Cost, Meter
from layerzero_tune.blocks.plan import settled
from layerzero_tune.blocks.search import fastest_each, search
from layerzero_tune.timing import launches
from layerzero_tune.timing.race import Race, Times
from tests import own_time
from tests.decoder import BLOCK, HEADS, HIDDEN, INNER, KV, WIDTH, inputs, layer, truth


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(blocks_place, "_MOST", 7)  # turns: these tests are not about what is a little faster
    lz.reset()
    yield
    lz.reset()


@pytest.mark.req("R-PLAN-01", "R-PLAN-03", "R-PLAN-04", "R-SOLV-07")
@pytest.mark.parametrize("measure", [False, True])
def test_a_planned_layer_gives_the_layers_result_with_fewer_steps(measure: bool) -> None:
    t = layer()
    plan = lz.plan_block(BLOCK, t, measure=measure)
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)
    if not measure:
        report = plan.explain()
        assert report.path.us < report.alone.us
        assert "add and norm in one" in report.fused and any("projection" in rule for rule in report.fused)
        assert len(plan.kernels) < sum(step.op in state.world.ops for step in BLOCK.steps)
    other = layer(batch=2)
    other["x"] = torch.randn_like(other["x"])
    torch.testing.assert_close(plan(*inputs(other)).double(), truth(other), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-PLAN-03")
def test_biases_and_sixteen_bits_are_planned_too() -> None:
    biases = {"bq": torch.randn(HEADS * WIDTH), "bk": torch.randn(KV * WIDTH), "bv": torch.randn(KV * WIDTH)}
    t = layer(**biases)
    plan = lz.plan_block(BLOCK, t)
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)
    assert any("projection" in rule for rule in plan.explain().fused)
    half = {name: item.bfloat16() for name, item in t.items()}
    found = lz.plan_block(BLOCK, half)(*inputs(half)).double()
    wanted = truth(half)
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    some = {name: item for name, item in t.items() if name != "bk"}  # one bias missing: the three do not pack
    plan = lz.plan_block(BLOCK, some)
    torch.testing.assert_close(plan(*inputs(some)).double(), truth(some), rtol=1e-5, atol=1e-5)
    assert not any("projection instead of 3" in rule for rule in plan.explain().fused)


def price(times: dict[str, float]) -> Measurements:
    return Measurements(lookup=lambda kernel_id, ctx: times.get(kernel_id.split(".")[1]), fingerprint=json.dumps(times))


@pytest.mark.req("R-PLAN-01", "R-PLAN-04")
def test_measured_times_decide_whether_ops_are_fused() -> None:
    t = layer()
    base = {"rms_norm": 10.0, "linear": 50.0, "rope": 10.0, "attention": 40.0, "silu_and_mul": 10.0}
    state.publish(measurements=price({**base, "add_rms_norm": 12.0, "mlp": 60.0}))
    fused = lz.plan_block(BLOCK, t).explain()
    assert "add and norm in one" in fused.fused and any("feed-forward" in rule for rule in fused.fused)
    assert {cost.cost.source for cost in fused.path.taken if cost.bound is not None} == {"perfdb"}
    state.publish(measurements=price({**base, "add_rms_norm": 500.0, "mlp": 900.0}))
    apart = lz.plan_block(BLOCK, t).explain()
    assert "add and norm in one" not in apart.fused and not any("feed-forward" in rule for rule in apart.fused)
    assert any(row["way"].endswith("add_rms_norm.native") and row["extra_us"] > 400 for row in apart.rejected())
    torch.testing.assert_close(lz.plan_block(BLOCK, t)(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-PLAN-01")
def test_the_total_counts_and_not_each_op_alone(lab: Any) -> None:
    """A rope kernel that is fastest alone leaves its result where attention has to copy it; the other does not."""

    def scattered(*args: Any) -> Any:
        q, k = lab.reference("rope")(*args)
        return tuple(torch.empty(*x.shape[:-1], x.shape[-1] * 2)[..., ::2].copy_(x) for x in (q, k))

    fast = lab.kernel(
        "fast.rope.scattered", scattered, layouts=frozenset({Layout.BSHD, Layout.BHSD}), mixed_dtypes=True
    )
    tidy = lab.kernel(
        "tidy.rope.plain", layouts=frozenset({Layout.BSHD, Layout.BHSD}), mixed_dtypes=True, priority=40.0
    )
    only = lab.kernel("dense.attention.only", stride_last_dim=1, adapt=frozenset({"contiguous"}), priority=99.0)
    lab.use(fast, tidy, only)
    times = {"fast.rope.scattered": 10.0, "tidy.rope.plain": 14.0, "dense.attention.only": 20.0}
    state.publish(measurements=Measurements(lookup=lambda kernel_id, ctx: times.get(kernel_id), fingerprint="here"))
    t = layer(tokens=64)
    report = lz.plan_block(BLOCK, t).explain()
    alone = [item.kernel_id for item in report.alone.taken]
    joint = [item.kernel_id for item in report.path.taken]
    assert "fast.rope.scattered" in alone and "tidy.rope.plain" in joint
    assert report.transforms == 0 and report.path.us < report.alone.us


@pytest.mark.req("R-PLAN-01")
def test_kernels_of_a_step_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, a machine that slows down in between would make the first the fastest."""
    timed: list[str] = []

    def slowing(call: Any, count: int) -> float:
        name = call()
        timed.append(name)
        pace = 1.0 if len(timed) < 7 else 10.0
        return pace * {"first": 5.0, "second": 4.0}[name]

    monkeypatch.setattr(blocks_cost, "clock_for", lambda device: slowing)
    found = Meter(state.world, measure=True)._times([lambda x: "first", lambda x: "second"], (torch.empty(4),))
    assert timed == ["first", "second"] * 6 and found == [5.0, 4.0]


@pytest.mark.req("R-PLAN-01")
def test_views_with_the_heads_first_are_part_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel gains anything by another layout, its views are work for nothing."""
    monkeypatch.setattr(blocks_cost, "clock_for", lambda device: lambda call, count: 5.0)  # whatever is timed
    t = layer()
    world = state.world
    with torch.no_grad():
        path = search(BLOCK, t, world, Meter(world, measure=True))
    ways = [edge for edge in path.considered if edge.rule == "heads first, as views"]
    assert {edge.taken[0].step.op for edge in ways} == {"rope", "attention"}
    assert all(edge.us == 15.0 for edge in ways)  # the kernel, the views of its inputs, those of its results
    assert not any("heads first" in edge.rule for edge in path.edges)


@pytest.mark.req("R-PLAN-02")
def test_plans_are_cached_by_signature_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_tune.blocks import plan as blocks

    searches: list[int] = []
    original = blocks.search
    monkeypatch.setattr(blocks, "search", lambda *args: searches.append(1) or original(*args))
    t = layer()
    first = lz.plan_block(BLOCK, t)
    assert lz.plan_block(BLOCK, layer()).report is first.report and len(searches) == 1  # other weights, same signature
    lz.plan_block(BLOCK, layer(tokens=7))
    assert len(searches) == 2
    lz.plan_block(decoder_layer(HEADS, KV, eps=1e-5), t)
    assert len(searches) == 3
    lz.configure(deny=["torch.mlp.*"])  # the backends in force have changed
    again = lz.plan_block(BLOCK, t)
    assert len(searches) == 4 and not any(kernel.startswith("torch.mlp") for kernel in again.kernels)


@pytest.mark.req("R-PLAN-02")
def test_each_part_of_a_signature_has_a_plan_of_its_own() -> None:
    """Shapes, dtypes, strides, gradients and the block itself; every plan is still there when it is asked for again."""
    t = layer()
    strided = torch.empty(*t["x"].shape[:-1], 2 * HIDDEN)[..., ::2].copy_(t["x"])
    wide = {name: item.clone() for name, item in t.items()}
    wide["wo"].requires_grad_()
    asked = {
        "as it is": (BLOCK, t),
        "shape": (BLOCK, layer(tokens=7)),
        "batch": (BLOCK, layer(batch=3)),
        "dtype": (BLOCK, layer(dtype=torch.bfloat16)),
        "strides": (BLOCK, {**t, "x": strided}),
        "a weight that is trained": (BLOCK, wide),
        "a bias": (BLOCK, layer(bq=torch.zeros(HEADS * WIDTH))),
        "the block": (decoder_layer(HEADS, KV, eps=1e-5), t),
    }
    first = {name: lz.plan_block(block, tensors).report for name, (block, tensors) in asked.items()}
    assert len({id(report) for report in first.values()}) == len(asked)
    again = {name: lz.plan_block(block, tensors).report for name, (block, tensors) in asked.items()}
    assert all(again[name] is first[name] for name in asked)


@pytest.mark.req("R-PLAN-02")
def test_a_plan_is_made_anew_when_a_backend_comes_changes_or_goes(lab: Any) -> None:
    """Under the same policy: what is registered has changed, and a plan of before would not know."""
    lab.use()
    t = layer()
    known = state.world.registry
    before = lz.plan_block(BLOCK, t)
    assert lz.plan_block(BLOCK, t).report is before.report
    kernel = lab.kernel("vendor.attention.new", priority=99.0)
    state.publish(registry=known.add((kernel,)))
    come = lz.plan_block(BLOCK, t)
    assert "vendor.attention.new" in come.kernels and "vendor.attention.new" not in before.kernels
    state.publish(registry=known.add((replace(kernel, version="2"),)))
    changed = lz.plan_block(BLOCK, t)
    assert changed.report is not come.report and "vendor.attention.new" in changed.kernels
    state.health.set_quarantined({"vendor.attention.new": "DEVICE_LOST"})  # nothing that is registered has changed
    assert "vendor.attention.new" not in lz.plan_block(BLOCK, t).kernels
    state.health.set_quarantined({})
    state.publish(registry=known)
    gone = lz.plan_block(BLOCK, t)
    assert "vendor.attention.new" not in gone.kernels
    torch.testing.assert_close(gone(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-POL-10")
def test_plan_mode_of_the_policy_says_whether_the_ways_through_a_block_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    made = public_blocks.Meter
    monkeypatch.setattr(
        public_blocks, "Meter", lambda world, measure: seen.append(measure) or made(world, measure=False)
    )
    monkeypatch.setattr(
        public_blocks, "_raced", lambda block, tensors, best, *rest: public_blocks.BlockReport(block, best, best, True)
    )
    monkeypatch.setattr(public_blocks, "_WALKS", 0)
    assert lz.plan_block(BLOCK, layer()).explain().measured is False
    with lz.scoped(plan_mode=True):
        assert lz.plan_block(BLOCK, layer()).explain().measured is True
        assert lz.plan_block(BLOCK, layer(), measure=False).explain().measured is False
    assert seen == [False, True, False]


@pytest.mark.req("R-PLAN-03")
def test_a_step_that_fails_falls_back_for_that_op_alone(lab: Any) -> None:
    lab.use(lab.kernel("new.add_rms_norm.fast", priority=99.0), lab.kernel("new.attention.fast", priority=99.0))
    t = layer()
    plan = lz.plan_block(BLOCK, t)
    assert "new.add_rms_norm.fast" in plan.kernels and "new.attention.fast" in plan.kernels
    for kernel_id in ("new.add_rms_norm.fast", "new.attention.fast"):
        lab.faults[kernel_id] = RuntimeError("broken")
        found, ran = lab.run(plan, *inputs(t))
        torch.testing.assert_close(found.double(), truth(t), rtol=1e-5, atol=1e-5)
        assert kernel_id not in ran and any(name.split(".")[1] == kernel_id.split(".")[1] for name in ran)


@pytest.mark.req("R-PLAN-03")
def test_a_wrong_kernel_never_gets_into_a_measured_plan(lab: Any) -> None:
    lab.use(
        lab.kernel("liar.mlp.fast", lambda x, up, down, *rest: torch.zeros(*x.shape[:-1], down.shape[0]), priority=10.0)
    )
    t = layer()
    plan = lz.plan_block(BLOCK, t, measure=True)
    looked_at = {item.kernel_id for edge in plan.report.path.considered for item in edge.taken}
    assert "torch.mlp.native" in looked_at and "liar.mlp.fast" not in looked_at | set(plan.kernels)
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-PLAN-03")
def test_packed_weights_follow_when_the_weights_are_written_to() -> None:
    t = layer()
    plan = lz.plan_block(BLOCK, t)
    assert any("projection" in rule for rule in plan.explain().fused)
    with torch.no_grad():
        t["wq"].mul_(-1.5)
        t["w_gate"].add_(0.1)
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-PLAN-03")
def test_weights_that_are_trained_are_not_packed_and_get_their_gradients() -> None:
    t = layer()
    for name in BLOCK.weights:
        if name in t:
            t[name].requires_grad_()
    plan = lz.plan_block(BLOCK, t)
    assert not any("projection" in rule for rule in plan.explain().fused)
    plan(*inputs(t)).sum().backward()
    wide = {name: item.detach().double().requires_grad_(item.requires_grad) for name, item in t.items()}
    truth(wide).sum().backward()
    for name in ("wq", "w_gate", "ln1", "wo"):
        torch.testing.assert_close(t[name].grad.double(), wide[name].grad, rtol=1e-4, atol=1e-4)


def test_halves_of_a_layer_for_a_cache_in_between() -> None:
    t = layer()
    before, after = attention_input(HEADS, KV), attention_output()
    q, k, v = lz.plan_block(before, {name: t[name] for name in (*before.inputs, "ln1", "wq", "wk", "wv")})(*inputs(t))
    mixed = lz.attention(q, k, v, is_causal=True, layout="BSHD")
    rest = {name: t[name] for name in ("x", "wo", "ln2", "w_gate", "w_up", "w_down")}
    out = lz.plan_block(after, {**rest, "attended": mixed})(t["x"], mixed)
    torch.testing.assert_close(out.double(), truth(t), rtol=1e-5, atol=1e-5)


def test_a_block_of_ones_own_steps() -> None:
    steps = (
        Step("add", (Ref("a"), Ref("b")), ("sum",)),
        Step("rms_norm", (Ref("sum"), Ref("w"), 1e-6), ("normed",)),
        Step("silu_and_mul", (Ref("normed"),), ("out",)),
    )
    block = Block("mine", ("a", "b"), steps, ("out", "sum"))
    a, b, w = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    out, total = lz.plan_block(block, {"a": a, "b": b, "w": w})(a, b)
    torch.testing.assert_close(total, a + b)
    gate, up = F.rms_norm(a + b, (8,), w, 1e-6).chunk(2, -1)
    torch.testing.assert_close(out, F.silu(gate) * up)


def test_what_makes_no_sense_is_refused_with_the_name_of_it() -> None:
    t = layer()
    with pytest.raises(InvalidInputError, match="needs wq"):
        lz.plan_block(BLOCK, {name: item for name, item in t.items() if name != "wq"})
    with pytest.raises(InvalidInputError, match="no tensor 'wx'"):
        lz.plan_block(BLOCK, {**t, "wx": t["wq"]})
    with pytest.raises(InvalidInputError, match="expected a layerzero"):
        lz.plan_block("decoder", t)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="no step makes y"):
        Block("b", ("x",), (Step("merge", (Ref("x"),), ("z",)),), ("y",))
    with pytest.raises(InvalidInputError, match="makes x again"):
        Block("b", ("x",), (Step("merge", (Ref("x"),), ("x",)),), ("x",))
    with pytest.raises(InvalidInputError):
        lz.plan_block(BLOCK, {**t, "wq": t["wq"][:, :3]})
    plan = lz.plan_block(BLOCK, t)
    for args, named in (((t["x"],), {}), ((*inputs(t), t["x"]), {}), (inputs(t), {"x": t["x"]}), (inputs(t), {"y": 1})):
        with pytest.raises(InvalidInputError, match="has each of x, cos, sin once"):
            plan(*args, **named)
    checked = lz.plan_block(BLOCK, t, check=True)
    checked(*inputs(t))
    with pytest.raises(PlanMismatchError, match="input x"):
        checked(t["x"][:, :3], t["cos"], t["sin"])


def test_a_report_shows_the_path_and_what_was_rejected() -> None:
    report = lz.plan_block(BLOCK, layer()).explain()
    text = str(report)
    assert "on this path" in text and "rejected:" in text and "torch.linear.native" in text
    data = json.loads(json.dumps(report.to_json()))
    assert data["path"] and data["rejected"] and data["per_op_estimated_us"] > 0
    covered = [op for row in data["path"] for op in row["steps"]]
    assert covered == [step.op for step in BLOCK.steps]
    assert replace(report, note="why").to_json()["note"] == "why"


def test_the_command_line_plans_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    llama = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": WIDTH, "intermediate_size": INNER, "vocab_size": 50, "torch_dtype": "float32", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    config.write_text(json.dumps(llama))
    done = CliRunner().invoke(cli, ["plan", str(config), "--tokens", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["block"] == "decoder_layer"
    words = CliRunner().invoke(cli, ["plan", str(config), "--tokens", "4"])
    assert "rejected:" in words.stdout and "op by op" in words.stdout
    config.write_text(json.dumps({**llama, "model_type": "gpt2", "layer_norm_eps": 1e-5}))
    assert CliRunner().invoke(cli, ["plan", str(config)]).exit_code == 1


def one_by_one(t: dict[str, Tensor]) -> Tensor:
    """The layer in public functions."""
    normed = lz.rms_norm(t["x"], t["ln1"], 1e-6)
    q, k, v = (lz.linear(normed, t[name]) for name in ("wq", "wk", "wv"))
    q, k, v = (item.unflatten(-1, (-1, WIDTH)) for item in (q, k, v))
    q, k = lz.rope(q, k, t["cos"], t["sin"], layout="BSHD")
    stream = lz.linear(lz.attention(q, k, v, is_causal=True, layout="BSHD").flatten(-2), t["wo"]) + t["x"]
    normed = lz.rms_norm(stream, t["ln2"], 1e-6)
    return stream + lz.linear(F.silu(lz.linear(normed, t["w_gate"])) * lz.linear(normed, t["w_up"]), t["w_down"])


def race_of(times: dict[str, float], spread: float = 0.0) -> Race:
    found = {name: Times(us, us, us, (spread * us) ** 2, 40, (spread * us) ** 2) for name, us in times.items()}
    return Race(found, min(times, key=lambda name: times[name]), True, 40, 0.1)


def dawdling(lab: Any, seconds: float) -> Any:
    """The reference of rms_norm, and then some."""

    return own_time.taking(seconds, lab.reference("rms_norm"))


@pytest.mark.req("R-PLAN-03", "R-PLAN-04")
def test_a_plan_that_does_not_win_runs_the_kernels_of_the_public_functions(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other kernels are faster alone: a plan may not fall behind what the caller has without one."""
    own_time.use_own_time(monkeypatch)
    lab.use(lab.kernel("lab.rms_norm.preferred", dawdling(lab, 2e-4), priority=99.0))
    monkeypatch.setattr(public_blocks, "race", lambda who, **named: race_of(dict.fromkeys(who, 100.0)))
    t = layer()
    with torch.no_grad():
        plan = lz.plan_block(BLOCK, t, measure=True)
        wanted, public = lab.run(one_by_one, t)
        found, ran = lab.run(plan, *inputs(t))
        each = fastest_each(BLOCK, t, state.world, Meter(state.world, measure=True))
    assert ran == public == list(plan.kernels) and "lab.rms_norm.preferred" in ran
    assert torch.equal(found, wanted)
    assert "lab.rms_norm.preferred" not in [item.kernel_id for item in each.taken]  # it is far slower than the others
    assert "each op keeps its own choice" in plan.explain().note


@pytest.mark.req("R-PLAN-01", "R-PLAN-04")
@pytest.mark.parametrize(
    ("times", "spread", "taken"),
    [
        ({"per_op": 100.0, "each": 99.0, "plan": 98.5}, 0.0, "per_op"),  # inside the noise: nothing is worth a change
        ({"per_op": 100.0, "each": 90.0, "plan": 89.0}, 0.0, "each"),  # as fast without packing anything
        ({"per_op": 100.0, "each": 95.0, "plan": 85.0}, 0.0, "plan"),
        ({"per_op": 100.0, "each": 90.0, "plan": 99.0}, 0.0, "each"),  # sums of single times were no proof
        ({"per_op": 100.0, "plan": 97.0}, 0.0, "plan"),
        ({"per_op": 100.0, "plan": 97.0}, 0.2, "per_op"),  # unsteady: nobody knows
    ],
)
def test_the_path_that_was_fastest_in_turns_is_taken(
    lab: Any, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], spread: float, taken: str
) -> None:
    lab.use(lab.kernel("lab.rms_norm.preferred", priority=99.0))
    prices = {"lab.rms_norm.preferred": 90.0, "torch.mlp.native": 20.0}
    monkeypatch.setattr(
        Meter,
        "kernels",
        lambda self, who, ctx, args: [Cost(prices.get(item.kernel.kernel_id, 50.0), "measured") for item in who],
    )
    ran: list[str] = []

    def fixed(who: Any, **named: Any) -> Race:
        ran.extend(who)
        return race_of({name: us for name, us in times.items() if name in who}, spread)

    monkeypatch.setattr(public_blocks, "race", fixed)
    t = layer()
    with torch.no_grad():
        plan = lz.plan_block(BLOCK, t, measure=True)
        found = plan(*inputs(t))
    assert ran == ["per_op", "each", "plan"]  # the preferred kernel has a high price, so the three differ
    torch.testing.assert_close(found.double(), truth(t), rtol=1e-5, atol=1e-5)
    fused, preferred = bool(plan.explain().fused), "lab.rms_norm.preferred" in plan.kernels
    assert (fused, preferred) == {"per_op": (False, True), "each": (False, False), "plan": (True, False)}[taken]
    assert plan.explain().plan_us == times[taken] and plan.explain().alone_us == 100.0
    assert ("each op keeps its own choice" in plan.explain().note) == (taken == "per_op")


def test_a_path_does_not_run_against_itself(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.use(lab.kernel("lab.rms_norm.preferred", priority=99.0))
    monkeypatch.setattr(
        Meter,
        "kernels",
        lambda self, who, ctx, args: [
            Cost(90.0 if item.kernel.kernel_id == "lab.rms_norm.preferred" else 50.0, "measured") for item in who
        ],
    )
    monkeypatch.setattr(public_blocks, "search", public_blocks.fastest_each)  # no rewrite is worth anything
    ran: list[str] = []

    def fixed(who: Any, **named: Any) -> Race:
        ran.extend(who)
        return race_of(dict.fromkeys(who, 100.0))

    monkeypatch.setattr(public_blocks, "race", fixed)
    with torch.no_grad():
        lz.plan_block(BLOCK, layer(), measure=True)
    assert ran == ["per_op", "each"]


def test_what_was_compiled_for_a_plan_is_bound_as_dispatch_would_bind_it(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))  # nothing is ready, and nothing is left behind
    for name in jit_cache.VENDOR_FOLDERS:
        monkeypatch.setenv(name, "")
    kernel = lab.kernel("lab.rms_norm.compiled", jit=True, priority=99.0)
    lab.use(kernel, jit="block", deny=["inductor.*"])
    t = layer()
    with torch.no_grad():
        plan = lz.plan_block(BLOCK, t)
        lab.run(one_by_one, t)
    searched = [item for item in plan.report.path.taken if item.kernel_id == "lab.rms_norm.compiled"]
    assert searched and state.world.ready
    hot = {id(bound.run) for bound in state.world.hot.values()}
    assert id(searched[0].bound.run) not in hot  # bound before its artifact was there, with the wrapper that makes it
    again = settled(searched[0])
    assert again is not None and id(again.run) in hot


def test_on_a_gpu_a_step_costs_its_launch_where_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(4, device="cuda")
    monkeypatch.setattr(blocks_cost, "clock_for", lambda device: lambda call, count: 5.0)
    monkeypatch.setattr(launches, "host_pace", lambda: 1.0)
    meter = Meter(state.world, measure=True)
    for launch, price in ((90.0, 90.0), (3.0, 5.0)):
        monkeypatch.setattr(launches, "launch_clock", lambda call, count, launch=launch: launch)
        assert meter._times([lambda x: None], (there,)) == [price]
        assert meter._times([lambda x: None], (torch.empty(4),)) == [5.0]  # a CPU does its work in the call


@pytest.mark.gpu
@pytest.mark.req("R-PLAN-03")
def test_a_layer_planned_on_a_gpu_is_right() -> None:
    t = {name: item.cuda() for name, item in layer(tokens=64, dtype=torch.bfloat16).items()}
    for measure in (False, True):
        found = lz.plan_block(BLOCK, t, measure=measure)(*inputs(t)).double()
        wanted = truth(t)
        assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_with_a_long_launch_is_not_a_cheap_one() -> None:
    x = torch.randn(16, 64, device="cuda")

    def late(item: Tensor) -> Tensor:
        for _ in range(3_000):  # the host's work, which the device waits for when short kernels follow one another
            pass
        return item + 1

    meter = Meter(state.world, measure=True)
    plain, waiting = meter._times([lambda item: item + 1, late], (x,))
    assert waiting > 2.0 * plain


@pytest.mark.gpu
@pytest.mark.req("R-PLAN-03", "R-PLAN-04")
def test_on_a_gpu_a_plan_that_does_not_win_gives_what_the_public_functions_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(public_blocks, "race", lambda who, **named: race_of(dict.fromkeys(who, 100.0)))
    t = {name: item.cuda() for name, item in layer(tokens=1, batch=8, dtype=torch.bfloat16).items()}
    with lz.scoped(jit="block", deny=["flashinfer.*", "inductor.*"]), torch.no_grad():
        plan = lz.plan_block(BLOCK, t, measure=True)
        assert list(plan.kernels) == [item.kernel_id for item in plan.report.alone.taken if item.bound is not None]
        torch.testing.assert_close(plan(*inputs(t)), one_by_one(t), rtol=0, atol=0)
