"""A tokenizer as LayerZero holds it: an identity, the engines that may serve it, and where its texts may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.model.context import TokenizerIdentity
from layerzero_tokenizers.cache import CACHE
from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.identity import Fingerprint

__all__ = ["Tokenizer"]

_NEVER = 1 << 62


class Tokenizer:
    """Made by `layerzero_tokenizers.load`; pass it to `lz.tokenize` and `lz.detokenize`.

    fingerprint   the digests of its parts
    home          the backend whose library the tokenizer belongs to
    engines       by backend: the home engine, and those proven to give the same
    around        how many special tokens are put before and after a text
    live          made from an object that its owner may still change: only the home engine serves it, uncached
    """

    __slots__ = (
        "_cache_from", "_identities", "around", "bos_id", "engines", "eos_id", "fingerprint", "home", "live", "lz_key",
        "namespace", "pad_id", "prefix", "source", "splits", "suffix", "tokenizer_id", "vocab_size",
    )  # fmt: skip

    def __init__(
        self,
        fingerprint: Fingerprint,
        home: Engine,
        *,
        vocab_size: int,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        splits: bool = False,
        live: bool = False,
        namespace: str = "",
        source: str = "",
        special: Mapping[str, int | None] | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.home = home.backend
        self.engines: dict[str, Engine] = {home.backend: home}
        self.vocab_size = vocab_size
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        self.around = (len(self.prefix), len(self.suffix))
        self.splits = splits and not live
        self.live = live
        self.namespace = namespace
        self.source = source
        named = dict(special or {})
        self.pad_id, self.bos_id, self.eos_id = named.get("pad"), named.get("bos"), named.get("eos")
        self._identities = tuple(fingerprint.identity(namespace, return_offsets=flag) for flag in (False, True))
        self.tokenizer_id = self._identities[0].tokenizer_id
        self.lz_key = f"{self.tokenizer_id}/live" if live else self.tokenizer_id
        self._cache_from = 0 if self.splits else _NEVER

    def identity_for(self, return_offsets: bool) -> TokenizerIdentity:
        """What selection sees of it."""
        return self._identities[bool(return_offsets)]

    @property
    def identity(self) -> TokenizerIdentity:
        """Its identity for a call that asks for ids alone."""
        return self._identities[0]

    def within(self, namespace: str) -> Tokenizer:
        """The same tokenizer in another namespace: nothing cached in one is seen in another."""
        other = Tokenizer(
            self.fingerprint, self.engines[self.home], vocab_size=self.vocab_size, prefix=self.prefix,
            suffix=self.suffix, splits=self.splits, live=self.live, namespace=namespace, source=self.source,
            special={"pad": self.pad_id, "bos": self.bos_id, "eos": self.eos_id},
        )  # fmt: skip
        other.engines = self.engines
        from layerzero_tokenizers.candidates import share

        share(self, other)
        return other

    def encode_text(self, engine: Engine, text: str, add: bool, parse: bool) -> list[int]:
        """The ids of one text, through the prefix cache where it is long enough and may be cut."""
        if len(text) < CACHE.min_chars or self._cache_from or not CACHE.max_bytes:
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
