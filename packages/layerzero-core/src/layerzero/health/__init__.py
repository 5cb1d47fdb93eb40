"""Which kernels may be tried: `breaker` (in memory), `quarantine`, `crash_markers` (on disk), `sticky`."""
