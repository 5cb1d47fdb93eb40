"""Speculative decoding: a draft model proposes, the target model verifies, and what comes out is the target's own."""

from layerzero_models.speculative.decoder import (
    CachedModel,
    Generation,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeReport,
    SpeculativeStats,
    compare,
    decode,
)
from layerzero_models.speculative.tree import TreeDecoder, TreeModel, tree_of

__all__ = [
    "CachedModel",
    "Generation",
    "SpeculativeConfig",
    "SpeculativeDecoder",
    "SpeculativeReport",
    "SpeculativeStats",
    "TreeDecoder",
    "TreeModel",
    "compare",
    "decode",
    "tree_of",
]
