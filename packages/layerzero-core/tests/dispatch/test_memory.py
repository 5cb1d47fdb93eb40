"""Memory: what kernels are said to take is what they take, and nothing is chosen that does not fit."""

from __future__ import annotations

import os
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.dispatch.adapt import adapt
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world, describe
from layerzero.errors import KernelExecutionError, NoKernelFoundError
from layerzero.health.breaker import BreakerPhase
from layerzero.model.formula import Formula
from layerzero.runtime import pressure as pressing
from layerzero.runtime.pressure import Levels, level, pressure
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.memory import estimate, leaner
from layerzero_verify.testing.cases import GROUPS, cases_of, load_cases
from layerzero_verify.testing.kit import Kit
from layerzero_verify.testing.run import call, context
from tools.peak_memory import measured_peak, result_bytes

X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
MIB = 1 << 20

# Index tensors, flags and the like, which no formula counts.
SMALL_CHANGE = 16 * 1024
PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
BUILT_IN = ("reference", "sdpa", "torch_native")


# -- estimates against measured peaks ---------------------------------------------------------------
def taken_and_declared(backend: str, kind: str) -> tuple[list[str], set[str], list[str]]:
    """Kernels of a backend over what they declare, those measured, and those that declare nothing."""
    load_cases()
    kit = Kit.open(f"layerzero.backends.{backend}.plugin" if backend in BUILT_IN else backend)
    over, looked, silent = [], set(), []
    for spec in kit.kernels:
        found = kit.device_for(spec)
        if isinstance(found, str) or found[0].type != kind:
            continue
        if spec.workspace is None:
            silent.append(spec.kernel_id)
            continue
        groups = [g for name in GROUPS for g in GROUPS[name] if g.op == spec.op and g.requires <= spec.features]
        for case in (case for group in groups for case in list(cases_of(group, spec))[: 3 if PROVE else 1]):
            args = case.arguments(found[0])
            ctx = context(kit, case, args)
            if spec.check(ctx):
                continue
            with torch.no_grad():
                if kind == "cuda":
                    call(kit, case, args)  # libraries take a workspace of their own, once
                out, peak = measured_peak(lambda case=case, args=args: call(kit, case, args), kind)
            looked.add(spec.kernel_id)
            taken, said = peak - result_bytes(out), spec.workspace_bytes(ctx)
            if taken > said + SMALL_CHANGE * (4 if kind == "cuda" else 1):  # a GPU's allocator rounds every one up
                over.append(f"{case.id}: took {taken}, declares {said}; {dict(ctx.dims)}")
    return over, looked, silent


@pytest.mark.req("R-MEM-01")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("backend", BUILT_IN)
def test_no_kernel_takes_more_than_it_declares(backend: str) -> None:
    """Every kernel that runs here, on every kind of call it declares, measured at the allocator."""
    over, looked, silent = taken_and_declared(backend, "cpu")
    assert not over, "\n".join(over)
    assert len(looked) >= 4 and not silent, f"declare nothing: {silent}"


@pytest.mark.req("R-MEM-01")
@pytest.mark.needs_package("layerzero_cpu")
def test_a_plugins_kernels_take_no_more_of_torchs_memory_than_they_declare() -> None:
    """What their native code takes from malloc for the time of a call, no allocator of torch's counts."""
    over, looked, _ = taken_and_declared("layerzero_cpu.plugin", "cpu")
    assert not over, "\n".join(over)
    assert looked >= {"cpu.mlp.fixed", "cpu.moe.experts", "cpu.moe.fixed"}


@pytest.mark.gpu
@pytest.mark.req("R-MEM-01")
@pytest.mark.parametrize("backend", BUILT_IN)
def test_no_kernel_takes_more_than_it_declares_on_a_gpu(backend: str) -> None:
    over, looked, _ = taken_and_declared(backend, "cuda")
    assert not over, "\n".join(over)
    assert looked


def big_calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    q, half = torch.randn(1, 8, 512, 64), torch.randn(1, 8, 512, 64).half()
    none = (None, 0.0, False, None, None, None, None, False)
    rows, weight = torch.randn(2048, 1024), torch.ones(1024)
    return {
        "reference.attention.plain": ("attention", (q, q, q, *none)),
        "sdpa.attention.math": ("attention", (half, half, half, *none)),
        "reference.rms_norm.plain": ("rms_norm", (rows, weight, 1e-6)),
        "torch.rms_norm.native": ("rms_norm", (rows, weight, 1e-6)),
    }


@pytest.mark.req("R-MEM-01")
@pytest.mark.parametrize("kernel_id", big_calls())
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_an_estimate_is_near_what_a_large_call_takes(kernel_id: str) -> None:
    op, args = big_calls()[kernel_id]
    spec = current_world().registry.kernels[kernel_id]
    ctx = describe(public_op(op), args, None, None, current_world())
    with torch.no_grad():
        out, peak = measured_peak(lambda: resolve(spec)(*args))
    taken, said = peak - result_bytes(out), estimate(spec, ctx).total
    assert taken <= said + SMALL_CHANGE, f"took {taken}, declared {said}"
    assert said <= 3 * taken + MIB, f"took {taken}, declared {said}: three times as much"


@pytest.mark.req("R-MEM-01")
def test_the_copies_of_adapted_inputs_are_part_of_the_estimate() -> None:
    """Strided, mixed and grouped inputs, adapted as dispatch does it, measured."""
    q = torch.randn(2, 8, 256, 128)[..., ::2]
    kv = torch.randn(2, 2, 256, 64)
    rest = (None, 0.0, False, None, None, None, None, False)
    ctx = describe(public_op("attention"), (q, kv, kv, *rest), "BHSD", None, current_world())
    for steps, tensors in ((("contiguous",), (q, q, q)), (("expand_kv",), (q.contiguous(), kv, kv))):
        told = ctx if tensors[1] is kv else ctx.with_dims(num_kv_heads=8)
        run = adapt(lambda a, b, c, *rest: a, told, list(steps), True)
        _, peak = measured_peak(lambda run=run, tensors=tensors: run(*tensors, *([None] * 8)))
        said = estimate(current_world().registry.kernels["sdpa.attention.flash_cpu"], told, [Step(s) for s in steps])
        assert 0 < peak <= said.temporaries + SMALL_CHANGE and said.temporaries <= 2 * peak, (steps, peak, said)
        assert said.total == said.workspace + said.temporaries > said.temporaries


@pytest.mark.req("R-MEM-01")
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("cast:float32->bfloat16", {}), ("mask:causal", {"is_causal": True}), ("mask:window", {"window": (16, 0)}),
        ("mask:alibi", {"alibi_slopes": torch.ones(8)}),
    ],
)  # fmt: skip
def test_casts_and_masks_are_estimated_as_what_they_take(step: str, words: dict[str, Any]) -> None:
    q = torch.randn(2, 8, 256, 64)
    names = public_op("attention").arguments[3:11]
    rest = [words.get(name, {"dropout_p": 0.0, "is_causal": False, "return_lse": False}.get(name)) for name in names]
    ctx = describe(public_op("attention"), (q, q, q, *rest), "BHSD", None, current_world())
    run = adapt(lambda a, b, c, *rest: a.new_zeros(()), ctx, [step], True)
    _, peak = measured_peak(lambda: run(q, q, q, *rest))
    said = estimate(current_world().registry.kernels["sdpa.attention.flash_cpu"], ctx, [Step(step)])
    assert 0 < peak <= said.temporaries + SMALL_CHANGE and said.temporaries <= 2 * peak, (peak, said)


class Step:
    def __init__(self, name: str) -> None:
        self.name = name


# -- what does not fit is not chosen ----------------------------------------------------------------
def two(lab: Any, greedy: str = "1000000 * rows", lean: str = "1000 * rows", **settings: Any) -> None:
    lab.use(
        lab.kernel("big.rms_norm.greedy", priority=95, workspace=Formula(greedy)),
        lab.kernel("small.rms_norm.lean", priority=90, workspace=Formula(lean)),
        **settings,
    )


@pytest.mark.req("R-MEM-02")
def test_selection_keeps_to_the_room_on_the_calls_own_device(lab: Any) -> None:
    two(lab)
    world = current_world()
    ctx = lz.explain("rms_norm", X, W).decision.context
    rows = ctx.dim("rows")
    for free, want in ((1_000_000 * rows, "big"), (1_000_000 * rows - 1, "small"), (1_000 * rows - 1, "torch")):
        for given in (free, MappingProxyType({"cpu": free, "cuda:0": 0}), {"cpu": free}):
            decision = select(ctx, replace(world, free_memory=given, memo={}))
            assert decision.chosen.startswith(want), (free, given)
    refused = decision.candidate("big.rms_norm.greedy")
    assert refused.reasons[0].code == "MEMORY_HEADROOM_EXCEEDED"
    assert (refused.reasons[0].value, refused.reasons[0].limit) == (1_000_000 * rows, 1_000 * rows - 1)
    elsewhere = select(ctx, replace(world, free_memory={"cuda:0": 0}, memo={}))
    assert elsewhere.chosen == "big.rms_norm.greedy"  # nothing is known of this device


@pytest.mark.req("R-MEM-01", "R-MEM-02")
def test_a_report_says_what_each_candidate_takes(lab: Any) -> None:
    two(lab)
    report = lz.explain("rms_norm", X, W).to_dict()
    told = {c["kernel_id"]: c["memory"] for c in report["candidates"]}
    assert told["big.rms_norm.greedy"] == {"workspace": 4_000_000, "temporaries": 0, "total": 4_000_000}
    assert told["small.rms_norm.lean"]["total"] == 4_000
    dense = {"contiguous": True, "adapt": frozenset({"contiguous"})}
    lab.use(lab.kernel("big.rms_norm.dense", workspace=Formula("5000"), **dense))
    report = lz.explain("rms_norm", torch.ones(3, 16)[:, ::2], W, backend="big").to_dict()
    (found,) = (c["memory"] for c in report["candidates"] if c["kernel_id"] == "big.rms_norm.dense")
    assert found["workspace"] == 5_000 and found["temporaries"] >= 96  # a dense copy of 24 numbers
    assert found["total"] == 5_000 + found["temporaries"]


@pytest.mark.req("R-MEM-02", "R-MEM-03")
def test_headroom_comes_from_the_policy_and_from_what_is_free(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 30]
    monkeypatch.setattr(pressing, "free_bytes", lambda device: free[0])
    two(lab, greedy="600 * 1048576", lean="100 * 1048576")
    assert lz.which("rms_norm", X, W).startswith("big") and state.world.free_memory is None
    lz.configure(memory_headroom_mb=512)
    lz.rms_norm(X, W)
    (why,) = lz.validate("big.rms_norm.greedy", X, W)
    assert (why.code, why.value, why.limit) == ("MEMORY_HEADROOM_EXCEEDED", 600 * MIB, 512 * MIB)
    assert lab.run(lz.rms_norm, X, W)[1] == ["small.rms_norm.lean"]
    with lz.scoped(memory_headroom_mb=64):
        assert lz.which("rms_norm", X, W).startswith("big")
    lz.configure(memory_headroom_mb=None)
    assert lz.which("rms_norm", X, W).startswith("big") and state.world.free_memory is None


@pytest.mark.req("R-MEM-03", "R-MEM-05")
def test_pressure_of_others_is_felt_while_calls_stay_hot(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cold call comes by: the timer looks, swaps the World, and the next hot call is another kernel's."""
    import time

    free = [8 << 30]
    monkeypatch.setattr(pressing, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(pressing, "_TIMER_S", 0.02)
    two(lab, greedy="4 * 1073741824", lean="1048576", memory_headroom_mb=1024)

    def settles(want: str) -> None:
        end = time.monotonic() + 60
        while lab.run(lz.rms_norm, X, W)[1] != [want]:
            assert time.monotonic() < end, f"{want} was never chosen"
            time.sleep(0.005)

    settles("big.rms_norm.greedy")
    misses = state.counters.misses
    for _ in range(5):
        lz.rms_norm(X, W)
    assert state.counters.misses == misses, "the calls are hot"
    free[0] = 3 << 30
    settles("small.rms_norm.lean")
    free[0] = 16 << 30
    settles("big.rms_norm.greedy")


def test_small_changes_of_free_memory_swap_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [8 << 30]
    monkeypatch.setattr(pressing, "free_bytes", lambda device: free[0])
    two(lab, memory_headroom_mb=0)
    lz.rms_norm(X, W)
    swaps = state.counters.swaps
    for change in (1.0, 1.01, 0.999, 1.15, 1.0):
        free[0] = int((8 << 30) * 1.05 * change)
        pressure._looked.clear()
        lz.rms_norm(torch.ones(3 + int(change * 100), 8), W)
    assert state.counters.swaps <= swaps + 1
    assert isinstance(state.world.free_memory, Levels)


def test_levels_go_down_by_fifths_and_never_say_more_than_there_is() -> None:
    for value in (0, 1, 2, 3, 1000, 12345678, 1 << 34, (1 << 34) + 1):
        assert 0.8 * value - 1 <= level(value) <= value


@pytest.mark.req("R-MEM-03")
def test_the_machines_own_number_is_used() -> None:
    lz.reset()
    lz.configure(memory_headroom_mb=1e9)  # a petabyte to be kept free
    try:
        lz.rms_norm(X, W)
        assert isinstance(state.world.free_memory, Levels) and state.world.free_memory["cpu"] > MIB
        big = torch.randn(1, 2, 64, 16)
        codes = {
            c.kernel_id: [r.code for r in c.reasons] for c in lz.explain("attention", big, big, big).decision.candidates
        }
        assert codes["sdpa.attention.math"] == ["MEMORY_HEADROOM_EXCEEDED"]
        with pytest.raises(NoKernelFoundError) as caught:
            lz.attention(big, big, big, backend="sdpa.attention.math")
        assert any(item.code == "MEMORY_HEADROOM_EXCEEDED" for item in caught.value.reasons)
    finally:
        lz.reset()


# -- running out of it --------------------------------------------------------------------------------
NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.req("R-MEM-04")
def test_out_of_memory_a_kernel_that_takes_less_runs_and_not_one_that_takes_more(lab: Any) -> None:
    lab.use(
        lab.kernel("a.rms_norm.first", priority=95, workspace=Formula("5000 * rows")),
        lab.kernel("b.rms_norm.more", priority=94, workspace=Formula("9000 * rows")),
        lab.kernel("c.rms_norm.same", priority=93, workspace=Formula("5000 * rows")),
        lab.kernel("d.rms_norm.less", priority=92, workspace=Formula("3 * rows")),
    )
    lab.faults["a.rms_norm.first"] = NO_MEMORY
    assert lab.run(lz.rms_norm, X, W)[1] == ["d.rms_norm.less"]
    assert lab.tries == ["a.rms_norm.first", "d.rms_norm.less"]
    assert state.health.snapshot().state("a.rms_norm.first").phase is BreakerPhase.CLOSED


@pytest.mark.req("R-MEM-04", "R-MEM-05")
def test_without_a_leaner_kernel_there_is_one_clear_error_after_few_tries(lab: Any) -> None:
    sizes = enumerate(f"{900 - index} * rows" for index in range(9))
    kernels = [lab.kernel(f"k{i}.rms_norm.x", priority=90 - i, workspace=Formula(size)) for i, size in sizes]
    lab.use(*kernels, only=True)
    for kernel in lab.registry.by_op("rms_norm"):
        lab.faults[kernel.kernel_id] = NO_MEMORY
    with pytest.raises(KernelExecutionError) as caught:
        lz.rms_norm(X, W)
    assert caught.value.code == "OUT_OF_MEMORY" and len(lab.tries) == 4  # the first and three more
    assert "k0.rms_norm.x: 3600 bytes" in str(caught.value) and "no other kernel takes less" in str(caught.value)
    assert not state.health.snapshot().kernels


@pytest.mark.req("R-MEM-05")
def test_a_kernel_that_keeps_running_out_is_set_aside(lab: Any) -> None:
    two(lab)
    lab.faults["big.rms_norm.greedy"] = NO_MEMORY
    seen = [state.health.snapshot().state("big.rms_norm.greedy").phase]
    for _ in range(3):
        assert lab.run(lz.rms_norm, X, W)[1] == ["small.rms_norm.lean"]
        seen.append(state.health.snapshot().state("big.rms_norm.greedy").phase)
    assert [item.value for item in seen] == ["closed", "closed", "closed", "open"]
    lab.clear()
    lz.rms_norm(X, W)
    assert lab.tries == ["small.rms_norm.lean"]


@pytest.mark.req("R-MEM-05")
def test_after_running_out_what_is_free_is_minded_for_a_while(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressing, "free_bytes", lambda device: 2_000_000)
    two(lab)
    lab.faults["big.rms_norm.greedy"] = NO_MEMORY
    lz.rms_norm(X, W)
    assert state.world.free_memory == {"cpu": level(2_000_000)}
    lab.clear()
    lz.rms_norm(X, W)
    assert lab.tries == ["small.rms_norm.lean"]  # not tried again: it would not fit
    assert lz.validate("big.rms_norm.greedy", X, W)[0].code == "MEMORY_HEADROOM_EXCEEDED"
    pressure._until = 0.0
    pressure._again()
    assert state.world.free_memory is None


def test_what_the_failed_kernel_held_is_let_go_before_the_next_runs(lab: Any) -> None:
    import gc
    import weakref

    held: list[Any] = []

    def hoards(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scratch = torch.zeros(1000)
        held.append(weakref.ref(scratch))
        raise NO_MEMORY

    def looks(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        gc.collect()
        alive.append(held[0]() is not None)
        return torch.rms_norm(x, (8,), weight, eps)

    alive: list[bool] = []
    lab.use(lab.kernel("a.rms_norm.hoards", hoards, priority=95), lab.kernel("b.rms_norm.looks", looks, priority=90))
    lz.rms_norm(X, W)
    assert alive == [False]


def test_leaner_says_whom_to_try() -> None:
    world = current_world()
    q = torch.randn(1, 2, 256, 16)
    decision = lz.explain("attention", q, q, q).decision
    names = leaner("reference.attention.plain", decision.steps, decision.context, world)
    takes = {c.kernel_id: sum(c.memory) for c in decision.candidates}
    assert all(takes[name] < takes["reference.attention.plain"] for name in names)
