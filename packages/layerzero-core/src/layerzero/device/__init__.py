"""Looking at the machine: which devices are here, what they can do, how much memory is free."""

from __future__ import annotations

from layerzero.device.catalogue import device_names, named_device
from layerzero.device.memory import free_bytes
from layerzero.device.probe import clear_probe_cache, probe_device, probe_devices
from layerzero.device.signature import backend_versions, environment_signature

__all__ = [
    "backend_versions",
    "clear_probe_cache",
    "device_names",
    "environment_signature",
    "free_bytes",
    "named_device",
    "probe_device",
    "probe_devices",
]
