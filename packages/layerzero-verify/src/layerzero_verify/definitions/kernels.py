"""Which kernels of an op can be tried here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from layerzero.dispatch.run import current_world
from layerzero.errors import UnknownNameError
from layerzero.model.enums import Platform
from layerzero.public.inspection import list_kernels
from layerzero.reasons import Reason, reason

__all__ = ["Kernel", "kernels_for", "known_backends"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to try: asked for by its id, through the real dispatch."""

    kernel_id: str
    deterministic: bool


def known_backends(names: Iterable[str]) -> None:
    """Refuse a name that is neither a kernel nor a backend here."""
    registry = current_world().registry
    for name in names:
        if name not in registry.kernels and name not in registry.backends and not registry.by_backend(name):
            known = sorted({kernel.backend for kernel in registry.kernels.values()})
            raise UnknownNameError(
                f"unknown backend or kernel {name!r}", code="BACKEND_UNKNOWN", value=name, limit=", ".join(known)
            )


def kernels_for(op: str, wanted: tuple[str, ...], device: torch.device) -> tuple[list[Kernel], dict[str, Reason]]:
    """The kernels of an op to try, and the reason against each of the others that were asked for.

    `wanted` names kernel ids or backends; empty means all. Whether a kernel takes a call is its own matter: dispatch
    says so when it is asked.
    """
    registry, platform = current_world().registry, _platform(device)
    found = [kernel for kernel in list_kernels(op) if not wanted or {kernel.kernel_id, kernel.backend} & set(wanted)]
    reasons = {
        name: reason("FEATURE_UNSUPPORTED", op, detail=f"{name} has no kernel of it")
        for name in wanted
        if not any(name in (kernel.kernel_id, kernel.backend) for kernel in found)
    }
    usable = []
    for kernel in found:
        backend = registry.backends.get(kernel.backend)
        if backend is not None and not backend.available:
            reasons[kernel.kernel_id] = next(iter(backend.reasons), reason("BACKEND_NOT_INSTALLED", kernel.backend))
        elif platform not in kernel.platforms:
            reasons[kernel.kernel_id] = reason("PLATFORM_MISMATCH", platform, kernel.platforms)
        else:
            usable.append(Kernel(kernel.kernel_id, bool(kernel.deterministic)))
    return usable, reasons


def _platform(device: torch.device) -> str:
    return Platform.ROCM.value if device.type == "cuda" and torch.version.hip else device.type
