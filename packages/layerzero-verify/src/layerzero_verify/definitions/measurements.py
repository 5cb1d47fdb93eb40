"""flashinfer-bench traces as measurements: a definition's workload becomes the bucket of one of our calls.

What passed its check becomes a row with its time and error. The hardware of a trace is a name, not a signature, so such
rows are never this machine's own; on a device of the same family they rank kernels that are registered here.
"""

from __future__ import annotations

import datetime
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from layerzero._ops.signature import public_op
from layerzero.device.catalogue import named_device
from layerzero.dispatch.run import current_world, describe
from layerzero.errors import LayerZeroError
from layerzero.measurements.believed import mode_of, versions_of
from layerzero.model.context import Context
from layerzero.perfdb.measurement import Measurement, Platform, bucket_of
from layerzero_verify.definitions.adapters import adapter_for
from layerzero_verify.definitions.dataset import Dataset, open_dataset
from layerzero_verify.definitions.inputs import make_inputs
from layerzero_verify.definitions.trace import Status, Trace, read_traces

_LARGEST = 1 << 28  # elements of made-up inputs: their shapes are what is needed


class _Described(Exception):
    """Carries a context out of an adapter that believes it is calling an op."""

    def __init__(self, context: Context) -> None:
        self.context = context


def measurements_of(file: Path, root: Path | None) -> tuple[list[Measurement], list[str]]:
    """The traces of a file, or of a dataset's folder, as rows of a PerfDB; and what was left out."""
    dataset = open_dataset(root if root is not None else file if file.is_dir() else None)
    traces, problems = _traces(dataset, file)
    rows: list[Measurement] = []
    for trace in traces:
        try:
            row = _row(trace, dataset)
        except LayerZeroError as error:
            problems.append(f"{trace.definition}: {error}")
            continue
        if row is not None:
            rows.append(row)
    return rows, problems


def _traces(dataset: Dataset, file: Path) -> tuple[list[Trace], list[str]]:
    if not file.is_dir():
        good, bad = read_traces(file)
        return good, [str(item) for item in bad]
    found: list[Trace] = []
    problems: list[str] = []
    for definition in dataset.definitions.values():
        good, wrong = dataset.traces(definition)
        found += good
        problems += [str(item) for item in wrong]
    return found, problems


def _row(trace: Trace, dataset: Dataset) -> Measurement | None:
    evaluation = trace.evaluation
    if evaluation is None or trace.solution is None:
        return None
    if evaluation.status is not Status.PASSED or not evaluation.latency_ms > 0:
        return None
    definition = dataset.select((trace.definition,))[0]
    ctx = _context(trace, definition, dataset.root)
    world = current_world()
    spec = world.ops[ctx.op]
    versions = versions_of(world.registry, trace.solution)
    device = _device(evaluation.hardware)
    us = evaluation.latency_ms * 1e3
    libs, measured_at = evaluation.libs, 0.0
    with suppress(ValueError):
        measured_at = datetime.datetime.fromisoformat(evaluation.timestamp).timestamp()
    return Measurement(
        op=ctx.op,
        bucket=bucket_of(ctx, spec.growing),
        # Another author's solution keeps its name, under which no kernel is registered.
        kernel_id=trace.solution if versions is not None else f"flashinfer-bench.{ctx.op}.{trace.solution}",
        kernel_version=versions[0] if versions is not None else "",
        backend_version=versions[1] if versions is not None else str(libs.get("flashinfer-python", "")),
        platform=Platform(
            f"named:{evaluation.hardware}", device, "", str(libs.get("cuda", "")), str(libs.get("torch", ""))
        ),
        median_us=us, p95_us=us, p99_us=us, variance=0.0, samples=1,
        max_error=evaluation.max_absolute_error,
        mode=mode_of("cuda" if device.startswith("sm") else "cpu"),
        measured_at=measured_at,
    )  # fmt: skip


def _context(trace: Trace, definition: Any, root: Path) -> Context:
    adapter = adapter_for(definition)
    sizes = {**definition.const_axes, **trace.workload.axes}
    largest = max((math.prod(definition.shape(spec, sizes) or ()) for spec in definition.inputs.values()), default=0)
    if largest > _LARGEST:
        raise LayerZeroError(
            f"the workload {trace.workload.uuid} is too large to be described here", code="SHAPE_INVALID",
            value=largest, limit=_LARGEST,
        )  # fmt: skip

    def op(*args: Any, **kwargs: Any) -> Any:
        public = public_op(adapter.op)
        canonical, layout, backend = public.normalize(args, kwargs)
        raise _Described(describe(public, canonical, layout, backend, current_world()))

    try:
        with torch.no_grad():
            adapter.call(op, make_inputs(definition, trace.workload, "cpu", root=root))
    except _Described as found:
        return found.context
    raise LayerZeroError(f"{definition.name} calls no op", code="FEATURE_UNSUPPORTED", value=definition.op_type)


def _device(hardware: str) -> str:
    """The family of a device that is given by its marketing name."""
    for word in reversed(hardware.lower().replace("-", " ").split()):
        try:
            found = named_device(word)
        except LayerZeroError:
            continue
        if found.sm_version is not None:
            return f"sm{found.sm_version}"
    return f"named-{hardware}"
