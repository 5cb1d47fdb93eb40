"""Beside others: `kernels.lock` for the library `kernels`, `[tool.kernels.dependencies]`, and `kernelize`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.files import write_whole
from layerzero_hub.errors import refuse
from layerzero_hub.loading import load
from layerzero_hub.lockfile import Lock
from layerzero_hub.names import check_repo_id
from layerzero_hub.policy import HubPolicy


def write_kernels_lock(lock: Lock, path: Path) -> None:
    """Repository, version and commit in the form `kernels` reads. Our own lock stays the authority."""
    from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

    entries = {
        KernelDependency(kernel.repo_id, KernelVersion.Version(kernel.version)): KernelLock(kernel.commit)
        for kernel in lock.kernels
    }
    write_whole(path, KernelLocks(entries).to_json() + "\n")


def dependencies(project: Path) -> list[tuple[str, int]]:
    """`[tool.kernels.dependencies]` of a pyproject.toml: repository → version."""
    try:
        data: Any = tomllib.loads(project.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse("HUB_POLICY_INVALID", "dependencies", f"{project.name}: {error}") from None
    table = data.get("tool", {}).get("kernels", {}).get("dependencies", {})
    found = []
    for repo_id, version in table.items():
        text = str(version.get("version") if isinstance(version, dict) else version)
        if not text.isascii() or not text.isdigit():
            raise refuse("HUB_POLICY_INVALID", "dependencies", f"{repo_id}: a version number, not {text}")
        found.append((check_repo_id(repo_id), int(text)))
    return found


@dataclass(frozen=True)
class LockedLayer:
    """A layer of a locked kernel for `kernels.use_kernel_mapping`, so that `kernelize` takes the verified one.

    mapping = {"RMSNorm": {"cpu": LockedLayer("org/fast-norm", "RMSNorm")}}
    """

    repo_id: str
    layer_name: str
    version: int | None = field(default=None, kw_only=True)
    policy: HubPolicy | None = field(default=None, kw_only=True, hash=False)

    def load(self) -> type[Any]:
        """The layer's class, from the verified kernel's `layers`."""
        module = load(self.repo_id, self.version, policy=self.policy)
        layer = getattr(getattr(module, "layers", None), self.layer_name, None)
        if not isinstance(layer, type):
            raise refuse("HUB_METADATA_INVALID", self.repo_id, f"no layer {self.layer_name}")
        return layer

    def __str__(self) -> str:
        return f"locked {self.repo_id}, layer {self.layer_name}"
