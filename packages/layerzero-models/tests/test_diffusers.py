"""LayerZero in diffusers: the same images, by our ops, and without a trace afterwards."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.errors import BackendNotAvailableError, InvalidInputError
from layerzero.numerics.compare import assert_close
from layerzero.numerics.tolerances import tolerance
from layerzero_models.patching import patch, patched, unpatch

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("diffusers"),
    # at import, about libraries that are not there; none of it is ours
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
]

# name -> how many of each processor there are, and the ops that must be called
EXPECTED: dict[str, tuple[dict[str, int], set[str]]] = {
    "unet": ({"AttnProcessor2_0": 8}, {"attention", "layer_norm"}),
    "dit": ({"AttnProcessor2_0": 2}, {"attention", "layer_norm"}),
    "pixart": ({"AttnProcessor2_0": 4}, {"attention", "layer_norm"}),
    "sd3": ({"JointAttnProcessor2_0": 3}, {"attention", "layer_norm", "rms_norm"}),
    "flux": ({"FluxAttnProcessor": 3}, {"attention", "layer_norm", "rms_norm", "rope"}),
    "hunyuan": ({"HunyuanAttnProcessor2_0": 4}, {"attention", "layer_norm"}),
    "qwen": ({"QwenDoubleStreamAttnProcessor2_0": 2}, {"attention", "layer_norm", "rms_norm"}),
    "vae": ({"AttnProcessor2_0": 2}, {"attention"}),
}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _load("diffusers_pipelines")


def made(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    build, inputs = zoo.MODELS[name]
    model = build().to(device, dtype)
    torch.manual_seed(1)
    return model, on(inputs(dtype), device)


def on(item: Any, device: str) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: on(value, device) for key, value in item.items()}
    return tuple(on(value, device) for value in item) if isinstance(item, tuple) else item


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs, return_dict=False)[0]
    return found


def holdings(model: nn.Module) -> dict[tuple[str, str], int]:
    """Everything every module and every processor holds, by identity."""
    found = {}
    for name, module in model.named_modules():
        for owner, item in ((name, module), (f"{name}.processor", getattr(module, "processor", None))):
            if item is not None:
                found |= {(owner, key): id(value) for key, value in vars(item).items() if key != "training"}
                found |= {(owner, f"_parameters.{k}"): id(v) for k, v in vars(item).get("_parameters", {}).items()}
    return found


@pytest.mark.req("R-DIF-01", "R-DIF-02")
@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_patched_model_computes_the_same_with_our_ops_and_goes_back_to_the_very_same_objects(name: str) -> None:
    processors, ops = EXPECTED[name]
    model, inputs = made(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before, expected = holdings(model), run(model, inputs)
    assert patch(model) is model
    report = patched(model)
    assert report is not None and report.library == "diffusers"
    assert report.version == importlib.metadata.version("diffusers")
    found = {kind: sum(item.kind == kind for item in report.patched) for kind in processors}
    assert found == processors
    with lz.record() as calls:
        actual = run(model, inputs)
    called: dict[str, int] = {}
    for item in calls.traffic.calls:
        called[item.context.op] = called.get(item.context.op, 0) + item.count
    assert set(called) == ops
    # Each patched processor attends once; a joint block with a second attention of its own twice.
    assert called["attention"] == sum(processors.values())
    assert_close(actual, expected, tolerance("model", "float32"))
    assert {key: torch.equal(value, weights[key]) for key, value in model.state_dict().items()} == dict.fromkeys(
        weights, True
    )
    assert unpatch(model) is model
    assert holdings(model) == before
    assert patched(model) is None
    with lz.record() as calls:
        assert torch.equal(run(model, inputs), expected)
    assert not calls.traffic.calls


@pytest.mark.req("R-DIF-01", "R-DIF-02")
@pytest.mark.parametrize("name", ["unet", "sd3", "flux", "hunyuan"])
def test_with_every_op_on_the_reference_kernels_the_result_stands(name: str) -> None:
    """A replacement that called torch itself, or passed an argument in the wrong place, would show here."""
    model, inputs = made(name)
    expected = run(model, inputs)
    patch(model)
    with lz.disabled():
        actual = run(model, inputs)
    assert_close(actual, expected, tolerance("model", "float32"))
    assert not torch.equal(actual, expected)  # another kernel did run


@pytest.mark.req("R-DIF-01", "R-DIF-02")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, of a CPU without bfloat16 instructions
@pytest.mark.parametrize("name", ["dit", "flux"])
def test_bfloat16_stays_as_near_to_float32_as_it_was(name: str) -> None:
    model, inputs = made(name)
    truth = run(model, inputs)
    model, inputs = made(name, torch.bfloat16)
    plain = run(model, inputs)
    patch(model)
    ours = run(model, inputs)
    assert ours.dtype is torch.bfloat16
    error, theirs = (ours.float() - truth).abs().max(), (plain.float() - truth).abs().max()
    assert error <= theirs + tolerance("attention", "bfloat16").atol


@pytest.mark.req("R-DIF-03")
@pytest.mark.parametrize("name", ["StableDiffusion", "SDXL", "Flux", "PixArt"])
def test_a_patched_pipeline_makes_the_same_valid_image(name: str, tmp_path: Path) -> None:
    pipe, inputs = zoo.PIPELINES[name](tmp_path / "clip")
    expected = zoo.image_of(pipe, inputs)
    before = {key: holdings(part) for key, part in pipe.components.items() if isinstance(part, nn.Module)}
    patch(pipe)
    report = patched(pipe)
    assert report is not None
    assert {item.name.split(".")[0] for item in report.patched} == set(before)  # the text encoder, too
    with lz.record() as calls:
        image = zoo.image_of(pipe, inputs)
    assert "attention" in {item.context.op for item in calls.traffic.calls}
    assert image.shape == expected.shape and image.shape[-1] == 3
    assert bool(torch.isfinite(image).all()) and 0.0 <= float(image.min()) < float(image.max()) <= 1.0
    assert float(image.std()) > 0.05  # not one colour
    assert_close(image, expected, tolerance("model", "float32"))
    unpatch(pipe)
    assert {key: holdings(part) for key, part in pipe.components.items() if isinstance(part, nn.Module)} == before
    assert torch.equal(zoo.image_of(pipe, inputs), expected)


def test_patching_twice_is_patching_once_and_unpatching_a_stranger_does_nothing() -> None:
    model, _ = made("dit")
    before = holdings(model)
    unpatch(model)
    assert holdings(model) == before
    patch(model)
    once = holdings(model)
    patch(model)
    assert holdings(model) == once
    unpatch(model)
    assert holdings(model) == before


def test_a_deep_copy_of_a_patched_model_is_its_own() -> None:
    model, inputs = made("flux")
    expected = run(model, inputs)
    patch(model)
    twin = copy.deepcopy(model)
    unpatch(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert_close(run(twin, inputs), expected, tolerance("model", "float32"))
    unpatch(twin)
    assert patched(twin) is None
    assert torch.equal(run(twin, inputs), expected)


def test_a_patch_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_models.diffusers import walk

    model, _ = made("dit")
    before, count = holdings(model), 0

    def failing(module: nn.Module) -> Any:
        nonlocal count
        count += 1
        if count > 20:
            raise RuntimeError("half way")
        return real(module)

    real = walk.norm_of
    monkeypatch.setattr(walk, "norm_of", failing)
    with pytest.raises(RuntimeError, match="half way"):
        patch(model)
    assert holdings(model) == before


def test_gradients_of_a_patched_model_are_those_of_the_library() -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    for name in ("unet", "flux"):
        model, inputs = made(name)
        expected = gradients(model)
        patch(model)
        actual = gradients(model)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(actual[key], value, tolerance("model", "float32"))


def test_gated_blocks_are_patched_when_asked_for_and_step_aside_for_hooks() -> None:
    model, inputs = made("unet")
    expected = run(model, inputs)
    report = patched(patch(model))
    assert report is not None and {item.kind for item in report.left} == {"FeedForward", "GroupNorm"}
    unpatch(model)
    patch(model, feed_forward=True)
    with lz.record() as calls:
        assert_close(run(model, inputs), expected, tolerance("model", "float32"))
    assert "mlp" in {item.context.op for item in calls.traffic.calls}
    gates = [module for module in model.modules() if type(module).__name__ == "GEGLU"]
    seen: list[int] = []
    for gate in gates:
        gate.proj.register_forward_hook(lambda *_: seen.append(1))
    with lz.record() as calls:
        assert_close(run(model, inputs), expected, tolerance("model", "float32"))
    assert len(seen) == len(gates) and "mlp" not in {item.context.op for item in calls.traffic.calls}


def test_what_is_left_alone_is_reported_with_the_reason() -> None:
    from diffusers.models.attention_processor import AttnProcessor, IPAdapterAttnProcessor2_0

    model, _ = made("unet")
    own = {name: AttnProcessor() for name in model.attn_processors}
    first, second = list(own)[:2]
    own[second] = IPAdapterAttnProcessor2_0(32, 32)
    model.set_attn_processor(dict(own))
    report = patched(patch(model))
    assert report is not None
    why = {item.name + ".processor": item.why for item in report.left if "Processor" in item.kind}
    assert why[first] == "the processor computes its scores itself"
    assert why[second] == "the processor has weights of its own"
    assert len(why) == len(own) and not any(item.op == "attention" for item in report.patched)
    assert report.to_json()["left"] and "left as it is" in str(report)


def test_a_model_split_over_devices_by_the_library_keeps_its_processors() -> None:
    model, _ = made("flux")
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._parallel_config = object()
    report = patched(patch(model))
    assert report is not None
    assert {item.why for item in report.left if "Processor" in item.kind} == {
        "runs over several devices by the library's own scheme"
    }


def test_layerzero_is_a_backend_of_the_librarys_dispatcher_by_name() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    from layerzero_models.diffusers.processors import backend

    member = backend()
    assert backend() is member and isinstance(member, AttentionBackendName)
    assert AttentionBackendName("layerzero") is member and copy.deepcopy(member) is member
    model, inputs = made("qwen")
    expected = run(model, inputs)
    active = _AttentionBackendRegistry._active_backend
    try:
        model.set_attention_backend("layerzero")
        with lz.record() as calls:
            assert_close(run(model, inputs), expected, tolerance("model", "float32"))
    finally:
        model.reset_attention_backend()
        _AttentionBackendRegistry.set_active_backend(active)
    assert {item.context.op for item in calls.traffic.calls} == {"attention"}


def test_the_dispatcher_passes_masks_scale_and_lse_on() -> None:
    from layerzero_models.diffusers.processors import attend

    q, k, v = (torch.randn(2, size, 3, 8) for size in (5, 7, 7))
    keep = torch.arange(7) < torch.tensor([[4], [7]])
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = nn.functional.scaled_dot_product_attention(*heads, attn_mask=keep[:, None, None], scale=0.5)
    out, lse = attend(q, k, v, keep, scale=0.5, return_lse=True)
    assert_close(out, expected.transpose(1, 2), tolerance("attention", "float32"))
    scores = (heads[0] @ heads[1].transpose(2, 3) * 0.5).masked_fill(~keep[:, None, None], -torch.inf)
    assert_close(lse, scores.logsumexp(-1).transpose(1, 2), tolerance("attention", "float32"))


@pytest.mark.parametrize("name", ["flux", "hunyuan", "qwen"])
def test_a_patched_attention_layer_compiles_without_a_break(name: str) -> None:
    """One layer of each way in: our processors, borrowed code, the dispatcher."""
    model, inputs = made(name)
    patch(model)
    layer = next(module for module in model.modules() if hasattr(module, "processor"))
    seen: list[tuple[Any, Any]] = []
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    run(model, inputs)
    handle.remove()
    args, kwargs = seen[0]
    with torch.no_grad():
        expected = layer(*args, **kwargs)
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        actual = compiled(*args, **kwargs)
        compiled(*args, **kwargs)  # the guards hold
    for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
        assert_close(one, other, tolerance("model", "float32"))


def _tensors(item: Any) -> list[torch.Tensor]:
    return [item] if isinstance(item, torch.Tensor) else list(item)


@pytest.mark.req("R-DIF-01")
def test_an_old_or_missing_diffusers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_models import diffusers as diffusers_models

    assert diffusers_models.version() == importlib.metadata.version("diffusers")
    model, _ = made("dit")
    before = holdings(model)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.30.3")
    with pytest.raises(BackendNotAvailableError) as old:
        patch(model)
    assert old.value.code == "BACKEND_VERSION_MISMATCH" and "0.30.3" in str(old.value)

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(BackendNotAvailableError) as missing:
        patch(model)
    assert missing.value.code == "BACKEND_NOT_INSTALLED" and holdings(model) == before


def test_something_else_is_refused_with_the_libraries_that_are_known() -> None:
    from diffusers import DDIMScheduler

    for item in (nn.Linear(2, 2), DDIMScheduler()):
        with pytest.raises(InvalidInputError) as refused:
            patch(item)
        assert refused.value.code == "TYPE_INVALID"


@pytest.mark.gpu
@pytest.mark.req("R-DIF-01", "R-DIF-02")
@pytest.mark.parametrize("name", list(EXPECTED))
def test_on_the_gpu_in_bfloat16_a_patched_model_stays_near_the_truth(name: str) -> None:
    model, inputs = made(name, device="cuda")
    truth = run(model, inputs)
    model, inputs = made(name, torch.bfloat16, "cuda")
    plain = run(model, inputs)
    patch(model)
    ours = run(model, inputs)
    error, theirs = (ours.float() - truth).abs().max(), (plain.float() - truth).abs().max()
    assert float(error) <= float(theirs) + tolerance("attention", "bfloat16").atol
    unpatch(model)
    assert torch.equal(run(model, inputs), plain)
