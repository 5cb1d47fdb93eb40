"""`lz.tokenize` and `lz.detokenize`: text to token ids and back, exactly as the tokenizer's own library does it.

The tokenizer is a handle (`layerzero_tokenizers.load`), an object of one of the libraries, or the name of one: a model
folder, a file, an encoding. Which library runs is selected like any other kernel; one that is not the tokenizer's own
may run only where it was proven to give the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor

from layerzero._ops.signature import looked_up
from layerzero.errors import InvalidInputError, invalid
from layerzero.model.checks import context_of
from layerzero.model.context import Context
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, Op
from layerzero_tokenizers.results import TokenBatch, Tokens, cut, pad

_resolve: Callable[[Any], Any] | None = None


# -- from what a caller passes to what an op takes ---------------------------------------------------
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
    elif isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise invalid("TYPE_INVALID", f"ids: {type(ids).__name__}", "a list or tensor of token ids")
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


# -- the ops -------------------------------------------------------------------------------------------
class _Options(TypedDict, total=False):
    """The options that do not change what `tokenize` returns."""

    add_special_tokens: bool
    parse_special: bool
    max_length: int | None
    truncation_side: Literal["left", "right"]
    padding_side: Literal["left", "right"]
    pad_id: int | None
    backend: str | None


@overload
def tokenize(
    text: str, tokenizer: Any, *, return_offsets: Literal[False] = ..., padding: None = ..., **options: Unpack[_Options]
) -> list[int]: ...


@overload
def tokenize(
    text: list[str] | tuple[str, ...], tokenizer: Any, *, return_offsets: Literal[False] = ..., padding: None = ...,
    **options: Unpack[_Options],
) -> list[list[int]]: ...  # fmt: skip


@overload
def tokenize(
    text: str, tokenizer: Any, *, return_offsets: Literal[True], padding: None = ..., **options: Unpack[_Options]
) -> Tokens: ...


@overload
def tokenize(
    text: list[str] | tuple[str, ...], tokenizer: Any, *, return_offsets: Literal[True], padding: None = ...,
    **options: Unpack[_Options],
) -> list[Tokens]: ...  # fmt: skip


@overload
def tokenize(
    text: Any, tokenizer: Any, *, return_offsets: bool = ..., padding: Literal["longest"] | int,
    **options: Unpack[_Options],
) -> TokenBatch: ...  # fmt: skip


@overload
def tokenize(
    text: Any, tokenizer: Any, *, return_offsets: bool = ..., padding: Literal["longest"] | int | None = ...,
    **options: Unpack[_Options],
) -> list[int] | list[list[int]] | Tokens | list[Tokens] | TokenBatch: ...  # fmt: skip


def tokenize(
    text: Any,
    tokenizer: Any,
    *,
    add_special_tokens: bool = True,
    return_offsets: bool = False,
    parse_special: bool = True,
    max_length: int | None = None,
    truncation_side: Literal["left", "right"] = "right",
    padding: Literal["longest"] | int | None = None,
    padding_side: Literal["left", "right"] = "right",
    pad_id: int | None = None,
    backend: str | None = None,
) -> Any:
    """Token ids of a text (a list of int), or of a sequence of texts (a list of such lists).

    tokenizer           a handle, a library's own object, a model folder or file, or an id; see docs/tokenizers.md
    add_special_tokens  what the tokenizer puts around a text (BOS, [CLS], ...)
    parse_special       special tokens written in the text count as such; False reads them as plain text
    return_offsets      `Tokens(ids, offsets)` instead of ids; offsets are the (start, end) of each token in characters
    max_length          at most so many ids, special tokens included; `truncation_side` says which end is cut
    padding             "longest" or a length: the texts come as one `TokenBatch` of tensors, filled with `pad_id`

    Long texts that begin alike are tokenized once up to where they differ, where that provably changes nothing.
    """
    tokenizer = handle_of(tokenizer)
    if type(text) is not str and type(text) is not list:
        text = check_text(text)
    args = (text, tokenizer, add_special_tokens, return_offsets, parse_special)
    out = looked_up(TOKENIZE, _encode_key, args, None, backend)
    if max_length is None and padding is None:
        return out
    around = tokenizer.around if add_special_tokens else (0, 0)
    if max_length is not None:
        out = cut(out, max_length, truncation_side, around)
    return out if padding is None else pad(out, padding, padding_side, tokenizer.pad_id if pad_id is None else pad_id)


@overload
def detokenize(
    ids: list[int], tokenizer: Any, *, skip_special_tokens: bool = ..., backend: str | None = ...,
) -> str: ...  # fmt: skip


@overload
def detokenize(
    ids: list[list[int]], tokenizer: Any, *, skip_special_tokens: bool = ..., backend: str | None = ...,
) -> list[str]: ...  # fmt: skip


@overload
def detokenize(
    ids: Any, tokenizer: Any, *, skip_special_tokens: bool = ..., backend: str | None = ...,
) -> str | list[str]: ...  # fmt: skip


def detokenize(
    ids: Any, tokenizer: Any, *, skip_special_tokens: bool = False, backend: str | None = None
) -> str | list[str]:
    """The text of token ids (a list or a one-dimensional tensor), or the texts of several lists or of a matrix.

    `skip_special_tokens` leaves special tokens out. For a stream of tokens use `layerzero_tokenizers.TextStream`:
    a token may hold half a character.
    """
    if type(ids) is not list:
        ids = canonical_ids(ids)
    if ids and type(ids[0]) is not int:
        ids = [item if type(item) is list else canonical_ids(item) for item in ids]
    args = (ids, handle_of(tokenizer), skip_special_tokens)
    return looked_up(DETOKENIZE, _decode_key, args, None, backend)  # type: ignore[no-any-return]


def _encode_key(world: Any, args: tuple[Any, ...], backend: str | None) -> tuple[Any, ...]:
    return _key("tokenize", args[1], type(args[0]), *args[2:], backend)


def _decode_key(world: Any, args: tuple[Any, ...], backend: str | None) -> tuple[Any, ...]:
    ids, tokenizer, skip = args
    return _key("detokenize", tokenizer, bool(ids) and type(ids[0]) is not int, skip, backend)


def _key(op: str, tokenizer: Any, *options: Any) -> tuple[Any, ...]:
    """The hot key of a call; a flag that is no flag is one clear error."""
    key = (op, tokenizer.lz_key, *options)
    try:
        hash(key)
    except TypeError:
        wrong = next(item for item in options if not isinstance(item, (bool, str, type, type(None))))
        limit = "a flag, or the name of a backend"
        raise InvalidInputError(code="TYPE_INVALID", value=type(wrong).__name__, limit=limit) from None
    return key


def _context(call: Call, op: str, handle: Any, needs: dict[str, object]) -> Context:
    needs["live_tokenizer"] = handle.live
    identity = replace(handle.identity, return_offsets=bool(needs.get("offsets")))
    return context_of(call, op, "text", {}, needs, kind=OpKind.TOKENIZATION, dtypes=("text",), tokenizer=identity)


def _describe_encode(call: Call) -> Context:
    text, tokenizer, _, return_offsets, parse_special = call.args
    check_text(text)
    needs = {"text_batch": isinstance(text, list), "offsets": return_offsets, "plain_special": not parse_special}
    return _context(call, "tokenize", handle_of(tokenizer), needs)


def _describe_decode(call: Call) -> Context:
    ids, tokenizer, _ = call.args
    handle = handle_of(tokenizer)
    many = bool(ids) and not isinstance(ids[0], int)
    for row in ids if many else (ids,):
        wrong = handle.engines[handle.home].unknown_id(row)
        if wrong is not None:
            raise InvalidInputError(code="TOKEN_ID_INVALID", value=str(wrong), limit=handle.vocab_size)
    return _context(call, "detokenize", handle, {"text_batch": many})


def _canonical_encode(given: dict[str, Any]) -> tuple[Any, ...]:
    return (
        check_text(given["text"]), handle_of(given["tokenizer"]), given["add_special_tokens"], given["return_offsets"],
        given["parse_special"],
    )  # fmt: skip


def _canonical_decode(given: dict[str, Any]) -> tuple[Any, ...]:
    ids = given["ids"]
    ids = ids if isinstance(ids, list) else canonical_ids(ids)
    if ids and not isinstance(ids[0], int):
        ids = [canonical_ids(item) for item in ids]
    return ids, handle_of(given["tokenizer"]), given["skip_special_tokens"]


TOKENIZE = Op(
    function=tokenize,
    op_kind=OpKind.TOKENIZATION,
    arguments=("text", "tokenizer", "add_special_tokens", "return_offsets", "parse_special"),
    input_kinds=("text", "object", "flag", "flag", "flag"),
    output_kind="ids",
    describe=_describe_encode,
    reference="layerzero_tokenizers.kernels:own_encode",
    fallback_id="own.tokenize.library",
    tolerance="exact",
    canonical=_canonical_encode,
)
DETOKENIZE = Op(
    function=detokenize,
    op_kind=OpKind.TOKENIZATION,
    output_kind="text",
    describe=_describe_decode,
    reference="layerzero_tokenizers.kernels:own_decode",
    fallback_id="own.detokenize.library",
    tolerance="exact",
    canonical=_canonical_decode,
)
