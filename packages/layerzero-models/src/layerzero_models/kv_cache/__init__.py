"""`lz.kv_cache`: keys and values of past tokens behind one interface."""

from layerzero_models.kv_cache.cache import KVCache, kv_cache

__all__ = ["KVCache", "kv_cache"]
