"""torch's own fused functions as kernels."""
