"""Read, check, migrate and hash `capabilities.json`: from a file to `KernelSpec` values.

Everything fails closed: a file that is not understood completely gives no kernel at all, and the error
says which key is wrong. The checks are those of the table in `layerzero.registry.fields`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.model.config import FrozenMap
from layerzero.model.device import DEFAULT_GENERATIONS, GenerationMap
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.registry.build import kernel_spec
from layerzero.registry.fields import DEFAULT_API, DOCUMENT, SCHEMA_VERSION
from layerzero.registry.kinds import body, fail

__all__ = ["MIGRATIONS", "Capabilities", "Conflict", "Vendor", "json_schema", "load_capabilities", "migrate"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
_LEAVES = frozenset({str, int, float, bool, type(None)})
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Vendor:
    """The library behind a backend, as far as package metadata can tell."""

    dist: str
    module: str | None = None
    version: str = ""
    extra: str | None = None
    install: str | None = None
    build_file: str | None = None
    build_cuda: str = ""

    def fix(self, backend: str) -> str:
        """The exact command that brings a right version in."""
        if self.install:
            return self.install
        if self.extra:
            return f"pip install 'layerzero-{backend}[{self.extra}]'"
        return f"pip install '{self.dist}{self.version}'" if self.version else f"pip install {self.dist}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A distribution that cannot share a process with the vendor, and the module they quarrel about."""

    dist: str
    module: str
    why: str
    unless: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One checked descriptor. `hash` changes whenever the content does."""

    backend: str
    kernels: tuple[KernelSpec, ...]
    hash: str
    api: str = DEFAULT_API
    backend_version: str = ""
    platforms: frozenset[Platform] = frozenset()
    vendor: Vendor | None = None
    generations: GenerationMap = field(default=DEFAULT_GENERATIONS)
    schema_version: str = SCHEMA_VERSION
    doc: str = ""
    source: str = ""
    conflicts: tuple[Conflict, ...] = ()
    isolation: FrozenMap = field(default_factory=FrozenMap)


def _from_0_9(document: dict[str, Any]) -> dict[str, Any]:
    """The draft kept kernels as one flat list with an `op` each, and called two fields otherwise.

    `kernels: [{op, id, …}]` became `ops: {op: [{kernel_id, …}]}`; `requires` became `vendor.version`.
    """
    flat = document.pop("kernels", None)
    if isinstance(flat, list) and "ops" not in document:
        ops: dict[str, list[Any]] = {}
        for index, entry in enumerate(flat):
            if not isinstance(entry, dict) or not isinstance(entry.get("op"), str):
                raise fail(
                    f"kernels[{index}].op",
                    "missing; each kernel of the 0.9 draft names its op",
                    code="SCHEMA_FIELD_MISSING",
                )
            moved = dict(entry)
            op = moved.pop("op")
            if "id" in moved:
                moved["kernel_id"] = moved.pop("id")
            ops.setdefault(op, []).append(moved)
        document["ops"] = ops
    requires = document.pop("requires", None)
    if requires is not None and isinstance(document.get("vendor"), dict):
        document["vendor"] = {**document["vendor"], "version": requires}
    document["schema_version"] = "1.0"
    return document


# version -> the function that lifts a document to a newer version; applied until SCHEMA_VERSION is reached.
MIGRATIONS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"0.9": _from_0_9}


def migrate(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document in the current schema version. A version nobody knows is refused."""
    current = dict(document)
    if "schema_version" not in current:
        raise fail(
            "schema_version",
            "missing; it says how to read the rest",
            code="SCHEMA_FIELD_MISSING",
            value="schema_version",
        )
    known = (*MIGRATIONS, SCHEMA_VERSION)
    for _ in known:
        version = current["schema_version"]
        if version == SCHEMA_VERSION:
            return current
        step = MIGRATIONS.get(version) if isinstance(version, str) else None
        if step is None:
            break
        current = step(current)
    shown = str(current["schema_version"])[:40]
    raise fail(
        "schema_version", f"version {shown!r} is not known, known: {', '.join(known)}",
        code="SCHEMA_VERSION_UNKNOWN", value=shown, limit=", ".join(known),
    )  # fmt: skip


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of capabilities.json, from the same table the validator uses."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"layerzero:capabilities:{SCHEMA_VERSION}",
    }
    return head | DOCUMENT.schema()


def load_capabilities(source: str | Path | Mapping[str, Any]) -> Capabilities:
    """Read a descriptor from a file (or take a mapping), check it whole, and build its kernels.

    Raises CapabilitiesError with `.key` at the wrong place; nothing else escapes for any content.
    """
    where = "" if isinstance(source, Mapping) else str(source)
    try:
        raw = source if isinstance(source, Mapping) else _read(Path(source))
        _check_depth(raw)
        document = DOCUMENT.parse(migrate(raw), "")
        return _build(document, _digest(raw), where)
    except CapabilitiesError as error:
        if not where:
            raise
        raise CapabilitiesError(
            f"{Path(where).name}: {body(error)}", key=error.key, code=error.code, reasons=error.reasons, hint=error.hint
        ) from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise fail("", f"cannot be read: {error.strerror}", code="CONFIG_FILE_MISSING", value=path.name) from None
    if len(data) > MAX_BYTES:
        raise fail("", f"larger than {MAX_BYTES} bytes", code="CONFIG_FILE_TOO_LARGE", value=path.name, limit=MAX_BYTES)
    try:
        found = json.loads(data.removeprefix(_BOM).decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise fail("", f"nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH) from None
    except json.JSONDecodeError as error:
        raise fail(f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}", value=error.msg) from None
    except ValueError as error:  # bad UTF-8, a number with too many digits
        raise fail("", f"not JSON: {error}", value=str(error)) from None
    if not isinstance(found, dict):
        raise fail("", f"expected an object at the top, got {type(found).__name__}", value=type(found).__name__)
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise fail(key[:80], "the key stands there twice", value=key)
        seen.add(key)
    return found


def _no_constant(text: str) -> Any:
    raise fail("", f"{text} is not a JSON number", value=text)


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH - 1):
        # Texts and numbers, which most values are, hold nothing deeper.
        level = [item for entry in level for item in _children(entry) if type(item) not in _LEAVES]
        if not level:
            return
    if any(len(_children(entry)) for entry in level):
        raise fail("", f"nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH)


def _children(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _digest(document: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise fail("", f"holds a value that JSON has no word for: {error}", value=str(error)) from None
    return hashlib.sha256(text.encode()).hexdigest()


def _build(document: Mapping[str, Any], digest: str, source: str) -> Capabilities:
    backend: str = document["backend"]
    kernels: list[KernelSpec] = []
    seen: dict[str, str] = {}
    for op, entries in document["ops"].items():
        for index, entry in enumerate(entries):
            where = f"ops.{op}[{index}]"
            kernel = kernel_spec(entry, backend, op, document["platforms"], where)
            if kernel.kernel_id in seen:
                raise fail(
                    f"{where}.kernel_id", f"{kernel.kernel_id} is also the id of {seen[kernel.kernel_id]}",
                    code="KERNEL_DUPLICATE", value=kernel.kernel_id, limit=seen[kernel.kernel_id],
                )  # fmt: skip
            seen[kernel.kernel_id] = where
            kernels.append(kernel)
    vendor = document["vendor"]
    try:
        given = document["generation_map"]
        generations = DEFAULT_GENERATIONS.override(given) if given else DEFAULT_GENERATIONS
    except CapabilitiesError as error:
        key = (error.key or "").replace("generations", "generation_map", 1)
        raise fail(key, body(error).split(": ", 1)[-1], code=error.code, value=error.reasons[0].value) from None
    return Capabilities(
        backend=backend,
        kernels=tuple(kernels),
        hash=digest,
        api=document["api"],
        backend_version=document["backend_version"],
        platforms=frozenset().union(*(k.platforms for k in kernels))
        if kernels
        else document["platforms"] or frozenset(),
        vendor=None
        if vendor is None
        else Vendor(
            vendor["dist"],
            vendor["import"],
            ",".join(filter(None, (vendor["version"], document["backend_version"]))),
            vendor["extra"],
            vendor["install"],
            *((vendor["build"]["file"], vendor["build"]["cuda"]) if vendor["build"] else ()),
        ),
        generations=generations,
        doc=document["doc"],
        source=source,
        conflicts=tuple(Conflict(c["dist"], c["module"], c["why"], c["unless"]) for c in document["conflicts"] or ()),
        isolation=FrozenMap({name: value for name, value in (document["isolation"] or {}).items() if value}),
    )
