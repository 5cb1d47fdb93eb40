"""Adapters over QuACK, the CuTe kernels of the FlashAttention authors."""
