"""What a compiled kernel is compiled for: one artifact for each kernel, environment and values of its `jit_key`.

The version of the kernel and the signature of the environment (device, driver, torch, vendor libraries) are part of
the artifact's name, so that an upgrade leaves old artifacts behind instead of believing in them.
"""

from __future__ import annotations

from typing import Any

from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec

Artifact = tuple[str, tuple[str, ...]]
"""(kernel id, (version, environment, "field=value", …)), a plain value that JSON can hold."""


def artifact_of(kernel: KernelSpec, ctx: Context, environment: str) -> Artifact:
    """The artifact a kernel needs for a call; `environment` is the signature of the context's device."""
    values = (f"{name}={_word(ctx.get(name))}" for name in kernel.jit_key)
    return kernel.kernel_id, (kernel.version, environment, *values)


def words_of(artifact: Artifact) -> str:
    """The artifact for people: its kernel and the values it was compiled for."""
    kernel_id, (_, _, *values) = artifact
    return f"{kernel_id} ({', '.join(values)})" if values else kernel_id


def _word(value: Any) -> str:
    if isinstance(value, (frozenset, set)):
        return "+".join(sorted(str(item) for item in value))
    return str(value)
