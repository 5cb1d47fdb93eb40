"""The engine over `sentencepiece.SentencePieceProcessor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.results import Tokens

__all__ = ["SentencePieceEngine"]


class SentencePieceEngine(Engine):
    """`prefix` and `suffix` are the BOS and EOS the processor, or the model's configuration, asks for."""

    backend = "sentencepiece"
    __slots__ = ("_direct", "sp")

    def __init__(self, sp: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> None:
        super().__init__(prefix, suffix)
        self.sp = sp
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
        return self._tokens(list(found["ids"]), [(start, end) for start, end in found["offsets"]], add)

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """The library's own batch call, which uses its own threads."""
        return self._rows(self.sp.encode(texts, add_bos=False, add_eos=False, enable_sampling=False), add)

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text; control symbols have none."""
        text: str = self.sp.decode(ids)
        return text

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
