"""LayerZero's own CPU kernels."""
