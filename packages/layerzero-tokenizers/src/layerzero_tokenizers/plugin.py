"""Hooks of the text ops and their backends. The libraries are independent, so each is a backend of its own."""

from __future__ import annotations

import importlib
from pathlib import Path

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status
from layerzero_tokenizers.ops import DETOKENIZE, TOKENIZE

FOLDERS = ("hf", "tiktoken", "sentencepiece", "own")
CAPABILITIES = tuple(Path(__file__).parent / folder / "capabilities.json" for folder in FOLDERS)


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the two ops, and the backends from their descriptors."""
    registrar.op(TOKENIZE)
    registrar.op(DETOKENIZE)
    for capabilities in CAPABILITIES:
        registrar.backend(capabilities)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> list[BackendStatus]:
    """One status for each library; they do not care about the device."""
    return [vendor_status(capabilities, device) for capabilities in CAPABILITIES]


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """A tokenizer built on the spot gives known ids and its text back."""
    health = importlib.import_module("layerzero_tokenizers.health")
    report: HealthReport = health.check(backend)
    return report
