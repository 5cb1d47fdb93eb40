"""Locked kernels as ordinary kernels of LayerZero: one capabilities document, made from lock and mapping.

Read when plugins register (the first call or inspection, never at `import layerzero`): policy, lock and the names in
the store. No kernel is hashed, imported or fetched here; that happens when one is bound, and each kernel carries a
predicate that refuses it, with its reason, as long as it may not load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.plugin import load_capabilities
from layerzero.reasons import Reason, reason
from layerzero_hub import signing
from layerzero_hub.contents import read_file
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.loading import choose
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.mapping import KernelMapping, parse_descriptor
from layerzero_hub.names import strict_json
from layerzero_hub.policy import HubPolicy
from layerzero_hub.store import Store

# What is claimed for a function nobody described further: contiguous float32 on a CPU, nothing else.
_MODEST: Mapping[str, Any] = {"platforms": ["cpu"], "dtypes": ["float32"], "contiguous": True, "priority": 0}
_ALONE: Mapping[str, Any] = {"schema_version": "1.0", "backend": "hub"}
_DESCRIPTOR_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class HubKernel:
    """One function of one locked build, under its kernel id."""

    kernel_id: str
    mapping: KernelMapping
    repo_id: str
    version: int
    digest: str
    refused: tuple[Reason, ...] = ()

    @property
    def attribute(self) -> str:
        """The name under which `layerzero_hub.bound` knows it."""
        return "k_" + re.sub(r"[^a-z0-9]", "_", self.kernel_id)

    def entry(self) -> dict[str, Any]:
        """Its entry of a capabilities document; functions are named in `layerzero_hub.bound` alone."""
        entry = {**_MODEST, **self.mapping.capabilities}
        entry["kernel_id"] = self.kernel_id
        entry["function"] = f"layerzero_hub.bound:{self.attribute}"
        entry["predicate"] = f"layerzero_hub.bound:p_{self.attribute[2:]}"
        if isinstance(entry.get("packer"), str) and ":" not in entry["packer"]:
            entry["packer"] = f"layerzero_hub.bound:w_{self.attribute[2:]}"
        entry.setdefault("doc", f"{self.repo_id} version {self.version}, {self.digest[:19]}")
        if "cuda" in entry["platforms"]:
            entry.setdefault("grid", "library")
        return entry


def table(policy: HubPolicy) -> dict[str, HubKernel]:
    """Kernel id → kernel, of everything that is mapped. A kernel that may not load is there too, with the reasons."""
    return survey(policy)[0]


def survey(policy: HubPolicy, lock: Lock | None = None) -> tuple[dict[str, HubKernel], tuple[Reason, ...]]:
    """`table`, and what is wrong with descriptors or entries that gave no kernel; of `lock` when it is read already."""
    if not policy.enabled or (lock is None and not policy.lock_path.is_file()):
        return {}, ()
    lock = lock or signing.read_lock(policy)
    store = Store(policy.store_path)
    found: dict[str, HubKernel] = {}
    problems: list[Reason] = []
    for locked in lock.kernels:
        try:
            variant = choose(locked)
        except HubError:
            continue  # a build for other machines
        refused = _refused(policy, store, locked, variant, lock.endpoint)
        try:
            mappings, wrong = _mappings(policy, store, locked, variant)
        except HubError as error:
            problems += error.reasons
            continue
        problems += wrong
        for mapping in mappings:
            kernel_id = _kernel_id(locked, variant, mapping)
            kernel = HubKernel(kernel_id, mapping, locked.repo_id, locked.version, variant.digest, refused)
            if kernel_id in found:
                again = f"{kernel_id} is mapped twice: give one a `variant`"
                problems.append(reason("HUB_POLICY_INVALID", "kernels", again))
                continue
            found[kernel_id] = replace(kernel, refused=refused + _wrong_entry(kernel))
    return found, tuple(problems)


def _wrong_entry(kernel: HubKernel) -> tuple[Reason, ...]:
    """Why the entry would spoil a capabilities document; looked at alone, so that it spoils nothing."""
    try:
        load_capabilities({**_ALONE, "ops": {kernel.mapping.op: [kernel.entry()]}})
    except (CapabilitiesError, TypeError, ValueError) as error:
        return (reason("HUB_DESCRIPTOR_INVALID", kernel.kernel_id, str(error)[:300]),)
    return ()


def capabilities(kernels: Mapping[str, HubKernel], base: Mapping[str, Any]) -> dict[str, Any]:
    """A capabilities document: `base` (the package's own file) with an entry for each of `table` that has one."""
    ops: dict[str, list[dict[str, Any]]] = {}
    for kernel in kernels.values():
        if any(item.code == "HUB_DESCRIPTOR_INVALID" for item in kernel.refused):
            continue
        ops.setdefault(kernel.mapping.op, []).append(kernel.entry())
    return {
        **base,
        "ops": {op: sorted(entries, key=lambda entry: str(entry["kernel_id"])) for op, entries in ops.items()},
    }


def _refused(
    policy: HubPolicy, store: Store, kernel: LockedKernel, variant: LockedVariant, endpoint: str
) -> tuple[Reason, ...]:
    """The cheap checks; the bytes are looked at when the kernel is bound."""
    try:
        policy.check_allowed(kernel.repo_id)
        policy.check_endpoint(endpoint)
        policy.check_digest(variant.digest)
        store.check_quarantine(variant.digest)
        if not store.installed(variant):
            raise refuse("HUB_NOT_INSTALLED", f"{kernel.repo_id}@{kernel.version}")
    except HubError as error:
        return error.reasons
    return ()


def _mappings(
    policy: HubPolicy, store: Store, kernel: LockedKernel, variant: LockedVariant
) -> tuple[tuple[KernelMapping, ...], tuple[Reason, ...]]:
    said = tuple(
        mapping
        for mapping in policy.kernels
        if mapping.repo == kernel.repo_id and mapping.version in (None, kernel.version)
    )
    if said or "layerzero.json" not in variant.files:
        return said, ()
    if variant.files["layerzero.json"].size > _DESCRIPTOR_BYTES:
        raise refuse("HUB_DESCRIPTOR_INVALID", kernel.repo_id, f"larger than {_DESCRIPTOR_BYTES} bytes")
    if not store.installed(variant):
        return (), ()  # the kernel has nothing to say yet
    # What it says decides which functions are called for which op: it is read like code, against its hash.
    raw = read_file(store.variant_path(variant), "layerzero.json", variant)
    data = strict_json(raw, "HUB_DESCRIPTOR_INVALID", kernel.repo_id, _DESCRIPTOR_BYTES)
    found, wrong = parse_descriptor(data, kernel.repo_id)
    return tuple(replace(mapping, version=kernel.version) for mapping in found), wrong


def _kernel_id(kernel: LockedKernel, variant: LockedVariant, mapping: KernelMapping) -> str:
    """`hub.<op>.<name>-v<version>[-variant]`: two versions, or two functions, stand side by side."""
    name = re.sub(r"[^a-z0-9_-]", "-", kernel.repo_id.split("/")[1].lower())
    owner = re.sub(r"[^a-z0-9_-]", "-", kernel.repo_id.split("/")[0].lower())
    extra = f"-{mapping.variant}" if mapping.variant else ""
    return f"hub.{mapping.op}.{owner}-{name}-v{kernel.version}{extra}"
