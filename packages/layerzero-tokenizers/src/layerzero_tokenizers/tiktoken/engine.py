"""The engine over `tiktoken.Encoding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.results import Tokens

__all__ = ["TiktokenEngine", "spans"]


class TiktokenEngine(Engine):
    """`lenient` passes over ids that are in no table, as the library this encoding stands in for does.

    The public `encode` first searches the text for special tokens that are not allowed; here all are, or none is
    parsed, so the core is called without that search.
    """

    backend = "tiktoken"
    __slots__ = ("_core", "_ordinary", "_special", "_special_ids", "enc", "lenient")

    def __init__(
        self, enc: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = (), *, lenient: bool = False
    ) -> None:
        super().__init__(prefix, suffix)
        self.enc = enc
        self.lenient = lenient
        self._special = enc.special_tokens_set
        self._special_ids = frozenset(enc._special_tokens.values())
        core: Any = getattr(enc, "_core_bpe", None)
        self._core = core.encode if core is not None and _takes(core, self._special) else self._public
        self._ordinary = core.encode_ordinary if hasattr(core, "encode_ordinary") else enc.encode_ordinary

    def _public(self, text: str, allowed: Any) -> list[int]:
        found: list[int] = self.enc.encode(text, allowed_special=allowed)
        return found

    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """Ids as `Encoding.encode(allowed_special="all")` gives them, or `encode_ordinary`."""
        found: list[int] = self._core(text, self._special) if parse else self._ordinary(text)
        return [*self.prefix, *found, *self.suffix] if add and (self.prefix or self.suffix) else found

    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """Ids with (start, end) in characters; the starts are those of `Encoding.decode_with_offsets`."""
        ids = self.encode(text, False, parse)
        return self._tokens(ids, spans(self.enc.decode_tokens_bytes(ids)), add)

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, as in `Encoding.decode`."""
        if skip:
            ids = [item for item in ids if item not in self._special_ids]
        try:
            text: str = self.enc.decode(ids)
        except KeyError:
            if not self.lenient:
                raise
            text = self.enc.decode([item for item in ids if self._known(item)])
        return text

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id that is in no table."""
        return next((item for item in ids if type(item) is not int or item < 0 or not self._known(item)), None)

    def _known(self, item: int) -> bool:
        try:
            self.enc.decode_single_token_bytes(item)
        except (KeyError, OverflowError):
            return False
        return True


def _takes(core: Any, special: Any) -> bool:
    """Whether the core has the call we know from tiktoken 0.9 to 0.14; else its public face is used."""
    try:
        return list(core.encode("a b", special)) == list(core.encode_ordinary("a b"))
    except (AttributeError, TypeError):
        return False


def spans(pieces: list[bytes]) -> list[tuple[int, int]]:
    """(start, end) in characters of byte pieces; a piece that begins inside a character starts with it."""
    found, length = [], 0
    for piece in pieces:
        inside = bool(piece) and 0x80 <= piece[0] < 0xC0
        start = max(0, length - inside)
        length += sum(not 0x80 <= byte < 0xC0 for byte in piece)
        found.append((start, length))
    return found
