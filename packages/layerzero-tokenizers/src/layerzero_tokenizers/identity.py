"""Who a tokenizer is: SHA-256 over everything that can change an id; and the handle that LayerZero holds it by.

The parts are what the libraries themselves call them. A digest depends on content alone, so it is the same in every
process and on every platform.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from layerzero.model.context import TokenizerIdentity
from layerzero.reasons import Reason, reason
from layerzero_tokenizers.cache import CACHE
from layerzero_tokenizers.engines import Engine


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The digests of a tokenizer's parts; `digest` is over all of them."""

    family: str
    vocab: str = "none"
    merges: str = "none"
    normalizer: str = "none"
    pre_tokenizer: str = "none"
    post_processor: str = "none"
    added_tokens: str = "none"
    special_tokens: str = "none"
    rest: str = "none"

    @property
    def digest(self) -> str:
        return _sha(*(getattr(self, field.name) for field in fields(self)))

    def identity(self, namespace: str) -> TokenizerIdentity:
        """What selection sees. The id names the whole digest, and the namespace it is used in."""
        name = f"{self.family}:{self.digest}"
        return TokenizerIdentity(
            tokenizer_id=f"{namespace}/{name}" if namespace else name,
            vocab_hash=self.vocab,
            normalizer_id=self.normalizer,
            pretokenizer_id=self.pre_tokenizer,
            merges_hash=self.merges,
            special_tokens_hash=_sha(self.added_tokens, self.special_tokens, self.post_processor),
        )


def changes(before: Fingerprint, after: Fingerprint) -> tuple[Reason, ...]:
    """A TOKENIZER_HASH_MISMATCH for each part that differs, naming it; empty when nothing does."""
    return tuple(
        reason("TOKENIZER_HASH_MISMATCH", f"{field.name} {getattr(after, field.name)}", getattr(before, field.name))
        for field in fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    )


def fingerprint(family: str, **parts: bytes | str | None) -> Fingerprint:
    """A Fingerprint from the canonical bytes of each part; what a library does not have is "none"."""
    return Fingerprint(family, **{name: _sha(name, part) for name, part in parts.items() if part is not None})


def of_hf(document: Mapping[str, Any]) -> Fingerprint:
    """From the content of a tokenizer.json (`Tokenizer.to_str`)."""
    model = dict(document["model"])
    vocab, merges = model.pop("vocab"), model.pop("merges", None)
    added = list(document.get("added_tokens") or ())
    if isinstance(vocab, Mapping):
        vocab = sorted(vocab.items(), key=lambda item: item[1])
    # A merge is written "a b" by older releases and ["a", "b"] by newer ones.
    pairs = None if merges is None else [m.split(" ", 1) if isinstance(m, str) else list(m) for m in merges]
    return fingerprint(
        "tokenizers",
        vocab=_canonical([model, vocab]),
        merges=_part(pairs),
        normalizer=_part(document.get("normalizer")),
        pre_tokenizer=_part(document.get("pre_tokenizer")),
        post_processor=_part(document.get("post_processor")),
        added_tokens=_canonical([item for item in added if not item.get("special")]),
        special_tokens=_canonical([item for item in added if item.get("special")]),
        rest=_canonical([document.get(name) for name in ("decoder", "truncation", "padding")]),
    )


def of_tiktoken(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> Fingerprint:
    """From the parts of a tiktoken Encoding. Its ranks are vocabulary and merges in one."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return fingerprint(
        "tiktoken",
        vocab=_framed(part for token, rank in ordered for part in (token, str(rank).encode())),
        merges=_framed(token for token, _ in ordered),
        pre_tokenizer=pattern,
        special_tokens=_canonical(sorted(special.items())),
    )


def of_sentencepiece(parsed: Any, *, add_bos: bool, add_eos: bool) -> Fingerprint:
    """From a parsed model file (`sp_model.parse`) and what the processor puts around a text."""
    ordinary = [piece for piece in parsed.pieces if piece.type in ("normal", "unused", "byte")]
    special = [piece for piece in parsed.pieces if piece.type in ("unknown", "control")]
    added = [piece for piece in parsed.pieces if piece.type == "user_defined"]
    rows = [(piece.text, piece.score, piece.type) for piece in parsed.pieces]
    return fingerprint(
        "sentencepiece",
        vocab=_canonical([parsed.model_type, rows]),
        merges=_canonical([(piece.text, piece.score) for piece in ordinary]) if parsed.model_type == "bpe" else None,
        normalizer=parsed.normalizer_bytes,
        pre_tokenizer=parsed.trainer_bytes,
        post_processor=_canonical([add_bos, add_eos]),
        added_tokens=_canonical([piece.text for piece in added]),
        special_tokens=_canonical([(piece.text, piece.type) for piece in special]),
        rest=parsed.rest_bytes,
    )


def _part(item: Any) -> bytes | None:
    return None if item is None else _canonical(item)


def _canonical(item: Any) -> bytes:
    return json.dumps(item, ensure_ascii=True, sort_keys=True, separators=(",", ":")).encode()


def _framed(items: Iterable[bytes]) -> bytes:
    """Bytes that tell ("ab", "c") from ("a", "bc")."""
    return b"".join(len(item).to_bytes(8, "little") + item for item in items)


def _sha(*parts: bytes | str) -> str:
    return hashlib.sha256(_framed(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()


@dataclass(frozen=True)
class Opened:
    """A tokenizer as its own library has it. `parts` is what a conversion starts from."""

    fingerprint: Fingerprint
    engine: Engine
    vocab_size: int
    parts: tuple[Any, ...]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    splits: bool = False
    immutable: bool = False
    source: str = ""
    special: Mapping[str, int | None] = field(default_factory=dict)
    special_texts: tuple[str, ...] = ()


class Tokenizer:
    """Made by `layerzero_tokenizers.load`; pass it to `lz.tokenize` and `lz.detokenize`.

    fingerprint   the digests of its parts
    identity      what selection sees of it where ids alone are asked for
    home          the backend whose library the tokenizer belongs to
    engines       by backend: the home engine, and those proven to give the same
    around        how many special tokens are put before and after a text
    live          made from an object that its owner may still change: only the home engine serves it, uncached
    """

    def __init__(self, opened: Opened, *, live: bool = False, namespace: str = "") -> None:
        self._opened = replace(opened, parts=())  # they are large, and of use to a conversion alone
        self.fingerprint, self.vocab_size, self.source = opened.fingerprint, opened.vocab_size, opened.source
        self.home = opened.engine.backend
        self.engines: dict[str, Engine] = {self.home: opened.engine}
        self.prefix, self.suffix = opened.prefix, opened.suffix
        self.around = (len(self.prefix), len(self.suffix))
        self.splits = opened.splits and not live
        self.live = live
        self.namespace = namespace
        self.pad_id, self.bos_id, self.eos_id = (opened.special.get(name) for name in ("pad", "bos", "eos"))
        self.identity = self.fingerprint.identity(namespace)
        self.tokenizer_id = self.identity.tokenizer_id
        self.lz_key = f"{self.tokenizer_id}/live" if live else self.tokenizer_id

    def within(self, namespace: str) -> Tokenizer:
        """The same tokenizer in another namespace: nothing cached in one is seen in another."""
        other = Tokenizer(self._opened, live=self.live, namespace=namespace)
        other.engines = self.engines
        return other

    def encode_text(self, engine: Engine, text: str, add: bool, parse: bool) -> list[int]:
        """The ids of one text, through the prefix cache where it is long enough and may be cut."""
        if len(text) < CACHE.min_chars or not self.splits or not CACHE.max_bytes:
            return engine.encode(text, add, parse)
        ids = CACHE.encode(engine, self.tokenizer_id, text, parse)
        return [*self.prefix, *ids, *self.suffix] if add and (self.prefix or self.suffix) else ids

    def remember(self, text: str, *, parse_special: bool = True) -> int:
        """Tokenize a system prompt ahead of time; how many characters are held, 0 where texts may not be cut."""
        if not self.splits:
            return 0
        return CACHE.remember(self.engines[self.home], self.tokenizer_id, text, parse_special)

    def __repr__(self) -> str:
        served = "+".join(sorted(self.engines))
        return f"<Tokenizer {self.source or self.tokenizer_id[:30]} {self.vocab_size} tokens, {served}>"
