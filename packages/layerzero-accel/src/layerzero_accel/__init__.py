"""An optional C accelerator for LayerZero's hot path."""
