"""Frozen values: what an op, a kernel, a device, a call, a decision and a policy are."""
