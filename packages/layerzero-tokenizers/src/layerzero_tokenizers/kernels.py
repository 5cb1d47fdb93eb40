"""The kernels: canonical arguments in, the engine's answer out. The vendor was imported when the handle was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero_tokenizers.cache import CACHE


def _encoder(backend: str | None) -> Callable[..., Any]:
    def encode(text: Any, tokenizer: Any, add: bool, offsets: bool, parse: bool) -> Any:
        engine = tokenizer.engines[backend or tokenizer.home]
        if offsets:
            if type(text) is str:
                return engine.encode_offsets(text, add, parse)
            return engine.offsets_batch(text, add, parse)
        if type(text) is str:
            if len(text) < CACHE.min_chars:
                return engine.encode(text, add, parse)
            return tokenizer.encode_text(engine, text, add, parse)
        if tokenizer.splits and max(map(len, text), default=0) >= CACHE.min_chars:
            return [tokenizer.encode_text(engine, item, add, parse) for item in text]
        return engine.encode_batch(text, add, parse)

    return encode


def _decoder(backend: str | None) -> Callable[..., Any]:
    def decode(ids: Any, tokenizer: Any, skip: bool) -> Any:
        engine = tokenizer.engines[backend or tokenizer.home]
        if ids and type(ids[0]) is not int:
            return engine.decode_batch(ids, skip)
        return engine.decode(ids, skip)

    return decode


hf_encode, hf_decode = _encoder("tokenizers"), _decoder("tokenizers")
tiktoken_encode, tiktoken_decode = _encoder("tiktoken"), _decoder("tiktoken")
sp_encode, sp_decode = _encoder("sentencepiece"), _decoder("sentencepiece")
own_encode, own_decode = _encoder(None), _decoder(None)
