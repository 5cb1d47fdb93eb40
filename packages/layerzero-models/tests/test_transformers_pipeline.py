"""Text in, text out with a patched model: transformers' pipeline, and our own tokenizing and sampling around it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.model.dispatch_table import PlanEntry, bucket_sizes, situation

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers", "tokenizers"),
]
PROMPTS = ["the quick brown fox", "a lazy dog jumps over the quick brown fox and the dog"]
WORDS = "the a quick brown fox lazy dog jumps over and runs away from it all".split()


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


@pytest.fixture
def tokenizer() -> Any:
    """Whole words, padded on the left; nothing is fetched."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *WORDS, *(f"w{i}" for i in range(zoo.VOCAB - 3 - len(WORDS)))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def ran(patched: Any) -> set[str]:
    """The ops of a patched model that kernels of ours have run."""
    report = lz.patched(patched)
    assert report is not None
    return {item.op for item in report.kernels()}


@pytest.mark.req("R-HFT-03")
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 8}, {"num_beams": 2}])
def test_the_text_generation_pipeline_writes_the_same_text(tokenizer: Any, options: dict[str, Any]) -> None:
    from transformers import pipeline

    model = zoo.made("llama")
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")

    def written() -> list[str]:
        torch.manual_seed(3)
        # A batch, so that the shorter prompt is padded.
        return [
            item[0]["generated_text"]
            for item in writer(PROMPTS, max_new_tokens=8, batch_size=2, return_full_text=False, **options)
        ]

    want = written()
    assert lz.patch(writer) is writer and lz.patched(writer) is lz.patched(model) is not None
    assert written() == want and all(want)
    assert ran(writer) >= {"attention", "rms_norm", "rope", "silu_and_mul"}
    lz.unpatch(writer)
    assert lz.patched(model) is None


@pytest.mark.req("R-HFT-03")
def test_text_to_text_has_no_pipeline_any_more_and_generate_does_its_work(tokenizer: Any) -> None:
    """transformers 5 dropped text2text-generation; an encoder-decoder's `generate` is what it was made of."""
    from transformers import pipeline

    model = zoo.made("t5")
    with pytest.raises(KeyError, match="text2text-generation"):
        pipeline("text2text-generation", model=model, tokenizer=tokenizer)  # type: ignore[call-overload]
    given = dict(tokenizer(PROMPTS, padding=True, return_tensors="pt"))
    given.pop("token_type_ids", None)
    want = model.generate(**given, max_new_tokens=8, min_new_tokens=8)
    got = lz.patch(model).generate(**given, max_new_tokens=8, min_new_tokens=8)
    assert tokenizer.batch_decode(got) == tokenizer.batch_decode(want)
    assert ran(model) >= {"attention", "rms_norm", "gelu_and_mul"}


@pytest.mark.req("R-TOK-10")
def test_tokens_a_model_and_sampling_of_ours_follow_a_dispatch_table(tokenizer: Any, tmp_path: Path) -> None:
    """Tokenize, a patched model, sample: every choice comes from the table, and without it the text is the same."""
    from layerzero.device.probe import probe_device
    from layerzero.dispatch.run import current_world
    from layerzero.runtime.state import state
    from layerzero.tables.file import hardware_of, make_table, save_table

    model = lz.patch(zoo.made("llama"))
    ids = torch.tensor([tokenizer(PROMPTS[1])["input_ids"]])

    def text() -> str:
        tokens, cache = ids, None
        made: list[int] = []
        with torch.no_grad():
            for step in range(8):
                out = model(tokens, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                draw = torch.Generator().manual_seed(step)
                tokens = lz.sample(out.logits[:, -1], top_k=5, generator=draw)[:, None]
                made.append(int(tokens))
        return str(tokenizer.decode(made))

    want = text()
    world = current_world()
    met = {
        bound.decision.context: bound.decision.chosen
        for bound in list(world.hot.values())
        if bound.decision.op in ("rms_norm", "add_rms_norm", "rope", "silu_and_mul")
    }
    assert {context.op for context in met} == {"rms_norm", "add_rms_norm", "rope", "silu_and_mul"}
    slow = {op: f"reference.{op}.plain" for op in ("rms_norm", "add_rms_norm", "rope", "silu_and_mul")}
    table = make_table(
        hardware=hardware_of(probe_device("cpu")),
        policy_hash=world.policy.policy_hash,
        kernels={kernel: world.registry.get(kernel).version for kernel in slow.values()},
        buckets={op: {} for op in slow},
        entries=tuple(
            PlanEntry(ctx.op, situation(ctx), bucket_sizes(ctx, {}) or (), slow[ctx.op], 12.5, 0.0) for ctx in met
        ),
    )
    path = tmp_path / "dispatch_table.json"
    save_table(table, path)
    lz.use_table(path)
    followed = state.counters.followed
    assert text() == want
    assert state.counters.followed - followed >= len(slow)
    ran = {bound.kernel_id for bound in current_world().hot.values() if bound.decision.op in slow}
    assert ran == set(slow.values())
