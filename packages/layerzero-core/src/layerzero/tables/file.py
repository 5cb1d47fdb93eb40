"""Reading and writing dispatch tables: deterministic bytes, a hash over the content, one clear error."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from layerzero import env
from layerzero.device.signature import environment_signature
from layerzero.errors import CapabilitiesError, DispatchTableError
from layerzero.files import write_whole
from layerzero.json_form import plain
from layerzero.model.device import DeviceSpec
from layerzero.model.dispatch_table import DispatchTable, Hardware, PlanEntry
from layerzero.reasons import ReasonCode
from layerzero.registry.kinds import body

__all__ = ["hardware_of", "load_table", "make_table", "save_table", "table_from_json", "table_json"]

_MAX_BYTES = 64 << 20


def hardware_of(device: DeviceSpec, threads: int | None = None) -> Hardware:
    """The header that binds a table to this device and its software; `threads` are those its times were taken with."""
    return Hardware(
        signature=environment_signature(device),
        device=device.name or device.device_type,
        driver=device.driver_version,
        torch=device.torch_version,
        backends=device.backend_versions,
        threads=threads,
    )


def make_table(
    hardware: Hardware,
    policy_hash: str,
    kernels: Mapping[str, str],
    buckets: Mapping[str, Mapping[str, tuple[int, ...]]],
    entries: tuple[PlanEntry, ...],
    model_id: str = "",
) -> DispatchTable:
    """A table with its content hash; equal inputs give equal hashes, in whatever order they come."""
    ordered = tuple(sorted(entries, key=lambda entry: json.dumps(_plan(entry), sort_keys=True)))
    bare = DispatchTable(hardware, policy_hash, dict(kernels), buckets, ordered, model_id)
    return replace(bare, content_hash=_hash(_content(bare)))


def table_json(table: DispatchTable) -> dict[str, Any]:
    """The file form of a table."""
    signed = {} if table.signature is None else {"signature": table.signature}
    return {**_content(table), "content_hash": table.content_hash, **signed}


def save_table(table: DispatchTable, path: str | os.PathLike[str]) -> None:
    """Write a table, whole or not at all; the same table gives the same bytes."""
    write_whole(Path(path), json.dumps(table_json(table), indent=1, sort_keys=True) + "\n")


def load_table(path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> DispatchTable:
    """Read a table. Raises DispatchTableError for a file that is missing, damaged, edited or of another version.

    With a `key` (default: LAYERZERO_TABLE_KEY) a table that is not signed with it is refused, too.
    """
    return _trusted(_read(Path(path)), key)


def table_from_json(data: Any, name: str = "table", *, key: str | os.PathLike[str] | None = None) -> DispatchTable:
    """A table from its file form, checked like a file: schema, content hash, signature where one is wanted."""
    return _trusted(_parsed(Path(name), data), key)


def _trusted(found: DispatchTable, key: str | os.PathLike[str] | None) -> DispatchTable:
    trusted = env.read().table_key if key is None else key
    if trusted is not None:
        from layerzero.tables.signing import verify

        verify(found.content_hash, found.signature, Path(trusted))
    return found


def _read(name: Path) -> DispatchTable:
    try:
        if name.stat().st_size > _MAX_BYTES:
            raise _bad(name, "it is too large", ReasonCode.CONFIG_FILE_TOO_LARGE, limit=f"{_MAX_BYTES} bytes")
        data = json.loads(name.read_bytes(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except FileNotFoundError:
        raise _bad(name, "no such file", ReasonCode.CONFIG_FILE_MISSING) from None
    except OSError as error:
        raise _bad(name, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(name, str(error) or type(error).__name__) from None
    return _parsed(name, data)


def _parsed(name: Path, data: Any) -> DispatchTable:
    from layerzero.tables.schema import SCHEMA_VERSION, TABLE

    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION:
        raise _bad(
            name, f"schema version {found}", ReasonCode.SCHEMA_VERSION_UNKNOWN, value=found, limit=SCHEMA_VERSION
        )
    try:
        file = TABLE.parse(data, "")
    except CapabilitiesError as error:
        raise _bad(name, body(error)) from None
    wanted = _hash({key: value for key, value in data.items() if key not in ("content_hash", "signature")})
    if file["content_hash"] != wanted:
        raise _bad(name, f"its content hash is {wanted[:12]}, written is {file['content_hash'][:12]}")
    entries = []
    for index, plan in enumerate(file["plans"]):
        op, bucket = plan["ops"][0], plan["bucket"]
        if op["op"] != bucket["op"]:
            raise _bad(name, f"plans.{index}: the bucket is of {bucket['op']}, its op is {op['op']}")
        if op["kernel_id"] not in file["kernels"]:
            raise _bad(name, f"plans.{index}: {op['kernel_id']} is not among the kernels")
        when = tuple((key, _frozen(bucket["when"][key])) for key in sorted(bucket["when"]))
        sizes = tuple(sorted(bucket["sizes"].items()))
        entries.append(PlanEntry(when=when, sizes=sizes, artifacts=tuple(plan["jit_artifacts"]), **op))
    for op_id, axes in file["buckets"].items():
        for axis, ends in axes.items():
            if list(ends) != sorted(set(ends)):
                raise _bad(name, f"buckets.{op_id}.{axis}: not ascending")
    machine = file["hardware_signature"]
    hardware = Hardware(**{**machine, "backends": tuple(sorted(machine["backends"].items()))})
    words = {key: file[key] for key in ("policy_hash", "kernels", "buckets", "model_id", "content_hash", "signature")}
    return DispatchTable(hardware=hardware, entries=tuple(entries), **words)


def _content(table: DispatchTable) -> dict[str, Any]:
    hardware = asdict(table.hardware) | {"backends": dict(table.hardware.backends)}
    if hardware["threads"] is None:
        del hardware["threads"]
    return {
        "schema_version": "1.0",
        "model_id": table.model_id,
        "hardware_signature": hardware,
        "policy_hash": table.policy_hash,
        "kernels": dict(table.kernels),
        "buckets": {op: {axis: list(ends) for axis, ends in axes.items()} for op, axes in table.buckets.items()},
        "plans": [_plan(entry) for entry in table.entries],
        "fallback": {"mode": "runtime_select"},
    }


def _plan(entry: PlanEntry) -> dict[str, Any]:
    op = {name: getattr(entry, name) for name in ("op", "kernel_id", "median_us", "error")}
    if entry.busy:
        op["busy"] = True
    bucket = {"op": entry.op, "when": plain(dict(entry.when)), "sizes": dict(entry.sizes)}
    return {"bucket": bucket, "ops": [op], "jit_artifacts": list(entry.artifacts)}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _no_constants(text: str) -> None:
    raise ValueError(f"{text} is not a number JSON knows")


def _bad(
    name: Path, why: str, code: ReasonCode = ReasonCode.PLAN_FILE_INVALID, *, value: object = None, limit: object = None
) -> DispatchTableError:
    return DispatchTableError(f"{name.name}: {why}", code=code, value=why if value is None else value, limit=limit)
