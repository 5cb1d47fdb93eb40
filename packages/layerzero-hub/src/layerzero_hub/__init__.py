"""LayerZero backend for kernels from the Hugging Face Kernel Hub."""
