"""Measures kernels here, writes dispatch tables, plans whole blocks, benchmarks and reports."""
