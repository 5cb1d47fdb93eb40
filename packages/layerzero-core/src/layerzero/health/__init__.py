"""Which kernels may be tried: `breaker` (circuit breakers in memory) and `quarantine` (on disk)."""
