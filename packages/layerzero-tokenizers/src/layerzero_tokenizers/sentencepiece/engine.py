"""The engine over `sentencepiece.SentencePieceProcessor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero_tokenizers.engines import in_threads
from layerzero_tokenizers.results import Tokens

__all__ = ["SentencePieceEngine"]


class SentencePieceEngine:
    """`prefix` and `suffix` are the BOS and EOS the processor, or the model's configuration, asks for."""

    backend = "sentencepiece"
    __slots__ = ("_direct", "prefix", "sp", "suffix")

    def __init__(self, sp: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> None:
        self.sp = sp
        self.prefix, self.suffix = list(prefix), list(suffix)
        self._direct = _direct(sp)

    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """Ids as `Encode` gives them; control symbols in a text are never parsed, user-defined ones always."""
        if self._direct is not None:
            found: list[int] = self._direct(text, False, -1, 0.1, False, False, False)
        else:
            found = self.sp.encode(text, add_bos=False, add_eos=False, enable_sampling=False)
        return [*self.prefix, *found, *self.suffix] if add and (self.prefix or self.suffix) else found

    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """Ids with the library's own offset mapping, in characters."""
        found = self.sp.encode(text, return_type="offset_mapping", add_bos=False, add_eos=False)
        ids, places = list(found["ids"]), [tuple(item) for item in found["offsets"]]
        if not add or not (self.prefix or self.suffix):
            return Tokens(ids, places)
        before, after = [(0, 0)] * len(self.prefix), [(0, 0)] * len(self.suffix)
        return Tokens([*self.prefix, *ids, *self.suffix], [*before, *places, *after])

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """The library's own batch call, which uses its own threads."""
        rows: list[list[int]] = self.sp.encode(texts, add_bos=False, add_eos=False, enable_sampling=False)
        if add and (self.prefix or self.suffix):
            return [[*self.prefix, *row, *self.suffix] for row in rows]
        return rows

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        """The same with offsets."""
        return in_threads(lambda text: self.encode_offsets(text, add, parse), texts)

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text; control symbols have none."""
        text: str = self.sp.decode(ids)
        return text

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        """Every row."""
        return [self.sp.decode(row) for row in rows]

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id outside the vocabulary."""
        size = self.sp.get_piece_size()
        return next((item for item in ids if type(item) is not int or not 0 <= item < size), None)


def _direct(sp: Any) -> Any:
    """The C++ call behind `Encode`, without the wrapper that sorts out its arguments; None where it is another one."""
    found = getattr(getattr(sp, "_processor", None), "_EncodeAsIds", None)
    try:
        same = found is not None and found("a b", False, -1, 0.1, False, False, False) == sp.encode(
            "a b", add_bos=False, add_eos=False
        )
    except TypeError:
        return None
    return found if same else None
