"""LayerZero backend for xFormers."""
