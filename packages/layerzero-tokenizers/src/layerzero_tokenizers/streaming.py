"""Text from tokens as they come, one at a time, never half a character."""

from __future__ import annotations

from typing import Any

import layerzero as lz
from layerzero_tokenizers.sources import resolve

_HOLE = "\ufffd"
_HOLD = 8  # a character takes four tokens at most; what is still no text after this many is none


class TextStream:
    """`push` a token, get the text that is certain now; `flush` gives the rest.

    The pieces put together are `lz.detokenize` of all tokens. A token may hold a part of a character: the text waits
    until the character is whole. Earlier tokens are decoded along, because some decoders look at what precedes.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = resolve(tokenizer)
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token decoded along
        self._read = 0  # first token whose text is not given out yet

    def push(self, token: int) -> str:
        """The text that this token completes; often empty."""
        self._ids.append(int(token))
        given, whole = self._text(self._start, self._read), self._text(self._start, len(self._ids))
        if not whole.endswith(_HOLE):
            return self._give(whole, given, len(self._ids))
        if len(self._ids) - self._read <= _HOLD:
            return ""
        end = len(self._ids) - 3
        return self._give(self._text(self._start, end), given, end)

    def flush(self) -> str:
        """What is left, broken characters as U+FFFD; the stream can be used again from the start."""
        given, whole = self._text(self._start, self._read), self._text(self._start, len(self._ids))
        self._ids, self._start, self._read = [], 0, 0
        return whole[len(given) :]

    def _give(self, whole: str, given: str, end: int) -> str:
        if len(whole) <= len(given):
            return ""  # a special token that is skipped, or white space that waits for the next word
        self._start, self._read = self._read, end
        return whole[len(given) :]

    def _text(self, start: int, end: int) -> str:
        if start == end:
            return ""
        text = lz.detokenize(self._ids[start:end], self._tokenizer, skip_special_tokens=self._skip)
        assert isinstance(text, str)
        return text
