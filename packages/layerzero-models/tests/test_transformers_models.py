"""Every architecture, patched and unpatched: the same logits, the same tokens, and afterwards the very same objects."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_verify.thresholds import LOGITS

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers"),
]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()
# What each architecture must be patched with; a part that no longer matches shows here, not as a slow model.
_LLAMA, _MOE = {"rms_norm", "rope", "silu_and_mul", "add_rms_norm"}, {"rms_norm", "rope", "moe", "add_rms_norm"}
_GEMMA = {"gemma_rms_norm", "rope", "gelu_and_mul", "add_rms_norm"}
OPS: dict[str, set[str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "gpt2": {"layer_norm"},
    "bart": {"layer_norm"},
    "vit": {"layer_norm"},
    "t5": {"rms_norm", "gelu_and_mul"},
}


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got - want).abs().max().item()


@pytest.mark.req("R-HFT-01", "R-HFT-05")
@pytest.mark.parametrize("name", zoo.ALL)
def test_logits_and_greedy_tokens_agree_and_unpatching_restores_the_very_same_objects(name: str) -> None:
    model = zoo.made(name)
    before = zoo.traces(model)
    sides = [None] if name == "vit" else [None, "left", "right"]
    given = [zoo.inputs(model, side) for side in sides]
    want = [zoo.logits(model, item) for item in given]
    greedy = None if name == "vit" else zoo.generated(model, given[1])

    assert lz.patch(model) is model
    report = lz.patched(model)
    assert report is not None and report.library == "transformers"
    assert report.version == importlib.metadata.version("transformers")
    assert {item.op for item in report.patched} >= {"attention", *OPS[name]}
    assert zoo.traces(model) != before
    for item, expected in zip(given, want, strict=True):
        assert far(zoo.logits(model, item), expected) < LOGITS / 10
    if greedy is not None:
        assert torch.equal(zoo.generated(model, given[1]), greedy)

    lz.unpatch(model)
    assert lz.patched(model) is None
    assert zoo.traces(model) == before
    assert all(torch.equal(zoo.logits(model, item), expected) for item, expected in zip(given, want, strict=True))


@pytest.mark.req("R-HFT-01", "R-HFT-05")
@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("mistral", 3), ("gpt2", 3), ("t5", 6), ("vit", 2)])
def test_every_attention_layer_runs_on_our_kernels_while_patched_and_none_before_or_after(
    lab: Any, name: str, layers: int
) -> None:
    """By the kernels that ran: a report, and logits that agree, could come from attention that nobody touched."""
    lab.use()
    model = zoo.made(name)
    given = zoo.inputs(model)

    def attended() -> int:
        lab.clear()
        zoo.logits(model, given)
        return sum(kernel.split(".")[1] == "attention" for kernel in lab.ran())

    assert attended() == 0
    lz.patch(model)
    assert attended() == layers
    lz.unpatch(model)
    assert attended() == 0


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma", "mixtral", "gpt2", "t5", "bart"])
def test_beam_search_finds_the_same_sequences(name: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, "left")
    want = zoo.generated(model, given, num_beams=3, num_return_sequences=2)
    got = zoo.generated(lz.patch(model), given, num_beams=3, num_return_sequences=2)
    assert torch.equal(got, want) and got.shape[0] == 4


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_sampling_draws_the_same_tokens_from_the_same_seed(name: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, "left")

    def drawn() -> torch.Tensor:
        torch.manual_seed(5)
        found: torch.Tensor = zoo.generated(model, given, do_sample=True, top_k=20, top_p=0.9, temperature=0.8)
        return found

    want = drawn()
    lz.patch(model)
    assert torch.equal(drawn(), want)


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_generation_over_every_cache_gives_the_same_tokens(name: str, cache: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, "left")
    want = zoo.generated(model, given, cache_implementation=cache)
    assert torch.equal(zoo.generated(lz.patch(model), given, cache_implementation=cache), want)


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks_and_without_a_cache_gives_the_same_tokens(name: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model)
    options: list[dict[str, Any]] = [{"prefill_chunk_size": 5}, {"use_cache": False}]
    want = [zoo.generated(model, given, **option) for option in options]
    lz.patch(model)
    for option, expected in zip(options, want, strict=True):
        assert torch.equal(zoo.generated(model, given, **option), expected)


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "gpt2"])
def test_gradients_of_a_patched_model_are_those_of_the_unpatched_one(name: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, "left")

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**given).logits.square().mean().backward()
        return {key: part.grad.clone() for key, part in model.named_parameters() if part.grad is not None}

    want = gradients()
    lz.patch(model)
    got = gradients()
    assert got.keys() == want.keys() and len(want) > 10
    for key, expected in want.items():
        assert far(got[key], expected) <= 1e-4 * max(1.0, expected.abs().max().item()), key


# torch says so once on a CPU without instructions for bf16
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma"])
def test_inference_mode_and_autocast_work(name: str) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, "left")
    with torch.inference_mode():
        want = model(**given).logits
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast = model(**given).logits
    lz.patch(model)
    keep = given["attention_mask"].bool()
    with torch.inference_mode():
        assert far(model(**given).logits[keep], want[keep]) < LOGITS / 10
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = model(**given).logits
    assert got.dtype == cast.dtype
    own = (cast.float() - want)[keep].abs()  # what bf16 itself costs
    assert (got.float() - want)[keep].abs().mean() <= 1.5 * own.mean()


@pytest.mark.req("R-OP-11")
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_images_in_either_memory_format_give_the_same_classes(form: torch.memory_format) -> None:
    """Patch embedding, attention and MLP of a ViT."""
    model = zoo.made("vit")
    pixels = zoo.inputs(model)["pixel_values"].to(memory_format=form)
    want = zoo.logits(model, {"pixel_values": pixels})
    model = lz.patch(model.to(memory_format=form))
    got = zoo.logits(model, {"pixel_values": pixels})
    assert far(got, want) < LOGITS / 10 and torch.equal(got.argmax(-1), want.argmax(-1))


HALVES = (torch.bfloat16, torch.float16)


def in_dtype(name: str, dtype: torch.dtype, folder: Path, **changes: Any) -> Any:
    """As transformers loads it in a dtype: T5's `wo` stays float32 in float16."""
    model = zoo.made(name, **changes)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


def like_unpatched(model: Any, given: dict[str, torch.Tensor], exact: torch.Tensor) -> None:
    """Logits of the patched model as near to float32's as the unpatched one's; it generates and has gradients."""
    want, tokens = zoo.logits(model, given), zoo.generated(model, given)
    lz.patch(model)
    got = zoo.logits(model, given)
    assert got.dtype is want.dtype
    own = (want.float() - exact).abs()  # what the dtype itself costs
    assert (got.float() - exact).abs().mean() <= 1.5 * own.mean() + LOGITS / 10
    assert far(got.float(), want.float()) <= 4 * own.max() + LOGITS / 10
    assert zoo.generated(model, given).shape == tokens.shape  # in half precision near ties may fall either way
    if want.dtype is torch.float32:
        assert torch.equal(zoo.generated(model, given), tokens)
    with torch.enable_grad():
        model(**given).logits.float().square().mean().backward()
    assert all(p.grad is None or p.grad.dtype is p.dtype for p in model.parameters())


@pytest.mark.fault(29)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gated-gelu", torch.float16),
        ("relu", torch.float16),
        ("gated-gelu", torch.bfloat16),
        *(pytest.param(kind, torch.float32, marks=pytest.mark.slow) for kind in ("gated-gelu", "relu")),
        pytest.param("relu", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_t5_computes_the_same_in_every_dtype_it_is_loaded_in(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    exact = zoo.made("t5", feed_forward_proj=kind)
    model = in_dtype("t5", dtype, tmp_path, feed_forward_proj=kind)
    kept = {p.dtype for n, p in model.named_parameters() if n.endswith("wo.weight")}
    assert kept == {torch.float32 if dtype is torch.float16 else dtype}  # else this shows nothing
    given = zoo.inputs(model, "right")
    like_unpatched(model, given, zoo.logits(exact, given))
    report = lz.patched(model)
    assert report is not None
    ops = [item.op for item in report.patched]
    assert ops.count("rms_norm") == 12
    assert ops.count("gelu_and_mul") == (4 if kind == "gated-gelu" else 0)


@pytest.mark.slow
@pytest.mark.fault(29)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [name for name in zoo.ALL if name not in ("t5", "vit")])
def test_every_architecture_computes_the_same_in_half_precision(name: str, dtype: torch.dtype) -> None:
    exact = zoo.made(name)
    given = zoo.inputs(exact, "left")
    like_unpatched(zoo.made(name).to(dtype), given, zoo.logits(exact, given))


@pytest.mark.fault(29)
@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "bart"])
def test_norms_give_the_result_and_dtype_of_their_own_forward_in_every_pair_of_dtypes(name: str) -> None:
    model = lz.patch(zoo.made(name))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    norms = {type(m): m for m in model.modules() if hasattr(m, "_layerzero") and type(m).__name__.endswith("Norm")}
    assert norms
    tried = 0
    for norm in norms.values():
        for weight in (torch.float32, *HALVES):
            norm.to(weight)
            for given in (torch.float32, *HALVES):
                with torch.no_grad():
                    try:
                        want = type(norm).forward(norm, x.to(given))
                    except RuntimeError:  # torch's layer norm refuses some; so do we
                        with pytest.raises(RuntimeError):
                            norm(x.to(given))
                        continue
                    got = norm(x.to(given))
                assert got.dtype is want.dtype, (type(norm).__name__, weight, given)
                rough = max(torch.finfo(dtype).eps for dtype in (weight, given, want.dtype))
                torch.testing.assert_close(got.float(), want.float(), rtol=4 * rough, atol=4 * rough)
                tried += 1
    assert tried >= 5


@pytest.mark.fault(29)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_rotations_give_the_dtype_of_their_own_function_in_every_pair_of_dtypes(name: str) -> None:
    model = lz.patch(zoo.made(name))
    own = type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]
    ours = model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    assert ours is not own
    generator = torch.Generator().manual_seed(3)
    q, k, angles = (torch.randn(shape, generator=generator) for shape in ((1, 4, 5, 16), (1, 2, 5, 16), (1, 5, 8)))
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    for heads in (torch.float32, *HALVES):
        for tables in (torch.float32, *HALVES):
            given = (q.to(heads), k.to(heads), cos.to(tables), sin.to(tables))
            rough = 4 * max(torch.finfo(heads).eps, torch.finfo(tables).eps)
            for got, want in zip(ours(*given), own(*given), strict=True):
                assert got.dtype is want.dtype, (heads, tables)
                torch.testing.assert_close(got.float(), want.float(), rtol=rough, atol=rough)
