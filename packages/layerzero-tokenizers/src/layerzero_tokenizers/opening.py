"""Opening a tokenizer: the engine of its own library, its fingerprint, and what stands around its texts."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError, invalid
from layerzero_tokenizers import candidates, convert, identity, sp_model
from layerzero_tokenizers.boundaries import hf_splits, sentencepiece_splits, tiktoken_splits
from layerzero_tokenizers.engines import Engine, HFEngine, SentencePieceEngine, TiktokenEngine
from layerzero_tokenizers.handle import Opened, Tokenizer

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
    parsed = sp_model.parse(data)  # refuses what is no model before the library sees it
    sp = vendor("sentencepiece", "sentencepiece").SentencePieceProcessor(model_proto=data)
    around = {name: bool(settings.get(f"add_{name}_token", False)) for name in ("bos", "eos")}
    return _of_sentencepiece(sp, parsed, str(path), add_bos=around["bos"], add_eos=around["eos"])


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
            try:
                wanted = tiktoken.encoding_name_for_model(wanted)
            except KeyError:
                pass
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
    special = {name: _id_of(tok, settings.get(f"{name}_token")) for name in ("pad", "bos", "eos")}
    if special["pad"] is None:
        special["pad"] = next((found for found in map(tok.token_to_id, _PADS) if found is not None), None)
    return Opened(
        identity.of_hf(document), HFEngine(tok), tok.get_vocab_size(), (document,), prefix, suffix,
        fixed and hf_splits(document), False, source, special,
        tuple(item["content"] for item in document.get("added_tokens") or ()),
    )  # fmt: skip


def _id_of(tok: Any, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    found: int | None = tok.token_to_id(str(text)) if text else None
    return found


def _around(tok: Any, document: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The ids a post-processor puts before and after a text, and whether they are the same for every text."""
    if document.get("padding") or document.get("truncation"):
        return (), (), False
    found = []
    for text in ("a", "a b", ""):
        whole, plain = tok.encode(text, add_special_tokens=True), tok.encode(text, add_special_tokens=False)
        extra = len(whole.ids) - len(plain.ids)
        mask = whole.special_tokens_mask
        before = next((index for index, flag in enumerate(mask) if not flag), extra)
        before = min(before, extra)
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
    return _of_sentencepiece(
        sp if live else type(sp)(model_proto=data), sp_model.parse(data), "SentencePieceProcessor", add_bos=add_bos,
        add_eos=add_eos,
    )  # fmt: skip


def _of_sentencepiece(sp: Any, parsed: Any, source: str, *, add_bos: bool, add_eos: bool) -> Opened:
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


# -- proof ---------------------------------------------------------------------------------------
def proof(handle: Tokenizer, opened: Opened, *, thorough: bool) -> candidates.Verdict | None:
    """Try the other library that could serve this tokenizer; None where it is not installed."""
    ways: dict[str, tuple[str, Callable[..., Engine]]] = {
        "tokenizers": ("tiktoken", convert.hf_to_tiktoken),
        "tiktoken": ("tokenizers", convert.tiktoken_to_hf),
        "sentencepiece": ("tokenizers", convert.sentencepiece_to_hf),
    }
    backend, convert_to = ways[handle.home]
    if importlib.util.find_spec(backend) is None:
        return None
    step = max(1, opened.vocab_size // 4_000)
    vocab = [_text(opened.engine, number) for number in range(0, opened.vocab_size, step)]
    around = () if handle.home == "tiktoken" else (opened.prefix, opened.suffix)

    def build() -> Engine:
        return convert_to(*opened.parts, *around)

    return candidates.prove(handle, backend, build, vocab, opened.special_texts, thorough=thorough)


def _text(engine: Engine, number: int) -> str:
    try:
        return engine.decode([number], False)
    except Exception:  # a hole in the numbering
        return ""
