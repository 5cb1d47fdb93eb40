"""LayerZero backends for FlashAttention 2, 3 and 4."""
