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

# op -> module of its public function; importing the module registers the op.
LATE_OPS: dict[str, str] = {
    "cast": "layerzero._ops.conversion",
    "cross_entropy": "layerzero._ops.loss",
    "gemma_add_rms_norm": "layerzero._ops.gemma",
    "gemma_rms_norm": "layerzero._ops.gemma",
    "xpos": "layerzero._ops.rotary",
    "grouped_attention": "layerzero._ops.grouped",
    "grouped_gemm": "layerzero._ops.moe",
    "mlp": "layerzero._ops.moe",
    "moe": "layerzero._ops.moe",
    "topk_gate": "layerzero._ops.moe",
    "mla_paged_attention": "layerzero._ops.mla",
    "varlen_attention": "layerzero._ops.varlen",
    "sampling_probs": "layerzero._ops.sampling_probs",
}


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
