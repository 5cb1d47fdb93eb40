"""From what a caller passes to what an op takes: tokenizer handles, texts and ids, each refused in one clear way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.errors import invalid

_resolve: Callable[[Any], Any] | None = None


def handle_of(tokenizer: Any) -> Any:
    """The handle of a tokenizer: itself, or one made from an object, a folder, a file or an id."""
    if hasattr(tokenizer, "lz_key"):
        return tokenizer
    if tokenizer is None or tokenizer == "":
        raise invalid("TOKENIZER_ID_MISSING")
    global _resolve
    if _resolve is None:
        from layerzero_tokenizers.sources import resolve as _resolve  # registering the ops needs none of it
    return _resolve(tokenizer)


def check_text(text: Any) -> Any:
    """A str, or a list of them; what cannot be text is refused, a lone surrogate with its place."""
    if isinstance(text, str):
        _check_unicode(text, "")
        return text
    if isinstance(text, Sequence) and not isinstance(text, (bytes, bytearray)):
        for index, item in enumerate(text):
            if not isinstance(item, str):
                raise invalid("TYPE_INVALID", f"text[{index}]: {type(item).__name__}", "a str")
            _check_unicode(item, f"text[{index}], ")
        return text if isinstance(text, list) else list(text)
    raise invalid("TYPE_INVALID", f"text: {type(text).__name__}", "a str or a sequence of them")


def _check_unicode(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise invalid("TEXT_INVALID", found, f"{where}character {error.start}") from None


def canonical_ids(ids: Any) -> list[Any]:
    """A list of int (or of lists of them) from lists, tuples, arrays and integer tensors."""
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex() or ids.ndim not in (1, 2):
            raise invalid("TYPE_INVALID", f"ids: {ids.dtype} of rank {ids.ndim}", "integers of rank 1 or 2")
        return ids.tolist()
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise invalid("TYPE_INVALID", f"ids: {type(ids).__name__}", "a list or tensor of token ids")
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return found
