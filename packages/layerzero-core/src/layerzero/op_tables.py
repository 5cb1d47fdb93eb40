"""Where ops are looked up by name: tables for rooms that stand below them, and ops that are imported when first used.

A process that calls attention and norms never pays for mixture-of-experts. The names are known from the start: plugins
register kernels for such an op, policies lock it, `lz.list_ops` shows it.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")
OP_TABLES: list[Mapping[str, Any]] = []

_LATE = {
    "conversion": "cast",
    "loss": "cross_entropy",
    "gemma": "gemma_add_rms_norm gemma_rms_norm",
    "rotary": "xpos",
    "grouped": "grouped_attention",
    "moe": "grouped_gemm mlp moe topk_gate",
    "mla": "mla_paged_attention",
    "varlen": "varlen_attention",
    "sampling_probs": "sampling_probs",
}
# op -> module of its public function; importing the module registers the op.
LATE_OPS = {name: f"layerzero._ops.{module}" for module, names in _LATE.items() for name in names.split()}


class LateTable(UserDict[str, Value]):
    """A table by op name, some of whose entries come with a module that is imported at the first look-up."""

    def __init__(self, later: Mapping[str, str]) -> None:
        super().__init__()
        self._later = later

    def __missing__(self, name: str) -> Value:
        if name in self._later:
            importlib.import_module(self._later[name])
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._later

    def __iter__(self) -> Iterator[str]:
        return iter({**self.data, **self._later})

    def __len__(self) -> int:
        return len({**self.data, **self._later})
