"""LayerZero backend for FlashInfer."""
