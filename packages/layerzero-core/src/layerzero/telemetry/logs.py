"""Log records as JSON lines, and formatters that leave secrets out.

What LayerZero knows beyond the text of a message (op, kernel_id, reasons, transform_cost_total, ...) is in the record's
attribute `layerzero`, a JSON-compatible dict; any handler may read it.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from layerzero.telemetry.redact import Redactor


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
