"""LayerZero backend for Liger Kernel."""
