"""Where the ops there are can be looked up by rooms that stand below them: tables by name, filled from above."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OP_TABLES: list[Mapping[str, Any]] = []
