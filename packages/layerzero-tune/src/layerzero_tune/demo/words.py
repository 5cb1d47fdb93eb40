"""The last stop of `lz demo`: text in, text out, where layerzero-tokenizers and one of its libraries are installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import textwrap
from typing import Any

from layerzero.errors import LayerZeroError

__all__ = ["text_lines", "text_round_trip"]

_PROMPT = "The quick brown fox"


def text_round_trip() -> dict[str, Any] | None:
    """Tokenize, generate and detokenize with a tokenizer trained on the spot; None where the package is not there."""
    package = "layerzero_tokenizers"
    if any(importlib.util.find_spec(name) is None for name in (package, "tokenizers")):
        return None
    try:
        return _taken(package)
    except LayerZeroError as error:  # a policy that keeps tokenizers out, say
        return {"error": str(error)}


def _taken(package: str) -> dict[str, Any]:
    import layerzero as lz

    small, pipeline, sources = (importlib.import_module(f"{package}.{n}") for n in ("small", "pipeline", "sources"))
    tokenizer = sources.load(small.gpt2())
    model = pipeline.TinyTransformer(tokenizer.vocab_size)
    made = pipeline.generate(_PROMPT, tokenizer, model, max_new_tokens=12)
    report = lz.explain("tokenize", _PROMPT, tokenizer)
    return {
        "prompt": _PROMPT,
        "prompt_ids": made.prompt_ids,
        "ids": made.ids,
        "text": made.text,
        "kernel": report.ran or report.chosen,
        "round_trip": lz.detokenize(made.prompt_ids, tokenizer) == _PROMPT,
    }


def text_lines(found: dict[str, Any] | None) -> list[str]:
    """The same for people; empty where there was nothing to show."""
    if found is None:
        return []
    if "error" in found:
        return _wrapped([f"Text in, text out: {found['error']}"])
    back = "comes back unchanged" if found["round_trip"] else "DOES NOT come back"
    lines = [
        "Text in, text out (random weights, so the words mean nothing)",
        f"  {found['prompt']!a}: {len(found['prompt_ids'])} tokens by {found['kernel']}, and {back}",
        f"  then {len(found['ids'])} more, streamed: {found['text']!a}",
    ]
    return _wrapped(lines)


def _wrapped(lines: list[str]) -> list[str]:
    width = max(40, shutil.get_terminal_size().columns)
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="    ")]
