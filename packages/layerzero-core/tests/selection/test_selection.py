"""Selection as a pure function: GPUs that are not here, kernels that exist on paper only, measurements made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.errors import CudaGraphUnsafeError, NoKernelFoundError
from layerzero.model.config import Policy
from layerzero.model.context import Context, TokenizerIdentity
from layerzero.model.enums import GPUGeneration, InstructionFamily, Layout, OpKind, Platform
from layerzero.model.formula import Formula
from layerzero.model.kernel import BackendSpec, KernelSpec, Limit
from layerzero.model.op import OperationSpec
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import builtin_ops
from layerzero.runtime.state import state
from layerzero.selection.engine import refuse, select
from layerzero.selection.world import Measurements, World

CUDA = frozenset({Platform.CUDA})
FULL = frozenset("gqa mask_bool mask_float dropout backward causal_top_left causal_bottom_right lse window".split())
HALVES = frozenset({"float16", "bfloat16"})


def spec(kernel_id: str, **fields: Any) -> KernelSpec:
    backend, op, _ = kernel_id.split(".")
    given: dict[str, Any] = {
        "platforms": CUDA,
        "dtypes": HALVES,
        "features": FULL,
        "layouts": frozenset({Layout.BHSD, Layout.BSHD}),
        "grid_layout": "library",
        "priority": 50.0,
    }
    return KernelSpec(kernel_id=kernel_id, op=op, backend=backend, function="vendor:f", **{**given, **fields})


REFERENCE = spec(
    "reference.attention.plain",
    platforms=frozenset(Platform),
    dtypes=frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn"}),
    features=FULL | {"softcap", "alibi", "head_dim_v"},
    priority=-10.0,
    deterministic=True,
    graph_safe=True,
)
HEAD_DIMS = (("head_dim", Limit(max=256, multiple_of=8)),)
FA2 = spec("flash2.attention.fwd", min_sm=80, priority=60, limits=HEAD_DIMS, stride_last_dim=1)
FA3 = spec(
    "flash3.attention.fwd",
    min_sm=90,
    max_sm=90,
    supported_generations=frozenset({GPUGeneration.HOPPER}),
    instruction_families=frozenset({InstructionFamily.WGMMA}),
    priority=80,
    limits=HEAD_DIMS,
    stride_last_dim=1,
)
FA4 = spec(
    "flash4.attention.fwd",
    min_sm=90,
    instruction_families=frozenset({InstructionFamily.WGMMA, InstructionFamily.TCGEN05}),
    features=FULL - {"dropout", "mask_bool", "mask_float"},
    priority=75,
    limits=HEAD_DIMS,
    stride_last_dim=1,
)
FLASHINFER = spec("flashinfer.attention.prefill", min_sm=75, priority=55, limits=HEAD_DIMS, stride_last_dim=1)
FP8 = spec("fp8.attention.fwd", dtypes=frozenset({"float8_e4m3fn"}), min_sm=90, priority=50)
MATH = spec("sdpa.attention.math", dtypes=HALVES | {"float32"}, priority=5, deterministic=True, graph_safe=True)
ALL = (REFERENCE, FA2, FA3, FA4, FLASHINFER, FP8, MATH)


def world(*kernels: KernelSpec, policy: Policy | None = None, **parts: Any) -> World:
    registry = KernelRegistry().add(kernels or ALL)
    return World(registry=registry, ops=builtin_ops, policy=policy or Policy(), **parts)


def call(device: str = "h100", dtype: str = "float16", **changes: Any) -> Context:
    sizes = {"batch": 2, "num_heads": 8, "num_kv_heads": 8, "seq_len_q": 512, "seq_len_k": 512, "head_dim": 128}
    sizes["head_dim_v"] = changes.get("head_dim", 128)
    fields = {name: value for name, value in changes.items() if name not in sizes}
    dims = tuple({**sizes, **{n: v for n, v in changes.items() if n in sizes}}.items())
    given: dict[str, Any] = {"device": named_device(device), "dtype": dtype, "dtypes": (dtype,), "layout": Layout.BHSD}
    return Context(op="attention", dims=dims, **{**given, **fields})


def codes(ctx: Context, kernel_id: str, here: World | None = None) -> list[str]:
    return [item.code.value for item in select(ctx, here or world()).candidate(kernel_id).reasons]


# -- hardware -------------------------------------------------------------------------------------
@pytest.mark.req("R-GEN-02", "R-GEN-03", "R-SEL-02")
@pytest.mark.parametrize(
    ("device", "winner"),
    [
        ("t4", "flashinfer.attention.prefill"),
        ("a100", "flash2.attention.fwd"),
        ("l40s", "flash2.attention.fwd"),
        ("h100", "flash3.attention.fwd"),
        ("h200", "flash3.attention.fwd"),
        ("b200", "flash4.attention.fwd"),
        ("b300", "flash4.attention.fwd"),
        ("rtx5090", "flash2.attention.fwd"),
    ],
)
def test_each_generation_gets_its_own_kernel(device: str, winner: str) -> None:
    assert select(call(device), world()).chosen == winner


@pytest.mark.req("R-GEN-03")
@pytest.mark.parametrize("device", ["b200", "gb200", "b300", "thor", "rtx5090", "gb10"])
def test_fa3_never_runs_on_blackwell_not_even_locked(device: str) -> None:
    found = codes(call(device), "flash3.attention.fwd")
    assert {"SM_TOO_NEW", "GENERATION_UNSUPPORTED"} <= set(found)
    locked = select(call(device), world(policy=Policy(locks=(("attention", "flash3.attention.fwd"),))))
    assert locked.chosen == ""
    assert refuse(locked).code == "LOCKED_KERNEL_UNAVAILABLE"


@pytest.mark.req("R-GEN-02")
def test_generation_and_instruction_family_are_named_in_the_reason() -> None:
    (old, generation, family) = select(call("a100"), world()).candidate("flash3.attention.fwd").reasons
    assert (old.code, old.value, old.limit) == ("SM_TOO_OLD", 80, 90)
    assert (generation.code, generation.value, generation.limit) == ("GENERATION_UNSUPPORTED", "AMPERE", "HOPPER")
    assert family.code == "INSTRUCTION_FAMILY_MISSING"


@pytest.mark.req("R-SEL-17")
def test_dtypes_follow_the_hardware() -> None:
    for kernel in ("flash2.attention.fwd", "flash3.attention.fwd", "flash4.attention.fwd", "sdpa.attention.math"):
        assert select(call("h100", "float16"), world()).candidate(kernel).accepted
    assert select(call("t4", "float16"), world()).chosen == "flashinfer.attention.prefill"
    assert "BF16_UNSUPPORTED" in codes(call("t4", "bfloat16"), "flashinfer.attention.prefill")
    assert select(call("a100", "bfloat16"), world()).chosen == "flash2.attention.fwd"
    assert select(call("h100", "float32"), world()).chosen == "sdpa.attention.math"
    assert select(call("h100", "float8_e4m3fn"), world()).chosen == "fp8.attention.fwd"
    assert "SM_TOO_OLD" in codes(call("l40s", "float8_e4m3fn"), "fp8.attention.fwd")
    assert "FP8_UNSUPPORTED" in codes(call("a100", "float8_e4m3fn"), "reference.attention.plain")


# -- shapes ---------------------------------------------------------------------------------------
@pytest.mark.req("R-SEL-15")
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_usual_head_dims_are_taken(head_dim: int) -> None:
    decision = select(call(head_dim=head_dim), world())
    assert decision.chosen == "flash3.attention.fwd"
    assert decision.candidate("flashinfer.attention.prefill").accepted


@pytest.mark.req("R-SEL-15")
def test_head_dims_outside_the_rule_are_flagged() -> None:
    for kernel in ("flash2.attention.fwd", "flash3.attention.fwd", "flashinfer.attention.prefill"):
        assert codes(call(head_dim=84), kernel) == ["HEAD_DIM_NOT_MULTIPLE"]
        assert codes(call(head_dim=320), kernel) == ["HEAD_DIM_TOO_LARGE"]
        assert "HEAD_DIM_TOO_LARGE" in codes(call(head_dim=257), kernel)
    decision = select(call(head_dim=320), world())
    assert decision.chosen == "sdpa.attention.math"
    why = decision.candidate("flash2.attention.fwd").reasons[0]
    assert (why.value, why.limit) == (320, 256)


@pytest.mark.req("R-SEL-16")
def test_batch_times_heads_is_a_limit_of_the_kernel_that_has_it() -> None:
    grid = (Formula("(seq_len_q + 127) // 128"), Formula("batch * num_heads"), Formula("1"))
    limited = spec("mine.attention.rows", priority=90, limits=(("batch_heads", Limit(max=65_535)),))
    gridded = spec("mine.attention.grid", priority=91, grid_layout=grid)
    here = world(REFERENCE, limited, gridded)
    for batch, heads, kv_heads in ((65_535, 1, 1), (13_107, 5, 1), (15, 4_369, 257)):
        at = call(batch=batch, num_heads=heads, num_kv_heads=kv_heads)
        assert select(at, here).candidate("mine.attention.rows").accepted
        assert select(at, here).candidate("mine.attention.grid").accepted
    for batch, heads, kv_heads in ((65_536, 1, 1), (8_192, 8, 2), (16, 4_096, 512)):
        beyond = call(batch=batch, num_heads=heads, num_kv_heads=kv_heads)
        decision = select(beyond, here)
        assert decision.chosen == "reference.attention.plain"
        for kernel in ("mine.attention.rows", "mine.attention.grid"):
            (why,) = decision.candidate(kernel).reasons
            assert why.code == "CUDA_BLOCK_LIMIT_EXCEEDED"
            assert str(65_536) in str(why.value)
            assert str(65_535) in str(why.limit)
    assert select(beyond, world()).chosen == "flash3.attention.fwd", "the limit is no rule for everybody"


@pytest.mark.req("R-SEL-07", "R-SEL-18", "R-SEL-20")
def test_strides_and_layouts_decide() -> None:
    from layerzero.model.context import Strides

    skipping = call(strides=Strides(last=2, aligned=True, order="other"))
    assert select(skipping, world()).chosen == "sdpa.attention.math"
    assert codes(skipping, "flash3.attention.fwd") == ["STRIDE_LAST_DIM"]
    only = spec("rows.attention.bshd", priority=99, layouts=frozenset({Layout.BSHD}))
    picky = spec("tight.attention.any", priority=98, contiguous=True)
    here = world(*ALL, only, picky)
    assert select(call(layout=Layout.BSHD), here).chosen == "rows.attention.bshd"
    assert select(call(layout=Layout.BHSD), here).chosen == "tight.attention.any"
    assert codes(call(layout=Layout.BHSD), "rows.attention.bshd", here) == ["LAYOUT_UNSUPPORTED"]
    assert select(call(strides=Strides(order="swapped")), here).chosen == "flash3.attention.fwd"


@pytest.mark.req("R-SEL-07", "R-SEL-19")
def test_what_a_kernel_does_not_declare_it_does_not_get() -> None:
    masked = call(needs=frozenset({"mask_bool"}))
    assert codes(masked, "flash4.attention.fwd") == ["MASK_UNSUPPORTED"]
    sparse = call(needs=frozenset({"block_mask"}))
    assert codes(sparse, "flash3.attention.fwd") == ["BLOCK_MASK_UNSUPPORTED"]
    taker = spec("flex.attention.block", features=FULL | {"block_mask"}, priority=1)
    assert select(sparse, world(*ALL, taker)).chosen == "flex.attention.block"
    assert select(sparse, world()).chosen == ""
    biased = call(needs=frozenset({"alibi"}))
    decision = select(biased, world())
    assert decision.chosen == "reference.attention.plain"
    assert decision.is_fallback


@pytest.mark.req("R-SEL-09")
def test_no_fallback_where_the_preferred_backend_serves() -> None:
    here = world(policy=Policy(prefer=("flash2",)))
    for head_dim in (64, 128):
        for dtype in ("float16", "bfloat16"):
            for heads in (8, 2):
                needs = frozenset({"causal_top_left"} | ({"gqa"} if heads == 2 else set()))
                decision = select(call("h100", dtype, head_dim=head_dim, num_kv_heads=heads, needs=needs), here)
                assert decision.chosen == "flash2.attention.fwd"
                assert not decision.is_fallback


# what a kernel asks for, the change of the call that it does not fit, and the one reason
FILTERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "platform": ({}, {"device": "mi300x"}, "PLATFORM_MISMATCH"),
    "hardware": ({"min_sm": 90}, {"device": "a100"}, "SM_TOO_OLD"),
    "dtype": ({"dtypes": frozenset({"float16"})}, {"dtype": "bfloat16"}, "DTYPE_UNSUPPORTED"),
    "shape": ({"limits": (("head_dim", Limit(max=128)),)}, {"head_dim": 256}, "HEAD_DIM_TOO_LARGE"),
    "gqa": ({"features": FULL - {"gqa"}}, {"num_kv_heads": 2, "needs": frozenset({"gqa"})}, "GQA_UNSUPPORTED"),
    "capture": ({}, {"capturing": True}, "CUDA_GRAPH_UNSAFE"),
    "determinism": ({}, {"deterministic": True}, "NOT_DETERMINISTIC"),
    "generation": (
        {"supported_generations": frozenset({GPUGeneration.HOPPER})},
        {"device": "b200"},
        "GENERATION_UNSUPPORTED",
    ),
}


@pytest.mark.req("R-SEL-02")
@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone_keeps_a_kernel_out_and_nothing_else_does(name: str) -> None:
    asks, change, why = FILTERS[name]
    picky, easy = spec("picky.attention.k", priority=99, **asks), spec("easy.attention.k", priority=50)
    fitting = {"capture": {"graph_safe": True}, "determinism": {"deterministic": True}}.get(name, {})
    here = world(REFERENCE, easy, picky)
    assert select(call(), here).chosen == "picky.attention.k"
    assert codes(call(**change), "picky.attention.k", here) == [why]
    assert select(call(**change), here).chosen != "picky.attention.k"
    taker = spec("taker.attention.k", priority=98, platforms=frozenset(Platform), **fitting)
    assert select(call(**change), world(REFERENCE, picky, taker)).chosen == "taker.attention.k"


# -- modes ----------------------------------------------------------------------------------------
@pytest.mark.req("R-SEL-02", "R-EXC-03")
def test_determinism_and_capture_filter() -> None:
    assert codes(call(deterministic=True), "flash3.attention.fwd") == ["NOT_DETERMINISTIC"]
    assert select(call(deterministic=True), world()).chosen == "sdpa.attention.math"
    assert codes(call(capturing=True), "flash3.attention.fwd") == ["CUDA_GRAPH_UNSAFE"]
    assert select(call(capturing=True), world()).chosen == "sdpa.attention.math"
    refused = select(call(capturing=True), world(FA2, FA3))
    error = refuse(refused)
    assert isinstance(error, CudaGraphUnsafeError) and error.code == "CUDA_GRAPH_UNSAFE"
    assert "flash2.attention.fwd" in str(error) and "flash3.attention.fwd" in str(error)


def test_batch_invariance_filters_and_one_kernel_serves_all_sizes() -> None:
    fast = spec("fast.attention.short", priority=70, batch_invariant=True, priority_below=(("seq_len_q", (64, -50.0)),))
    sure = spec("sure.attention.long", priority=40, batch_invariant=True, min_sm=80)
    here = world(REFERENCE, FA2, fast, sure)
    wanted = call(batch_invariant=True)
    assert codes(wanted, "flash2.attention.fwd", here) == ["NOT_BATCH_INVARIANT"]
    assert codes(wanted, "reference.attention.plain", here) == ["NOT_BATCH_INVARIANT"]
    measured = Measurements(lookup=lambda name, ctx: 1.0 if name.startswith("sure") else 9.0)
    sizes: list[dict[str, Any]] = [{"seq_len_q": 1, "batch": 1}, {"seq_len_q": 2048}, {"seq_len_q": 1, "batch": 64}]
    free = {select(call(**size), world(fast, sure, measurements=measured)).chosen for size in sizes}
    held = {
        select(call(batch_invariant=True, **size), world(fast, sure, measurements=measured)).chosen for size in sizes
    }
    assert free == {"sure.attention.long"} and held == {"fast.attention.short"}
    with pytest.raises(NoKernelFoundError, match="batch_invariant"):
        raise refuse(select(wanted, world(REFERENCE, FA2)))


@pytest.mark.req("R-POL-13")
def test_the_graph_whitelist_is_policy() -> None:
    strict = Policy(graph_strict_mode=True, graph_whitelist=("sdpa.*",))
    decision = select(call(capturing=True), world(policy=strict))
    assert decision.chosen == "sdpa.attention.math"
    found = [item.code.value for item in decision.candidate("reference.attention.plain").reasons]
    assert found == ["GRAPH_NOT_WHITELISTED"]
    assert select(call(), world(policy=strict)).chosen == "flash3.attention.fwd"


@pytest.mark.req("R-MEM-02")
def test_workspace_is_held_against_free_memory() -> None:
    greedy = spec("greedy.attention.k", priority=99, workspace=Formula("batch * num_heads * seq_len_q * seq_len_k * 4"))
    need = 2 * 8 * 512 * 512 * 4
    assert select(call(), world(*ALL, greedy, free_memory=need)).chosen == "greedy.attention.k"
    tight = world(*ALL, greedy, free_memory=need + 2**20 - 1, policy=Policy(memory_headroom_mb=1))
    (why,) = select(call(), tight).candidate("greedy.attention.k").reasons
    assert (why.code, why.value) == ("MEMORY_HEADROOM_EXCEEDED", need)


def test_an_unavailable_backend_gives_its_own_reason() -> None:
    from layerzero.reasons import reason

    why = reason("BACKEND_NOT_INSTALLED", "flash-attn", "flash-attn")
    registry = (
        KernelRegistry().add((REFERENCE,)).add((FA2,), BackendSpec(name="flash2", available=False, reasons=(why,)))
    )
    decision = select(call("a100"), World(registry=registry, ops=builtin_ops))
    assert decision.candidate("flash2.attention.fwd").reasons == (why,)
    assert decision.is_fallback


# -- score ----------------------------------------------------------------------------------------
def measured(times: dict[str, float], noise: float = 0.02) -> Measurements:
    return Measurements(lambda kernel_id, ctx: times.get(kernel_id), repr(sorted(times.items())), noise)


@pytest.mark.req("R-SEL-03")
def test_the_score_is_the_sum_of_its_parts() -> None:
    here = world(
        policy=Policy(prefer=("flash2",), boosts=(("flash2.*", 3.0),)),
        measurements=measured({"flash2.attention.fwd": 120.0, "flash3.attention.fwd": 100.0}),
    )
    for item in select(call(), here).candidates:
        if item.accepted:
            assert item.score == pytest.approx(sum(value for _, value in item.score_parts))
            assert [name for name, _ in item.score_parts] == ["priority", "policy", "measured", "transforms"]
    slower = dict(select(call(), here).candidate("flash2.attention.fwd").score_parts)
    assert slower["policy"] == 23.0
    assert slower["measured"] == pytest.approx(-2.0)


@pytest.mark.req("R-SEL-03")
def test_where_there_are_measurements_they_decide_not_priorities() -> None:
    times = {"sdpa.attention.math": 50.0, "flash3.attention.fwd": 60.0, "flash2.attention.fwd": 55.0}
    times |= {"flash4.attention.fwd": 70.0, "flashinfer.attention.prefill": 500.0, "reference.attention.plain": 9e3}
    decision = select(call(), world(measurements=measured(times)))
    assert decision.ranking[:4] == (
        "sdpa.attention.math",
        "flash2.attention.fwd",
        "flash3.attention.fwd",
        "flash4.attention.fwd",
    )
    assert decision.winner.measured_us == 50.0


@pytest.mark.req("R-SEL-10")
def test_inside_the_noise_the_kernel_id_decides_the_same_way_every_time() -> None:
    times = dict.fromkeys((kernel.kernel_id for kernel in ALL), 100.0)
    for jitter in (0.0, 0.5, 1.9):
        shaken = {**times, "flash2.attention.fwd": 100.0 + jitter, "sdpa.attention.math": 100.0 + jitter / 2}
        assert select(call(), world(measurements=measured(shaken))).chosen == "flash2.attention.fwd"
    assert select(call(), world(measurements=measured({**times, "flash2.attention.fwd": 103.0}))).chosen != (
        "flash2.attention.fwd"
    )


@pytest.mark.req("R-SEL-03", "R-SEL-10")
def test_less_may_be_expected_of_a_kernel_below_a_size(lab: Any) -> None:
    """As of attention kernels that do not split long keys: the best for many queries, the worst for one."""
    many = lab.kernel("many.rms_norm.rows", priority=95.0, priority_below=(("rows", (9, 20.0)),))
    lab.use(many, lab.kernel("few.rms_norm.rows", priority=50.0))
    weight = torch.ones(8)
    told = {rows: lab.run(lz.rms_norm, torch.randn(rows, 8), weight)[1][-1:] for rows in (16, 8, 9, 1, 16, 8)}
    assert told[16] == told[9] == ["many.rms_norm.rows"]  # also behind others that are remembered
    assert told[8] == told[1] == ["few.rms_norm.rows"]
    found = lz.explain("rms_norm", torch.randn(8, 8), weight)
    score = next(item for item in found.candidates if item.kernel_id == "many.rms_norm.rows").score
    assert score == 20.0


@pytest.mark.req("R-SEL-10")
def test_equal_worlds_decide_equally_whatever_the_order_of_registration() -> None:
    first = select(call(), world(*ALL))
    for kernels in (ALL[::-1], ALL[3:] + ALL[:3]):
        again = select(call(), world(*kernels))
        assert again.chosen == first.chosen
        assert again.ranking == first.ranking
        assert [c.to_json() for c in again.candidates] == [c.to_json() for c in first.candidates]


@pytest.mark.req("R-POL-05")
def test_prefer_avoid_and_boost_move_the_score() -> None:
    base = select(call(), world()).candidate("flash2.attention.fwd").score or 0.0
    for policy, change in (
        (Policy(prefer=("flash2",)), 20.0),
        (Policy(avoid=("flash2.*",)), -50.0),
        (Policy(boosts=(("flash2.attention.fwd", 7.5),)), 7.5),
    ):
        moved = select(call(), world(policy=policy)).candidate("flash2.attention.fwd").score or 0.0
        assert moved - base == pytest.approx(change)


# -- refusals, caches -----------------------------------------------------------------------------
@pytest.mark.req("R-EXC-02")
def test_a_refusal_names_every_objection() -> None:
    here = world(FA2, FA3)
    decision = select(call("t4"), here)
    assert decision.chosen == ""
    error = refuse(decision)
    assert isinstance(error, NoKernelFoundError)
    assert error.code == "NO_KERNEL"
    assert {item.code for item in error.reasons} >= {"NO_KERNEL", "SM_TOO_OLD"}
    for kernel in ("flash2.attention.fwd", "flash3.attention.fwd"):
        assert kernel in str(error)


@pytest.mark.req("R-CACHE-10")
def test_a_change_of_capabilities_changes_the_fingerprint_and_the_choice(lab: Any) -> None:
    x, w = torch.randn(2, 8), torch.ones(8)
    lz.rms_norm(x, w)
    before = state.world
    weaker = lab.recording(lab.builtin.get("torch.rms_norm.native"), lab.reference("rms_norm"))
    state.publish(registry=lab.registry.replace([replace(weaker, dtypes=frozenset({"float16"}))]))
    assert state.world.fingerprint != before.fingerprint
    assert lab.run(lz.rms_norm, x, w)[1] == ["reference.rms_norm.plain"]
    state.publish(registry=before.registry)
    assert state.world.fingerprint == before.fingerprint
    assert lab.run(lz.rms_norm, x, w)[1] == ["torch.rms_norm.native"]


@pytest.mark.req("R-CACHE-10")
@pytest.mark.parametrize(
    "change", [{"capabilities_hash": "new"}, {"version": "2"}, {"vendor_version": "9"}, {"available": False}], ids=str
)
def test_a_backend_that_comes_with_other_capabilities_is_selected_anew(lab: Any, change: dict[str, Any]) -> None:
    """The hash of its descriptor, its version, its vendor's, whether it works: kernels and versions are the same."""
    x, w, kernel = torch.randn(2, 8), torch.ones(8), lab.kernel("acme.rms_norm.k", priority=99.0)
    backend = BackendSpec(name="acme", version="1", vendor_version="8", capabilities_hash="old")

    def selections(**changes: Any) -> int:
        state.publish(registry=lab.registry.add((kernel,), replace(backend, **changes)))
        before = state.counters.selections
        lz.rms_norm(x, w)
        return state.counters.selections - before

    assert [selections(), selections(), selections(**change), selections(**change), selections()] == [1, 0, 1, 0, 0]
    assert lz.which("rms_norm", x, w) == "acme.rms_norm.k"


@pytest.mark.req("R-CACHE-11", "R-CACHE-12")
def test_contexts_are_equal_only_when_nothing_that_decides_differs() -> None:
    base: dict[str, Any] = {"op": "tokenize", "kind": OpKind.TOKENIZATION, "dims": (("batch", 2),)}
    one = Context(**base, tokenizer=TokenizerIdentity("llama", "aaaa"))
    same = Context(**base, tokenizer=TokenizerIdentity("llama", "aaaa"))
    assert one == same
    assert hash(one) == hash(same)
    others = [
        TokenizerIdentity("llama", "bbbb"),
        TokenizerIdentity("llama", "aaaa", merges_hash="m"),
        TokenizerIdentity("llama", "aaaa", special_tokens_hash="s"),
        TokenizerIdentity("llama", "aaaa", return_offsets=True),
        TokenizerIdentity("llama", "aaaa", normalizer_id="n"),
        TokenizerIdentity("llama", "aaaa", pretokenizer_id="p"),
        TokenizerIdentity("gpt2", "aaaa"),
    ]
    contexts = {one, *(Context(**base, tokenizer=item) for item in others)}
    assert len(contexts) == 8


@pytest.mark.req("R-CACHE-12")
def test_models_with_other_tokenizers_do_not_share_decisions(lab: Any) -> None:
    from layerzero.dispatch.run import decide

    tokenize = OperationSpec(
        op_id="tokenize",
        op_kind=OpKind.TOKENIZATION,
        arguments=("text",),
        input_kinds=("text",),
        output_kind="ids",
        has_fallback=False,
        fallback_id="reference.tokenize.plain",
    )
    lab.use(lab.kernel("a.tokenize.k", print, features=frozenset()))
    state.use(lab.registry, {"tokenize": tokenize})
    decisions = [
        decide(
            tokenize,
            Context(op="tokenize", kind=OpKind.TOKENIZATION, tokenizer=TokenizerIdentity("llama", vocab)),
            state.world,
        )
        for vocab in ("aaaa", "bbbb", "aaaa")
    ]
    assert decisions[0] is decisions[2]
    assert decisions[0] is not decisions[1]


@pytest.mark.req("R-SEL-10")
def test_selection_is_a_pure_function() -> None:
    here = world()
    first = select(call(), here)
    assert select(call(), here) == first
    assert select(call(), here).fingerprint == here.fingerprint


@pytest.mark.parametrize(
    "build",
    [
        lambda: call(),
        lambda: call(needs=frozenset({"gqa", "causal_top_left"}), num_kv_heads=2),
        lambda: call(deterministic=True, dtype="float32"),
    ],
)
def test_a_decision_survives_json(build: Callable[[], Context]) -> None:
    data = json.loads(json.dumps(select(build(), world()).to_json()))
    assert len(data["candidates"]) == len(ALL)
    assert data["context"]["dims"]["head_dim"] == 128
