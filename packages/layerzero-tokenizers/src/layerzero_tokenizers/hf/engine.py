"""The engine over `tokenizers.Tokenizer`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from layerzero_tokenizers.results import Tokens

__all__ = ["HFEngine"]


class HFEngine:
    """`prefix` and `suffix` are put around a text where the tokenizer has no post-processor to do it itself.

    `strict` refuses to decode ids it does not know, as the library it stands in for does.
    """

    backend = "tokenizers"
    __slots__ = ("_encode", "_lock", "_plain", "prefix", "strict", "suffix", "tok")

    def __init__(
        self, tok: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = (), *, strict: bool = False
    ) -> None:
        self.tok = tok
        self.strict = strict
        self._encode = tok.encode
        self.prefix, self.suffix = list(prefix), list(suffix)
        self._plain: Any = None
        self._lock = threading.Lock()

    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """Ids as `Tokenizer.encode` gives them."""
        found: list[int] = (self._encode if parse else self._plain_tok().encode)(text, None, False, add).ids
        return [*self.prefix, *found, *self.suffix] if add and (self.prefix or self.suffix) else found

    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """Ids and the library's own offsets."""
        found = (self.tok if parse else self._plain_tok()).encode(text, None, False, add)
        return self._tokens(found, add)

    def _tokens(self, found: Any, add: bool) -> Tokens:
        if not add or not (self.prefix or self.suffix):
            return Tokens(found.ids, found.offsets)
        before, after = [(0, 0)] * len(self.prefix), [(0, 0)] * len(self.suffix)
        return Tokens([*self.prefix, *found.ids, *self.suffix], [*before, *found.offsets, *after])

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """The library's own batch call, which uses its own threads; the fast one does not compute offsets."""
        tok = self.tok if parse else self._plain_tok()
        rows = [item.ids for item in tok.encode_batch_fast(texts, add_special_tokens=add)]
        if add and (self.prefix or self.suffix):
            return [[*self.prefix, *row, *self.suffix] for row in rows]
        return rows

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        """The same with offsets."""
        tok = self.tok if parse else self._plain_tok()
        return [self._tokens(item, add) for item in tok.encode_batch(texts, add_special_tokens=add)]

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text, as `Tokenizer.decode` gives it."""
        if self.strict and any(self.tok.id_to_token(item) is None for item in ids):
            raise KeyError("an id that is in no table")
        text: str = self.tok.decode(ids, skip_special_tokens=skip)
        return text

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        """The library's own batch call."""
        if self.strict:
            return [self.decode(row, skip) for row in rows]
        texts: list[str] = self.tok.decode_batch(rows, skip_special_tokens=skip)
        return texts

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id the library cannot take. It passes over ids that it does not know, and so do we."""
        return next((item for item in ids if type(item) is not int or not 0 <= item < 1 << 32), None)

    def _plain_tok(self) -> Any:
        """A second tokenizer that reads special tokens in a text as text; made at first need."""
        if self._plain is None:
            with self._lock:
                if self._plain is None:
                    copied = type(self.tok).from_str(self.tok.to_str())
                    copied.encode_special_tokens = True
                    self._plain = copied
        return self._plain
