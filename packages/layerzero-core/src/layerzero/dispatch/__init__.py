"""From a call to the kernel that runs: `hot` keys, `decide` decides, `bind` binds, `run` runs, `failover` replaces."""
