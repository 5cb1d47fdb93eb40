"""Reports: what was decided and what ran, readable by people and programs."""
