"""Runs the block of `lz demo` and looks closely: which kernel ran, is it right, how fast is it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.numerics import compare, tolerance
from layerzero.runtime.state import state
from layerzero.tuning.inputs import Call as Inputs
from layerzero.tuning.truth import reduction
from layerzero_tune.demo.block import Call, Model, PlainTorch, Recorder, sizes_for
from layerzero_tune.demo.stations import DECODE, PREFILL, Check, DecodeStep, Station, Stop, Tour
from layerzero_tune.draws import gate
from layerzero_tune.timing.race import race

TICKS = 3 + len(PREFILL) + len(DECODE)


def take(device: str | None, *, quick: bool, tick: Callable[[str], None]) -> Tour:
    """Run everything on `device` (the best one here when None). `tick` is called before each of TICKS stages."""
    began, cores = time.perf_counter(), os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = f"{load:.1f} on {cores} cores: times are rough" if load > 0.75 * cores else ""  # others used it already
    spec = DeviceSpec.detect(device)
    if spec.device_type == "meta":
        raise InvalidInputError(code="DEVICE_NOT_PRESENT", value="meta", limit="a device that computes")
    where = torch.device(spec.device_type if spec.device_type in ("cpu", "mps") else f"{spec.device_type}:{spec.index}")
    dtype = torch.bfloat16 if spec.device_type != "cpu" and spec.supports_bf16 else torch.float32
    sizes = sizes_for(spec.device_type, quick=quick)
    with torch.no_grad():
        tick("building the block")
        model = Model(sizes, where, dtype)
        tick("prefill")
        recorder = Recorder(lz)
        first, _ = _timed(model.prefill, recorder, sync=model.sync)
        tick("decoding")
        decode, agreement, step_calls, counters = _decode(model)
        new = [call for call in step_calls if call.op in {station.op for station in DECODE}]
        stops = []
        calls = [*zip(PREFILL, recorder.calls, strict=True), *zip(DECODE, new, strict=True)]
        for station, call in calls:
            tick(station.title)
            stops.append(_stop(station, call, model.sync, quick=quick))
        whole = _interleaved(
            {"lz": partial(model.prefill, lz), "torch": partial(model.prefill, PlainTorch)}, model.sync, quick=quick
        )
    return Tour(
        version=lz.__version__,
        device=spec,
        dtype=str(dtype).removeprefix("torch."),
        sizes=sizes,
        facts=_facts(spec, where, dtype, busy),
        stops=tuple(stops),
        decode=decode,
        decode_calls=len(step_calls) * len(decode),
        agreement=agreement,
        counters=counters,
        first_pass_us=first,
        lz_us=whole["lz"],
        torch_us=whole["torch"],
        seconds=time.perf_counter() - began,
    )


# -- decoding ------------------------------------------------------------------------------------
def _decode(model: Model) -> tuple[tuple[DecodeStep, ...], Check, list[Call], dict[str, int]]:
    """Decode with LayerZero and with plain torch, step by step in turn, and count what dispatch had to do."""
    ours, theirs = model.cache(), model.cache()
    generator, other = model.generator(), model.generator()
    ids = model.run(lz, ours, model.prompt, generator).token.unsqueeze(0)
    model.run(PlainTorch, theirs, model.prompt, other)
    recorder = Recorder(lz)
    ops: Any = recorder
    before, steps, agreement = state.counters.to_json(), [], []
    for _ in range(model.sizes.decode_steps):
        start = state.counters.selections
        lz_us, out = _timed(model.run, ops, ours, ids, generator, sync=model.sync)
        made = state.counters.selections - start
        torch_us, _ = _timed(model.run, PlainTorch, theirs, ids, other, sync=model.sync)
        steps.append(DecodeStep(ours.length, made, lz_us, torch_us))
        assert out.paged is not None and out.dense is not None
        bound = tolerance("paged_attention", out.paged.dtype)
        agreement.append(compare(out.paged, out.dense.squeeze(2), bound))
        ids = out.token.unsqueeze(0)
        ops = lz  # the first step is looked at; the rest run bare
    counters = {name: value - before[name] for name, value in state.counters.to_json().items()}
    worst = max(report.max_abs for report in agreement)
    how = f"paged and dense attention compared at each of {len(agreement)} steps"
    check = Check(all(report.ok for report in agreement), worst, how)
    return tuple(steps), check, recorder.calls, counters


# -- one station ---------------------------------------------------------------------------------
def _stop(station: Station, call: Call, sync: Callable[[], None], *, quick: bool) -> Stop:
    function = getattr(lz, call.op)
    report = lz.explain(call.op, *call.args, **call.kwargs)
    check = _check(call, report.context)
    contenders: dict[str, Callable[[], Any]] = {
        "": partial(function, *call.args, **call.kwargs),
        "torch": partial(getattr(PlainTorch, call.op), *call.args, **call.kwargs),
    }
    with _quiet():
        contenders["plan"] = partial(lz.plan(call.op, *call.args, **call.kwargs), *call.args, **call.kwargs)
        for item in report.candidates:
            if item.accepted and item.kernel_id != report.chosen:
                contender = partial(function, *call.args, **call.kwargs, backend=item.kernel_id)
                try:
                    contender()
                except LayerZeroError:
                    continue  # it fits on paper, but raised here: shown without a time
                contenders[item.kernel_id] = contender
        times = _interleaved(contenders, sync, quick=quick)
    lz_us, torch_us, plan_us = (times.pop(name) for name in ("", "torch", "plan"))
    seen = report.chosen, report.ran, tuple(report.candidates)
    shapes = ["×".join(map(str, item.shape)) for item in call.args if isinstance(item, Tensor) and item.ndim]
    shown = shapes[:1] if call.op in ("rms_norm", "add_rms_norm", "sample_topk", "sample_topp") else shapes[:3]
    return Stop(station, " · ".join(shown), *seen, check, lz_us, torch_us, times, plan_us)


def _check(call: Call, ctx: Context) -> Check:
    """Hold the op against its truth on the same inputs, by the gate that every tuned kernel passes."""
    spec = public_op(call.op)
    args, layout, _ = spec.normalize(call.args, call.kwargs)

    def run(*args: Any) -> Any:
        named = spec.keywords(args) if spec.keywords else dict(zip(spec.arguments, args, strict=False))
        return getattr(lz, call.op)(**named)

    with torch.random.fork_rng([]):
        verdict = gate(spec, ctx, lambda: Inputs(args, call.kwargs, layout)).check(None, run)
    bound = tolerance(call.op, ctx.dtype, k=reduction(args))
    if call.op.startswith("sample"):
        rule = "equal seeds give the reference's tokens, or all draws its distribution"
    else:
        rule = "must be equal" if bound.exact else f"may differ by {bound.atol:.0e} + {bound.rtol:.0e}·|x|"
    return Check(bool(verdict.ok), verdict.max_error, verdict.why or rule)


# -- time ----------------------------------------------------------------------------------------
def _timed(call: Callable[..., Any], *args: Any, sync: Callable[[], None]) -> tuple[float, Any]:
    """µs and result of one call, device included."""
    sync()
    start = time.perf_counter()
    out = call(*args)
    sync()
    return (time.perf_counter() - start) * 1e6, out


def _interleaved(
    contenders: dict[str, Callable[[], Any]], sync: Callable[[], None], *, quick: bool
) -> dict[str, float]:
    """Median µs per call. All take turns in each round, so that a slow moment of the machine hits them alike."""

    def clock(call: Callable[[], Any], count: int) -> float:
        def repeat() -> None:
            for _ in range(count):
                call()

        return _timed(repeat, sync=sync)[0] / count

    found = race(contenders, rounds=5 if quick else 31, clock=clock, warmup=1)
    return {name: item.median_us for name, item in found.times.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Timing the kernels that lost makes selections nobody asked for; keep them out of the log."""
    log = logging.getLogger("layerzero.selection")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


# -- the machine ---------------------------------------------------------------------------------
def _facts(spec: DeviceSpec, device: torch.device, dtype: torch.dtype, busy: str) -> tuple[tuple[str, str], ...]:
    features = sorted(spec.cpu_features) or sorted(spec.instruction_families)
    absent = [item.name for item in state.records if item.state != "ok"]
    facts = [
        ("device", f"{spec.name or spec.device_type} ({device})"),
        ("memory", f"{spec.memory_bytes / 2**30:.0f} GiB" if spec.memory_bytes else ""),
        ("compute capability", f"SM {spec.sm_version}" if spec.sm_version else ""),
        ("cores" if spec.device_type == "cpu" else "multiprocessors", str(spec.multiprocessors or "")),
        ("features", ", ".join(str(item) for item in features)),
        ("threads of torch", str(torch.get_num_threads()) if spec.device_type == "cpu" else ""),
        ("dtype of the block", str(dtype).removeprefix("torch.")),
        ("torch", str(torch.__version__)),
        ("CUDA", spec.cuda_version or ""),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("load before", busy),
        ("backends here", ", ".join(item.name for item in state.records if item.state == "ok")),
        ("not usable here", f"{', '.join(absent)} (lz doctor says why)" if absent else ""),
    ]
    return tuple((name, value) for name, value in facts if value)
