"""Level 4 and the way ops are put into a transformers model: right while it lasts, and without a trace afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero_verify import forward, models
from layerzero_verify.forward import check_model, matrix, placed
from layerzero_verify.layers import check_stages
from layerzero_verify.lineup import Caller, LineUp
from layerzero_verify.models import Events, applied, hooked, stage_of, watched
from layerzero_verify.report import Check, StageError, Status

CPU = torch.device("cpu")
SELECTED = LineUp("as selected")
REQUIRED = ("llama", "mistral", "qwen", "gemma", "gpt2", "t5", "vit")

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers"),
]


def bad(checks: list[Check]) -> list[str]:
    return [str(check) for check in checks if check.status is not Status.OK]


@pytest.mark.req("R-PAR-07")
@pytest.mark.parametrize("name", REQUIRED)
def test_a_model_on_our_ops_gives_transformers_logits_and_top_1(name: str) -> None:
    model = models.made(name)
    checks = list(check_model(name, model, SELECTED, CPU))
    assert bad(checks) == []
    assert [check.name for check in checks] == ["full forward", "padded batch"][: 1 if name == "vit" else 2]
    for check in checks:
        assert check.threshold == 1e-3 and check.max_abs is not None and check.mean_abs is not None
        assert check.max_abs < 1e-4 and dict(check.figures) == {"top1_agreement": 1.0}
        assert {kernel.split(".")[1] for kernel in check.served} >= {"attention", "linear"}


def with_a_head(lab: Any, model: Any, change: Any) -> Check:
    """Level 4 of a model whose logits come from a kernel that changes them a little; its other products are right."""
    plain, words = lab.reference("linear"), model.module.config.vocab_size

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = plain(x, weight, *rest)
        if weight.shape[0] == words:
            out = change(out)
        return out

    lab.use(lab.kernel("planted.linear.head", product, priority=99.0))
    check = next(iter(check_model("llama", model, SELECTED, CPU)))
    assert check.name == "full forward" and "planted.linear.head" in check.served
    return check


@pytest.mark.req("R-PAR-07")
@pytest.mark.parametrize(("part", "status"), [(0.8, Status.OK), (1.2, Status.FAIL)])
def test_one_logit_beyond_the_threshold_fails_a_model_and_one_within_does_not(
    lab: Any, part: float, status: Status
) -> None:
    model, place = models.made("llama"), (1, 3, 5)
    step = part * 1e-3 * (1.0 + model.logits(model.inputs)[place].abs().item())

    def change(logits: torch.Tensor) -> torch.Tensor:
        logits[place] += step
        return logits

    check = with_a_head(lab, model, change)
    assert check.status is status, check
    assert check.max_abs == pytest.approx(step, rel=0.02) and dict(check.figures)["top1_agreement"] == 1.0


@pytest.mark.req("R-PAR-07")
def test_the_mean_difference_is_over_all_logits(lab: Any) -> None:
    model = models.made("llama")
    words = model.module.config.vocab_size

    def change(logits: torch.Tensor) -> torch.Tensor:
        logits[..., : words // 4] += 8e-4
        return logits

    check = with_a_head(lab, model, change)
    assert check.status is Status.OK and check.max_abs == pytest.approx(8e-4, rel=0.02)
    assert check.mean_abs == pytest.approx(8e-4 * (words // 4) / words, rel=0.02)


@pytest.mark.req("R-PAR-07")
def test_top_1_is_compared_at_every_position(lab: Any) -> None:
    model, places = models.made("llama"), [(0, 2), (1, 4)]
    count = model.inputs["input_ids"].numel()

    def change(logits: torch.Tensor) -> torch.Tensor:
        for place in places:
            first, second = logits[place].topk(2).indices.tolist()
            logits[place][[first, second]] = logits[place][[second, first]]
        return logits

    check = with_a_head(lab, model, change)
    assert check.status is Status.FAIL
    assert dict(check.figures)["top1_agreement"] == pytest.approx((count - 2) / count)
    assert f"top-1 differs at 2 of {count} positions, first at [0, 2]" in check.detail


@pytest.mark.req("R-PAR-07")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_single_tokens_over_a_cache_give_the_logits_of_the_full_forward(name: str) -> None:
    checks = list(check_model(name, models.made(name), SELECTED, CPU, cached=True))
    assert bad(checks) == [] and checks[-1].name == "prefill + decode with cache"


def test_the_window_of_mistral_reaches_the_kernel_as_a_window() -> None:
    """Not as a mask: a kernel that ignores `window` would otherwise pass level 4."""
    seen: list[tuple[Any, ...]] = []

    class Listening(Caller):
        def __call__(self, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
            if op == "attention":
                _, _, _, mask, _, is_causal, *_ = args
                seen.append((kwargs["window"], mask, is_causal))
            return super().__call__(stage, op, *args, **kwargs)

    model = models.made("mistral")
    with applied(model.module, Listening(SELECTED)):
        model.logits(model.inputs)
    assert seen == [((4, 0), None, True)] * 2


def _traces(module: Any) -> dict[str, Any]:
    """Whatever a patch could leave behind."""
    from transformers import AttentionInterface, AttentionMaskInterface

    file = sys.modules["transformers.models.llama.modeling_llama"]
    return {
        "implementation": module.config._attn_implementation,
        "registered": ("layerzero_verify" in AttentionInterface(), "layerzero_verify" in AttentionMaskInterface()),
        "rotation": file.apply_rotary_pos_emb,
        "instances": [name for name, part in module.named_modules() if "forward" in vars(part)],
        "hooks": [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks],
    }


@pytest.mark.parametrize("broken", [False, True])
def test_the_patch_leaves_nothing_behind(broken: bool) -> None:
    model = models.made("llama")
    before, want = _traces(model.module), model.logits(model.inputs)
    events: Events = {}
    try:
        with hooked(model.module, events) as observe, applied(model.module, Caller(SELECTED), observe):
            assert _traces(model.module) != before
            model.logits(model.inputs)
            if broken:
                raise KeyError("in the middle")
    except KeyError:
        pass
    assert _traces(model.module) == before
    assert before["instances"] == [] and before["hooks"] == [] and before["registered"] == (False, False)
    assert torch.equal(model.logits(model.inputs), want)
    assert len(events) > 20


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_watching_changes_nothing(name: str) -> None:
    model = models.made(name)
    want = model.logits(model.inputs)
    events: Events = {}
    with hooked(model.module, events) as observe, watched(model.module, observe):
        got = model.logits(model.inputs)
    assert (got - want).abs().max().item() < 1e-5
    assert any(key.endswith("attn_out") for key in events) and any(key.endswith("mlp_out") for key in events)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.layers.0.input_layernorm", "ln1_out"),
        ("model.layers.1.self_attn.q_proj", "q_proj"),
        ("transformer.h.0.attn.c_proj", "proj_out"),
        ("transformer.h.0.mlp.c_proj", "mlp_out"),
        ("encoder.block.0.layer.0.SelfAttention.o", "proj_out"),
        ("decoder.block.1.layer.2.DenseReluDense.wo", "mlp_out"),
        ("vit.layers.0.layernorm_after", "ln2_out"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        ("model.layers.0.mlp.act_fn", ""),
    ],
)
def test_stages_are_known_by_transformers_names(name: str, stage: str) -> None:
    assert stage_of(name) == stage


def test_an_op_that_raises_inside_a_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.made("llama")
    line_up = LineUp("toy", ("torch.silu_and_mul.native",))

    def refuse(self: Caller, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        if op == "silu_and_mul":
            raise StageError(stage, op, "torch.silu_and_mul.native", RuntimeError("no such instruction"))
        return real(self, stage, op, *args, **kwargs)

    real = Caller.__call__
    monkeypatch.setattr(Caller, "__call__", refuse)
    check = next(iter(check_model("llama", model, line_up, CPU)))
    assert check.status is Status.FAIL and "no such instruction" in check.detail
    assert (check.op, check.stage) == ("silu_and_mul", "model.layers.0.mlp swiglu_out")
    gate = list(matrix(line_up, CPU, 0))
    assert [item.status.value for item in gate] == ["fail", "ok", "ok"], "gpt2 and t5 have no SwiGLU"


@pytest.mark.req("R-PAR-14")
def test_the_preflights_three_models_run() -> None:
    checks = list(matrix(SELECTED, CPU, 0))
    assert bad(checks) == [] and [check.subject.split()[0] for check in checks] == list(models.MATRIX)


@pytest.mark.req("R-PAR-09")
@pytest.mark.parametrize("which", ["weight", "loss"])
@pytest.mark.parametrize(("part", "status"), [(0.7, Status.OK), (1.3, Status.FAIL)])
def test_a_model_of_transformers_is_trained_within_the_same_bounds(
    monkeypatch: pytest.MonkeyPatch, which: str, part: float, status: Status
) -> None:
    """A weight of ours, or its loss, is off by a part of what one step allows."""
    real = forward._stepped
    models_stepped: list[Any] = []

    def stepped(module: Any, ids: torch.Tensor) -> float:
        loss = real(module, ids)
        models_stepped.append(module)
        if len(models_stepped) == 1:  # the truth comes second
            with torch.no_grad():
                place = module.lm_head.weight[2:3, 3:4]
                place += (which == "weight") * part * 1e-5 * (1 + place.abs())
            loss += (which == "loss") * part * 1e-5
        return loss

    monkeypatch.setattr(forward, "_stepped", stepped)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gradients, last = forward.check_training("llama", models.made("llama"), SELECTED, CPU, "float32", steps=1)
    torch.set_num_threads(before)
    assert bad([gradients]) == [] and last.name == "weights after 1 steps"
    assert (last.status, last.threshold) == (status, 1e-5), last
    if status is Status.FAIL:
        assert "loss differs by" in last.detail if which == "loss" else last.stage == "lm_head.weight"


@pytest.mark.req("R-PAR-09")
def test_a_weight_of_a_model_beyond_its_bound_is_found_beside_one_that_differs_more_within_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large weights may differ by more than small ones; looked at after 1, 5 and 20 steps."""
    real, stepped_so_far = forward._stepped, 0

    def stepped(module: Any, ids: torch.Tensor) -> float:
        nonlocal stepped_so_far
        stepped_so_far += 1
        loss = real(module, ids)
        with torch.no_grad():
            module.lm_head.weight[2, 3], module.model.norm.weight[1] = 1e-3, 4.0
            if stepped_so_far % 2:  # the truth comes second
                module.lm_head.weight[2, 3] += 1.3e-5  # of 1e-5
                module.model.norm.weight[1] += 3e-5  # of 5e-5
        return loss

    monkeypatch.setattr(forward, "_stepped", stepped)
    torch.set_num_threads(1)
    checks = list(forward.check_training("llama", models.made("llama"), SELECTED, CPU, "float32", steps=20))
    assert [check.name for check in checks[1:]] == [f"weights after {count} steps" for count in (1, 5, 20)]
    assert [check.threshold for check in checks[1:]] == [1e-5, 1e-3, 1e-2]
    assert (checks[1].status, checks[1].stage) == (Status.FAIL, "lm_head.weight")
    assert checks[2].status is checks[3].status is Status.OK


@pytest.mark.req("R-PAR-05")
def test_stage_diffs_with_a_models_own_weights() -> None:
    checks = list(check_stages("qwen", models.made("qwen"), SELECTED, CPU, "float32"))
    assert bad(checks) == [] and [check.name for check in checks] == ["stage diff, layer 0", "stage diff, layer 1"]
    stages = [row.stage for row in checks[0].stages]
    wanted = "ln1_out q_rope k_rope scores attn_out proj_out ln2_out fc1_out swiglu_out output".split()
    assert [stage for stage in stages if stage in wanted] == wanted
    assert all(row.kernel for row in checks[0].stages if row.stage not in ("output",))
    assert all(0.0 <= row.max_abs <= row.threshold for check in checks for row in check.stages)
    skipped = list(check_stages("gemma", models.made("gemma"), SELECTED, CPU, "float32"))
    assert [check.status for check in skipped] == [Status.SKIP]


@pytest.mark.req("R-PAR-05")
def test_the_difference_of_every_stage_is_told_from_the_wrong_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: Caller, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        out = real(self, stage, op, *args, **kwargs)
        return out + 0.25 if op == "silu_and_mul" else out

    real = Caller.__call__
    monkeypatch.setattr(Caller, "__call__", shifted)
    check = next(iter(check_stages("qwen", models.made("qwen"), SELECTED, CPU, "float32")))
    rows = {row.stage: row for row in check.stages}
    assert check.status is Status.FAIL and rows["swiglu_out"].max_abs == pytest.approx(0.25, abs=1e-3)
    assert rows["output"].max_abs > rows["output"].threshold
    stages = [row.stage for row in check.stages]
    assert all(row.ok and row.max_abs < 1e-3 for row in check.stages[: stages.index("swiglu_out")])


@pytest.mark.req("R-PAR-05", "R-PAR-15")
def test_a_saved_model_is_verified_with_its_real_weights(tmp_path: Path) -> None:
    models.made("llama").module.save_pretrained(tmp_path / "my_model")
    report = lz.verify(level=(3, 4), model=str(tmp_path / "my_model"), op="attention", backend="sdpa", device="cpu")
    assert report.ok, report.verdict.text
    subjects = {check.subject.split(" [")[0] for level in report.levels for check in level.checks if level.number >= 3}
    assert subjects == {str(tmp_path / "my_model")}
    with pytest.raises(InvalidInputError, match="no folder"):
        models.from_folder(str(tmp_path / "nothing"))


def test_a_copy_in_another_dtype_is_made_once_and_leaves_the_original() -> None:
    model = models.made("gpt2")
    half = placed(model, CPU, "bfloat16")
    assert placed(model, CPU, "bfloat16") is half and placed(model, CPU, "float32") is model
    assert next(model.module.parameters()).dtype is torch.float32
    assert next(half.module.parameters()).dtype is torch.bfloat16
