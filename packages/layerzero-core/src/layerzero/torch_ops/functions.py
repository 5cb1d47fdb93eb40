"""The public functions by name, filled by `install`: they live on the floor above, which nothing here may import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["functions"]

functions: dict[str, Callable[..., Any]] = {}
