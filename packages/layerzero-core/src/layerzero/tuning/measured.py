"""From stored measurements to what selection reads: believed here, weighed by how steady they were.

A measurement counts when kernel, backend, torch, driver and device are the very ones of this process. Where a bucket
has none of those, devices of the same family say which kernel is faster than which, at half their weight: a ranking,
no times. A time with a wide spread moves towards the middle of its bucket, one that is all spread says nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.perfdb.bucket import bucket_of
from layerzero.perfdb.measurement import Measurement, Platform, weight
from layerzero.perfdb.store import PerfDB
from layerzero.registry.kernels import KernelRegistry
from layerzero.selection.world import Measurements, World

__all__ = ["measurements_from", "platform_of", "versions_of"]

_SIMILAR = 0.5  # weight of a measurement from another device of the family


def platform_of(device: DeviceSpec) -> Platform:
    """The platform that measurements taken on this device belong to."""
    if device.sm_version is not None:
        family = f"sm{device.sm_version}"
    else:
        family = f"{device.device_type}-{device.vendor}"
    runtime = device.cuda_version or device.rocm_version or ""
    return Platform(device.hardware_signature, family, device.driver_version or "", runtime, device.torch_version or "")


def versions_of(registry: KernelRegistry, kernel_id: str) -> tuple[str, str] | None:
    """(kernel version, backend version) as a measurement names them; None for a kernel that is not registered."""
    kernel = registry.kernels.get(kernel_id)
    if kernel is None:
        return None
    backend = registry.backends.get(kernel.backend)
    vendor = "" if backend is None else backend.vendor_version or backend.version
    return kernel.version, vendor


def measurements_from(db: PerfDB, world: World, *, mode: str = "eager/hot", noise: float = 0.02) -> Measurements:
    """What a database says to this World. Buckets are read once, when a selection first asks for one."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}

    def lookup(kernel_id: str, ctx: Context) -> float | None:
        spec = world.ops.get(ctx.op)
        bucket = bucket_of(ctx, () if spec is None else spec.elastic)
        platform = platform_of(ctx.device)
        key = (ctx.op, bucket, platform.device)
        if key not in times:
            times[key] = believed(
                db.find(ctx.op, bucket, mode), platform, lambda name: versions_of(world.registry, name)
            )
        return times[key].get(kernel_id)

    return Measurements(lookup, _fingerprint(db), noise)


def _fingerprint(db: PerfDB) -> str:
    """Changes with every write: a decision made before is not one made after."""
    try:
        found = db.path.stat()
    except OSError:
        return ""
    text = f"{db.path}:{found.st_mtime_ns}:{found.st_size}:{found.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def believed(
    items: list[Measurement], platform: Platform, versions: Callable[[str], tuple[str, str] | None]
) -> dict[str, float]:
    """Times in µs by kernel id: of this platform, else relative ones of the family."""
    fitting = [
        item
        for item in items
        # One that was never compared with the reference, or is of another build, says nothing about this kernel.
        if item.max_error is not None and versions(item.kernel_id) == (item.kernel_version, item.backend_version)
    ]
    own = [(item.kernel_id, item.median_us, weight(item)) for item in fitting if item.platform == platform]
    if own:
        return _weighed(own)
    similar: dict[str, list[Measurement]] = {}
    for item in fitting:
        if item.platform.family == platform.family:
            similar.setdefault(item.platform.device, []).append(item)
    if not similar:
        return {}
    # The device that knows most kernels ranks them; times of two devices are not comparable.
    best = max(similar.values(), key=lambda found: (len(found), max(item.measured_at for item in found)))
    return _weighed([(item.kernel_id, item.median_us, _SIMILAR * weight(item)) for item in best])


def _weighed(found: list[tuple[str, float, float]]) -> dict[str, float]:
    trusted = [(name, us, trust) for name, us, trust in found if trust > 0.0]
    if not trusted:
        return {}
    total = sum(trust for _, _, trust in trusted)
    middle = sum(trust * math.log(us) for _, us, trust in trusted) / total
    return {name: math.exp(middle + trust * (math.log(us) - middle)) for name, us, trust in trusted}
