"""Kernels as data: the capabilities descriptor with its schema, and the registry snapshot built from it."""

from layerzero.registry.capabilities import Capabilities, Vendor, json_schema, load_capabilities, migrate
from layerzero.registry.kernels import KernelRegistry

__all__ = ["Capabilities", "KernelRegistry", "Vendor", "json_schema", "load_capabilities", "migrate"]
