"""Known-answer self tests: a tiny tokenizer is built by each library, and must give the ids it has to."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

from layerzero.plugin import HealthReport

_TEXT = "ab ab é"


def check(backend: str) -> HealthReport:
    """The report for one backend; `own` needs no library of its own."""
    test = _TESTS.get(backend)
    if test is None:
        return HealthReport(backend, False, f"unknown backend {backend}")
    try:
        wrong = test()
    except Exception as error:
        return HealthReport(backend, False, f"{type(error).__name__}: {error}")
    return HealthReport(backend, not wrong, wrong or "known ids, and the text came back", None if wrong else 0.0)


def _hf() -> str:
    tokenizers: Any = importlib.import_module("tokenizers")
    vocab = {"a": 0, "b": 1, "ab": 2, "é": 3, "[UNK]": 4}
    tok = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return _compare(tok.encode(_TEXT).ids, [2, 2, 3], tok.decode([2, 2, 3]), _TEXT)


def _tiktoken() -> str:
    tiktoken: Any = importlib.import_module("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    enc = tiktoken.Encoding("check", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    return _compare(enc.encode(_TEXT), [256, 32, 256, 32, 195, 169], enc.decode(enc.encode(_TEXT)), _TEXT)


def _sentencepiece() -> str:
    library: Any = importlib.import_module("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ab é"] * 20), model_writer=model, vocab_size=8, model_type="bpe",
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    sp = library.SentencePieceProcessor(model_proto=model.getvalue())
    ids = sp.encode(_TEXT)
    return _compare(ids, sp.encode("ab") * 2 + sp.encode("é"), sp.decode(ids), _TEXT)


def _compare(ids: list[int], wanted: list[int], text: str, expected: str) -> str:
    if list(ids) != wanted:
        return f"ids {list(ids)}, expected {wanted}"
    return "" if text == expected else f"text {text!r}, expected {expected!r}"


_TESTS: dict[str, Callable[[], str]] = {
    "tokenizers": _hf,
    "tiktoken": _tiktoken,
    "sentencepiece": _sentencepiece,
    "own": str,
}
