"""From what people have to a handle: a library's object, a model folder, a file, a configuration, an id.

A name is looked up on disk at every use, so a changed file is seen at once. An object that its owner may still change
is served as it is, by its own library; `load` takes a frozen copy, which other libraries and the cache may serve too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.errors import invalid
from layerzero_tokenizers import opening
from layerzero_tokenizers.cache import CACHE, due
from layerzero_tokenizers.candidates import prove as prove_other
from layerzero_tokenizers.candidates import register
from layerzero_tokenizers.identity import Fingerprint, Opened, Tokenizer, changes

_log = logging.getLogger("layerzero.tokenizers")
_lock = threading.RLock()
_LIMIT = 64
_KEYS = ("tokenizer", "tokenizer_file", "vocab_file", "encoding_name", "tiktoken", "name_or_path", "_name_or_path")
PACE = 100  # looking through an object again may take one part in so many of the time
_paths: OrderedDict[str, tuple[tuple[Any, ...], Tokenizer]] = OrderedDict()
_live: OrderedDict[int, list[Any]] = OrderedDict()  # id -> [object, handle, uses, when to look again]
_EXPECTED = "a folder with tokenizer.json or tokenizer.model, such a file, a tiktoken name, or a tokenizer object"


def load(source: Any, *, namespace: str = "", prove: bool = True, thorough: bool = False) -> Tokenizer:
    """A frozen handle of a tokenizer.

    source     a folder, file, configuration, id or object, see docs/tokenizers.md
    namespace  keeps cached text apart from that of other namespaces, even for the same tokenizer
    prove      try whether other installed libraries give the same ids on the probe corpus; those that do may serve
    thorough   prove with every code point of planes 0 and 1, not with each seventh
    """
    if isinstance(source, Tokenizer):
        return source.within(namespace) if namespace else source
    with _lock:
        return _handle(_open(source), namespace=namespace, live=False, prove=prove, thorough=thorough)


def resolve(source: Any) -> Tokenizer:
    """The handle for a `tokenizer=` argument, kept from call to call."""
    if isinstance(source, Tokenizer):
        return source
    entry = _live.get(id(source))
    if entry is not None:
        return _still(entry)
    if isinstance(source, (str, os.PathLike)):
        return _named(os.fspath(source))
    with _lock:
        opened = _open(source, live=True)
        handle = _handle(opened, live=not opened.immutable, prove=False)
        _live[id(source)] = [source, handle, 0, 0.0]  # the object is held, so its id stays its own
        while len(_live) > _LIMIT:
            _live.popitem(last=False)
        return handle


def forget(source: Any = None) -> None:
    """Let go of one source, or of all; the next use looks again."""
    with _lock:
        if source is None:
            _paths.clear()
            _live.clear()
        else:
            _live.pop(id(source), None)
            if isinstance(source, (str, os.PathLike)):
                _paths.pop(os.fspath(source), None)


def _still(entry: list[Any]) -> Tokenizer:
    """The handle of an object met before, checked for change: its size always, all of it by sampling."""
    source, handle, uses, again = entry
    entry[2] = uses + 1
    if not handle.live:
        return handle  # type: ignore[no-any-return]
    if opening.size_of(source) != handle.vocab_size or (due(uses + 1) and time.monotonic() >= again):
        with _lock:
            began = time.monotonic()
            opened = _open(source, live=True)
            entry[3] = time.monotonic() + PACE * (time.monotonic() - began)
            if _changed(handle, opened.fingerprint):
                entry[1] = _handle(opened, live=True, prove=False)
    return entry[1]  # type: ignore[no-any-return]


def _named(name: str) -> Tokenizer:
    path = Path(name)
    stamp = opening.stamp(path)
    known = _paths.get(name)
    if known is not None and known[0] == stamp:
        return known[1]
    with _lock:
        known = _paths.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        handle = _handle(_open(path if stamp else name), live=False, prove=True)
        if known is not None:
            _changed(known[1], handle.fingerprint)
        _paths[name] = (stamp, handle)
        while len(_paths) > _LIMIT:
            _paths.popitem(last=False)
        return handle


def _changed(handle: Tokenizer, now: Fingerprint) -> bool:
    """Whether a tokenizer is another than its handle says; what was cached for the handle is dropped then."""
    why = changes(handle.fingerprint, now)
    if why:
        dropped = CACHE.invalidate(handle.tokenizer_id, *why)
        parts = "; ".join(str(item) for item in why)
        _log.warning("tokenizer %s changed: %s; %d cached prefixes dropped", handle.source, parts, dropped)
    return bool(why)


def _open(source: Any, *, live: bool = False) -> Opened:
    if isinstance(source, (str, Path)):
        return opening.from_path(Path(source)) if opening.stamp(Path(source)) else opening.from_name(str(source))
    if isinstance(source, Mapping):
        return _from_config(source)
    found = opening.from_object(source, live=live)
    if found is not None:
        return found
    # A model's configuration object.
    for name in ("name_or_path", "_name_or_path"):
        place = getattr(source, name, None)
        if isinstance(place, str) and place:
            return _open(place)
    raise invalid("TOKENIZER_UNKNOWN", f"a {type(source).__name__}", _EXPECTED)


def _from_config(config: Mapping[str, Any]) -> Opened:
    """A configuration names its tokenizer as a file, a folder or an encoding."""
    for key in _KEYS:
        place = config.get(key)
        if isinstance(place, (str, Path)) and str(place):
            return _open(place)
    expected = "one of tokenizer, tokenizer_file, vocab_file, encoding_name, name_or_path"
    raise invalid("TOKENIZER_UNKNOWN", f"configuration with {', '.join(sorted(config))[:80] or 'no keys'}", expected)


def _handle(opened: Opened, *, live: bool, prove: bool, namespace: str = "", thorough: bool = False) -> Tokenizer:
    handle = Tokenizer(opened, live=live, namespace=namespace)
    register(handle)
    if prove:
        prove_other(handle, opened, thorough=thorough)
    return handle
