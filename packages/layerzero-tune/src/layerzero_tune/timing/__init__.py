"""How a set of candidates is timed."""
