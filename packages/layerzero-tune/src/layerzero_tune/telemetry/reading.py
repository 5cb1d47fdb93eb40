"""Reading another process's metrics: from its port, or from the file it rewrites."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError

Labels = tuple[tuple[str, str], ...]
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_MAX_BYTES = 16 << 20
PORT = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]*):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one moment: sample name → labels → value."""

    samples: Mapping[str, Mapping[Labels, float]]
    time: float
    pid: int | None = None
    source: str = field(default="", compare=False)

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get(name, {}).get(tuple(sorted(labels.items())))

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [(dict(labels), value) for labels, value in self.samples.get(name, {}).items()]


def read(source: str) -> Reading:
    """The metrics at an address (`9464`, `host:9464`, `http://…/metrics`) or in a file (JSON or text)."""
    if address := PORT.fullmatch(source):
        source = f"http://{address['host'] or '127.0.0.1'}:{address['port']}/metrics"
    if re.match(r"https?://", source):
        return _parsed(_fetched(source), source)
    try:
        path = Path(source).expanduser()
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(source, f"larger than {_MAX_BYTES} bytes")
        return _parsed(path.read_text(encoding="utf-8"), source)
    except OSError as error:
        raise _bad(source, error.strerror or type(error).__name__) from None
    except UnicodeDecodeError as error:
        raise _bad(source, str(error)) from None


def _fetched(source: str) -> str:
    import urllib.request  # late: `lz` imports this module for every verb

    try:
        with urllib.request.urlopen(source, timeout=5) as answer:
            body: bytes = answer.read(_MAX_BYTES)
            return body.decode()
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise _bad(source, str(error)) from None


def _bad(source: str, why: str) -> ConfigurationError:
    hint = "start the process with LAYERZERO_METRICS=<port or file>, or call lz.observe(metrics=...) in it"
    return ConfigurationError(
        f"no metrics at {source}: {why}", value=source, limit="a port, an address or a file", hint=hint
    )


def _parsed(body: str, source: str) -> Reading:
    if not body.lstrip().startswith("{"):
        return Reading(parse_text(body), time.time(), None, source)
    try:
        data = json.loads(body)
        if data.get("format") != "layerzero-metrics-1":
            raise ValueError("it is not a file of metrics")
        samples: dict[str, dict[Labels, float]] = {}
        for item in data["metrics"]:
            for row in item["samples"]:
                labels = tuple(sorted((str(k), str(v)) for k, v in row["labels"].items()))
                samples.setdefault(str(row["name"]), {})[labels] = float(row["value"])
        return Reading(samples, float(data["time"]), int(data["pid"]), source)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _bad(source, f"{type(error).__name__}: {error}") from None


def parse_text(body: str) -> dict[str, dict[Labels, float]]:
    """Samples of an exposition text; lines that are none are passed over."""
    found: dict[str, dict[Labels, float]] = {}
    for line in body.split("\n"):  # not splitlines: a label may hold what that takes for the end of a line
        match = None if line.startswith("#") else _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value.replace("Inf", "inf"))
        except ValueError:
            continue
        pairs = tuple(sorted((key, _plain(text)) for key, text in _LABEL.findall(labels or "")))
        found.setdefault(name, {})[pairs] = number
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def difference(before: Reading, after: Reading, name: str, labels: Mapping[str, Any] | None = None) -> float:
    """How much a counter grew between two readings; from zero where the process was started anew."""
    key = {str(k): str(v) for k, v in (labels or {}).items()}
    old, new = before.value(name, **key) or 0.0, after.value(name, **key) or 0.0
    return new - old if new >= old else new
