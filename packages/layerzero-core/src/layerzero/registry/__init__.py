"""Kernels as data: `capabilities` (descriptor and schema) and `kernels` (the registry snapshot)."""
