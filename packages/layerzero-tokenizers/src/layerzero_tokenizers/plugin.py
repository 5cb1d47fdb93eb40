"""Hooks of the text ops and their backends. The libraries are independent, so each is a backend of its own.

The self tests have known answers: a tiny tokenizer is built by each library, and must give the ids it has to.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status
from layerzero_tokenizers.ops import DETOKENIZE, TOKENIZE

FOLDERS = ("hf", "tiktoken", "sentencepiece", "own")
CAPABILITIES = tuple(Path(__file__).parent / folder / "capabilities.json" for folder in FOLDERS)
_TEXT = "ab ab é"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the two ops, and the backends from their descriptors."""
    registrar.op(TOKENIZE)
    registrar.op(DETOKENIZE)
    for capabilities in CAPABILITIES:
        registrar.backend(capabilities)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> list[BackendStatus]:
    """One status for each library; they do not care about the device."""
    return [vendor_status(capabilities, device) for capabilities in CAPABILITIES]


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """A tokenizer built on the spot gives known ids and its text back; `own` needs no library of its own."""
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
    return _compare(tok.encode(_TEXT).ids, [2, 2, 3], tok.decode([2, 2, 3]))


def _tiktoken() -> str:
    tiktoken: Any = importlib.import_module("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    enc = tiktoken.Encoding("check", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    return _compare(enc.encode(_TEXT), [256, 32, 256, 32, 195, 169], enc.decode(enc.encode(_TEXT)))


def _sentencepiece() -> str:
    library: Any = importlib.import_module("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ab é"] * 20), model_writer=model, vocab_size=8, model_type="bpe",
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    sp = library.SentencePieceProcessor(model_proto=model.getvalue())
    ids = sp.encode(_TEXT)
    return _compare(ids, sp.encode("ab") * 2 + sp.encode("é"), sp.decode(ids))


def _compare(ids: list[int], wanted: list[int], text: str) -> str:
    if list(ids) != wanted:
        return f"ids {list(ids)}, expected {wanted}"
    return "" if text == _TEXT else f"text {text!r}, expected {_TEXT!r}"


_TESTS: dict[str, Callable[[], str]] = {
    "tokenizers": _hf,
    "tiktoken": _tiktoken,
    "sentencepiece": _sentencepiece,
    "own": str,
}
