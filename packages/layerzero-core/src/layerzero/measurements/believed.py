"""From stored measurements to what selection reads: believed here, weighed by how steady they were.

A measurement counts when kernel, backend, torch, driver, device and, on a CPU, the number of threads are the very ones
of this process; one of before threads were written down, where torch uses as many as by itself. Where a bucket
has none of those, devices of the same family say which kernel is faster than which, at half their weight: a ranking,
no times. A time with a wide spread moves towards the middle of its bucket, by no more than that spread; one that is all
spread says nothing, unless its slowest is ahead of everybody. Times that cannot be told from the fastest, by their own
spread, count as equal to it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from layerzero.device.memory import text_of
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.perfdb.measurement import NO_TRUST, Measurement, Platform, alike, bucket_of, median_error, weight
from layerzero.perfdb.store import PerfDB
from layerzero.reasons import Reason, reason
from layerzero.registry.kernels import KernelRegistry
from layerzero.selection.world import Measurements, World

TORCH_DEFAULT = "torch.default"
"""The name under which times of torch's own code are kept; no kernel can bear it, since kernel ids have three parts."""
REFUSED = "refused"  # the mode of a row that holds no time: this kernel was wrong here, or raised
NOISE = 0.0125  # inside this band two kernels are equally fast, and their names decide
_SIMILAR = 0.5  # weight of a measurement from another device of the family
_SPREADS = 2.0  # a time is moved by no more: nearly all calls took less than that


def platform_of(device: DeviceSpec) -> Platform:
    """The platform that measurements taken on this device, now, belong to."""
    sm = device.sm_version
    family = f"{device.device_type}-{device.vendor}" if sm is None else f"sm{sm}"
    runtime = device.cuda_version or device.rocm_version or ""
    threads = _threads() if device.device_type == "cpu" else 0
    return Platform(
        device.hardware_signature, family, device.driver_version or "", runtime, device.torch_version or "", threads
    )


def _threads() -> int:
    import torch  # loaded long since, wherever something is measured or selected

    return torch.get_num_threads()


@lru_cache(maxsize=1)
def usual_threads() -> frozenset[int]:
    """How many threads torch may use on this machine where nobody says: one for each core, or each half of one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    halves = text_of("/sys/devices/system/cpu/smt/active").strip() == "1"
    return frozenset({count, max(1, count // 2)} if halves else {count})


def same_platform(theirs: Platform, ours: Platform) -> bool:
    """Whether times taken there hold here; a time without a number of threads was taken with torch's usual one."""
    if theirs.threads == ours.threads:
        return theirs == ours
    return theirs.threads == 0 and theirs[:-1] == ours[:-1] and ours.threads in usual_threads()


def versions_of(registry: KernelRegistry, kernel_id: str) -> tuple[str, str] | None:
    """(kernel version, backend version) as a measurement names them; None for a kernel that is not registered."""
    kernel = registry.kernels.get(kernel_id)
    if kernel is None:
        return None
    backend = registry.backends.get(kernel.backend)
    vendor = "" if backend is None else backend.vendor_version or backend.version
    return kernel.version, vendor


def mode_of(device_type: str, *, capturing: bool = False) -> str:
    """How a call is measured: eager calls on a CPU follow each other, on a GPU other ops empty the cache between them.

    A call that is captured into a graph costs no host time, so its times are kept apart.
    """
    cache = "hot" if device_type == "cpu" else "cold"
    return f"{'graph' if capturing else 'eager'}/{cache}"


def measurements_from(db: PerfDB, world: World) -> Measurements:
    """What a database says to this World. Buckets are read once, when a selection first asks for one."""
    import torch

    ops, registry, count_threads = world.ops, world.registry, torch.get_num_threads

    @cache
    def believed(op: str, bucket: str, platform: Platform, mode: str) -> Believed:
        return judged(db.find(op, bucket, mode, REFUSED), platform, lambda name: versions_of(registry, name))

    # By the call itself: one selection asks for every kernel of the op, and spelling a bucket takes microseconds.
    @lru_cache(maxsize=4096)
    def by_call(ctx: Context, threads: int) -> Believed:
        spec = ops.get(ctx.op)
        bucket = bucket_of(ctx, () if spec is None else spec.growing)
        mode = mode_of(ctx.device.device_type, capturing=ctx.capturing)
        return believed(ctx.op, bucket, platform_of(ctx.device), mode)

    def ask(ctx: Context) -> Believed:
        return by_call(ctx, count_threads())

    return Measurements(
        lambda kernel_id, ctx: ask(ctx).times.get(kernel_id),
        _fingerprint(db),
        NOISE,
        lambda ctx: ask(ctx).notes,
        lambda kernel_id, ctx: ask(ctx).refused.get(kernel_id),
    )


def _fingerprint(db: PerfDB) -> str:
    """Changes with every write, and with the threads of torch: a decision made before is not one made after."""
    try:
        found = db.path.stat()
    except OSError:
        return ""
    text = f"{db.path}:{found.st_mtime_ns}:{found.st_size}:{found.st_ino}:{db.ttl_s}:{_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Believed(NamedTuple):
    """Times in µs by kernel id, and what else was found and why it does not count."""

    times: Mapping[str, float] = MappingProxyType({})
    notes: tuple[Reason, ...] = ()
    refused: Mapping[str, Reason] = MappingProxyType({})


def judged(items: list[Measurement], platform: Platform, versions: Callable[[str], tuple[str, str] | None]) -> Believed:
    """The rows of one bucket: which count here, as times or as a ranking, and why the others do not."""
    fitting: list[Measurement] = []
    doubts: Counter[str] = Counter()
    refused: dict[str, Reason] = {}
    wild: list[Measurement] = []
    for item in items:
        if item.kernel_id == TORCH_DEFAULT:  # no kernel: what the others were held against
            continue
        if item.mode == REFUSED:
            own_build = versions(item.kernel_id) == (item.kernel_version, item.backend_version)
            if own_build and _same_machine(item.platform, platform):
                refused[item.kernel_id] = _refusal(item)
            continue
        doubt = _doubt(item, versions(item.kernel_id))
        if doubt is None and item.spread >= NO_TRUST:
            wild.append(item)
        elif doubt is None:
            fitting.append(item)
        else:
            doubts[doubt] += 1
    mine = holding([*fitting, *wild], platform)
    here = [item for item in fitting if item in mine]
    # A time too wide to be believed that is ahead of all others even at its slowest: calls of a microsecond on a busy
    # machine. Left out, the kernel would lose to one of many times its length.
    first = min((item.median_us for item in here), default=0.0)
    ahead = [item for item in wild if item in mine and item.p95_us < first]
    for item in wild:
        if item not in ahead:
            doubts[_unsteady(item)] += 1
    here += [replace(item, median_us=item.p95_us, variance=0.0) for item in ahead]
    own = [(item.kernel_id, us, weight(item)) for item, us in zip(here, _levelled(here), strict=True)]
    spreads = {item.kernel_id: item.spread for item in here}
    similar: dict[Platform, list[Measurement]] = {}
    for item in fitting:
        if not same_platform(item.platform, platform):
            doubts[_difference(item.platform, platform)] += 1
            # The same machine with other threads ranks nothing: what uses them well there may be the slower one here.
            if item.platform.family == platform.family and not _same_machine(item.platform, platform):
                similar.setdefault(item.platform, []).append(item)
    notes = [reason("PERF_NOT_BELIEVED", count, why) for why, count in sorted(doubts.items())]
    if own or not similar:
        return Believed(_weighed(own, spreads), tuple(notes), refused)
    # The device that knows most kernels ranks them; times of two devices are not comparable.
    best = max(similar.values(), key=lambda found: (len(found), max(item.measured_at for item in found)))
    ranked = _weighed([(item.kernel_id, item.median_us, _SIMILAR * weight(item)) for item in best])
    notes.append(reason("PERF_RANKED_BY", best[0].platform.device, platform.family))
    return Believed(ranked, tuple(notes), refused)


def _same_machine(theirs: Platform, ours: Platform) -> bool:
    """Whether two platforms differ in their threads at most."""
    return theirs[:-1] == ours[:-1]


def holding(items: list[Measurement], platform: Platform) -> list[Measurement]:
    """Those whose times hold on this platform; of a kernel with a time for the threads of now, no older one."""
    known = {item.kernel_id for item in items if item.platform == platform}
    return [
        item
        for item in items
        if item.platform == platform or (item.kernel_id not in known and same_platform(item.platform, platform))
    ]


def _levelled(items: list[Measurement]) -> list[float]:
    """Medians in order; one inside the noise band of the fastest, by the spread of both, is the fastest's."""
    steady = [item for item in items if weight(item) > 0.0]
    if not steady:
        return [item.median_us for item in items]
    best = min(steady, key=lambda item: (item.median_us, item.kernel_id))
    best_error = median_error(best.variance, best.samples)
    level = []
    for item in items:
        error = median_error(item.variance, item.samples)
        same = alike(best.median_us, best_error, item.median_us, error, 0.0)
        level.append(best.median_us if same else item.median_us)
    return level


def _refusal(item: Measurement) -> Reason:
    """What the parity gate found: wrong by so much, or not able to run at all."""
    if item.max_error is None:
        return reason("KERNEL_RAISED", "when it was tuned")
    return reason("NUMERICS_MISMATCH", f"{item.max_error:.3g} (found by lz tune)", "the tolerance of the op")


def _doubt(item: Measurement, here: tuple[str, str] | None) -> str | None:
    """Why a row says nothing about the kernel of this process."""
    if item.max_error is None:
        return f"{item.kernel_id} was never compared with the reference"
    if here is None:
        return f"{item.kernel_id} is not registered here"
    if here != (item.kernel_version, item.backend_version):
        return f"{item.kernel_id} was {item.kernel_version} ({item.backend_version}), here it is {here[0]} ({here[1]})"
    return None


def _unsteady(item: Measurement) -> str:
    return f"the times of {item.kernel_id} spread as wide as they are long"


def _difference(theirs: Platform, ours: Platform) -> str:
    """The first thing in which two platforms differ."""
    for name in ("device", "driver", "runtime", "torch", "family", "threads"):
        left, right = getattr(theirs, name), getattr(ours, name)
        if left != right:
            return f"{name} {left or 'unknown'}, here {right or 'unknown'}"
    return "the same platform"


def _weighed(found: list[tuple[str, float, float]], spreads: Mapping[str, float] | None = None) -> dict[str, float]:
    """Each time moved towards the middle, the further the less it is trusted, at most by so many of its spreads.

    Without that bound a kernel three times as fast as the next, of unsteady times, would end up behind it. Those that
    count as equally fast stay so: which of them was the steadier one that day must not decide.
    """
    trusted = [(name, us, trust) for name, us, trust in found if trust > 0.0]
    if not trusted:
        return {}
    total = sum(trust for _, _, trust in trusted)
    middle = sum(trust * math.log(us) for _, us, trust in trusted) / total
    told: dict[str, float] = {}
    for name, us, trust in trusted:
        moved = (1.0 - trust) * (middle - math.log(us))
        if spreads is not None:
            most = math.log1p(_SPREADS * spreads[name])
            moved = max(-most, min(most, moved))
        told[name] = us * math.exp(moved)
    least = min(us for _, us, _ in trusted)
    level = [name for name, us, _ in trusted if us == least]
    return told | dict.fromkeys(level, min(told[name] for name in level))


def doubt_of(item: Measurement, world: World) -> str | None:
    """Why a row does not count in this process; None where it does. For listings."""
    if item.kernel_id == TORCH_DEFAULT:
        return "torch's own code, which kernels are held against"
    if item.mode == REFUSED:
        return f"refused: {_refusal(item).message}"
    doubt = _doubt(item, versions_of(world.registry, item.kernel_id))
    if doubt is None and item.spread >= NO_TRUST:
        doubt = f"{_unsteady(item)}, unless even its slow calls beat all others"
    if doubt is not None:
        return doubt
    from layerzero.device.probe import probe_devices

    here = [platform_of(device) for device in probe_devices()]
    if any(same_platform(item.platform, platform) for platform in here):
        return None
    same = [platform for platform in here if platform.family == item.platform.family]
    return _difference(item.platform, (same or here)[0])
