"""Adapters over FlashAttention 3."""
