"""Log records as JSON lines, and formatters that leave secrets out.

What LayerZero knows beyond the text of a message (op, kernel_id, reasons, transform_cost_total, ...) is in the record's
attribute `layerzero`, a JSON-compatible dict; any handler may read it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from layerzero.errors import ConfigurationError


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, process, thread, rank, and the details."""

    def __init__(self, redactor: Redactor | None = None) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "thread": record.threadName,
        }
        rank = os.environ.get("RANK")
        if rank is not None:
            row["rank"] = rank
        found = getattr(record, "layerzero", None)
        if isinstance(found, dict):
            row.update({key: value for key, value in found.items() if key not in row})
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        if self._redactor is not None:
            row = self._redactor.value(row)
        return json.dumps(row, default=str, ensure_ascii=False)


class RedactingFormatter(logging.Formatter):
    """Another formatter's text without secrets, tracebacks included."""

    def __init__(self, inner: logging.Formatter, redactor: Redactor) -> None:
        super().__init__()
        self._inner, self._redactor = inner, redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor(self._inner.format(record))


HIDDEN = "[redacted]"  # in place of a secret that slipped into a message

# What secrets look like. Where a group named `kept` matches, that part stays: the name of a variable, a host.
_SECRETS = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}",
    r"\b(?:sk|pk|rk)-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_]{16,}",
    r"\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"(?P<kept>(?i:\b(?:bearer|basic|token)\s+))[A-Za-z0-9._~+/=-]{12,}",
    r"(?P<kept>(?i:[\w-]*(?:password|passwd|secret|api[_-]?key|access[_-]?key|(?<!special_)token)\b[\"']?\s*[=:]\s*[\"']?))"
    r"[^\s\"',;&}\]]{4,}",
    r"(?P<kept>\b[a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+(?=@)",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]+?-----END [A-Z ]*PRIVATE KEY-----",
)


class Redactor:
    """Replaces what looks like a secret, and whatever else the given patterns (regular expressions) match."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in _SECRETS]
        for pattern in patterns:
            try:
                made = re.compile(pattern)
            except (re.error, TypeError, RecursionError) as error:
                raise ConfigurationError(
                    f"cannot redact by {pattern!r}: {error}", value=str(pattern), limit="a regular expression"
                ) from None
            if made.match(""):
                raise ConfigurationError(
                    f"cannot redact by {pattern!r}: it matches everywhere", value=pattern, limit="a non-empty match"
                )
            self._patterns.append(made)

    def __call__(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(lambda match: (match.groupdict().get("kept") or "") + HIDDEN, text)
        return text

    def value(self, value: Any) -> Any:
        """The same for every text inside a JSON-compatible value."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self(str(key)): self._under(str(key), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _under(self, key: str, item: Any) -> Any:
        """A value whose key says that it is a secret is one, whatever it looks like."""
        if isinstance(item, str) and len(item) >= 4 and self(f"{key}={item}") != f"{key}={item}":
            return HIDDEN
        return self.value(item)
