"""The reference: every op in plain, readable PyTorch.

These functions say what an op means. They are the last candidate of every selection and the truth that other kernels
are measured against, so they prefer accuracy to speed: low-precision inputs are widened to float32 (float64 stays
float64), the arithmetic is done there, and the result is rounded once to the dtype of the input. Each takes exactly
the canonical arguments of its op, positionally.
"""
