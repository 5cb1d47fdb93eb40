"""The same tokenizer in another library, where it can be written down. Whether it is the same is proven after."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

from layerzero_tokenizers.boundaries import GPT2
from layerzero_tokenizers.engines import Engine, HFEngine, TiktokenEngine

_LARGEST = 60_000  # ranks beyond which merges are not recovered at load


class NotConvertible(Exception):
    """Why a tokenizer cannot be written for another library."""


# The 256 characters by which byte-level vocabularies write bytes.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}
_CHARS = {byte: char for char, byte in _BYTES.items()}


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:
        raise NotConvertible(f"token {token!r} is not written in bytes") from None


# -- Hugging Face to tiktoken --------------------------------------------------------------------
def hf_to_tiktoken(document: Mapping[str, Any], prefix: tuple[int, ...], suffix: tuple[int, ...]) -> Engine:
    """A byte-level BPE whose ids follow its merges; anything else raises NotConvertible."""
    model = document["model"]
    if model.get("type") != "BPE":
        raise NotConvertible(f"a {model.get('type')} model, not BPE")
    if any(document.get(name) for name in ("truncation", "padding", "normalizer")):
        raise NotConvertible("it truncates, pads or normalizes")
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if found := [name for name in odd if model.get(name)]:
        raise NotConvertible(f"its model has {', '.join(found)}")
    pattern = _pattern(document.get("pre_tokenizer"))
    added = document.get("added_tokens") or ()
    if any(item.get("lstrip") or item.get("rstrip") or item.get("single_word") for item in added):
        raise NotConvertible("an added token strips white space or asks for whole words")
    special = {item["content"]: item["id"] for item in added}
    if any(a != b and b.startswith(a) for a in special for b in special):
        raise NotConvertible("an added token begins with another one")
    ranks = {_bytes_of(token): number for token, number in model["vocab"].items() if token not in special}
    if len(ranks) + len(special) < len(model["vocab"]) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise NotConvertible("not every byte is a token")
    tiktoken: Any = importlib.import_module("tiktoken")
    name = f"layerzero-{len(ranks)}"
    enc = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenEngine(enc, prefix, suffix, lenient=True)


def _pattern(item: Mapping[str, Any] | None) -> str:
    """The regex of a byte-level pre-tokenizer."""
    if item is not None and item["type"] == "ByteLevel" and item.get("use_regex", True):
        if item.get("add_prefix_space"):
            raise NotConvertible("it adds a prefix space")
        return GPT2
    if item is not None and item["type"] == "Sequence" and len(item["pretokenizers"]) == 2:
        split, level = item["pretokenizers"]
        regex = split.get("pattern", {}).get("Regex") if split["type"] == "Split" else None
        plain = level["type"] == "ByteLevel" and not level.get("use_regex", True) and not level.get("add_prefix_space")
        if regex and plain and split.get("behavior") == "Isolated" and not split.get("invert"):
            return str(regex)
    raise NotConvertible("its pre-tokenizer is not one regex over bytes")


# -- tiktoken to Hugging Face --------------------------------------------------------------------
def tiktoken_to_hf(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> Engine:
    """A BPE with the merges that the ranks stand for."""
    if len(ranks) > _LARGEST:
        raise NotConvertible(f"{len(ranks)} ranks, more than {_LARGEST}")
    tokenizers: Any = importlib.import_module("tokenizers")
    vocab = {_written(token): rank for token, rank in ranks.items()} | dict(special)
    merges = [(_written(left), _written(right)) for left, right in _merges(ranks)]
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    # Oniguruma reads possessive intervals as something else; greedy ones match the same here.
    regex = re.sub(r"([+?*]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    pre = tokenizers.pre_tokenizers
    tok.pre_tokenizer = pre.Sequence([
        pre.Split(tokenizers.Regex(regex), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)
    ])  # fmt: skip
    tok.decoder = tokenizers.decoders.ByteLevel()
    if special:
        tok.add_special_tokens(sorted(special, key=lambda token: special[token]))
    return HFEngine(tok, strict=True)


def _written(token: bytes) -> str:
    return "".join(_CHARS[byte] for byte in token)


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """For each token the two parts it is merged from, in rank order."""
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) < 2:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            best = min(pairs)
            if best >= rank:
                raise NotConvertible(f"token {rank} cannot be reached by merges")
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found.append((parts[0], parts[1]))
    return found


# -- SentencePiece to Hugging Face ---------------------------------------------------------------
def sentencepiece_to_hf(model: Any, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> Engine:
    """A unigram model with the same scores and the model's own character map."""
    if model.model_type != "unigram":
        raise NotConvertible(f"a {model.model_type} model")
    if any(piece.type in ("user_defined", "unused") for piece in model.pieces) or model.whitespace_as_suffix:
        raise NotConvertible("it has symbols that its library treats in its own way")
    if not (model.add_dummy_prefix and model.remove_extra_whitespaces and model.escape_whitespaces):
        raise NotConvertible("it treats white space in its own way")
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.type == "unknown")
    tokenizers: Any = importlib.import_module("tokenizers")
    # Control symbols are never matched in a text; HF would match them, so they get a string nobody writes.
    vocab = [
        (f"\x00{index}" if piece.type in ("control", "unknown") else piece.text, piece.score)
        for index, piece in enumerate(model.pieces)
    ]
    tok = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback))
    norm, regex = tokenizers.normalizers, tokenizers.Regex
    steps = [norm.Precompiled(model.charsmap)] if model.charsmap else []
    steps += [norm.Replace(regex(" {2,}"), " "), norm.Strip(left=True, right=True)]
    tok.normalizer = norm.Sequence(steps)
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tok.decoder = tokenizers.decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return HFEngine(tok, prefix, suffix, strict=True)
