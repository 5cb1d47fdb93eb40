"""What vouches for a kernel before its first answer: a kit that came with it, or a check on this machine.

Read when a kernel is about to run a kind of call that nobody has met; files are opened then, and only its own. `learn`
adds what a check has shown and publishes a new World.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from layerzero.device.signature import family_of
from layerzero.errors import CapabilitiesError
from layerzero.forking import fresh_lock
from layerzero.health.first_use import FOLDER, Checked, FirstUses
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import OpKind
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.model.situation import KitProof, kind_of
from layerzero.plugin.discovery import normalized
from layerzero.reasons import Reason, reason
from layerzero.registry.proofs import load_proofs
from layerzero.runtime.crashes import place
from layerzero.runtime.state import state
from layerzero.selection.world import Proofs, World

_log = logging.getLogger("layerzero.health")

BASELINES = frozenset({"reference", "torch", "sdpa"})
"""Built-in backends made of torch's own functions: what somebody without LayerZero runs; others are held to it."""

# Holds each library against the tokenizer's own on thousands of texts before it may serve it (its `predicate`s say so).
_TOKENIZERS = "layerzero-tokenizers"
_TEXT = frozenset({"text"})


class ProofRegistry:
    """What is known of kernels in this process; what checks have shown is kept on disk as well."""

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self.forget()

    def forget(self) -> None:
        """Everything but what is on disk; for tests, and where the folder has changed."""
        with self._lock:
            self._shipped: dict[tuple[str, str, str, str], Mapping[str, KitProof]] = {}
            self._local: dict[Checked, dict[str, float]] = {}
            self._agreed: set[tuple[Checked, str]] = set()
            self._learnt = 0
            # Checks that found out nothing: calls to go, and after.
            self._open: dict[tuple[str, str], tuple[int, int]] = {}
            self.problems: dict[str, Reason] = {}

    # -- checks that found out nothing ----------------------------------------------------------------
    def waits(self, kernel: KernelSpec, ctx: Context) -> bool:
        """Whether such a call is too early for another check of this kernel. Asked once a call: each counts."""
        key = (kernel.kernel_id, kind_of(ctx))
        with self._lock:
            left, pause = self._open.get(key, (0, 1))
            self._open[key] = (max(left - 1, 0), pause)
        return left > 0

    def wait(self, kernel: KernelSpec, ctx: Context) -> None:
        """Let twice as many calls go by as before the last check."""
        key = (kernel.kernel_id, kind_of(ctx))
        with self._lock:
            pause = 2 * self._open.get(key, (0, 1))[1]
            self._open[key] = (pause, pause)

    # -- reading -------------------------------------------------------------------------------------
    def of_world(self, world: World) -> Proofs:
        """What a World with these backends is told. Those in a process of their own have the versions found there."""
        backends, enclosed = world.registry.backends, world.enclosed

        def of(kernel: KernelSpec, ctx: Context, grouped: bool) -> str | None:
            return self.proof(kernel, _versions(kernel, backends, enclosed), ctx, grouped)

        return Proofs(of, f"{self._learnt}")

    def proof(self, kernel: KernelSpec, backend: BackendSpec | None, ctx: Context, grouped: bool) -> str | None:
        """By what a kernel is proven for such calls, in words; None where it is not."""
        known = self._brought(kernel, backend, ctx.device, lambda kit: kit.covers(ctx), ctx.kind is OpKind.TOKENIZATION)
        if known is not None:
            return known
        who, kind = _who(kernel, backend, ctx.device), kind_of(ctx)
        if grouped:
            return "checked on every rank" if (who, kind) in self._agreed else None
        return "checked here" if kind in self._known(who) else None

    def _brought(
        self,
        kernel: KernelSpec,
        backend: BackendSpec | None,
        device: DeviceSpec,
        fits: Callable[[KitProof], bool],
        text: bool,
    ) -> str | None:
        """What vouches for a kernel before anybody has checked it: a kit's proof that fits, or where it comes from."""
        if backend is None:
            return None
        shipped = self._kit(backend, family_of(device)).get(kernel.kernel_id) if backend.proofs else None
        if shipped is not None and fits(shipped):
            return shipped.source
        if backend.builtin and backend.name in BASELINES:
            return "baseline"
        return "its own corpus" if text and normalized(backend.dist) == _TOKENIZERS else None

    def _kit(self, backend: BackendSpec, family: str) -> Mapping[str, KitProof]:
        vendor = f"{backend.vendor} {backend.vendor_version}" if backend.vendor else ""
        key = (backend.proofs, backend.version, vendor, family)
        found = self._shipped.get(key)
        if found is None:
            try:
                found = load_proofs(Path(backend.proofs), backend.name, backend.version, vendor, family)
            except CapabilitiesError as error:
                found = {}
                self.problems[backend.name] = reason("PROOF_INVALID", backend.name, str(error))
                _log.warning("%s", self.problems[backend.name])
            self._shipped[key] = found
        return found

    def _known(self, who: Checked) -> dict[str, float]:
        found = self._local.get(who)
        if found is None:
            kept = _disk()
            found = self._local[who] = {} if kept is None else kept.kinds(who)
            if kept is not None and kept.problem is not None:
                self.problems[FOLDER] = kept.problem
                _log.warning("checks of earlier processes are not believed: %s", kept.problem)
        return found

    def standing(self, kernel: KernelSpec, world: World, device: DeviceSpec) -> str | None:
        """By what a kernel is proven for some calls on a device, for lists; None where nothing vouches for it."""
        backend = _versions(kernel, world.registry.backends, world.enclosed)
        known = self._brought(kernel, backend, device, lambda kit: True, kernel.dtypes == _TEXT)
        return known or ("checked here" if self._known(_who(kernel, backend, device)) else None)

    # -- learning ------------------------------------------------------------------------------------
    def learn(self, kernel: KernelSpec, ctx: Context, error: float, *, agreed: bool = False) -> None:
        """A kernel was right for such a call: remembered here and on disk, and a new World says so."""
        if self._remember(state.world, kernel, ctx, error, agreed):
            self._publish()

    def tuned(self, ctx: Context, errors: Mapping[str, float]) -> None:
        """Tuning has held these kernels against the reference: as good as a check of their first use."""
        world = state.world
        if world.proofs is None:
            return
        kernels = [world.registry.kernels[name] for name in errors if name in world.registry.kernels]
        new = [kernel for kernel in kernels if world.proofs.of(kernel, ctx, False) is None]
        if [kernel for kernel in new if self._remember(world, kernel, ctx, errors[kernel.kernel_id], False)]:
            self._publish()

    def _remember(self, world: World, kernel: KernelSpec, ctx: Context, error: float, agreed: bool) -> bool:
        """Write it down; whether that changes anything."""
        who = _who(kernel, _versions(kernel, world.registry.backends, world.enclosed), ctx.device)
        kind = kind_of(ctx)
        with self._lock:
            known = self._known(who)
            new, more = kind not in known, agreed and (who, kind) not in self._agreed
            known[kind] = error
            if agreed:
                self._agreed.add((who, kind))
            self._learnt += new or more
        if new:
            kept = _disk()
            if kept is not None and not kept.add(who, kind, error) and kept.problem is not None:
                _log.warning("%s was checked, which cannot be remembered: %s", kernel.kernel_id, kept.problem)
        return new or more

    def _publish(self) -> None:
        with state.changing():
            if state.world.proofs is not None:
                state.publish(proofs=self.of_world(state.world))

    def error_of(self, kernel: KernelSpec, ctx: Context, world: World) -> float | None:
        """How far off the kernel was when it was checked here; None where it never was."""
        who = _who(kernel, _versions(kernel, world.registry.backends, world.enclosed), ctx.device)
        return self._known(who).get(kind_of(ctx))


def _disk() -> FirstUses | None:
    """The folder beside the quarantine; None where that is off."""
    file = place()
    return None if file is None else FirstUses(file.parent / FOLDER)


def _versions(
    kernel: KernelSpec, backends: Mapping[str, BackendSpec], enclosed: Mapping[str, BackendSpec]
) -> BackendSpec | None:
    return enclosed.get(kernel.backend) or backends.get(kernel.backend)


def _who(kernel: KernelSpec, backend: BackendSpec | None, device: DeviceSpec) -> Checked:
    """A kernel by all that its result may depend on: its package, the library it calls, torch, the kind of device."""
    package = "" if backend is None else backend.version
    vendor = "" if backend is None or not backend.vendor else f"{backend.vendor} {backend.vendor_version}"
    version = " ".join(filter(None, (kernel.version, package, vendor, f"torch {device.torch_version}")))
    return Checked(kernel.kernel_id, version, family_of(device))


proof_registry = ProofRegistry()
state.on_reset(proof_registry.forget)
