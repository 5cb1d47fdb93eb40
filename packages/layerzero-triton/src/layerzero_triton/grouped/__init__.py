"""Grouped attention in Triton: a plan of work for one launch, and the kernels that carry it out."""
