"""What PerfDB holds, as measured cases: one for each bucket of calls, mode and device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerzero.device.probe import probe_devices
from layerzero.dispatch.run import current_world, decide
from layerzero.errors import LayerZeroError
from layerzero.measurements.believed import NOISE, REFUSED, TORCH_DEFAULT
from layerzero.model.context import Context
from layerzero.perfdb.measurement import Measurement, bucket_of
from layerzero.perfdb.store import PerfDB
from layerzero_tune.bench.contest import compete
from layerzero_tune.report.data import Measured, Timed
from layerzero_tune.timing.clock import RULES
from layerzero_tune.timing.race import leader

Ratios = Mapping[tuple[str, str], tuple[str, float]]
"""(op, bucket) -> a kernel, and how many times its time plain torch took beside it."""


def cases_of(db: PerfDB, beside: Ratios | None = None) -> list[Measured]:
    """Every bucket with at least one kernel that was held against the reference, the newest measurement of each.

    The database knows kernels only; `beside` says how plain torch did beside one of them (`torch_beside`).
    """
    groups: dict[tuple[str, str, str, str, int], list[Measurement]] = {}
    wrong: dict[tuple[str, str, str], dict[str, str]] = {}
    for item in sorted(db.all(), key=lambda item: item.measured_at):
        if item.mode == REFUSED:
            why = "raised" if item.max_error is None else f"wrong by {item.max_error:.1e}"
            wrong.setdefault((item.op, item.bucket, item.platform.device), {})[item.kernel_id] = why
        else:
            place = (item.platform.device, item.platform.threads)
            groups.setdefault((item.op, item.bucket, item.mode, *place), []).append(item)
    names = {spec.hardware_signature: spec.name or spec.device_type for spec in probe_devices()}
    found = [
        case
        for key, items in groups.items()
        if (case := _case(key, items, names, wrong.get((key[0], key[1], key[3]), {}), beside or {})) is not None
    ]
    return sorted(found, key=lambda case: (case.op, case.dtype, tuple(case.sizes.items()), case.mode))


def _case(
    key: tuple[str, str, str, str, int],
    items: Sequence[Measurement],
    names: Mapping[str, str],
    wrong: Mapping[str, str],
    beside: Ratios,
) -> Measured | None:
    op, bucket, mode, device, threads = key
    try:
        told = json.loads(bucket)
        sizes = {str(name): int(size) for name, size in told["sizes"].items()}
        when: dict[str, Any] = dict(told["when"])
    except (ValueError, KeyError, TypeError, AttributeError):  # of another version, or from another program
        return None
    newest = {item.kernel_id: item for item in items}
    kernels = {
        name: Timed(item.median_us, item.max_error)
        for name, item in newest.items()
        if item.max_error is not None and name != TORCH_DEFAULT
    }
    if not kernels:
        return None
    plain = newest[TORCH_DEFAULT].median_us if TORCH_DEFAULT in newest else None
    kernel, ratio = beside.get((op, bucket), ("", 0.0))
    if plain is None and kernel in kernels and mode.startswith("eager"):
        plain = ratio * kernels[kernel].us
    chosen = leader({name: item.us for name, item in kernels.items()}, NOISE)
    dtype, causal = str(when.get("dtype", "float32")), when.get("causal", "none") != "none"
    refused = {name: why for name, why in wrong.items() if name not in kernels}
    way, _, cache = mode.partition("/")
    rule = RULES.get(f"cuda/{way}" if way == "graph" or cache == "cold" else f"cpu/{way}", "")  # cold means a GPU
    place = names.get(device, device) + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")
    return Measured(
        _name(op, sizes, dtype, causal, when), op, dtype, sizes, place, mode, chosen, kernels,
        plain, None, refused, causal, any(item.surroundings.shared for item in newest.values()), rule,
    )  # fmt: skip


def torch_beside(
    contexts: Iterable[Context], db: PerfDB | None = None, seconds: float = 0.15
) -> dict[tuple[str, str], tuple[str, float]]:
    """Time plain torch beside what runs now, one short race a call; left out: no baseline, a device elsewhere, and
    calls for which the database has a time of it already."""
    here, world, found = {spec.hardware_signature for spec in probe_devices()}, current_world(), {}
    rows = [] if db is None else [item for item in db.all() if item.kernel_id == TORCH_DEFAULT]
    known = {(item.op, item.bucket) for item in rows if item.platform.device in here}
    for ctx in contexts:
        spec = world.ops.get(ctx.op)
        if spec is None or ctx.needs_grad or ctx.capturing or ctx.device.hardware_signature not in here:
            continue
        key = ctx.op, bucket_of(ctx, spec.growing)
        if key in found or key in known:
            continue
        try:
            outcome = compete("", ctx, seconds=seconds, least=5, only=[decide(spec, ctx, world).chosen], check=False)
        except (LayerZeroError, RuntimeError, NotImplementedError):  # too large for what is free now, for one
            continue
        if outcome.torch.us is not None and outcome.best:
            found[key] = (outcome.best, outcome.torch.us / outcome.times[outcome.best])
    return found


def _name(op: str, sizes: Mapping[str, int], dtype: str, causal: bool, when: Mapping[str, Any]) -> str:
    """A name to read: sizes that grow stand for everything up to them."""
    short = {"batch": "B", "seq_len_q": "Sq", "seq_len_k": "Sk", "head_dim": "D", "rows": "rows ", "hidden": "hidden "}
    words = [
        f"{short.get(name, name + ' ')}{size}"
        for name, size in sizes.items()
        if name not in ("num_heads", "num_kv_heads")
    ]
    if "num_heads" in sizes:
        words.append(f"H{sizes['num_heads']}/{sizes.get('num_kv_heads', sizes['num_heads'])}")
    more = [str(when[name]) for name in ("quant_format", "mask", "window") if when.get(name) not in (None, "none")]
    return " ".join([op, *words, dtype, *(["causal"] if causal else []), *more])
