"""What every library is to the rest of the package: an engine that encodes and decodes, and nothing else.

A library is not imported here: an engine is made around an object of it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from layerzero_tokenizers.results import Tokens

# Below this many characters a batch is done by the calling thread: handing it out would cost more.
_WORTH_THREADS = 200_000


class Engine(ABC):
    """One tokenizer in one library. Safe to use from many threads at once.

    `add` asks for `prefix` and `suffix` around a text, where the library itself puts nothing there; `parse` tells
    whether special tokens written in the text count as such.
    """

    backend: str

    def __init__(self, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> None:
        self.prefix, self.suffix = list(prefix), list(suffix)

    @abstractmethod
    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """The ids with their places, in characters."""

    @abstractmethod
    def decode(self, ids: list[int], skip: bool) -> str:
        """The text of ids; `skip` leaves special tokens out."""

    @abstractmethod
    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id that the library cannot take, None when it takes all."""

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """Every text; the work is shared out only where it is worth a thread."""
        return _in_threads(lambda text: self.encode(text, add, parse), texts)

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        return _in_threads(lambda text: self.encode_offsets(text, add, parse), texts)

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        return [self.decode(row, skip) for row in rows]

    def _tokens(self, ids: list[int], places: list[tuple[int, int]], add: bool) -> Tokens:
        if not add or not (self.prefix or self.suffix):
            return Tokens(ids, places)
        before, after = [(0, 0)] * len(self.prefix), [(0, 0)] * len(self.suffix)
        return Tokens([*self.prefix, *ids, *self.suffix], [*before, *places, *after])

    def _rows(self, rows: list[list[int]], add: bool) -> list[list[int]]:
        if add and (self.prefix or self.suffix):
            return [[*self.prefix, *row, *self.suffix] for row in rows]
        return rows


def _in_threads(run: Callable[[str], Any], texts: list[str]) -> list[Any]:
    """`run` on each text, in order; a large batch is shared out among the cores, as the libraries release the GIL."""
    workers = min(os.cpu_count() or 1, 8, len(texts) // 16)
    if workers < 2 or sum(map(len, texts)) < _WORTH_THREADS:
        return [run(text) for text in texts]
    size = -(-len(texts) // (workers * 4))
    chunks = [texts[at : at + size] for at in range(0, len(texts), size)]
    with ThreadPoolExecutor(workers) as pool:
        return [item for done in pool.map(lambda part: [run(text) for text in part], chunks) for item in done]


class HFEngine(Engine):
    """Over `tokenizers.Tokenizer`.

    `prefix` and `suffix` are for one that has no post-processor to put them there itself; `strict` refuses to decode
    ids it does not know, as the library it stands in for does.
    """

    backend = "tokenizers"

    def __init__(
        self, tok: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = (), *, strict: bool = False
    ) -> None:
        super().__init__(prefix, suffix)
        self.tok = tok
        self.strict = strict
        self._encode = tok.encode

    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        found: list[int] = (self._encode if parse else self._reader(False).encode)(text, None, False, add).ids
        return [*self.prefix, *found, *self.suffix] if add and (self.prefix or self.suffix) else found

    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        found = self._reader(parse).encode(text, None, False, add)
        return self._tokens(found.ids, found.offsets, add)

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """The library's own batch call, which uses its own threads; the fast one does not compute offsets."""
        found = self._reader(parse).encode_batch_fast(texts, add_special_tokens=add)
        return self._rows([item.ids for item in found], add)

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        found = self._reader(parse).encode_batch(texts, add_special_tokens=add)
        return [self._tokens(item.ids, item.offsets, add) for item in found]

    def decode(self, ids: list[int], skip: bool) -> str:
        if self.strict and any(self.tok.id_to_token(item) is None for item in ids):
            raise KeyError("an id that is in no table")
        text: str = self.tok.decode(ids, skip_special_tokens=skip)
        return text

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        if self.strict:
            return super().decode_batch(rows, skip)
        texts: list[str] = self.tok.decode_batch(rows, skip_special_tokens=skip)
        return texts

    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id the library cannot take. It passes over ids that it does not know, and so do we."""
        return next((item for item in ids if type(item) is not int or not 0 <= item < 1 << 32), None)

    def _reader(self, parse: bool) -> Any:
        return self.tok if parse else self._plain

    @cached_property
    def _plain(self) -> Any:
        """A second tokenizer, which reads special tokens in a text as text; made at first need."""
        copied = type(self.tok).from_str(self.tok.to_str())
        copied.encode_special_tokens = True
        return copied


class SentencePieceEngine(Engine):
    """Over `SentencePieceProcessor`; `prefix` and `suffix` are the BOS and EOS it or the configuration asks for."""

    backend = "sentencepiece"

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
        found = self.sp.encode(text, return_type="offset_mapping", add_bos=False, add_eos=False)
        return self._tokens(list(found["ids"]), [(start, end) for start, end in found["offsets"]], add)

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        return self._rows(self.sp.encode(texts, add_bos=False, add_eos=False, enable_sampling=False), add)

    def decode(self, ids: list[int], skip: bool) -> str:
        """The text; control symbols have none."""
        text: str = self.sp.decode(ids)
        return text

    def unknown_id(self, ids: Sequence[Any]) -> Any:
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


class TiktokenEngine(Engine):
    """Over `tiktoken.Encoding`; `lenient` passes over unknown ids, as the library this encoding stands in for does.

    The public `encode` first searches the text for special tokens that are not allowed; here all are, or none is
    parsed, so the core is called without that search.
    """

    backend = "tiktoken"

    def __init__(
        self, enc: Any, prefix: Sequence[int] = (), suffix: Sequence[int] = (), *, lenient: bool = False
    ) -> None:
        super().__init__(prefix, suffix)
        self.enc = enc
        self.lenient = lenient
        self._special = enc.special_tokens_set
        self._special_ids = frozenset(enc._special_tokens.values())
        core: Any = getattr(enc, "_core_bpe", None)
        self._core = core.encode if _takes(core, self._special) else self._public
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
