"""LayerZero's own kernels written in Triton."""
