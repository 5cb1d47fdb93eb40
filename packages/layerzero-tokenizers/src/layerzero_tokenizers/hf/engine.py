"""The engine over `tokenizers.Tokenizer`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.results import Tokens

__all__ = ["HFEngine"]


class HFEngine(Engine):
    """`prefix` and `suffix` are for a tokenizer that has no post-processor to put them there itself.

    `strict` refuses to decode ids it does not know, as the library it stands in for does.
    """

    backend = "tokenizers"
    __slots__ = ("_encode", "_lock", "_plain", "strict", "tok")

    def __init__(
        self, tok: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = (), *, strict: bool = False
    ) -> None:
        super().__init__(prefix, suffix)
        self.tok = tok
        self.strict = strict
        self._encode = tok.encode
        self._plain: Any = None
        self._lock = threading.Lock()

    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """Ids as `Tokenizer.encode` gives them."""
        found: list[int] = (self._encode if parse else self._reader(False).encode)(text, None, False, add).ids
        return [*self.prefix, *found, *self.suffix] if add and (self.prefix or self.suffix) else found

    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """Ids and the library's own offsets."""
        found = self._reader(parse).encode(text, None, False, add)
        return self._tokens(found.ids, found.offsets, add)

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """The library's own batch call, which uses its own threads; the fast one does not compute offsets."""
        found = self._reader(parse).encode_batch_fast(texts, add_special_tokens=add)
        return self._rows([item.ids for item in found], add)

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        """The same with offsets."""
        found = self._reader(parse).encode_batch(texts, add_special_tokens=add)
        return [self._tokens(item.ids, item.offsets, add) for item in found]

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text, as `Tokenizer.decode` gives it."""
        if self.strict and any(self.tok.id_to_token(item) is None for item in ids):
            raise KeyError("an id that is in no table")
        text: str = self.tok.decode(ids, skip_special_tokens=skip)
        return text

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        """The library's own batch call."""
        if self.strict:
            return super().decode_batch(rows, skip)
        texts: list[str] = self.tok.decode_batch(rows, skip_special_tokens=skip)
        return texts

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id the library cannot take. It passes over ids that it does not know, and so do we."""
        return next((item for item in ids if type(item) is not int or not 0 <= item < 1 << 32), None)

    def _reader(self, parse: bool) -> Any:
        """The tokenizer, or a second one that reads special tokens in a text as text; made at first need."""
        if parse:
            return self.tok
        if self._plain is None:
            with self._lock:
                if self._plain is None:
                    copied = type(self.tok).from_str(self.tok.to_str())
                    copied.encode_special_tokens = True
                    self._plain = copied
        return self._plain
