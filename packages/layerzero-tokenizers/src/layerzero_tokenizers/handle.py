"""A tokenizer as LayerZero holds it: an identity, the engines that may serve it, and where its texts may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.model.context import TokenizerIdentity
from layerzero_tokenizers.cache import CACHE
from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.identity import Fingerprint


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
    home          the backend whose library the tokenizer belongs to
    engines       by backend: the home engine, and those proven to give the same
    around        how many special tokens are put before and after a text
    live          made from an object that its owner may still change: only the home engine serves it, uncached
    """

    __slots__ = (
        "_identities", "_opened", "around", "bos_id", "engines", "eos_id", "fingerprint", "home", "live", "lz_key",
        "namespace", "pad_id", "prefix", "source", "splits", "suffix", "tokenizer_id", "vocab_size",
    )  # fmt: skip

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
        self._identities = tuple(self.fingerprint.identity(namespace, return_offsets=flag) for flag in (False, True))
        self.tokenizer_id = self._identities[0].tokenizer_id
        self.lz_key = f"{self.tokenizer_id}/live" if live else self.tokenizer_id

    def identity_for(self, return_offsets: bool) -> TokenizerIdentity:
        """What selection sees of it."""
        return self._identities[bool(return_offsets)]

    @property
    def identity(self) -> TokenizerIdentity:
        """Its identity for a call that asks for ids alone."""
        return self._identities[0]

    def within(self, namespace: str) -> Tokenizer:
        """The same tokenizer in another namespace: nothing cached in one is seen in another."""
        other = Tokenizer(self._opened, live=self.live, namespace=namespace)
        other.engines = self.engines
        from layerzero_tokenizers.candidates import share

        share(self, other)
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

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id that is none of this tokenizer's, None when all are."""
        return self.engines[self.home].unknown_id(ids)

    def __repr__(self) -> str:
        served = "+".join(sorted(self.engines))
        return f"<Tokenizer {self.source or self.tokenizer_id[:30]} {self.vocab_size} tokens, {served}>"
