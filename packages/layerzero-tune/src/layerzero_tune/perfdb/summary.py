"""A measurement, and the calls of a bucket, in a few words for people."""

from __future__ import annotations

import json
from collections.abc import Iterable

from layerzero.perfdb.bucket import GROWING
from layerzero.perfdb.measurement import Measurement

_GROWING = GROWING | {"elements"}

_SHOWN = ("dtype", "causal", "mask", "window", "quant_format", "layout")


def summarise(item: Measurement) -> str:
    """The bucket of a measurement: its sizes, and what of its situation tells it from its neighbours."""
    try:
        bucket = json.loads(item.bucket)
        return bucket_words(bucket["sizes"].items(), bucket["when"].items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return item.bucket[:80]


def bucket_words(sizes: Iterable[tuple[str, int]], when: Iterable[tuple[str, object]]) -> str:
    """The calls of a bucket in words: sizes, those that grow up to its end, and what is special about them."""
    words = [f"{name}{'≤' if name in _GROWING else '='}{size}" for name, size in sizes]
    return " ".join([*words, *(f"{name}={value}" for name, value in when if name in _SHOWN)])
