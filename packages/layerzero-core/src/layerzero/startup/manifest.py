"""A warm-up manifest: the calls a deployment will make, the critical ones marked. A JSON file people may edit.

It names the model and holds the hash of the configuration it was made from, so that a manifest left over from
another model is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero.files import write_whole
from layerzero.model.context import Context
from layerzero.recording.traffic import Recorded, call_to_json, calls_from_json, read_mapping

FORMAT = "layerzero-warmup/1"
_SHARE = 0.9  # of recorded calls: those that make up this share of the traffic block, the rest follows
_DECODE_TOKENS = 64  # of a model's calls: those of so few tokens are decode steps, which every request waits for


@dataclass(frozen=True, slots=True)
class Item:
    """One call to be ready for."""

    context: Context
    critical: bool = False
    strides: tuple[tuple[int, ...] | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Calls to be ready for, critical ones first."""

    items: tuple[Item, ...]
    model_id: str = ""
    config_hash: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        calls = [call_to_json(item, "critical") for item in self.items]
        head = {"format": FORMAT, "model_id": self.model_id, "config_hash": self.config_hash}
        write_whole(Path(path), json.dumps({**head, "calls": calls}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Manifest:
        """Read the file. Raises ConfigurationError for one that is missing, damaged or of another kind."""
        data = read_mapping(path)
        if data.get("format") != FORMAT or not isinstance(data.get("calls"), list):
            raise ConfigurationError(
                f"{Path(path).name}: no warm-up manifest", code="SCHEMA_VERSION_UNKNOWN",
                value=str(data.get("format")), limit=FORMAT,
            )  # fmt: skip

        def item(context: Context, entry: dict[str, Any], strides: Any) -> Item:
            if not isinstance(entry["critical"], bool):
                raise ValueError(f"critical is {entry['critical']!r}, expected true or false")
            return Item(context, entry["critical"], strides)

        items = calls_from_json(path, data["calls"], item)
        return Manifest(_ordered(items), str(data.get("model_id", "")), str(data.get("config_hash", "")))

    def require(self, config: Mapping[str, Any]) -> None:
        """Raise when this manifest was made from another configuration than this one."""
        found = config_hash(config)
        if self.config_hash and found != self.config_hash:
            raise ConfigurationError(
                "the manifest was made from another model configuration", code="CONFIG_INVALID",
                value=f"config {found[:12]}", limit=f"config {self.config_hash[:12]}",
                hint="make it again: lz warmup CONFIG --write MANIFEST",
            )  # fmt: skip


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a file calls itself a warm-up manifest."""
    name = Path(path)
    return name.is_file() and name.suffix == ".json" and read_mapping(path).get("format") == FORMAT


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of a model configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def mark_critical(calls: Iterable[Recorded]) -> tuple[Item, ...]:
    """Which calls everybody waits for: of recorded ones the most frequent, of a model's the decode steps."""
    given = sorted(calls, key=lambda call: -call.count)
    recorded = len({call.count for call in given}) > 1
    total, seen = sum(call.count for call in given), 0
    items = []
    for call in given:
        critical = seen < _SHARE * total if recorded else _tokens(call.context) <= _DECODE_TOKENS
        seen += call.count
        items.append(Item(call.context, critical, call.strides))
    return _ordered(items)


def _tokens(ctx: Context) -> int:
    rows = ctx.dim("rows") or ctx.dim("tokens")
    return rows if rows is not None else (ctx.dim("batch") or 1) * (ctx.dim("seq_len_q") or 1)


def _ordered(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple(sorted(items, key=lambda item: not item.critical))
