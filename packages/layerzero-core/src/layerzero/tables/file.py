"""Reading and writing dispatch tables: deterministic bytes, a hash over the content, one clear error."""

from __future__ import annotations

import json
import os
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
from layerzero.reasons import ReasonCategory, ReasonCode
from layerzero.registry.kinds import (
    FLAG,
    Field,
    Kind,
    Record,
    choice,
    decoded,
    digest,
    either,
    list_of,
    map_of,
    number,
    read,
    text,
    whole,
)

_MAX_BYTES = 64 << 20
_MAX_PLANS = 1 << 20
SCHEMA_VERSION = "1.0"


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
    return replace(bare, content_hash=digest(_content(bare)))


def table_json(table: DispatchTable) -> dict[str, Any]:
    """The file form of a table."""
    signed = {} if table.signature is None else {"signature": table.signature}
    return {**_content(table), "content_hash": table.content_hash, **signed}


def save_table(table: DispatchTable, path: str | os.PathLike[str]) -> None:
    """Write a table, whole or not at all; the same table gives the same bytes."""
    write_whole(Path(path), json.dumps(table_json(table), indent=1, sort_keys=True) + "\n")


def load_table(path: str | os.PathLike[str]) -> DispatchTable:
    """Read a table. Raises DispatchTableError for a file that is missing, damaged, edited or of another version.

    Where LAYERZERO_TABLE_KEY names a key a table that is not signed with it is refused, too.
    """
    name = Path(path)
    try:
        data = decoded(read(name, _MAX_BYTES))
    except CapabilitiesError as error:
        code = error.code if error.code.category is ReasonCategory.CONFIG else ReasonCode.PLAN_FILE_INVALID
        raise _bad(name, error.body.removeprefix(": "), code) from None
    return table_from_json(data, name)


def table_from_json(data: Any, name: Path = Path("table")) -> DispatchTable:
    """A table from its file form, checked like a file: schema, content hash, signature where one is wanted."""
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION:
        raise _bad(
            name, f"schema version {found}", ReasonCode.SCHEMA_VERSION_UNKNOWN, value=found, limit=SCHEMA_VERSION
        )
    try:
        file = TABLE.parse(data, "")
    except CapabilitiesError as error:
        raise _bad(name, error.body) from None
    wanted = digest({key: value for key, value in data.items() if key not in ("content_hash", "signature")})
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
    key = env.read().table_key
    if key is not None:
        from layerzero.tables.signing import verify

        verify(words["content_hash"], words["signature"], Path(key))
    return DispatchTable(hardware=hardware, entries=tuple(entries), **words)


def _content(table: DispatchTable) -> dict[str, Any]:
    hardware = asdict(table.hardware) | {"backends": dict(table.hardware.backends)}
    if hardware["threads"] is None:
        del hardware["threads"]
    return {
        "schema_version": SCHEMA_VERSION,
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


def _bad(
    name: Path, why: str, code: ReasonCode = ReasonCode.PLAN_FILE_INVALID, *, value: object = None, limit: object = None
) -> DispatchTableError:
    return DispatchTableError(f"{name.name}: {why}", code=code, value=why if value is None else value, limit=limit)


# -- the form of a file, as one declarative table -------------------------------------------------------------------
_TEXT, _ANY_TEXT, _HASH = text(), text(empty=True), text(r"^.{8,}\Z", "a hash")
_ANYTHING = Kind(lambda value, where: value, dict)


def _maybe(kind: Kind) -> Kind:
    return either(lambda value: value is None, Kind(lambda value, where: None, lambda: {"type": "null"}), kind)


_MACHINE = Record(
    "machine",
    Field("signature", _HASH, "decides whether the table holds", required=True),
    Field("device", _ANY_TEXT, "where it was solved", required=True),
    Field("driver", _maybe(_ANY_TEXT), "of the device"),
    Field("torch", _maybe(_ANY_TEXT), "its version"),
    Field("backends", map_of(_ANY_TEXT, _ANY_TEXT), "vendor libraries and their versions", default={}),
    Field("threads", _maybe(whole(1)), "of torch, for times on a CPU"),
)
_BUCKET = Record(
    "bucket",
    Field("op", _TEXT, "the op", required=True),
    Field("when", map_of(_ANYTHING, _ANY_TEXT), "properties of the call that are not defaults", default={}),
    Field("sizes", map_of(whole(), _ANY_TEXT), "axis to the end of its bucket, or the exact size", required=True),
)
_OP = Record(
    "op",
    Field("op", _TEXT, "the op", required=True),
    Field("kernel_id", _TEXT, "the kernel that serves it", required=True),
    Field("median_us", _maybe(number(0.0)), "its time"),
    Field("error", _maybe(number(0.0)), "its largest error"),
    Field("busy", FLAG, "others used the machine while the time was taken", default=False),
)
_PLAN = Record(
    "plan",
    Field("bucket", _BUCKET, "the calls it speaks of", required=True),
    Field("ops", list_of(_OP, 1, to=list, unique=False, most=1), "the kernel of its op", required=True),
    Field("jit_artifacts", list_of(_ANY_TEXT, to=list, unique=False), "what its kernel has compiled", default=()),
)
_FALLBACK = Record("fallback", Field("mode", choice(frozenset({"runtime_select"})), "calls without a plan"))
TABLE = Record(
    "dispatch_table.json",
    Field("schema_version", choice(frozenset({SCHEMA_VERSION})), "version of this format", required=True),
    Field("model_id", _ANY_TEXT, "the model it was solved for", default=""),
    Field("hardware_signature", _MACHINE, "the machine it holds for", required=True),
    Field("policy_hash", _HASH, "the policy it was solved under", required=True),
    Field("kernels", map_of(_ANY_TEXT, _ANY_TEXT), "kernels and their versions", required=True),
    Field(
        "buckets",
        map_of(map_of(list_of(whole(), to=tuple, unique=False), _ANY_TEXT), _ANY_TEXT),
        "op to axis to the ends of its buckets",
        required=True,
    ),
    Field("plans", list_of(_PLAN, to=list, unique=False, most=_MAX_PLANS), "one for each bucket", required=True),
    Field("fallback", _FALLBACK, "what happens to a call that no plan covers"),
    Field("content_hash", text(r"^.{64}\Z", "a sha256"), "over everything else", required=True),
    Field("signature", _maybe(_ANY_TEXT), "of the hash"),
)
