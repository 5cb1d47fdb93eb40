"""Adapters over FlashAttention 4."""
