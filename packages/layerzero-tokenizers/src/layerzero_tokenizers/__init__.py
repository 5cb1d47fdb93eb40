"""LayerZero backends for Hugging Face tokenizers, tiktoken and SentencePiece.

import layerzero as lz
from layerzero_tokenizers import load

tokenizer = load("path/to/model")            # or an object, a file, a tiktoken name
ids = lz.tokenize("Hello, world", tokenizer)
text = lz.detokenize(ids, tokenizer)
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CACHE", "TextStream", "TinyTransformer", "Tokenizer", "forget", "generate", "load", "verdicts"]

# Loaded at first use: registering the backends needs none of them.
_LAZY = {
    "CACHE": "cache",
    "TextStream": "pipeline",
    "TinyTransformer": "pipeline",
    "Tokenizer": "identity",
    "forget": "sources",
    "generate": "pipeline",
    "load": "sources",
    "verdicts": "candidates",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
