"""Which kernels may be tried: `breaker`, `registry` (in memory), `quarantine`, `crash_markers` (on disk), `sticky`."""
