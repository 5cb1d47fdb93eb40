"""Which kernels may be tried: `breaker` and `book` (in memory), `quarantine` and `crumbs` (on disk), `sticky`."""
