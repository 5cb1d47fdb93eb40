"""The verbs `lz verify` and `lz definitions`."""
