"""Measurements that came with the packages: how long kernels took beside torch's own code on machines of ours.

`measurements.json` beside a backend's descriptor, written by `tools/shipped.py` from what `benchmarks/factory.py` took:

    {"schema_version": "1.0", "backend": "acme", "families": {"sm90": {
         "device": "NVIDIA H200", "commit": "0123abc", "taken": "2026-11-17", "version": "1.2.0", "vendor": "3.1",
         "torch": "2.11.0", "threads": 0, "capped": "", "busy": 0.01,
         "groups": [{"op": "rms_norm", "kind": "float16", "axes": ["rows", "hidden"], "kernels": ["acme.rms_norm.fast"],
                     "errors": [0.001], "points": [[16, 4096, 278528, 262144, 10.2, 0.51]]}],
         "graphs": […]}},
     "hash": "sha256 of everything else"}

A point is the sizes, bytes and operations of a call, the µs of torch's own code, and each kernel's time over that; a
kernel without one (null) was wrong, raised or could not run. Every kernel was held against the reference before it was
timed; `errors` are the largest errors, null where they were not kept. `graphs` holds the same for calls in a replayed
CUDA graph, where a launch costs the host nothing: of the calls shorter than SHORT_US, longer ones take what they take.
`capped` names the variable that kept the
processor from its instructions, `busy` is the share of the cores that other programs used meanwhile.

A file is read when a call is selected for which nothing was measured here. It counts for the very version of the
backend and its vendor, and for the family of devices; on other devices of the platform the rates its kernels reached
count (`between`). A file that is not right counts for nothing and is named with the reason; it never raises.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.device.signature import family_of
from layerzero.errors import CapabilitiesError, from_outside
from layerzero.measurements.between import Estimate, Kind, Point
from layerzero.model.context import Context
from layerzero.model.decision import ROOFLINE, SHIPPED, Expectation
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.model.situation import words_of
from layerzero.reasons import Reason, reason
from layerzero.registry.kernels import KernelRegistry
from layerzero.registry.kinds import decoded, read
from layerzero.registry.proofs import sealed

SCHEMA_VERSION = "1.0"
_log = logging.getLogger("layerzero.perfdb")
_CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
# Expected times that differ by less are the same; where other programs used the machine meanwhile, by much less certain
# ones: left out one by one, calls were told with a median error of a tenth and of a half.
_NOISE, _BUSY_NOISE = 0.03, 0.5
_BUSY = 0.1  # share of the cores that others used
_BEHIND = 1.05  # more than the noise, inside which names decide
_HALVES = frozenset({"float16", "bfloat16"})
_GQA, _CAUSAL, _ATTENTION = "gqa", "causal_top_left", "attention"
# Octaves between calls with such a word and those without it, where too few of the same kind were measured.
_LIKE, FEW, _GQA_IN_FLOAT32 = {_GQA: 2.0, _CAUSAL: 1.0}, 8, 4.0
SHORT_US = 50.0
"""Calls that torch's own code takes less for are measured in graphs too."""
Kinds = Mapping[tuple[str, str], tuple[tuple[str, ...], tuple[Point, ...]]]

Told = tuple[Mapping[str, Expectation], tuple[Reason, ...]]


class Family(NamedTuple):
    """What one backend's file holds of one family of devices. `kinds`: (op, kind of call) → axes and points, `graphs`
    those of calls in graphs."""

    name: str
    device: str
    commit: str
    version: str
    vendor: str
    torch: str
    capped: str
    threads: int
    busy: float
    kinds: Kinds
    graphs: Kinds

    @property
    def calls(self) -> int:
        return sum(len(points) for _, points in self.kinds.values())


def instruction_cap() -> str:
    """The variable that keeps torch on this processor from its newest instructions, as NAME=value; else empty."""
    return next((f"{name}={os.environ[name]}" for name in _CAPS if os.environ.get(name)), "")


def load(path: str) -> Mapping[str, Family] | Reason:
    """The families of a file, or why it counts for nothing. Read once, and again when it has changed."""
    try:
        found = os.stat(path)
    except OSError as error:
        return reason("PERF_SHIPPED_INVALID", Path(path).name, error.strerror)
    return _loaded(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=256)
def _loaded(path: str, changed: int, size: int) -> Mapping[str, Family] | Reason:
    try:
        document = decoded(read(Path(path)))
        if document.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version {document.get('schema_version')!r} is not known")
        if sealed(document)["hash"] != document.get("hash"):
            raise ValueError("the hash does not fit the content")
        return {name: _family(name, entry, document["backend"]) for name, entry in document["families"].items()}
    except (CapabilitiesError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = reason("PERF_SHIPPED_INVALID", Path(path).parent.name, f"{error}".splitlines()[0][:200])
        _log.warning("%s", why)
        return why


def _family(name: str, entry: Mapping[str, Any], backend: str) -> Family:
    kinds, graphs = (_kinds(groups, backend) for groups in (entry["groups"], entry.get("graphs", ())))
    told = {key: str(entry[key]) for key in ("device", "commit", "version", "vendor", "torch", "capped")}
    return Family(name, **told, threads=int(entry["threads"]), busy=float(entry["busy"]), kinds=kinds, graphs=graphs)


def _kinds(groups: Sequence[Mapping[str, Any]], backend: str) -> Kinds:
    kinds = {}
    for group in groups:
        axes, names, dtype = tuple(group["axes"]), tuple(group["kernels"]), group["kind"].partition(" ")[0]
        strangers = [item for item in names if not item.startswith(f"{backend}.")]
        if strangers:
            raise ValueError(f"{strangers[0]} is no kernel of {backend}")
        points = []
        for row in group["points"]:
            sizes, (moved, flops, base_us, *ratios) = tuple(map(int, row[: len(axes)])), row[len(axes) :]
            times = {item: float(at) for item, at in zip(names, ratios, strict=True) if at is not None}
            if not all(0.0 < value < float("inf") for value in (base_us, *times.values())) or min(moved, flops) < 0:
                raise ValueError(f"a time of {group['op']} is not a time: {row}")
            points.append(Point(sizes, dtype, float(moved), float(flops), float(base_us), times))
        kinds[group["op"], group["kind"]] = (axes, tuple(points))
    return kinds


def standing(backend: BackendSpec, family: str) -> tuple[Family | None, Reason | None]:
    """What a backend's file says of a family of devices, or of another of the platform with the reason why not.

    (None, None): it ships nothing for such devices. (None, reason): nothing of it may be used.
    """
    if not backend.measurements:
        return None, None
    families = load(backend.measurements)
    if isinstance(families, Reason):
        return None, families
    alike = [name for name in families if _platform(name) == _platform(family)]
    if not alike:
        return None, None
    found = families[min(alike, key=lambda name: (name != family, _apart(name, family), name))]
    theirs, ours = (found.version, found.vendor), (backend.version, backend.vendor_version or "")
    if theirs != ours:
        return None, reason("PERF_SHIPPED_VERSION", backend.name, f"{_spelled(theirs)}, here {_spelled(ours)}")
    cap = instruction_cap() if _platform(family) == "cpu" else ""
    if found.name != family or found.capped != cap:
        theirs_, ours_ = (f"{name} {capped}".strip() for name, capped in ((found.name, found.capped), (family, cap)))
        return found, reason("PERF_SHIPPED_DEVICE", backend.name, f"{theirs_}, this one is {ours_}")
    return found, None


def _spelled(versions: tuple[str, str]) -> str:
    return " with ".join(filter(None, versions))


def _platform(family: str) -> str:
    """ "sm", "gfx" or "cpu": the letters that a family begins with."""
    return family[: next((n for n, letter in enumerate(family) if not letter.isalpha()), len(family))]


def _apart(one: str, other: str) -> int:
    """How many numbers lie between two families: sm89 is nearer to sm90 than sm75."""
    numbers = [int("".join(letter for letter in name if letter.isdigit()) or 0) for name in (one, other)]
    return abs(numbers[0] - numbers[1])


def shipped_by(registry: KernelRegistry, ops: Mapping[str, Any]) -> Callable[[Context, Sequence[str]], Told]:
    """What selection asks: what is expected of kernels for a call, and which files were refused."""
    pools: dict[Any, _Pool] = {}

    def ask(ctx: Context, names: Sequence[str]) -> Told:
        known = [registry.kernels[name] for name in names if name in registry.kernels]  # others came while it runs
        backends = tuple(sorted({kernel.backend for kernel in known} & registry.backends.keys()))
        key = (ctx.op, ctx.dtype, words_of(ctx), ctx.capturing, ctx.device, backends)
        pool = pools.get(key)
        if pool is None:
            pool = pools[key] = _pool(ctx, key[2], [registry.backends[name] for name in backends])
        sizes = dict(ctx.dims)
        if pool.kind is None or sizes.keys() != set(pool.axes):
            return {}, pool.refused
        here, cost = [sizes[axis] for axis in pool.axes], _cost(ops.get(ctx.op), ctx)
        found = free_first(pool.kind.estimates(names, here, ctx.dtype, cost, pool.near), registry.kernels)
        return {name: _expectation(estimate, pool.axes) for name, estimate in found.items()}, pool.refused

    return ask


def free_first(found: Mapping[str, Estimate], kernels: Mapping[str, KernelSpec]) -> dict[str, Estimate]:
    """Kernels that run any batch by one schedule are expected behind those of their backend that may choose one.

    Of 916 measured calls that both ran, on four machines, the former was a tenth faster in eight; between measured
    calls it was expected to be more often.
    """
    free: dict[str, float] = {}
    for name, item in found.items():
        if not kernels[name].batch_invariant:
            free[kernels[name].backend] = min(item.ratio, free.get(kernels[name].backend, math.inf))
    return {
        name: item._replace(ratio=max(item.ratio, _BEHIND * free.get(kernels[name].backend, 0.0)))
        if kernels[name].batch_invariant
        else item
        for name, item in found.items()
    }


def _cost(op: Any, ctx: Context) -> tuple[float, float]:
    """Bytes and operations of a call; of an op that does not say, or cannot, nothing: sizes alone then count."""
    try:
        return (0.0, 0.0) if getattr(op, "cost", None) is None else op.cost(ctx)
    except Exception as error:
        if from_outside(error):
            raise
        return 0.0, 0.0


def together(op: str, dtype: str, words: frozenset[str], device: str, measured: Mapping[str, int]) -> dict[str, float]:
    """Kinds whose calls are interpolated together, and how many octaves away the others lie.

    On accelerators the two half precisions are one, and of attention in them GQA is seen in the sizes alone; in float32
    and for pages torch's own code is another one for GQA. Attention of which few calls were `measured` is told from
    kinds like it, too.
    """
    dtypes = _HALVES if dtype in _HALVES and device != "cpu" else (dtype,)

    def kinds(found: frozenset[str], octaves: float = 0.0) -> dict[str, float]:
        return {" ".join((name, *sorted(found))): octaves for name in dtypes}

    own = kinds(words)
    if op != _ATTENTION:
        return own
    if sum(measured.get(kind, 0) for kind in own) >= FEW:
        return own if device == "cpu" else own | kinds(words ^ {_GQA}, 0.0 if dtype in _HALVES else _GQA_IN_FLOAT32)
    for swapped in ({_GQA}, {_CAUSAL}, {_GQA, _CAUSAL}):
        own |= kinds(words ^ swapped, math.hypot(*(_LIKE[word] for word in swapped)))
    return own


class _Pool(NamedTuple):
    """The measured calls that one kind of call is told from; `near`: taken on its family of devices."""

    kind: Kind | None
    axes: tuple[str, ...]
    near: bool
    refused: tuple[Reason, ...]


def _pool(ctx: Context, words: frozenset[str], backends: Sequence[BackendSpec]) -> _Pool:
    """The points of all backends, those of one measured call put together; of another family only if none has ours.

    For calls in a graph the short ones count as they were measured in one, and long ones as they were measured eagerly.
    """
    op, stood = ctx.op, [standing(backend, family_of(ctx.device)) for backend in backends]
    notes = [why for _, why in stood if why is not None]
    known = [(found, why is None) for found, why in stood if found is not None]
    measured = {key[1]: len(points) for found, _ in known for key, (_, points) in found.kinds.items() if key[0] == op}
    groups: dict[bool, list[tuple[Family, tuple[str, ...], str, Point]]] = {True: [], False: []}
    for kind, apart in sorted(together(op, ctx.dtype, words, ctx.device.device_type, measured).items()):
        for found, ours in known:
            axes, points = found.kinds.get((op, kind), ((), ()))
            if ctx.capturing and found.graphs:
                axes, short = found.graphs.get((op, kind), (axes, ()))
                points = (*short, *(point for point in points if point.base_us >= SHORT_US))
            groups[ours] += [(found, axes, kind, point._replace(apart=apart)) for point in points]
    near = bool(groups[True])
    merged: dict[Any, Point] = {}
    order = groups[near][0][1] if groups[near] else ()
    for found, axes, kind, point in groups[near]:
        if axes != order:
            continue
        key = (found.device, found.commit, kind, point.sizes)
        before = merged.get(key, point)
        taken = (found.device, found.commit, found.torch)
        noise = _NOISE if found.busy <= _BUSY else _BUSY_NOISE
        merged[key] = point._replace(ratios={**before.ratios, **point.ratios}, source=taken, noise=noise)
    return _Pool(Kind(tuple(merged.values()), order) if merged else None, order, near, tuple(_together(notes)))


def _together(notes: Sequence[Reason]) -> list[Reason]:
    """One note for all backends that were refused for the same reason."""
    names: dict[tuple[Any, Any], list[str]] = {}
    for note in notes:
        names.setdefault((note.code, note.limit), []).append(str(note.value))
    return [reason(code, ", ".join(sorted(found)), limit) for (code, limit), found in names.items()]


def _expectation(found: Estimate, axes: tuple[str, ...]) -> Expectation:
    device, commit, torch = found.nearest.source
    nearest = tuple(zip(axes, found.nearest.sizes, strict=True))
    source = SHIPPED if found.near else ROOFLINE
    noise = found.nearest.noise
    return Expectation(found.ratio, found.base_us, source, device, commit, torch, nearest, found.octaves, noise)
