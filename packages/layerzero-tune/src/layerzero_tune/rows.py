"""Rows of the PerfDB from what a trial found, and how the machine was meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from layerzero.measurements.believed import REFUSED, holding, mode_of, platform_of, versions_of
from layerzero.model.context import Context
from layerzero.perfdb.measurement import Measurement, Surroundings, bucket_of
from layerzero.perfdb.store import PerfDB
from layerzero.selection.world import World
from layerzero.tuning.truth import Verdict
from layerzero_tune.timing.baselines import TORCH_DEFAULT
from layerzero_tune.timing.host_load import BUSY, LIMIT
from layerzero_tune.timing.race import Times


def row(
    world: World, ctx: Context, kernel_id: str, found: Times, error: float | None, around: Surroundings
) -> Measurement | None:
    """What was measured of one kernel, or of torch's own code, which nobody selects and reports hold kernels against;
    None where its version is not known."""
    torch_version = ctx.device.torch_version or ""
    versions: tuple[str, str] | None = (torch_version, torch_version)
    if kernel_id != TORCH_DEFAULT:
        versions = versions_of(world.registry, kernel_id)
    if versions is None:
        return None
    return Measurement(
        op=ctx.op, bucket=bucket_of(ctx, world.ops[ctx.op].growing), kernel_id=kernel_id, kernel_version=versions[0],
        backend_version=versions[1], platform=platform_of(ctx.device), median_us=found.median_us,
        p95_us=found.p95_us, p99_us=found.p99_us, variance=found.steady, samples=found.samples, max_error=error,
        mode=mode_of(ctx.device.device_type, capturing=ctx.capturing), surroundings=around,
        measured_at=time.time(),
    )  # fmt: skip


def refused_row(
    world: World, ctx: Context, kernel_id: str, verdict: Verdict, around: Surroundings
) -> Measurement | None:
    """A row without a time: selection then rejects the kernel for such calls, whatever its author expects of it."""
    found = row(world, ctx, kernel_id, Times(1.0, 1.0, 1.0, 0.0, 1), 0.0, around)
    if found is None:
        return None
    return replace(found, mode=REFUSED, max_error=verdict.max_error if verdict.max_error > 0 else None)


def stored_row(world: World, ctx: Context, kernel_id: str, db: PerfDB) -> Measurement | None:
    """What was measured of a kernel in the bucket of a call, on this very platform; None where it was not."""
    mode = mode_of(ctx.device.device_type, capturing=ctx.capturing)
    bucket = bucket_of(ctx, world.ops[ctx.op].growing)
    return row_of(kernel_id, holding(db.find(ctx.op, bucket, mode), platform_of(ctx.device)), world)


def row_of(kernel_id: str, rows: Iterable[Measurement], world: World) -> Measurement | None:
    """The first of these rows that is of a kernel as it is now: of its version and its backend's."""
    versions = versions_of(world.registry, kernel_id)
    own = (item for item in rows if item.kernel_id == kernel_id)
    return next((item for item in own if versions == (item.kernel_version, item.backend_version)), None)


def surroundings(ctx: Context, stolen: float = 0.0, busy: float = 0.0) -> Surroundings:
    """How the machine is while measuring, as far as it says; `stolen` is the share of time its host gave to others,
    `busy` the share of its cores that other programs used."""
    disturbed = stolen > LIMIT or busy > BUSY
    if ctx.device.device_type != "cuda":
        from layerzero.device.memory import available_host_bytes

        free = available_host_bytes()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
        used = None if free is None or not total else min(1.0, max(0.0, 1.0 - free / total))
        return Surroundings(None, None, used, disturbed)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return Surroundings(
        _asked(torch.cuda.temperature), _asked(torch.cuda.power_draw, 1e-3), 1.0 - free_bytes / total_bytes,
        True if disturbed else _gpu_shared(),
    )  # fmt: skip


def _gpu_shared() -> bool | None:
    """Whether another process has something on this GPU; None where nobody says (an extra of torch's)."""
    try:
        listed = str(torch.cuda.list_gpu_processes())
    except Exception:
        return None
    count = sum(line.split()[:1] == ["process"] for line in listed.splitlines())
    return count > 1 if count else None  # this process is one of them


def _asked(question: Callable[[], Any], scale: float = 1.0) -> float | None:
    try:
        return float(question()) * scale
    except Exception:  # the management library is an extra of torch's
        return None
