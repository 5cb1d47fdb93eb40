"""What explain says would change a choice does change it: every hint of every candidate is followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.model.context import Context
from layerzero.model.decision import Candidate
from layerzero.model.enums import GPUGeneration, Layout, Platform
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.policy.layers import Level, PolicyLayer, merge
from layerzero.reasons import Reason
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import builtin_ops
from layerzero.selection.engine import select
from layerzero.selection.world import Measurements, World

pytestmark = [pytest.mark.fault(9)]

FEATURES = frozenset("gqa dropout backward causal_top_left".split())
DTYPES = frozenset({"float16", "float32"})


def kernel(kernel_id: str, **fields: Any) -> KernelSpec:
    given: dict[str, Any] = {
        "platforms": frozenset({Platform.CUDA}),
        "dtypes": DTYPES,
        "features": FEATURES,
        "grid_layout": "library",
        "layouts": frozenset({Layout.BHSD, Layout.BSHD}),
    }
    backend, op, _ = kernel_id.split(".")
    return KernelSpec(kernel_id=kernel_id, op=op, backend=backend, function="vendor:f", **{**given, **fields})


KERNELS = {
    item.kernel_id: item
    for item in (
        kernel("reference.attention.plain", priority=-10.0, platforms=frozenset(Platform)),
        kernel("fast.attention.old", priority=90.0, dtypes=frozenset({"float16"}), max_sm=80),
        kernel("fast.attention.new", priority=100.0, min_sm=90, limits=(("head_dim", Limit(max=128)),)),
        kernel("fast.attention.compiled", priority=95.0, jit=True),
        kernel("plain.attention.math", priority=5.0),
        kernel("plain.attention.forward", priority=50.0, features=FEATURES - {"backward", "dropout"}),
        kernel("odd.attention.hopper", priority=60.0, supported_generations=frozenset({GPUGeneration.HOPPER})),
        kernel("odd.attention.layout", priority=60.0, layouts=frozenset({Layout.BSHD})),
    )
}
PATTERNS = [*KERNELS, "fast", "plain", "odd.*", "*"]
some_patterns = st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True)
levels = st.sampled_from([Level.FILE, Level.ENV, Level.PROGRAMMATIC, Level.CONTEXT])


@st.composite
def layers(draw: Any) -> PolicyLayer:
    given: dict[str, Any] = {"prefer": draw(some_patterns), "avoid": draw(some_patterns)}
    given["boosts"] = draw(st.dictionaries(st.sampled_from(PATTERNS), st.floats(-200, 200), max_size=2))
    for name in ("deny", "allow"):
        if draw(st.integers(0, 3)) == 0:
            given[name] = draw(some_patterns)
    if draw(st.integers(0, 4)) == 0:
        given["locks"] = {"attention": draw(st.sampled_from(sorted(KERNELS)))}
    more = {"strict_mode": True, "enabled": False, "fallback_enabled": False, "on_fault": "fallback"}
    for name in draw(st.sets(st.sampled_from(sorted(more)), max_size=1)):
        given[name] = more[name]
    return PolicyLayer.of(draw(levels), **given)


@st.composite
def calls(draw: Any) -> Context:
    dim = draw(st.sampled_from([64, 256]))
    sizes = {"batch": 2, "num_heads": 8, "num_kv_heads": 8, "seq_len_q": 64, "seq_len_k": 64}
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return Context(
        op="attention",
        dims=tuple({**sizes, "head_dim": dim, "head_dim_v": dim}.items()),
        device=named_device(draw(st.sampled_from(["a100", "h100"]))),
        dtype=dtype,
        dtypes=(dtype,),
        layout=draw(st.sampled_from([Layout.BHSD, Layout.BSHD])),
        needs=frozenset(draw(st.sets(st.sampled_from(["backward", "dropout"])))),
        backend=draw(st.sampled_from([None, None, None, "fast", "plain.attention.math"])),
    )


class Scene:
    """A call, the policy layers around it and the kernels there are; each can be changed and asked again."""

    def __init__(self, ctx: Context, stack: list[PolicyLayer], times: dict[str, float]) -> None:
        self.ctx, self.stack, self.kernels, self.times = ctx, list(stack), dict(KERNELS), times

    def copy(self) -> Scene:
        found = Scene(self.ctx, self.stack, self.times)
        found.kernels = dict(self.kernels)
        return found

    def select(self) -> Any:
        registry = KernelRegistry().add(tuple(self.kernels.values()))
        times = Measurements(lookup=lambda name, ctx: self.times.get(name))
        return select(self.ctx, World(registry=registry, ops=builtin_ops, policy=merge(self.stack), measurements=times))

    def without(self, **fields: Any) -> None:
        self.stack = [replace(layer, **fields) for layer in self.stack]

    def settle(self, **settings: Any) -> None:
        self.stack.append(PolicyLayer.of(Level.CALL, **settings))

    def change(self, name: str, **fields: Any) -> None:
        self.kernels[name] = replace(self.kernels[name], **fields)

    def cast(self, dtype: str) -> None:
        self.ctx = replace(self.ctx, dtype=dtype, dtypes=(dtype,))


# What each hint asks for, done.
DONE: dict[str, Callable[[Scene, str, Reason], None]] = {
    "POLICY_DENIED": lambda s, name, why: s.without(deny=()),
    "POLICY_NOT_ALLOWED": lambda s, name, why: s.settle(allow=[*why.limit.split(", "), name]),
    "POLICY_LOCKED_OUT": lambda s, name, why: s.without(locks=()),
    "POLICY_DISABLED": lambda s, name, why: s.settle(enabled=True),
    "BACKEND_NOT_REQUESTED": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, backend=None)),
    "ADAPTATION_NOT_ALLOWED": lambda s, name, why: s.settle(strict_mode=False),
    "JIT_NOT_READY": lambda s, name, why: s.settle(jit="block"),
    "BACKWARD_UNSUPPORTED": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, needs=s.ctx.needs - {"backward"})),
    "DROPOUT_UNSUPPORTED": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, needs=s.ctx.needs - {"dropout"})),
    "DTYPE_UNSUPPORTED": lambda s, name, why: s.cast(why.limit),
    "SM_TOO_OLD": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, device=named_device("h100"))),
    "SM_TOO_NEW": lambda s, name, why: s.change(name, max_sm=None),
    "GENERATION_UNSUPPORTED": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, device=named_device("h100"))),
    "LAYOUT_UNSUPPORTED": lambda s, name, why: setattr(s, "ctx", replace(s.ctx, layout=Layout(why.limit))),
    "HEAD_DIM_TOO_LARGE": lambda s, name, why: s.change(name, limits=()),
}


def follow(scene: Scene, item: Candidate) -> None:
    """Do what the hint of an accepted candidate says; it must then be the one that runs."""
    then = scene.copy()
    told = re.search(r'lz\.prefer\("(.+?)"\) would choose it', item.flip)
    if told:
        then.stack.append(PolicyLayer.of(Level.CONTEXT, prefer=[told[1]]))
    else:
        assert "a lock on it, where the other was set, would choose it" in item.flip
        locked = [layer for layer in then.stack if layer.locks]
        then.stack = [
            replace(layer, locks=(("attention", item.kernel_id),)) if layer in locked else layer for layer in then.stack
        ]
    assert then.select().chosen == item.kernel_id, item.flip


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(calls(), st.lists(layers(), max_size=3), st.dictionaries(st.sampled_from(sorted(KERNELS)), st.floats(1, 90)))
def test_every_hint_flips_what_it_says(ctx: Context, stack: list[PolicyLayer], times: dict[str, float]) -> None:
    scene = Scene(ctx, stack, times)
    decision = scene.select()
    for item in decision.candidates:
        if item.kernel_id == decision.chosen:
            assert item.flip == ""
        elif item.accepted:
            follow(scene, item)
        else:
            then = scene.copy()
            if item.flip == "set fallback_enabled: true":
                then.settle(fallback_enabled=True)
            else:
                assert item.reasons[0].hint in item.flip
                for why in item.reasons:
                    DONE[why.code.value](then, item.kernel_id, why)
            after = then.select().candidate(item.kernel_id)
            assert not {why.code for why in item.reasons} & {why.code for why in after.reasons} - {"ADAPTED"}, after


CALLS = {
    "rms_norm": lambda: (torch.randn(4, 64), torch.ones(64)),
    "layer_norm": lambda: (torch.randn(4, 64), torch.ones(64), torch.zeros(64)),
    "silu_and_mul": lambda: (torch.randn(4, 64),),
    "attention": lambda: (torch.randn(1, 2, 8, 16),) * 3,
    "linear": lambda: (torch.randn(4, 8), torch.randn(6, 8)),
    "rope": lambda: (torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2, 16), torch.randn(4, 8), torch.randn(4, 8)),
    "embedding": lambda: (torch.arange(4), torch.randn(8, 16)),
}


@pytest.fixture
def as_they_come() -> Iterator[None]:
    """The kernel that is chosen answers the first call too, proven or not."""
    lz.configure(on_first_use="off")
    yield
    lz.reset()


@pytest.mark.req("R-POL-05")
@pytest.mark.usefixtures("as_they_come")
@pytest.mark.parametrize("op", CALLS)
def test_lz_prefer_chooses_any_kernel_that_fits_and_the_innermost_preference_wins(op: str) -> None:
    given = CALLS[op]()
    report = lz.explain(op, *given)
    fitting = [item for item in report.candidates if item.accepted]
    assert len(fitting) > 1
    for item in fitting:
        for pattern in (item.kernel_id, item.backend):
            with lz.prefer(pattern):
                chosen = lz.explain(op, *given)
                assert chosen.decision.winner.backend == item.backend
                getattr(lz, op)(*given)
                assert lz.explain(op, *given).ran == chosen.chosen
        if item.kernel_id != report.chosen:
            assert f'lz.prefer("{item.kernel_id}")' in item.flip
        for other in fitting:
            with lz.prefer(other.kernel_id), lz.prefer(item.kernel_id):
                assert lz.which(op, *given) == item.kernel_id
