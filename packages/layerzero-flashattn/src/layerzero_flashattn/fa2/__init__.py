"""Adapters over FlashAttention 2."""
