"""The registry: an immutable snapshot of every known kernel and backend.

Selection, listing and caches read a `KernelRegistry`; whoever wants another one builds a new snapshot
with `add`, `replace` or `without` and publishes it. Nothing is ever changed in place, so a reader needs no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from layerzero.errors import PluginError, UnknownNameError, nearest
from layerzero.json_form import digest
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero.model.kernel import BackendSpec, KernelSpec


@dataclass(frozen=True)
class KernelRegistry:
    """All kernels by id, all backends by name. `version` counts the snapshots since the empty one."""

    kernels: Mapping[str, KernelSpec] = field(default_factory=lambda: MappingProxyType({}))
    backends: Mapping[str, BackendSpec] = field(default_factory=lambda: MappingProxyType({}))
    version: int = 0
    # Ids whose constraints came from code and not from a hashed descriptor.
    loose: frozenset[str] = frozenset()

    # -- looking up ------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.kernels)

    def __contains__(self, kernel_id: object) -> bool:
        return kernel_id in self.kernels

    def get(self, kernel_id: str) -> KernelSpec:
        """The kernel with this id; an unknown id raises UnknownNameError and names the nearest."""
        try:
            return self.kernels[kernel_id]
        except KeyError:
            near = next(iter(nearest(kernel_id, self.kernels, 1)), None)
            hint = f"did you mean {near}?" if near else "lz list shows every kernel"
            raise UnknownNameError(
                f"no kernel {kernel_id!r}", code="KERNEL_UNKNOWN", value=kernel_id, limit=near, hint=hint
            ) from None

    @cached_property
    def _by_op(self) -> Mapping[str, tuple[KernelSpec, ...]]:
        found: dict[str, list[KernelSpec]] = {}
        for _, spec in sorted(self.kernels.items()):
            found.setdefault(spec.op, []).append(spec)
        return {op: tuple(specs) for op, specs in found.items()}

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_op))

    def by_op(self, op: str) -> tuple[KernelSpec, ...]:
        """Every kernel of an op, ordered by id; empty for an op nobody serves."""
        return self._by_op.get(op, ())

    def by_backend(self, backend: str) -> tuple[KernelSpec, ...]:
        return tuple(spec for _, spec in sorted(self.kernels.items()) if spec.backend == backend)

    def by_platform(self, platform: Platform | str) -> tuple[KernelSpec, ...]:
        return tuple(spec for _, spec in sorted(self.kernels.items()) if Platform(platform) in spec.platforms)

    def by_context(self, ctx: Context) -> tuple[KernelSpec, ...]:
        """Kernels of usable backends whose declared constraints fit a context as it is, ordered by id."""
        return tuple(spec for spec in self.by_op(ctx.op) if self.available(spec.backend) and not spec.check(ctx))

    def available(self, backend: str) -> bool:
        """Whether a backend may be used; one that registered kernels in code only always may."""
        spec = self.backends.get(backend)
        return spec is None or spec.available

    @cached_property
    def capabilities_hash(self) -> str:
        """Changes whenever a descriptor, a version, an availability or a kernel declared in code changes."""
        backends = self.backends.values()
        parts = {
            "backends": sorted(
                (b.name, b.capabilities_hash, b.version, b.vendor_version or "", b.available) for b in backends
            ),
            "kernels": sorted((spec.kernel_id, spec.version) for spec in self.kernels.values()),
            "loose": [self.kernels[kernel_id].to_json() for kernel_id in sorted(self.loose)],
        }
        return digest(parts)

    # -- building --------------------------------------------------------------------------------
    def add(self, kernels: Iterable[KernelSpec], backend: BackendSpec | None = None) -> KernelRegistry:
        """A new snapshot with these kernels, and with the backend that brings them.

        A kernel id or backend name that is taken raises PluginError; the present snapshot stays as it is.
        """
        new = tuple(kernels)
        merged = dict(self.kernels)
        for spec in new:
            if spec.kernel_id in merged:
                owner = f"backend {merged[spec.kernel_id].backend}"
                raise PluginError(code="KERNEL_DUPLICATE", value=spec.kernel_id, limit=owner)
            merged[spec.kernel_id] = spec
        backends = dict(self.backends)
        if backend is not None:
            if backend.name in backends:
                owner = backends[backend.name].dist or "an earlier plugin"
                raise PluginError(code="PLUGIN_DUPLICATE", value=backend.name, limit=owner)
            backends[backend.name] = backend
        described = backend is not None and bool(backend.capabilities_hash)
        loose = self.loose if described else self.loose | {spec.kernel_id for spec in new}
        return self._next(merged, backends, loose)

    def replace(self, kernels: Iterable[KernelSpec]) -> KernelRegistry:
        """A new snapshot in which these kernels stand instead of those with the same ids; an unknown id raises."""
        new = {spec.kernel_id: spec for spec in kernels}
        for kernel_id in new:
            self.get(kernel_id)
        return self._next({**self.kernels, **new}, dict(self.backends), self.loose | new.keys())

    def without(self, *, kernels: Iterable[str] = (), backends: Iterable[str] = ()) -> KernelRegistry:
        """A new snapshot without these kernels and without these backends and all their kernels."""
        gone, gone_backends = set(kernels), set(backends)
        kept = {
            name: spec for name, spec in self.kernels.items() if name not in gone and spec.backend not in gone_backends
        }
        left = {name: spec for name, spec in self.backends.items() if name not in gone_backends}
        return self._next(kept, left, self.loose & kept.keys())

    def _next(
        self, kernels: dict[str, KernelSpec], backends: dict[str, BackendSpec], loose: frozenset[str]
    ) -> KernelRegistry:
        return KernelRegistry(MappingProxyType(kernels), MappingProxyType(backends), self.version + 1, loose)
