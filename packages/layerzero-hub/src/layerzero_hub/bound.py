"""Locked kernels as ordinary kernels of LayerZero: one capabilities document, made from lock and mapping, and what its
functions are: attributes of this module that exist once a kernel is asked for.

Policy, lock and the names in the store are read when plugins register (the first call or inspection, never at `import
layerzero`). No kernel is hashed, imported or fetched then; each carries a predicate that refuses it, with its reason,
as long as it may not load.

`k_<kernel>` is the callable that binding imports: the kernel is verified and loaded at that moment. `p_<kernel>` is its
predicate: the reasons against it, empty when it may load. `w_<kernel>` is its packer of weights, where it has one. All
follow the policy as it was when plugins registered; in the process of an isolated backend, where none did, the one that
is found there by the same rules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

from layerzero.errors import CapabilitiesError
from layerzero.plugin import load_capabilities
from layerzero.reasons import Reason, reason
from layerzero_hub import signing
from layerzero_hub.contents import read_file
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.loading import load
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.names import strict_json
from layerzero_hub.policy import HubPolicy, KernelMapping, discovered, parse_descriptor
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
        """The name under which this module knows it, after `k_`, `p_` or `w_`."""
        return re.sub(r"[^a-z0-9]", "_", self.kernel_id)

    def entry(self) -> dict[str, Any]:
        """Its entry of a capabilities document; functions are named in this module alone."""
        entry = {**_MODEST, **self.mapping.capabilities, "kernel_id": self.kernel_id}
        entry["function"] = f"{__name__}:k_{self.attribute}"
        entry["predicate"] = f"{__name__}:p_{self.attribute}"
        if isinstance(entry.get("packer"), str) and ":" not in entry["packer"]:
            entry["packer"] = f"{__name__}:w_{self.attribute}"
        entry.setdefault("doc", f"{self.repo_id} version {self.version}, {self.digest[:19]}")
        if "cuda" in entry["platforms"]:
            entry.setdefault("grid", "library")
        return entry


def survey(policy: HubPolicy, lock: Lock | None = None) -> tuple[dict[str, HubKernel], tuple[Reason, ...]]:
    """Kernel id → kernel, of all that is mapped; what is wrong with descriptors or entries that gave no kernel.

    A kernel that may not load is there too, with the reasons. `lock` is given where it is read already.
    """
    if not policy.enabled or (lock is None and not policy.lock_path.is_file()):
        return {}, ()
    lock = lock or signing.read_lock(policy)
    store = Store(policy.store_path)
    found: dict[str, HubKernel] = {}
    problems: list[Reason] = []
    for locked in lock.kernels:
        try:
            variant = locked.fitting()
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
            kernel_id = _kernel_id(locked, mapping)
            if kernel_id in found:
                again = f"{kernel_id} is mapped twice: give one a `variant`"
                problems.append(reason("HUB_POLICY_INVALID", "kernels", again))
                continue
            kernel = HubKernel(kernel_id, mapping, locked.repo_id, locked.version, variant.digest, refused)
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
    """A capabilities document: `base` (the package's own file) with an entry for each of these kernels that has one."""
    ops: dict[str, list[dict[str, Any]]] = {}
    for kernel in sorted(kernels.values(), key=lambda kernel: kernel.kernel_id):
        if not any(item.code == "HUB_DESCRIPTOR_INVALID" for item in kernel.refused):
            ops.setdefault(kernel.mapping.op, []).append(kernel.entry())
    return {**base, "ops": ops}


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
            raise refuse("HUB_NOT_INSTALLED", str(kernel))
    except HubError as error:
        return error.reasons
    return ()


def _mappings(
    policy: HubPolicy, store: Store, kernel: LockedKernel, variant: LockedVariant
) -> tuple[tuple[KernelMapping, ...], tuple[Reason, ...]]:
    said = tuple(one for one in policy.kernels if one.repo == kernel.repo_id and one.version in (None, kernel.version))
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


def _kernel_id(kernel: LockedKernel, mapping: KernelMapping) -> str:
    """`hub.<op>.<owner>-<name>-v<version>[-variant]`: two versions, or two functions, stand side by side."""
    name = re.sub(r"[^a-z0-9_-]", "-", kernel.repo_id.lower())
    extra = f"-{mapping.variant}" if mapping.variant else ""
    return f"hub.{mapping.op}.{name}-v{kernel.version}{extra}"


# -- binding --------------------------------------------------------------------------------------------------------
_kernels: dict[str, HubKernel] = {}
_policy: list[HubPolicy] = []


def remember(kernels: Mapping[str, HubKernel], policy: HubPolicy) -> None:
    """Called at registration: what the attributes stand for from now on."""
    _kernels.clear()
    _kernels.update({kernel.attribute: kernel for kernel in kernels.values()})
    _policy[:] = [policy]


def __getattr__(name: str) -> Any:
    kind, attribute = name[:2], name[2:]
    if kind not in ("k_", "p_", "w_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _policy:
        policy = discovered()
        remember(survey(policy)[0], policy)
    kernel = _kernels.get(attribute)
    if kernel is None:
        raise AttributeError(f"layerzero_hub.bound has no {name!r}: the kernel is not locked and mapped")
    if kind == "p_":
        return lambda ctx: list(kernel.refused)
    if kind == "w_":
        return _function(kernel.mapping.capabilities["packer"], kernel)
    return _adapted(_function(kernel.mapping.function, kernel), kernel.mapping)


def _function(name: str, kernel: HubKernel) -> Callable[..., Any]:
    """A function of the kernel, which is verified and loaded now."""
    function = _resolve(load(kernel.repo_id, kernel.version, policy=_policy[0], digest=kernel.digest), name)
    if not callable(function):
        raise refuse("HUB_METADATA_INVALID", kernel.repo_id, f"no function {name}")
    return cast("Callable[..., Any]", function)


def _resolve(module: ModuleType, name: str) -> Any:
    """What `name` (dots between) is in a kernel's module; only modules and classes of the kernel are walked through.

    A kernel imports torch, and through torch everything can be reached: `torch.os.system` is no function of the kernel.
    """
    found: Any = module
    for part in name.split("."):
        if not _is_inside(found, module.__name__):
            raise refuse("HUB_DESCRIPTOR_INVALID", module.__name__, f"{name} leads out of the kernel")
        found = getattr(found, part, None)
    return found


def _is_inside(value: object, identity: str) -> bool:
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, type):
        name = value.__module__
    else:
        return False
    return name in (identity, f"torch.ops.{identity}") or name.startswith(f"{identity}.")


def _adapted(function: Callable[..., Any], mapping: KernelMapping) -> Callable[..., Any]:
    """The function as a kernel of the op, which gets the op's canonical arguments in their order."""
    if not mapping.arguments and not mapping.keywords and not mapping.out:
        return function
    from layerzero import list_ops

    canonical = next((list(spec.arguments) for spec in list_ops() if spec.op_id == mapping.op), None)
    if canonical is None:
        raise refuse("HUB_POLICY_INVALID", "kernels", f"there is no op {mapping.op}")
    try:
        order = [canonical.index(name) for name in mapping.arguments]
        named = [(theirs, canonical.index(ours)) for theirs, ours in mapping.keywords]
    except ValueError as error:
        raise refuse("HUB_POLICY_INVALID", "kernels", f"{error}; {mapping.op} has {', '.join(canonical)}") from None

    def call(*arguments: Any) -> Any:
        given = [arguments[index] for index in order]
        keywords = {theirs: arguments[index] for theirs, index in named}
        if not mapping.out:
            return function(*given, **keywords)
        out = arguments[0].new_empty(arguments[0].shape)
        function(out, *given, **keywords)
        return out

    call.__name__ = mapping.function.rsplit(".", maxsplit=1)[-1]
    call.__doc__ = inspect.getdoc(function)
    return call
