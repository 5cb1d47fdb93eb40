"""CUDA graphs: which kernels may stand in one, how to get ready for a capture, and how to prove it beforehand.

`rehearsal` runs a function as if it were being captured, with one World from the first warm-up to the last replay.
`capture` gets the device ready, tries single kernels, captures, and mends what a failed capture leaves behind.
"""

from layerzero.graphs.checks import capture_graph, is_graph_safe, validate_graph_capture

__all__ = ["capture_graph", "is_graph_safe", "validate_graph_capture"]
