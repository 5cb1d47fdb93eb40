"""A measurement in a few words, for people."""

from __future__ import annotations

import json

from layerzero.perfdb.measurement import Measurement

__all__ = ["summarise"]

_SHOWN = ("dtype", "causal", "mask", "window", "quant_format", "layout")


def summarise(item: Measurement) -> str:
    """The bucket of a measurement: its sizes, and what of its situation tells it from its neighbours."""
    try:
        bucket = json.loads(item.bucket)
        sizes = " ".join(f"{name}={size}" for name, size in bucket["sizes"].items())
        when = " ".join(f"{name}={bucket['when'][name]}" for name in _SHOWN if name in bucket["when"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return item.bucket[:80]
    return f"{sizes} {when}".strip()
