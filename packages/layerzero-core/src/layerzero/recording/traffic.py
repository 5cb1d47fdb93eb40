"""Recorded traffic as a value and as a file: contexts that occurred, how often, with which strides."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero.files import locked, set_aside, write_whole
from layerzero.json_form import field_readers, plain
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import OpKind
from layerzero.reasons import ReasonCode

if TYPE_CHECKING:
    from layerzero.recording.tally import Tally

Made = TypeVar("Made")

FORMAT = "layerzero-traffic/1"
_MAX_BYTES = 256 << 20
# Everything about a call but its sizes, the device and what is only for reports.
_READERS = {name: read for name, read in field_readers(Context).items() if name not in ("device", "dims", "notes")}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call that occurred: its context, how often, and where they are known strides and the threads of torch."""

    context: Context
    count: int = 1
    strides: tuple[tuple[int, ...] | None, ...] | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls that occurred, the most frequent first."""

    calls: tuple[Recorded, ...] = ()

    @staticmethod
    def of(tally: Tally) -> Traffic:
        import torch

        threads, counts = torch.get_num_threads(), tally.counts().items()
        return _sorted(Recorded(ctx, count, _frozen(strides), threads) for ctx, (count, strides) in counts)

    @property
    def contexts(self) -> tuple[Context, ...]:
        return tuple(item.context for item in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __add__(self, other: Traffic) -> Traffic:
        """Both together; calls of one context add up."""
        found: dict[Context, Recorded] = {}
        for item in (*self.calls, *other.calls):
            before = found.get(item.context)
            if before is not None:
                item = replace(before, count=before.count + item.count, threads=item.threads or before.threads)
            found[item.context] = item
        return _sorted(found.values())


def _sorted(calls: Any) -> Traffic:
    return Traffic(tuple(sorted(calls, key=lambda item: (-item.count, json.dumps(context_to_json(item.context))))))


def _frozen(strides: Sequence[Any] | None) -> tuple[tuple[int, ...] | None, ...] | None:
    return None if strides is None else tuple(None if item is None else tuple(map(int, item)) for item in strides)


# -- contexts ----------------------------------------------------------------------------------------
def volume(ctx: Context) -> int:
    """How large a call is, next to others of its op: the product of its sizes."""
    return math.prod(max(1, size) for _, size in ctx.dims)


def context_to_json(ctx: Context) -> dict[str, Any]:
    """Everything about a call but the device and what is only for reports; defaults are left out."""
    usual = Context(ctx.op, dims=ctx.dims) if ctx.kind is not OpKind.TOKENIZATION else None
    found: dict[str, Any] = {"op": ctx.op, "device_type": ctx.device.device_type, "sizes": dict(ctx.dims)}
    for name in (name for name in _READERS if name != "op"):
        value = getattr(ctx, name)
        if usual is None or value != getattr(usual, name):
            found[name] = plain(value)
    return found


def context_from_json(data: dict[str, Any], device: DeviceSpec) -> Context:
    """The inverse, for calls on a device of this process. Raises ConfigurationError naming what is wrong."""
    if not isinstance(data, dict):
        raise _bad("a call is no mapping", type(data).__name__)
    given = {name: value for name, value in data.items() if name not in ("device_type", "sizes")}
    unknown = sorted(given.keys() - _READERS.keys())
    if unknown:
        raise _bad(f"unknown field {unknown[0]!r}", unknown[0])
    try:
        dims = tuple((str(name), _whole(size)) for name, size in data.get("sizes", {}).items())
        read = {name: _READERS[name](value) for name, value in given.items()}
        return Context(**read, device=device, dims=dims)
    except LayerZeroError as error:
        raise _bad(str(error), str(error)) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise _bad(f"a call cannot be read: {error}", str(error)) from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


# -- files -------------------------------------------------------------------------------------------
def read_json(path: str | os.PathLike[str], most: int) -> Any:
    """The content of a JSON file of at most so many bytes. Raises ConfigurationError where it cannot be had."""
    name = Path(path)
    try:
        if name.stat().st_size > most:
            raise ConfigurationError(code="CONFIG_FILE_TOO_LARGE", value=name.name, limit=f"{most} bytes")
        return json.loads(name.read_bytes())
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name.name}: not JSON: {error}", code="SCHEMA_INVALID", value=str(error)) from None


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file that holds a mapping; of a folder its config.json."""
    name = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    found = read_json(name, _MAX_BYTES)
    if not isinstance(found, dict):
        raise ConfigurationError(f"{name.name}: no mapping", code="SCHEMA_INVALID", value=type(found).__name__)
    return found


def call_to_json(call: Any, field: str) -> dict[str, Any]:
    """An entry of a file of calls: context, strides where they are known, and one field more."""
    strides = {} if call.strides is None else {"strides": [None if s is None else list(s) for s in call.strides]}
    return {"context": context_to_json(call.context), field: getattr(call, field), **strides}


def calls_from_json(
    path: str | os.PathLike[str], entries: list[Any], made: Callable[[Context, dict[str, Any], Any], Made]
) -> list[Made]:
    """The entries of such a file, for the devices of this process: `made` takes context, entry and strides."""
    from layerzero.device.probe import probe_device

    devices: dict[str, DeviceSpec] = {}
    calls = []
    for number, entry in enumerate(entries):
        where = f"calls[{number}]"
        try:
            kind = str(entry["context"].get("device_type", "cpu"))
            if kind not in devices:
                devices[kind] = probe_device(kind)
            context = context_from_json(entry["context"], devices[kind])
            calls.append(made(context, entry, _frozen(entry.get("strides"))))
        except LayerZeroError as error:
            message = f"{Path(path).name}: {where}: {error.body}"
            raise ConfigurationError(message, code=error.code, value=where, hint=error.hint) from None
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"{Path(path).name}: {where}: {error!r}", code="SCHEMA_INVALID", value=where
            ) from None
    return calls


def save(traffic: Traffic, path: str | os.PathLike[str]) -> None:
    """Write a traffic file, whole or not at all."""
    calls = [{**call_to_json(item, "count"), "threads": item.threads} for item in traffic.calls]
    write_whole(Path(path), json.dumps({"format": FORMAT, "calls": calls}, indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> Traffic:
    """Read a traffic file; its calls are meant for the devices of this process.

    Raises ConfigurationError for a file that is missing, damaged or of another kind.
    """
    data = read_json(path, _MAX_BYTES)
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != FORMAT or not isinstance(data.get("calls"), list):
        raise ConfigurationError(
            f"{Path(path).name}: not recorded traffic", code="SCHEMA_VERSION_UNKNOWN", value=str(found), limit=FORMAT
        )

    def made(ctx: Context, entry: dict[str, Any], strides: Any) -> Recorded:
        return Recorded(ctx, _whole(entry["count"]), strides, _whole(entry.get("threads", 0)))

    return _sorted(calls_from_json(path, data["calls"], made))


def add_to_file(traffic: Traffic, path: str | os.PathLike[str]) -> None:
    """Add to what a file holds, so that several runs or processes make one; a damaged file is set aside."""
    whole = Path(path)
    with locked(whole.with_name(f".{whole.name}.lock"), 0o666):
        before = Traffic()
        if Path(path).exists():
            try:
                before = load(path)
            except ConfigurationError:
                set_aside(whole)
        save(before + traffic, path)


def _bad(why: str, value: str) -> ConfigurationError:
    return ConfigurationError(why, code=ReasonCode.SCHEMA_INVALID, value=value)
