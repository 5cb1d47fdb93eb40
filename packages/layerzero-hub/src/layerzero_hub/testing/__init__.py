"""A kernel hub on loopback for tests, with real endpoints and every attack as a switch; and kernels to put in it."""

from layerzero_hub.testing.hub import Attack, LoopbackHub, Repository
from layerzero_hub.testing.kernels import metadata_for, universal_kernel

__all__ = ["Attack", "LoopbackHub", "Repository", "metadata_for", "universal_kernel"]
