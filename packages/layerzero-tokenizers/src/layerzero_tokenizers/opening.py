"""Opening a tokenizer: the engine of its own library, its fingerprint, and what stands around its texts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError, invalid
from layerzero_tokenizers import identity
from layerzero_tokenizers.boundaries import hf_splits, sentencepiece_splits, tiktoken_splits
from layerzero_tokenizers.engines import HFEngine, SentencePieceEngine, TiktokenEngine
from layerzero_tokenizers.identity import Opened

_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SIDE = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def vendor(module: str, extra: str) -> Any:
    """The library, or the command that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{module} cannot be imported: {error}",
            code="BACKEND_NOT_INSTALLED",
            value=module,
            limit=f"'layerzero-tokenizers[{extra}]'",
        ) from error


def stamp(path: Path) -> tuple[Any, ...]:
    """What changes when the files of a tokenizer do; empty when there is no such file or folder."""
    folder = path.is_dir()
    found = [("empty", 0, 0, 0)] if folder else []
    for file in [path / name for name in (*_FILES, *_SIDE)] if folder else [path]:
        with suppress(OSError, ValueError):
            status = file.stat()
            found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def size_of(source: Any) -> int:
    """The size of an object's vocabulary: the cheapest sign of a change."""
    inner = getattr(source, "backend_tokenizer", source)
    if hasattr(inner, "get_vocab_size"):
        return int(inner.get_vocab_size())
    return int(inner.get_piece_size()) if hasattr(inner, "get_piece_size") else -1


# -- where from ----------------------------------------------------------------------------------
def from_path(path: Path) -> Opened:
    """A file, or a folder in which one is looked for."""
    settings: dict[str, Any] = {}
    file = path
    if path.is_dir():
        for name in reversed(_SIDE):
            settings |= _json(path / name)
        file = next((path / name for name in _FILES if (path / name).is_file()), path)
        if file is path:
            encoding = settings.get("encoding_name") or settings.get("tiktoken")
            if isinstance(encoding, str):
                return from_name(encoding)
            raise invalid("TOKENIZER_UNKNOWN", str(path), f"one of {', '.join(_FILES)}")
    data = file.read_bytes()
    if file.suffix == ".json":
        tokenizers = vendor("tokenizers", "hf")
        try:
            tok = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:
            message = f"{file} cannot be read: {error}"
            raise invalid("TOKENIZER_UNKNOWN", str(file), "a tokenizer.json", message) from error
        return of_hf(tok, str(path), settings)
    parsed = parse(data)  # refuses what is no model before the library sees it
    sp = vendor("sentencepiece", "sentencepiece").SentencePieceProcessor(model_proto=data)
    add_bos, add_eos = (bool(settings.get(f"add_{name}_token", False)) for name in ("bos", "eos"))
    return _of_sentencepiece(sp, parsed, str(path), add_bos, add_eos)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def from_name(name: str) -> Opened:
    """An id: a tiktoken encoding or model (those of tiktoken_ext plugins too), or a model in the local hub cache."""
    wanted = name.removeprefix("tiktoken:")
    if importlib.util.find_spec("tiktoken") is not None:
        tiktoken: Any = importlib.import_module("tiktoken")
        known = set(tiktoken.list_encoding_names())
        if wanted not in known:
            with suppress(KeyError):
                wanted = tiktoken.encoding_name_for_model(wanted)
        if wanted in known:
            try:
                return of_tiktoken(tiktoken.get_encoding(wanted))
            except Exception as error:  # its table has to be fetched, and cannot be
                message = f"tiktoken cannot build {wanted}: {type(error).__name__}: {error}"
                expected = "an encoding whose table is on this machine"
                raise invalid("TOKENIZER_UNKNOWN", wanted, expected, message) from error
    cached = _from_hub_cache(name)
    if cached is not None:
        return from_path(cached)
    expected = "a folder or file that exists, a tiktoken encoding, or a model in the local hub cache"
    raise invalid("TOKENIZER_UNKNOWN", name, expected)


def _from_hub_cache(name: str) -> Path | None:
    """The folder of a model that is already on this machine; nothing is fetched."""
    if importlib.util.find_spec("huggingface_hub") is None or name.count("/") > 1 or not name.strip():
        return None
    hub: Any = importlib.import_module("huggingface_hub")
    for file in _FILES:
        try:
            found = hub.try_to_load_from_cache(name, file)
        except Exception:  # not the name of a repository
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def from_object(source: Any, *, live: bool) -> Opened | None:
    """An object of one of the libraries, or a transformers tokenizer around one; None for anything else."""
    inner = getattr(source, "backend_tokenizer", source)
    home = type(inner).__module__.partition(".")[0]
    if home == "tokenizers" and hasattr(inner, "to_str"):
        settings = {f"{name}_token": getattr(source, f"{name}_token", None) for name in ("pad", "bos", "eos")}
        return of_hf(inner if live else type(inner).from_str(inner.to_str()), type(source).__name__, settings)
    if home == "tiktoken":
        return of_tiktoken(inner)
    if home == "sentencepiece":
        return _of_processor(inner, live)
    return None


# -- each library --------------------------------------------------------------------------------
def of_hf(tok: Any, source: str, settings: Mapping[str, Any]) -> Opened:
    """A `tokenizers.Tokenizer`."""
    document = json.loads(tok.to_str())
    prefix, suffix, fixed = _around(tok, document)
    special: dict[str, int | None] = {}
    for name in ("pad", "bos", "eos"):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        special[name] = tok.token_to_id(str(text)) if text else None
    if special["pad"] is None:
        special["pad"] = next((found for found in map(tok.token_to_id, _PADS) if found is not None), None)
    return Opened(
        identity.of_hf(document), HFEngine(tok), tok.get_vocab_size(), (document,), prefix, suffix,
        fixed and hf_splits(document), False, source, special,
        tuple(item["content"] for item in document.get("added_tokens") or ()),
    )  # fmt: skip


def _around(tok: Any, document: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The ids a post-processor puts before and after a text, and whether they are the same for every text."""
    if document.get("padding") or document.get("truncation"):
        return (), (), False
    found = []
    for text in ("a", "a b", ""):
        whole, plain = tok.encode(text, add_special_tokens=True), tok.encode(text, add_special_tokens=False)
        extra = len(whole.ids) - len(plain.ids)
        before = min(extra, next((at for at, flag in enumerate(whole.special_tokens_mask) if not flag), extra))
        prefix, suffix = tuple(whole.ids[:before]), tuple(whole.ids[len(whole.ids) - (extra - before) :])
        if [*prefix, *plain.ids, *suffix] != list(whole.ids):
            return (), (), False
        found.append((prefix, suffix))
    # An empty text does not show where its special tokens stand; those of the others do.
    same = found[0] == found[1] and [*found[2][0], *found[2][1]] == [*found[0][0], *found[0][1]]
    return (*found[0], True) if same else ((), (), False)


def of_tiktoken(enc: Any) -> Opened:
    """A `tiktoken.Encoding`, which does not change after it is made."""
    ranks, special, pattern = enc._mergeable_ranks, enc._special_tokens, enc._pat_str
    eos = special.get("<|endoftext|>")
    return Opened(
        identity.of_tiktoken(ranks, special, pattern), TiktokenEngine(enc), enc.n_vocab, (ranks, special, pattern),
        splits=tiktoken_splits(pattern, special), immutable=True, source=enc.name, special={"eos": eos},
        special_texts=tuple(special),
    )  # fmt: skip


def _of_processor(sp: Any, live: bool) -> Opened:
    if getattr(sp, "_reverse", False) or getattr(sp, "_enable_sampling", False):
        message = "a processor that samples or reverses has no fixed tokenization"
        raise invalid("TOKENIZER_UNKNOWN", "enable_sampling or reverse", "a processor without them", message)
    data = sp.serialized_model_proto()
    add_bos, add_eos = bool(getattr(sp, "_add_bos", False)), bool(getattr(sp, "_add_eos", False))
    own = sp if live else type(sp)(model_proto=data)
    return _of_sentencepiece(own, parse(data), "SentencePieceProcessor", add_bos, add_eos)


def _of_sentencepiece(sp: Any, parsed: Any, source: str, add_bos: bool, add_eos: bool) -> Opened:
    ids = {"pad": sp.pad_id(), "bos": sp.bos_id(), "eos": sp.eos_id()}
    named = {name: found if found >= 0 else None for name, found in ids.items()}
    prefix = (named["bos"],) if add_bos and named["bos"] is not None else ()
    suffix = (named["eos"],) if add_eos and named["eos"] is not None else ()
    return Opened(
        identity.of_sentencepiece(parsed, add_bos=add_bos, add_eos=add_eos),
        SentencePieceEngine(sp, prefix, suffix), sp.get_piece_size(), (parsed,), prefix, suffix,
        sentencepiece_splits(parsed), False, source, named,
        tuple(piece.text for piece in parsed.pieces if piece.type == "user_defined"),
    )  # fmt: skip


# -- a SentencePiece model file: the few fields that matter here, read without a library from its protobuf --
_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user_defined", 5: "unused", 6: "byte"}
_MODELS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float
    type: str


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a model file says, and the raw bytes of its parts for hashing."""

    pieces: tuple[Piece, ...]
    model_type: str
    whitespace_as_suffix: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    normalizer_bytes: bytes
    trainer_bytes: bytes
    rest_bytes: bytes


def parse(data: bytes) -> SentencePieceModel:
    """Raises InvalidInputError for bytes that are no SentencePiece model."""
    try:
        return _parse(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        message = f"not a SentencePiece model: {error}"
        raise invalid("TOKENIZER_UNKNOWN", "damaged file", "a model file", message) from None


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer, normalizer, rest = b"", b"", b""
    for number, value in _fields(data):
        if number == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append(Piece(entry.get(1, b"").decode(), score, _TYPES[entry.get(3, 1)]))
        elif number == 2:
            trainer += value
        elif number == 3:
            normalizer += value
        else:
            rest += repr((number, value)).encode()
    if not pieces:
        raise ValueError("it has no vocabulary")
    told, spec = dict(_fields(trainer)), dict(_fields(normalizer))
    return SentencePieceModel(
        tuple(pieces), _MODELS[told.get(3, 1)], bool(told.get(24, 0)), bool(told.get(35, 0)), spec.get(2, b""),
        bool(spec.get(3, 1)), bool(spec.get(4, 1)), bool(spec.get(5, 1)), normalizer, trainer, rest,
    )  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value): whole numbers for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value: Any
            value, at = _varint(data, at)
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise ValueError("it ends early")
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
