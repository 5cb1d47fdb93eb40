"""What `lz.explain` names is what runs: random calls, recorded by the kernels themselves, checked by the reference."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.model.enums import Layout
from layerzero.model.kernel import Limit
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
CONTEXTS = 5_000 if PROVE else 260
THREADED = 400 if PROVE else 40

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Case:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Any:
        return getattr(lz, self.op)

    def tensors(self) -> list[Tensor]:
        given = [*self.args, *self.kwargs.values()]
        return [item for item in given if isinstance(item, Tensor) and item.is_floating_point()]


# -- the kernels that compete --------------------------------------------------------------------
def competitors(lab: Any) -> list[Any]:
    """Kernels of many kinds; each wins somewhere because the stronger ones ask for more."""

    def limits(**given: Any) -> tuple[tuple[str, Limit], ...]:
        return tuple((name, limit if isinstance(limit, Limit) else Limit(**limit)) for name, limit in given.items())

    make = lab.kernel
    few = frozenset({"gqa", "backward"})
    bshd, both = frozenset({Layout.BSHD}), frozenset({Layout.BSHD, Layout.BHSD})
    every = frozenset({"layout", "contiguous", "dtype", "gqa", "mask"})
    return [
        make("a.attention.decode", priority=99, limits=limits(seq_len_q={"max": 1})),
        make("a.attention.bare", priority=98, features=frozenset({"gqa"}), limits=limits(seq_len_k={"min": 20})),
        make("a.attention.top_left", priority=97, features=few | {"causal_top_left"}),
        make("a.attention.bottom_right", priority=96, features=few | {"causal_bottom_right", "lse"}),
        make("a.attention.wide_groups", priority=95, limits=limits(gqa_ratio={"min": 4})),
        make("a.attention.dim40", priority=94, limits=limits(head_dim={"one_of": frozenset({40})})),
        make("a.attention.other_layout", priority=93, layouts=bshd, dtypes=frozenset({"float32", "bfloat16"})),
        make("a.attention.packed", priority=92, contiguous=True, features=few | {"mask_bool", "mask_float"}),
        make("a.attention.long", priority=91, limits=limits(seq_len_k={"min": 33, "max": 48})),
        make("a.attention.half", priority=90, dtypes=frozenset({"float16"})),
        make("a.attention.brain", priority=89, dtypes=frozenset({"bfloat16"}), layouts=both),
        make("a.attention.windowed", priority=88, features=few | {"window", "causal_top_left", "causal_bottom_right"}),
        make("a.attention.capped", priority=87, features=few | {"softcap", "lse"}, adapt=every),
        make("a.attention.biased", priority=86, features=few | {"mask_float", "alibi"}, stride_last_dim=1),
        make("a.attention.double", priority=85, dtypes=frozenset({"float64"})),
        make("a.attention.aligned", priority=84, aligned_strides=True, features=few | {"lse", "mask_bool"}),
        make("b.rms_norm.small", priority=90, limits=limits(rows={"max": 4})),
        make("b.rms_norm.forward", priority=80, features=frozenset({"no_weight", "mixed_weight"})),
        make("b.rms_norm.sixteen", priority=85, limits=limits(hidden={"multiple_of": 16})),
        make("b.rms_norm.packed", priority=75, contiguous=True, dtypes=frozenset({"float32"})),
        make("b.add_rms_norm.half", priority=70, dtypes=frozenset({"float16", "bfloat16"})),
        make("b.layer_norm.biased", priority=70, limits=limits(hidden={"min": 24})),
        make("b.layer_norm.plain", priority=65, features=frozenset({"backward"})),
        make("b.silu_and_mul.wide", priority=70, limits=limits(hidden={"min": 16})),
        make("b.silu_and_mul.forward", priority=60, features=frozenset()),
        make("b.rope.pairs", priority=70, features=frozenset({"interleaved", "backward"}), layouts=both),
        make("b.rope.halves", priority=65, features=frozenset({"rotate_half", "backward", "partial_rotary"})),
        make("b.linear.bias", priority=70, limits=limits(n={"min": 8})),
    ]


# -- random calls ---------------------------------------------------------------------------------
def strided(rng: random.Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """A random tensor that may be a view: transposed storage, every second element, or a slice."""
    kind = rng.choice(("plain", "plain", "plain", "swapped", "step", "slice"))
    if kind == "swapped" and len(shape) == 4:
        b, one, two, d = shape
        return torch.randn(b, two, one, d, dtype=dtype).transpose(1, 2)
    if kind == "step":
        return torch.randn(*shape[:-1], shape[-1] * 2, dtype=dtype)[..., ::2]
    if kind == "slice":
        return torch.randn(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]
    return torch.randn(*shape, dtype=dtype)


def attention_case(rng: random.Random) -> Case:
    dtype, layout = rng.choice(DTYPES), rng.choice(("BHSD", "BHSD", "BSHD"))
    batch, kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 1, 2, 4))
    heads, dim = kv_heads * group, rng.choice((8, 16, 40, 17))
    seq_k = rng.choice((1, 5, 16, 24, 33, 40, 50))
    seq_q = rng.choice((1, seq_k, seq_k, rng.randint(1, 40)))
    flat = rng.random() < 0.1
    if flat:
        heads = kv_heads = 1

    def tensor(seq: int, count: int) -> Tensor:
        if flat:
            return strided(rng, batch, seq, dim, dtype=dtype)
        shape = (batch, count, seq, dim) if layout == "BHSD" else (batch, seq, count, dim)
        return strided(rng, *shape, dtype=dtype)

    kwargs: dict[str, Any] = {"layout": layout}
    kind = rng.random()
    if kind < 0.25:
        shape = rng.choice(((seq_q, seq_k), (1, seq_k), (batch, 1, seq_q, seq_k), (batch, heads, 1, seq_k)))
        shape = shape[-2:] if flat else shape
        mask_type = rng.choice((torch.bool, dtype, torch.float32))
        mask = torch.rand(shape) > 0.3 if mask_type is torch.bool else torch.randn(shape).to(mask_type)
        kwargs["attn_mask"] = mask
    elif kind < 0.65:
        kwargs["is_causal"] = rng.choice((True, "bottom_right"))
    if rng.random() < 0.15:
        kwargs["window"] = rng.choice((0, 3, (4, -1), (-1, 2), (5, 5)))
    if rng.random() < 0.12:
        kwargs["softcap"] = rng.choice((5.0, 30.0))
    if rng.random() < 0.12:
        kwargs["alibi_slopes"] = torch.rand(heads) if rng.random() < 0.7 else torch.rand(batch, heads)
    if rng.random() < 0.2:
        kwargs["return_lse"] = True
    if rng.random() < 0.3:
        kwargs["scale"] = rng.choice((0.1, 0.3))
    return Case("attention", (tensor(seq_q, heads), tensor(seq_k, kv_heads), tensor(seq_k, kv_heads)), kwargs)


def other_case(rng: random.Random) -> Case:
    dtype = rng.choice(DTYPES)
    rows, width = rng.choice((1, 3, 9, 40)), rng.choice((8, 12, 16, 30, 48))
    op = rng.choice(("rms_norm", "rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "rope", "linear"))
    weight_type = torch.float32 if rng.random() < 0.2 else dtype
    weight = None if rng.random() < 0.2 else torch.randn(width).to(weight_type)
    x = strided(rng, 2, rows, width, dtype=dtype)
    if op == "rms_norm":
        return Case(op, (x, weight, rng.choice((1e-6, 1e-5))), {})
    if op == "add_rms_norm":
        return Case(op, (x, torch.randn(2, rows, width, dtype=dtype), weight), {})
    if op == "layer_norm":
        bias = torch.randn(width, dtype=dtype) if weight is not None and rng.random() < 0.5 else None
        return Case(op, (x, weight, bias), {})
    if op == "silu_and_mul":
        return Case(op, (x,), {})
    if op == "linear":
        bias = torch.randn(6, dtype=dtype) if rng.random() < 0.5 else None
        return Case(op, (x, torch.randn(6, width, dtype=dtype), bias), {})
    layout = rng.choice(("BHSD", "BSHD"))
    shape = (2, 3, rows, 16) if layout == "BHSD" else (2, rows, 3, 16)
    rotary = rng.choice((16, 8))
    angles = torch.rand(rows, rotary // 2)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    pair = (strided(rng, *shape, dtype=dtype), strided(rng, *shape, dtype=dtype))
    return Case("rope", (*pair, *tables), {"interleaved": rng.random() < 0.5, "layout": layout})


def make_case(rng: random.Random) -> Case:
    return attention_case(rng) if rng.random() < 0.65 else other_case(rng)


# -- the truth ------------------------------------------------------------------------------------
def expected(case: Case) -> Any:
    """What the reference says; under autocast after the casts that torch would make."""
    public = public_op(case.op)
    args, layout, _ = public.normalize(case.args, case.kwargs)
    plain = public.fallback_impl
    assert plain is not None
    values = list(args)
    if torch.is_autocast_enabled("cpu") and public.autocast:
        kind = torch.get_autocast_dtype("cpu")
        for i, item in enumerate(values[:3]):
            if isinstance(item, Tensor) and item.is_floating_point() and item.dtype is not torch.float64:
                values[i] = item.to(kind)
    with torch.autocast("cpu", enabled=False):
        if case.op != "attention":
            return plain(*values)
        flat = values[0].ndim == 3
        swap = layout == "BSHD" and not flat
        for i in range(3):
            values[i] = values[i].unsqueeze(1) if flat else values[i].transpose(1, 2) if swap else values[i]
        out = plain(*values)
        many = isinstance(out, tuple)
        main = out[0] if many else out
        main = main.squeeze(1) if flat else main.transpose(1, 2) if swap else main
        return (main, out[1].squeeze(1) if flat else out[1]) if many else main


def verify(case: Case, out: Any) -> None:
    wanted = expected(case)
    main = wanted[0] if isinstance(wanted, tuple) else wanted
    wide = max((case.args[1].shape[-1] if case.op == "linear" else 1), 1)
    tol = tolerance(case.op, main.dtype, k=wide)
    assert_close(out, wanted, tol, check_dtype=True, path=f"{case.op} {case.kwargs}")


def check_truth(lab: Any, case: Case) -> str:
    """Explain, run cold, run hot: three times the same kernel, and the right numbers. Returns its id."""
    named = lz.explain(case.op, *case.args, **case.kwargs).chosen
    out, ran = lab.run(case.function, *case.args, **case.kwargs)
    assert ran == [named]
    verify(case, out)
    selections = state.counters.selections
    again, ran_hot = lab.run(case.function, *case.args, **case.kwargs)
    assert ran_hot == [named]
    verify(case, again)
    assert lz.which(case.op, *case.args, **case.kwargs) == named
    assert state.counters.selections == selections, "a second look at the same call must not select again"
    return named


@contextlib.contextmanager
def some_mode(rng: random.Random, case: Case) -> Iterator[str]:
    """Run the case inside one of torch's modes or one of our scopes."""
    mode = rng.choice(("plain", "grad", "no_grad", "inference", "autocast", "prefer", "deny", "lock", "disabled"))
    with contextlib.ExitStack() as stack:
        if mode in ("grad", "no_grad"):
            for item in case.tensors():
                if item.is_leaf:
                    item.requires_grad_(rng.random() < 0.7)
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif mode in ("prefer", "deny", "lock"):
            ranking = lz.select(case.op, *case.args, **case.kwargs).ranking
            pick = rng.choice(ranking)
            if mode == "prefer":
                stack.enter_context(lz.prefer(pick))
            elif mode == "lock":
                stack.enter_context(lz.scoped(locks={case.op: pick}))
                assert lz.which(case.op, *case.args, **case.kwargs) == pick
            elif len(ranking) > 1:
                stack.enter_context(lz.scoped(deny=[ranking[0]]))
                assert lz.which(case.op, *case.args, **case.kwargs) == ranking[1]
        elif mode == "disabled":
            stack.enter_context(lz.disabled())
            assert lz.which(case.op, *case.args, **case.kwargs).startswith("reference.")
        yield mode


@pytest.mark.req("R-API-30", "R-API-31", "R-SEL-01", "R-API-01", "R-API-03", "R-API-04", "R-API-05")
@pytest.mark.timeout(1800 if PROVE else 300)
def test_truth_explain_names_the_kernel_that_runs_in_every_mode_and_scope(lab: Any) -> None:
    lab.use(*competitors(lab))
    rng = random.Random(20_261_115)
    torch.manual_seed(1)
    winners: set[str] = set()
    contexts: set[Any] = set()
    modes: dict[str, int] = {}
    for _ in range(CONTEXTS):
        case = make_case(rng)
        with some_mode(rng, case) as mode:
            winners.add(check_truth(lab, case))
            modes[mode] = modes.get(mode, 0) + 1
            contexts.add(lz.explain(case.op, *case.args, **case.kwargs).context)
    assert len(contexts) >= 200, len(contexts)
    assert len(winners) >= 20, sorted(winners)
    assert len(modes) == 9
    assert min(modes.values()) >= 10


@pytest.mark.req("R-API-31", "R-SEL-14")
@pytest.mark.timeout(1800 if PROVE else 300)
def test_truth_holds_after_failover(lab: Any) -> None:
    lab.use(*competitors(lab), breaker={"failures": 1, "cooldown_s": 600})
    rng = random.Random(77)
    torch.manual_seed(2)
    seen: set[str] = set()
    for _ in range(600 if PROVE else 60):
        case = make_case(rng)
        ranking = lz.select(case.op, *case.args, **case.kwargs).ranking
        if len(ranking) < 2:
            continue
        broken, heir = ranking[0], ranking[1]
        hot = rng.random() < 0.5
        if hot:
            check_truth(lab, case)
        lab.faults[broken] = RuntimeError("out of order")
        lab.clear()
        out, ran = lab.run(case.function, *case.args, **case.kwargs)
        assert lab.tries == [broken, heir]
        assert ran == [heir]
        verify(case, out)
        report = lz.explain(case.op, *case.args, **case.kwargs)
        assert report.chosen == report.ran == heir
        assert report.decision.candidate(broken).reasons[0].code == "CIRCUIT_OPEN"
        assert check_truth(lab, case) == heir
        lab.faults.clear()
        state.health.reset()
        assert check_truth(lab, case) == broken
        seen.add(broken)
    assert len(seen) >= 10


@pytest.mark.req("R-API-31", "R-CONC-01")
@pytest.mark.timeout(1800 if PROVE else 300)
def test_truth_holds_from_two_threads_at_once(lab: Any) -> None:
    lab.use(*competitors(lab))
    torch.manual_seed(3)
    problems: list[BaseException] = []
    winners: set[str] = set()
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            start.wait()
            for _ in range(THREADED):
                case = make_case(rng)
                scope = lz.prefer("a.*") if seed == 1 else lz.scoped(avoid=["a.*"])
                with scope:
                    named = lz.explain(case.op, *case.args, **case.kwargs).chosen
                    for _again in range(2):
                        out, ran = lab.run(case.function, *case.args, **case.kwargs)
                        assert ran == [named]
                        verify(case, out)
                    winners.add(named)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert len(winners) >= 10


def test_truth_gradients_are_those_of_the_reference(lab: Any) -> None:
    lab.use(*competitors(lab))
    rng = random.Random(5)
    torch.manual_seed(4)
    checked = 0
    while checked < (400 if PROVE else 30):
        case = make_case(rng)
        if any(item.dtype in (torch.float16, torch.bfloat16) for item in case.tensors()):
            continue
        leaves = [item.requires_grad_() for item in case.tensors() if item.is_leaf]
        if not leaves:
            continue
        named = lz.which(case.op, *case.args, **case.kwargs)
        out, ran = lab.run(case.function, *case.args, **case.kwargs)
        assert ran == [named]
        mine = gradients(out, leaves)
        truth = gradients(expected(case), leaves)
        for left, right in zip(mine, truth, strict=True):
            assert_close(left, right, tolerance("silu", left.dtype), path=f"gradient through {named} {case.kwargs}")
        checked += 1


def gradients(out: Any, leaves: list[Tensor]) -> list[Tensor]:
    parts = [item for item in (out if isinstance(out, tuple) else (out,)) if item is not None and item.requires_grad]
    total = sum((item.double().square().masked_fill(~item.isfinite(), 0.0)).sum() for item in parts[:1])
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]
