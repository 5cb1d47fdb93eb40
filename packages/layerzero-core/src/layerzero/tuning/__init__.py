"""Measuring kernels, and letting selection see what was measured."""
