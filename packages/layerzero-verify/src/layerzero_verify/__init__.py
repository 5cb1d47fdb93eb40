"""The conformance kit for kernels, the parity ladder for models and definitions for LayerZero."""
