"""Dispatch: from a call to the kernel that really runs. `hot` keys, `bind` plans, `run` runs and fails over."""
