"""Read, check, migrate and hash `capabilities.json`: from a file to `KernelSpec` values.

Everything fails closed: a file that is not understood completely gives no kernel at all, and the error
says which key is wrong. The checks are those of the table in `layerzero.registry.fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.errors import CapabilitiesError, ConfigurationError
from layerzero.model.config import FrozenMap
from layerzero.model.device import DEFAULT_GENERATIONS, GenerationMap
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.registry.fields import DEFAULT_API, DOCUMENT, FLAG_FEATURES, KERNEL, SCHEMA_VERSION
from layerzero.registry.kinds import check_depth, decoded, digest, fail, read

# Fields that make features and limits of a KernelSpec, and those it calls otherwise; all others it has as they are.
_MADE_INTO = frozenset({*FLAG_FEATURES, "attn_mask", "causal", "paged", "head_dim", "max_seq_len"})
_RENAMED = {"generations": "supported_generations", "grid": "grid_layout"}
_NAMES = frozenset(field.name for field in KERNEL.fields)


def kernel_spec(
    entry: dict[str, Any], backend: str, op: str, platforms: frozenset[Platform] | None, where: str, version: str
) -> KernelSpec:
    """The KernelSpec of one checked entry; raises CapabilitiesError where fields contradict each other."""
    kernel_id: str = entry["kernel_id"]
    if kernel_id.split(".")[0] != backend:
        text, limit = f"{kernel_id[:60]!r} does not begin with {backend!r}", f"{backend}.{op}.<variant>"
        raise fail(f"{where}.kernel_id", text, code="KERNEL_ID_INVALID", value=kernel_id, limit=limit)
    chosen = entry.get("platforms") or platforms
    if not chosen:
        text = "missing; neither the kernel nor the file names platforms"
        raise fail(f"{where}.platforms", text, code="SCHEMA_FIELD_MISSING", value="platforms")
    low, high = entry.get("min_sm"), entry.get("max_sm")
    if low is not None and high is not None and low > high:
        raise fail(f"{where}.min_sm", f"{low} exceeds max_sm {high}", value=low, limit=high)
    paged = entry["paged"] if isinstance(entry.get("paged"), dict) else {}
    given = {_RENAMED.get(name, name): value for name, value in entry.items() if name not in _MADE_INTO}
    given |= {"platforms": chosen, "features": _features(entry), "limits": tuple(_limits(entry, paged, where).items())}
    if pairs := entry.get("head_dim", {}).get("pairs"):
        given["head_dim_pairs"] = pairs
    if "priority_below" in entry:
        found = entry["priority_below"].items()
        given["priority_below"] = tuple(sorted((name, (item["size"], item["priority"])) for name, item in found))
    if "error_bounds" in entry:
        given["error_bounds"] = tuple(sorted(entry["error_bounds"].items()))
    if paged.get("layouts"):
        given["kv_cache_layouts"] = paged["layouts"]
    if paged.get("index_dtypes"):
        given["index_dtypes"] = paged["index_dtypes"]
    try:
        return KernelSpec(op=op, backend=backend, version=version, **given)
    except ConfigurationError as error:
        cause = error.reasons[0]
        name = "kernel_id" if error.code == "KERNEL_ID_INVALID" else str(cause.value).replace("grid_layout", "grid")
        key = f"{where}.{name}" if name in _NAMES else where
        text = error.body.replace("grid_layout", "grid")
        raise fail(key, text, code=error.code, value=cause.value, limit=cause.limit) from None


def _features(entry: Mapping[str, Any]) -> frozenset[str]:
    found = [name for name in FLAG_FEATURES if entry.get(name)]
    found += entry.get("features", ())
    found += [f"mask_{kind}" for kind in entry.get("attn_mask", ())]
    found += [f"causal_{side}" for side in entry.get("causal", ())]
    if entry.get("paged", False) is not False:
        found.append("paged")
    return frozenset(found)


def _limits(entry: Mapping[str, Any], paged: Mapping[str, Any], where: str) -> dict[str, Limit]:
    found: dict[str, Limit] = {}

    def put(name: str, key: str, **bounds: Any) -> None:
        if name in found:
            raise fail(f"{where}.{key}", f"{name} is limited in two places", value=name, limit="one")
        try:
            found[name] = Limit(**bounds)
        except ConfigurationError as error:
            cause = error.reasons[0]
            raise fail(f"{where}.{key}", error.body, value=cause.value, limit=cause.limit) from None

    if "head_dim" in entry:
        put("head_dim", "head_dim", **{k: v for k, v in entry["head_dim"].items() if k != "pairs"})
    for name, bounds in entry.get("limits", {}).items():
        put(name, f"limits.{name}", **bounds)
    if "max_seq_len" in entry:
        put("seq_len_q", "max_seq_len", max=entry["max_seq_len"])
        put("seq_len_k", "max_seq_len", max=entry["max_seq_len"])
    if paged.get("page_sizes"):
        put("page_size", "paged.page_sizes", one_of=paged["page_sizes"])
    return found


_MAX_RECENT = 64
# Descriptors read and found right, by file and content: loading plugins again, a probe and doctor ask for the same.
_RECENT: dict[tuple[str, bytes], Capabilities] = {}


# Making the class of a dataclass takes a millisecond of the first call; a named tuple's, a fifth of that.
class Vendor(NamedTuple):
    """The library behind a backend, as far as package metadata can tell."""

    dist: str
    module: str | None = None
    version: str = ""
    extra: str | None = None
    install: str | None = None
    build_file: str | None = None
    build_cuda: str = ""


class Conflict(NamedTuple):
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
                raise fail(f"kernels[{index}].op", "missing in a kernel of the 0.9 draft", code="SCHEMA_FIELD_MISSING")
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


def migrate(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document in the current schema version. A version nobody knows is refused."""
    if "schema_version" not in document:
        raise fail("schema_version", "missing; it says how to read the rest", code="SCHEMA_FIELD_MISSING")
    version = document["schema_version"]
    if version == SCHEMA_VERSION:
        return dict(document)
    if version == "0.9":
        return _from_0_9(dict(document))
    shown, known = str(version)[:40], f"0.9, {SCHEMA_VERSION}"
    text = f"version {shown!r} is not known, known: {known}"
    raise fail("schema_version", text, code="SCHEMA_VERSION_UNKNOWN", value=shown, limit=known)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of capabilities.json, from the same table the validator uses."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"layerzero:capabilities:{SCHEMA_VERSION}",
    }
    return head | DOCUMENT.schema()


def load_capabilities(
    source: str | Path | Mapping[str, Any], *, version: Callable[[Vendor | None], str] = lambda vendor: "0"
) -> Capabilities:
    """Read a descriptor from a file (or take a mapping), check it whole, and build its kernels.

    `version` says, for the vendor the descriptor names, which version its kernels have; "0" without it.
    Raises CapabilitiesError with `.key` at the wrong place; nothing else escapes for any content.
    """
    where = "" if isinstance(source, Mapping) else str(source)
    try:
        if isinstance(source, Mapping):
            return _build(_checked(source), digest(source), where, version)
        data = read(Path(source))
        known = _RECENT.get((where, data))
        # Good only while its kernels have the version they would get now.
        if known is not None and all(kernel.version == version(known.vendor) for kernel in known.kernels[:1]):
            return known
        raw = decoded(data)
        made = _build(_checked(raw), digest(raw), where, version)
        if len(_RECENT) >= _MAX_RECENT:
            _RECENT.clear()
        _RECENT[where, data] = made
        return made
    except CapabilitiesError as error:
        if not where:
            raise
        raise CapabilitiesError(
            f"{Path(where).name}: {error.body}", key=error.key, code=error.code, reasons=error.reasons, hint=error.hint
        ) from None


def _checked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every declared field in its in-memory form. Nothing can be deep and otherwise right."""
    try:
        document: dict[str, Any] = DOCUMENT.parse(migrate(raw), "")
        return document
    except (CapabilitiesError, RecursionError):  # spelling a wrong value that is deep ends in the latter
        check_depth(raw)
        raise


def _build(
    document: Mapping[str, Any], digest: str, source: str, version_of: Callable[[Vendor | None], str]
) -> Capabilities:
    backend: str = document["backend"]
    vendor = _vendor(document)
    version = version_of(vendor)
    kernels: list[KernelSpec] = []
    seen: dict[str, str] = {}
    for op, entries in document["ops"].items():
        for index, entry in enumerate(entries):
            where = f"ops.{op}[{index}]"
            kernel = kernel_spec(entry, backend, op, document["platforms"], where, version)
            name, first = kernel.kernel_id, seen.setdefault(kernel.kernel_id, where)
            if first != where:
                text = f"{name} is also the id of {first}"
                raise fail(f"{where}.kernel_id", text, code="KERNEL_DUPLICATE", value=name, limit=first)
            kernels.append(kernel)
    given = document["generation_map"]
    generations = DEFAULT_GENERATIONS.override(given, "generation_map") if given else DEFAULT_GENERATIONS
    platforms: frozenset[Platform] = frozenset().union(*(kernel.platforms for kernel in kernels))
    if not kernels:
        platforms = document["platforms"] or frozenset()
    return Capabilities(
        backend=backend,
        kernels=tuple(kernels),
        hash=digest,
        api=document["api"],
        backend_version=document["backend_version"],
        platforms=platforms,
        vendor=vendor,
        generations=generations,
        doc=document["doc"],
        source=source,
        conflicts=tuple(Conflict(**item) for item in document["conflicts"] or ()),
        isolation=FrozenMap({name: value for name, value in (document["isolation"] or {}).items() if value}),
    )


def _vendor(document: Mapping[str, Any]) -> Vendor | None:
    vendor = document["vendor"]
    if vendor is None:
        return None
    return Vendor(
        vendor["dist"],
        vendor["import"],
        ",".join(filter(None, (vendor["version"], document["backend_version"]))),
        vendor["extra"],
        vendor["install"],
        *((vendor["build"]["file"], vendor["build"]["cuda"]) if vendor["build"] else ()),
    )
