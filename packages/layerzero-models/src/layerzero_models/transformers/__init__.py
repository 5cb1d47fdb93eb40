"""LayerZero in models of transformers 5: `attn_implementation="layerzero"`, `lz.patch` and the way back."""

from layerzero_models.transformers.enabling import enable_transformers
from layerzero_models.transformers.patching import patch, patched, unpatch

__all__ = ["enable_transformers", "patch", "patched", "unpatch"]
