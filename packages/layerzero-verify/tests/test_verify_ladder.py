"""The parity ladder: its rungs, its rules, its verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.errors import InvalidInputError, UnknownNameError
from layerzero.model.enums import Layout
from layerzero.model.kernel import Limit
from layerzero.numerics import Tolerance, assert_close
from layerzero_verify import block, ladder, thresholds
from layerzero_verify.block import CONFIGS, made
from layerzero_verify.kernels import CONTRACTS, Bench, contract, window
from layerzero_verify.ladder import LANES, STEPS, named, verify
from layerzero_verify.layers import check_layer
from layerzero_verify.lineup import LineUp, Target, resolve
from layerzero_verify.oracles import ORACLES, Truth, rope_tables
from layerzero_verify.report import STAGES, Check, Level, StageDiff, Status, judge, localise, red_flags
from layerzero_verify.training import _Model, check_training, grows_exponentially

CPU = torch.device("cpu")
SELECTED = LineUp("as selected")


@pytest.fixture(autouse=True)
def one_thread(clean: None) -> Iterator[None]:
    """Small tensors: a second thread only gets in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _spec(kernel_id: str):
    return next(item for item in lz.list_kernels() if item.kernel_id == kernel_id)


# -- tables -----------------------------------------------------------------------------------------------
@pytest.mark.req("R-PAR-12")
def test_the_configs_are_these() -> None:
    found = {c.name: (c.hidden, c.heads, c.kv_heads, c.layers, c.rope) for c in CONFIGS.values()}
    assert found == {
        "tiny": (64, 2, 2, 2, True), "gqa": (128, 8, 2, 2, True), "deep": (64, 2, 2, 6, True),
        "wide": (128, 8, 8, 2, True), "no_rope": (64, 2, 2, 2, False), "medium": (256, 4, 4, 4, True),
    }  # fmt: skip
    with pytest.raises(UnknownNameError, match="huge"):
        named(CONFIGS, "huge")


@pytest.mark.req("R-PAR-12")
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_and_trained_models_have_the_sizes_of_their_config(name: str) -> None:
    """A config whose KV heads or layers were lost would pass every level all the same."""
    config = CONFIGS[name]
    hidden, heads, kv_heads, layers = {
        "tiny": (64, 2, 2, 2), "gqa": (128, 8, 2, 2), "deep": (64, 2, 2, 6), "wide": (128, 8, 8, 2),
        "no_rope": (64, 2, 2, 2), "medium": (256, 4, 4, 4),
    }[name]  # fmt: skip
    made_one, trained = made(config, 0, 0), _Model(config, CPU, 0)
    for layer in (made_one, *trained.layers):
        assert (layer.heads, layer.kv_heads, layer.head_dim) == (heads, kv_heads, hidden // heads)
        assert layer.wq.shape == layer.wo.shape == (hidden, hidden)
        assert layer.wk.shape == layer.wv.shape == (hidden * kv_heads // heads, hidden)
    assert len(trained.layers) == layers
    assert (trained.tables is None) is ("positions" in trained.parameters()) is (name == "no_rope")


@pytest.mark.req("R-PAR-12")
def test_level_2_runs_every_layer_of_the_deep_config() -> None:
    forward = next(iter(check_layer(CONFIGS["deep"], SELECTED, CPU)))
    assert {row.stage.split()[1] for row in forward.stages} == set("012345") and forward.status is Status.OK


@pytest.mark.req("R-PAR-10", "R-PAR-09")
def test_the_thresholds_are_these() -> None:
    t = thresholds
    assert (t.KERNEL, t.LAYER, t.LOGITS, t.GRADS, t.WEIGHTS, t.EMBEDDING_GRAD) == (1e-5, 1e-4, 1e-3, 1e-5, 1e-3, 1e-2)
    assert t.TRAINING == ((1, 1e-5, 1e-5), (5, 1e-3, 1e-2), (20, 1e-2, 1e-1))
    # Level 1 is the tolerance table, and never looser than the ladder's own bound in float32.
    assert t.kernel("attention", "float32").atol == 1e-5 and t.kernel("rms_norm", "float32").atol == 1e-6
    assert t.kernel("some_new_op", "float32").rtol == 1e-5
    assert t.kernel("attention", "bfloat16").atol == 1e-2
    assert t.kernel("attention", "float32", declared=0.5).atol == 0.5


@pytest.mark.req("R-PAR-13", "R-OP-10")
def test_each_lane_holds_what_the_one_before_holds_and_all_hold_the_window_contract() -> None:
    quick, full, stress = (LANES[name] for name in ("quick", "full", "stress"))
    for less, more in ((quick, full), (full, stress)):
        assert set(less.configs) <= set(more.configs) and set(less.models) <= set(more.models)
        assert (less.steps, less.seeds, less.length) < (more.steps, more.seeds, more.length)
    assert set(full.configs) == set(CONFIGS)
    assert {"llama", "mistral", "qwen", "gemma", "gpt2", "t5", "vit"} <= set(quick.models)
    assert stress.steps >= 100
    assert window in CONTRACTS  # level 1 of every lane runs them all


@pytest.mark.req("R-PAR-13")
@pytest.mark.parametrize(
    ("lane", "seeds", "steps", "length"), [("quick", 1, 5, 12), ("full", 3, 20, 24), ("stress", 20, 200, 96)]
)
def test_a_lane_draws_and_trains_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, lane: str, seeds: int, steps: int, length: int
) -> None:
    drawn: list[int] = []
    trained: list[tuple[str, int]] = []
    lengths: list[int] = []
    monkeypatch.setattr(Bench, "forward", lambda bench: drawn.append(bench.seed) or iter(()))
    monkeypatch.setattr(Bench, "backward", lambda bench: iter(()))
    monkeypatch.setattr(Bench, "composed", lambda bench, count: iter(()))

    def training(config, line_up, device, *, steps, seed):
        trained.append((config.name, steps))
        return [Check(5, "training", Status.OK)]

    monkeypatch.setattr(ladder.training, "check_training", training)
    monkeypatch.setattr(ladder.models, "missing", lambda: "")
    monkeypatch.setattr(ladder.models, "brought", dict)
    monkeypatch.setattr(ladder.models, "made", lambda name, seed, length: lengths.append(length))
    monkeypatch.setattr(ladder.forward, "matrix", lambda *given: [Check(0, "model runs", Status.OK)])
    monkeypatch.setattr(ladder.forward, "check_model", lambda *given, **more: [Check(4, "full forward", Status.OK)])
    report = verify(lane=lane, kernel="torch.rms_norm.native", level=(1, 4, 5), device="cpu", dtype="float32")
    assert report.lane == lane and drawn == list(range(seeds))
    assert dict(trained) == dict.fromkeys(LANES[lane].training, steps)
    assert set(lengths) == {length} and len(lengths) >= len(LANES[lane].models)


@pytest.mark.req("R-PAR-15")
def test_the_checklist_for_a_new_model_has_its_six_steps_and_a_command_each() -> None:
    words = ["Kernels", "Layer", "Weight conversion", "Forward parity", "Training", "Stress"]
    assert [step["step"].split(":")[0] for step in STEPS] == words
    assert all(step["command"].startswith("lz verify ") for step in STEPS)
    assert [step["command"].split("--level ")[1][0] for step in STEPS] == list("123455")
    assert all("--model FOLDER" in STEPS[place]["command"] for place in (2, 3)), "weights of the model itself"
    assert "--lane full" in STEPS[4]["command"] and 5 <= LANES["full"].steps <= 20
    assert "--lane stress" in STEPS[5]["command"] and LANES["stress"].steps >= 100
    assert "5 to 20 steps" in STEPS[4]["step"] and "100 and more" in STEPS[5]["step"]


# -- the localiser ----------------------------------------------------------------------------------------
def rows(**wrong: float) -> list[StageDiff]:
    """Stages of a layer with rounding errors everywhere and these differences."""
    found = []
    for stage in STAGES[1:16]:
        size = wrong.get(stage, 2e-6)
        found.append(StageDiff(f"layer 0 {stage}", "op", f"x.op.{stage}", size, 1e-4, size <= 1e-4))
    return found


@pytest.mark.req("R-PAR-06", "R-PAR-05")
@pytest.mark.parametrize(
    ("wrong", "component", "stage"),
    [
        ({"q_rope": 0.3, "scores": 2.0, "attn_out": 0.2}, "RoPE", "q_rope"),
        ({"k_rope": 0.3, "attn_out": 0.2, "output": 0.1}, "RoPE", "k_rope"),
        ({"scores": 0.3, "attn_out": 0.2}, "attention", "scores"),
        ({"attn_out": 0.2, "proj_out": 0.1, "mlp_out": 0.1}, "attention", "attn_out"),
        ({"proj_out": 0.1, "residual": 0.1, "output": 0.2}, "output projection", "proj_out"),
        ({"fc1_out": 0.1, "swiglu_out": 0.2, "mlp_out": 0.2}, "MLP", "fc1_out"),
        ({"swiglu_out": 0.2, "mlp_out": 0.1}, "MLP", "swiglu_out"),
        ({"mlp_out": 0.1, "output": 0.1}, "MLP", "mlp_out"),
        ({"ln1_out": 0.1, "q_proj": 0.2, "q_rope": 0.2}, "norm", "ln1_out"),
        ({"ln2_out": 0.1, "mlp_out": 0.2}, "norm", "ln2_out"),
        ({"q_proj": 0.2, "q_rope": 0.2, "attn_out": 0.2}, "QKV projection", "q_proj"),
        ({"output": 0.2}, "residual add", "output"),
    ],
)
def test_the_first_stage_that_differs_names_the_component(wrong, component: str, stage: str) -> None:
    found = localise(rows(**wrong))
    assert (found["component"], found["stage"]) == (component, f"layer 0 {stage}")
    assert found["detail"]


def test_stages_that_agree_accuse_nobody() -> None:
    assert localise(rows()) == {}
    assert red_flags(rows()) == ()


@pytest.mark.req("R-PAR-11")
def test_red_flags_are_a_difference_above_one_a_lone_outlier_and_exponential_growth() -> None:
    assert "bug, not rounding" in red_flags(rows(attn_out=1.5))[0]
    assert "bug, not rounding" in red_flags(rows(attn_out=1.001))[0]
    assert not any("bug" in text for text in red_flags(rows(attn_out=1.0))), "what is far off is not yet a bug"
    assert any("far worse" in text and "attn_out" in text for text in red_flags(rows(attn_out=0.5)))
    assert red_flags(rows(attn_out=1.5e-4)) == (), "a little above the limit is no red flag"
    assert grows_exponentially([1e-7 * 2.0**step for step in range(20)])
    assert not grows_exponentially([1e-7 * step for step in range(1, 20)])
    assert not grows_exponentially([1e-9 * 2.0**step for step in range(12)]), "still far below anything that matters"


# -- the verdict ------------------------------------------------------------------------------------------
def level(number: int, *, fails: bool = False, skips: bool = False) -> Level:
    if skips:
        return Level(number, (), "left out")
    good = Check(number, "forward", Status.OK)
    bad = Check(number, "forward", Status.FAIL, op="rope", kernel="x.rope.y", stage="q_rope", component="RoPE")
    return Level(number, (good, bad) if fails else (good,))


def target() -> Target:
    return replace(resolve(op="rope", device="cpu"), name="backend x")


@pytest.mark.req("R-PAR-16")
@pytest.mark.parametrize(
    ("levels", "kind", "number"),
    [
        ([level(0), level(1), level(2), level(3), level(4), level(5)], "pass", None),
        ([level(0), level(1, fails=True), level(2, fails=True), level(4, fails=True)], "kernel", 1),
        ([level(0), level(1), level(2, fails=True), level(3, fails=True)], "integration", 2),
        ([level(0), level(1), level(2), level(3), level(4, fails=True), level(5)], "integration", 4),
        ([level(0), level(1), level(2), level(3), level(4), level(5, fails=True)], "integration", 5),
        ([level(0), level(4, fails=True)], "unplaced", 4),
        ([level(0), level(1, skips=True), level(4, fails=True)], "unplaced", 4),
        ([level(0, fails=True), level(1), level(2)], "contract", 0),
    ],
)
def test_the_pyramid_rule(levels: list[Level], kind: str, number: int | None) -> None:
    found = judge(levels, target())
    assert (found.kind, found.level, found.ok) == (kind, number, kind == "pass")
    if number:
        assert (found.op, found.kernel, found.stage, found.component) == ("rope", "x.rope.y", "q_rope", "RoPE")
    if kind == "integration":
        assert "integration fault" in found.text and "pass: the parts are right" in found.text


def test_nothing_to_verify_is_not_a_pass() -> None:
    empty = replace(target(), kernels=(), absent=(("x.rope.y", "runs on cuda, the device is cpu"),))
    found = judge([], empty)
    assert not found.ok and "runs on cuda" in found.text


# -- level 1 ----------------------------------------------------------------------------------------------
LEVEL_1 = {  # op -> whether it has a backward
    "rope": True, "rms_norm": True, "attention": True, "paged_attention": False, "linear": True, "mlp": True,
    "gelu_and_mul": True, "silu_and_mul": True, "cross_entropy": True, "embedding": True,
}  # fmt: skip


@pytest.mark.req("R-PAR-01", "R-PAR-02")
@pytest.mark.parametrize("op", LEVEL_1)
def test_level_1_holds_the_reference_to_formulas_of_its_own(op: str) -> None:
    assert op in ORACLES, "the reference would be held to itself"
    made_bench = Bench(_spec(f"reference.{op}.plain"), CPU, dtype="float32")
    with made_bench.locked():
        forward = list(made_bench.forward())
        backward = list(made_bench.backward())
    assert [str(check) for check in (*forward, *backward) if check.status is Status.FAIL] == []
    assert sum(check.status is Status.OK for check in forward) >= 1
    # The long sums of the accumulation cases give numbers of thirty; all others are near one.
    assert max(c.max_abs for c in forward if c.max_abs is not None and "accumulation" not in c.stage) < 1e-5
    if LEVEL_1[op]:
        assert sum(check.status is Status.OK for check in backward) >= 1
    if op == "attention":
        assert any("gqa" in check.stage for check in forward) and any("gqa" in check.stage for check in backward)
    if op == "paged_attention":
        assert {"result: decode_NHD", "result: mixed_HND"} <= {check.stage for check in forward}


@pytest.mark.req("R-PAR-01")
def test_the_formulas_agree_with_torch() -> None:
    draw = torch.Generator().manual_seed(5)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    exact = Tolerance(1e-12, 1e-12)
    q, k, v, x, w = tensor(2, 4, 5, 8), tensor(2, 2, 7, 8), tensor(2, 2, 7, 8), tensor(3, 16), tensor(16)
    options = (None, 0.0, True, None, None, None, None, False)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(ORACLES["attention"](q, k, v, *options), want, exact)
    assert_close(ORACLES["rms_norm"](x, w, 1e-6), F.rms_norm(x, (16,), w, 1e-6), exact)
    assert_close(ORACLES["layer_norm"](x, w, w, 1e-5), F.layer_norm(x, (16,), w, w, 1e-5), exact)
    assert_close(ORACLES["silu_and_mul"](x), F.silu(x[:, :8]) * x[:, 8:], exact)
    assert_close(ORACLES["gelu_and_mul"](x, "tanh"), F.gelu(x[:, :8], approximate="tanh") * x[:, 8:], exact)
    wide, bias = tensor(4, 16), tensor(4)
    assert_close(ORACLES["linear"](x, wide, bias, "gelu"), F.gelu(F.linear(x, wide, bias)), exact)
    up, gate, down, up_bias, gate_bias, down_bias = (tensor(*n) for n in ((8, 16), (8, 16), (5, 8), (8,), (8,), (5,)))
    left, right = F.silu(F.linear(x, gate, gate_bias)), F.linear(x, up, up_bias)
    found = ORACLES["mlp"](x, up, down, gate, "silu", up_bias, gate_bias, down_bias)
    assert_close(found, F.linear(left * right, down, down_bias), exact)
    packed = (torch.cat((gate, up)), down, None, "silu", torch.cat((gate_bias, up_bias)), None, down_bias)
    assert_close(ORACLES["mlp"](x, *packed), found, exact)
    plain = F.linear(F.gelu(right, approximate="tanh"), down)
    assert_close(ORACLES["mlp"](x, up, down, None, "gelu_tanh", up_bias, None, None), plain, exact)
    labels = torch.tensor([1, -100, 3])
    assert_close(ORACLES["cross_entropy"](x, labels, -100), F.cross_entropy(x, labels), exact)
    ids = torch.tensor([[2, 0], [1, 2]])
    assert_close(ORACLES["embedding"](ids, x, None), F.embedding(ids, x), exact)


@pytest.mark.needs_package("transformers")
def test_the_truth_of_a_layer_is_transformers_layer() -> None:
    """The ladder's own truth is checked against somebody else's."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from layerzero_verify.block import from_transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    torch.manual_seed(0)
    layer = LlamaDecoderLayer(config, 0).double().eval()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    cos, sin = rope_tables(6, 8)
    full = tuple(torch.cat((table, table), -1)[None] for table in (cos, sin))
    hidden = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, attention_mask=hidden, position_embeddings=full)
    got = block.forward(Truth(), from_transformers(layer, config).to(torch.float64), x, (cos, sin))["output"]
    # transformers' norm rounds to float32 on its way.
    assert_close(got, want, Tolerance(1e-6, 1e-6))


def test_another_seed_gives_other_numbers_and_the_same_seed_the_same() -> None:
    spec = _spec("reference.rms_norm.plain")
    case = Bench(spec, CPU).plain()
    assert case is not None
    first, again, other = (Bench(spec, CPU, seed=seed).arguments(case)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


# -- levels 2 and 3 ---------------------------------------------------------------------------------------
@pytest.mark.req("R-PAR-03", "R-PAR-04")
@pytest.mark.parametrize("name", ["tiny", "gqa", "no_rope"])
def test_a_layer_agrees_with_the_truth_forward_backward_and_in_decode(name: str) -> None:
    checks = list(check_layer(CONFIGS[name], SELECTED, CPU))
    assert [str(check) for check in checks if check.status is not Status.OK] == []
    forward, backward = checks[:2]
    seen = {row.stage.split(" ", 2)[2] for row in forward.stages}
    assert {"ln1_out", "scores", "attn_out", "proj_out", "ln2_out", "fc1_out", "swiglu_out", "output"} <= seen
    assert ({"q_rope", "k_rope"} <= seen) is (name != "no_rope")
    assert {"layer 1 wq", "layer 0 w2", "input"} <= {row.stage for row in backward.stages}
    assert all(row.threshold == 1e-4 for row in (*forward.stages, *backward.stages))
    assert [check.name for check in checks[2:]] == [
        "prefill + decode, contiguous", "prefill + decode, paged NHD", "prefill + decode, paged HND"
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 units says so once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_a_narrow_dtype_the_bound_is_what_torch_itself_loses(dtype: str) -> None:
    checks = list(check_layer(CONFIGS["tiny"], SELECTED, CPU, dtype))
    assert [str(check) for check in checks if check.status is not Status.OK] == []
    assert all(1e-4 < check.threshold < 0.5 for check in checks if check.threshold is not None)


def test_a_kernel_that_raises_is_named_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("illegal instruction")

    from layerzero.dispatch import bind

    monkeypatch.setattr(bind, "_import", lambda path: broken)
    lz.reset()
    check = next(iter(check_layer(CONFIGS["tiny"], LineUp("torch", ("torch.rms_norm.native",)), CPU)))
    assert check.status is Status.FAIL
    assert (check.op, check.kernel, check.stage) == ("rms_norm", "torch.rms_norm.native", "layer 0 ln1_out")
    assert "illegal instruction" in check.detail


# -- level 5 ----------------------------------------------------------------------------------------------
@pytest.mark.req("R-PAR-08", "R-PAR-09")
def test_training_stays_together_for_twenty_steps() -> None:
    checks = list(check_training(CONFIGS["tiny"], SELECTED, CPU, steps=20))
    assert [str(check) for check in checks if check.status is not Status.OK] == []
    names = [check.name for check in checks]
    assert names.count("gradient of the first step") == 2 * 8 + 3
    assert [name for name in names if name.startswith("weights")] == [
        "weights after 1 steps", "weights after 5 steps", "weights after 20 steps"
    ]  # fmt: skip
    figures = dict(checks[-1].figures)
    assert figures["loss"] < dict(checks[-3].figures)["loss"], "nothing was learned, so nothing was shown"


@pytest.mark.req("R-PAR-08", "R-PAR-11")
def test_a_wrong_gradient_is_found_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_verify import training

    real = training._gradients
    calls = []

    def wrong(model, loss):
        value, grads = real(model, loss)
        calls.append(1)
        if len(calls) % 2:  # ours, not torch's
            grads["layer 1 wv"] = grads["layer 1 wv"] * 1.5
        return value, grads

    monkeypatch.setattr(training, "_gradients", wrong)
    found = [c for c in check_training(CONFIGS["tiny"], SELECTED, CPU, steps=5) if c.status is Status.FAIL]
    assert found[0].stage == "layer 1 wv" and found[0].op == "linear" and found[0].first is not None
    assert any("weights after" in check.name for check in found)


@pytest.mark.req("R-PAR-09")
def test_loss_curves_are_compared_beyond_twenty_steps() -> None:
    tiny = replace(CONFIGS["tiny"], hidden=16, layers=1, vocab=11)
    checks = list(check_training(tiny, SELECTED, CPU, steps=25))
    assert checks[-1].name == "loss curve over 25 steps" and checks[-1].status is Status.OK
    assert dict(checks[-1].figures)["correlation"] > 0.99


# -- the whole --------------------------------------------------------------------------------------------
@pytest.mark.req("R-PAR-13")
def test_a_short_run_of_the_quick_lane_is_green() -> None:
    report = verify(lane="quick", op="silu_and_mul", level=(1, 2), config="tiny", device="cpu")
    assert report.ok, report.verdict.text
    assert [item.number for item in report.levels] == [0, 1, 2]
    assert set(report.kernels) == {"reference.silu_and_mul.plain", "torch.silu_and_mul.native"}
    used = {row.kernel for check in report.levels[2].checks for row in check.stages if row.op == "silu_and_mul"}
    assert used == set(report.kernels), "both kernels had their turn in the layer"


def test_what_was_there_before_is_there_afterwards() -> None:
    torch.manual_seed(3)
    state, threads, policy = torch.get_rng_state(), torch.get_num_threads(), lz.get_config()
    verify(op="embedding", level=1, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads and lz.get_config() == policy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lane": "fast"}, "fast"),
        ({"level": 7}, "7"),
        ({"level": ()}, "level"),
        ({"dtype": "complex64"}, "complex64"),
        ({"kernel": "torch.rms_norm.natve"}, "torch.rms_norm.native"),
        ({"op": "rms_nrm"}, "rms_norm"),
        ({"backend": "tourch"}, "torch"),
        ({"config": "huge"}, "huge"),
        ({"device": "cuda:7"}, "cuda:7"),
    ],
)
def test_a_request_that_means_nothing_is_refused(options, words: str) -> None:
    if "device" in options and torch.cuda.device_count() > 7:
        pytest.skip("that device is here")
    with pytest.raises((InvalidInputError, UnknownNameError), match=words):
        verify(**options)


def test_without_transformers_level_4_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else real(name, *a)
    )
    report = verify(op="rms_norm", level=(3, 4), device="cpu")
    found = {item.number: item for item in report.levels}
    assert found[4].status is Status.SKIP and "layerzero-verify[models]" in found[4].skipped
    assert found[3].status is Status.OK and "made weights" in found[3].checks[0].subject
    assert "level 4 (transformers is not installed" in report.verdict.text


@pytest.mark.req("R-PAR-14")
def test_the_preflight_refuses_what_is_declared_wrongly(lab) -> None:
    orphan = lab.kernel("toy.rms_norm.orphan", function=lambda *args: None)
    lost = replace(orphan, kernel_id="toy.rms_norm.lost", function="layerzero_no_such_module:f")
    greedy = lab.kernel("toy.layer_norm.greedy")
    lab.use(lost, replace(greedy, limits=(), features=greedy.features - {"bias"}))
    report = verify(backend="toy", level=(1, 2), device="cpu")
    preflight = report.levels[0]
    assert report.verdict.kind == "contract" and not report.ok
    assert [check.kernel for check in preflight.failures] == ["toy.rms_norm.lost"]
    assert "layerzero_no_such_module" in preflight.failures[0].detail
    data = report.to_json()["levels"][0]
    assert (data["name"], data["status"], data["failed"]) == ("preflight", "fail", 1)


@pytest.mark.req("R-PAR-14")
@pytest.mark.parametrize(
    ("kernel_id", "fields", "words"),
    [
        ("toy.rms_norm.never", {"limits": (("hidden", Limit(max=1)),)}, "its own constraints refuse a plain call"),
        ("toy.attention.both", {"layouts": frozenset({Layout.BHSD, Layout.BSHD})}, "cannot see the layout"),
        ("toy.nobodys.op", {"op": "nobodys"}, "no op 'nobodys' is known"),
    ],
)
def test_the_preflight_holds_a_declaration_to_what_can_be_said_without_numbers(lab, kernel_id, fields, words) -> None:
    spec = replace(lab.kernel(kernel_id.replace("nobodys", "rms_norm")), kernel_id=kernel_id, **fields)
    (check,) = contract(spec, CPU)
    assert (check.level, check.name, check.status) == (0, "contract", Status.FAIL)
    assert check.kernel == kernel_id and words in check.detail
    right = lab.kernel("toy.rms_norm.right")
    lab.use(right)
    assert [check.status for check in contract(right, CPU)] == [Status.OK]


def test_a_kernel_found_wrong_takes_no_part_above(lab) -> None:
    wrong = lab.kernel("toy.rms_norm.wrong", function=lambda x, weight, eps: x * 2)
    lab.use(wrong)
    report = verify(backend="toy", level=(1, 2, 5), device="cpu")
    assert report.verdict.level == 1
    assert all(item.status is Status.SKIP for item in report.levels if item.number >= 2)
    found = verify(op="rms_norm", level=(1, 2), config="tiny", device="cpu")
    assert found.verdict.kernel == "toy.rms_norm.wrong"
    above = next(item for item in found.levels if item.number == 2)
    assert above.status is Status.OK
    assert "toy.rms_norm.wrong" not in {row.kernel for check in above.checks for row in check.stages}


def test_numbers_made_here_are_of_the_size_a_trained_layer_has() -> None:
    for config in CONFIGS.values():
        x = torch.randn(2, 5, config.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out = block.forward(Truth(), made(config, 0, 0).to(torch.float64), x, None)["output"]
        assert 0.5 < out.std().item() < 3 and math.isfinite(out.sum().item())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.req("R-PAR-01")
def test_the_built_in_kernels_are_right_on_a_gpu() -> None:
    for backend in ("reference", "sdpa", "torch"):
        report = verify(device="cuda", backend=backend)
        assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.slow
@pytest.mark.req("R-PAR-01", "R-PAR-13")
def test_the_quick_lane_is_green_for_every_built_in_kernel() -> None:
    report = verify(lane="quick", device="cpu")
    assert report.ok, "\n".join(map(str, report.failures))
    assert [item.status for item in report.levels if item.number != 4] == [Status.OK] * 5


@pytest.mark.slow
@pytest.mark.req("R-PAR-13", "R-PAR-09")
def test_the_full_lane_is_green_for_every_built_in_kernel() -> None:
    report = verify(lane="full", device="cpu")
    assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.parametrize("op", ["cast", "quantize", "dequantize"])
def test_results_of_eight_bits_have_their_gradients_checked_too(op):
    """Whatever a kernel gives, the sums that ask for its gradients can be made: torch adds up no float8."""
    report = verify(op=op, level=(1,), device="cpu")
    failed = [check for level in report.levels for check in level.checks if check.status is Status.FAIL]
    assert not failed and any(check.name == "backward" for level in report.levels for check in level.checks)
