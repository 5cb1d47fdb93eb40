"""Hooks of the tokenizer backends. The libraries are independent, so each is a backend of its own."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status

FOLDERS = ("hf", "tiktoken", "sentencepiece")
CAPABILITIES = tuple(Path(__file__).parent / folder / "capabilities.json" for folder in FOLDERS)


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the three backends from their descriptors."""
    for capabilities in CAPABILITIES:
        registrar.backend(capabilities)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> list[BackendStatus]:
    """One status for each library; they do not care about the device."""
    return [vendor_status(capabilities, device) for capabilities in CAPABILITIES]


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Nothing can be shown to be right before there is a kernel."""
    return HealthReport(backend, False, "no kernels to test yet")
