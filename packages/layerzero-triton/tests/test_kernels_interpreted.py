"""Our Triton kernels, run by Triton's interpreter against the reference; no GPU is needed.

The interpreter has to be chosen before Triton is imported, so the cases run in one child process, which is this file
as a script: it prints what each case found wrong. (It rounds to bfloat16 by cutting off, and multiplies bfloat16
matrices wrongly: products in bfloat16 are tested on the GPU.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES: dict[str, object] = {}


def case(name):
    def keep(function):
        CASES[name] = function
        return function

    return keep


def differs(op, got, want, dtype=F32):
    """The worst place where a result leaves the bounds of the table; None when there is none."""
    from layerzero.numerics import compare, tolerance

    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for a, b in pairs:
        if a is None or b is None:
            if a is not b:
                return "one is None"
            continue
        report = compare(a, b, tolerance(op, dtype))
        if not report.ok:
            return str(report)
    return None


def gradients(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    made = function(*(t * 1 for t in leaves))
    made = made if isinstance(made, tuple) else (made,)
    gen = torch.Generator().manual_seed(1)
    sum((t * torch.randn(t.shape, generator=gen)).sum() for t in made if t is not None).backward()
    return tuple(t.grad for t in leaves)


def norm_case(name, shape, dtype, weight_dtype=None, *, weighted=True):
    @case(f"norm {name}")
    def run():
        from layerzero.backends.reference import norm as truth
        from layerzero_triton import norm

        x, r = (torch.randn(shape).to(dtype) for _ in range(2))
        w = torch.randn(shape[-1]).to(weight_dtype or dtype) if weighted else None
        return differs("rms_norm", norm.rms_norm(x, w, 1e-6), truth.rms_norm(x, w, 1e-6), dtype) or differs(
            "rms_norm", norm.add_rms_norm(x, r, w, 1e-6), truth.add_rms_norm(x, r, w, 1e-6), dtype
        )


norm_case("float32", (3, 48), F32)
norm_case("float16", (2, 3, 64), F16)
norm_case("bfloat16", (1, 130), BF16)
norm_case("wide weight", (3, 16), F16, F32)
norm_case("without weight", (5, 20), F32, weighted=False)


@case("norm gemma")
def gemma():
    from layerzero.backends.reference import norm as truth
    from layerzero_triton import norm

    x, r, w = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    return differs("rms_norm", norm.gemma_rms_norm(x, w, 1e-6), truth.gemma_rms_norm(x, w, 1e-6)) or differs(
        "rms_norm", norm.gemma_add_rms_norm(x, r, w, 1e-6), truth.gemma_add_rms_norm(x, r, w, 1e-6)
    )


@case("norm of rows that are read twice")
def norm_twice():
    from layerzero.backends.reference import norm as truth
    from layerzero_triton import norm
    from layerzero_triton.config import NormConfig

    twice = NormConfig(1, 4, 5, again=True)
    for weight in (torch.randn(64), None):
        x = torch.randn(5, 64)
        got, none = norm.norm(x, None, weight, 1e-6, False, twice)
        wrong = differs("rms_norm", got, truth.rms_norm(x, weight, 1e-6))
        if wrong or none is not None:
            return wrong or "a stream without a residual"
    gemma, _ = norm.norm(x, None, w := torch.randn(64), 1e-6, True, twice)
    # Where a row is padded, or a residual is added, it is held as ever.
    padded, added = torch.randn(5, 48), norm.norm(x, x * 2, w, 1e-6, False, twice)
    return (
        differs("rms_norm", gemma, truth.gemma_rms_norm(x, w, 1e-6))
        or differs("rms_norm", norm.norm(padded, None, None, 1e-6, False, twice)[0], truth.rms_norm(padded, None, 1e-6))
        or differs("rms_norm", added, truth.add_rms_norm(x, x * 2, w, 1e-6))
    )


@case("norm of every other column")
def norm_strided():
    from layerzero.backends.reference import norm as truth
    from layerzero_triton import norm

    x, w = torch.randn(4, 2, 40)[..., ::2], torch.randn(40)[::2]
    return differs("rms_norm", norm.rms_norm(x, w, 1e-6), truth.rms_norm(x, w, 1e-6))


@case("layer norm")
def layer_norm():
    from layerzero.backends.reference import norm as truth
    from layerzero_triton.layer_norm import layer_norm as ours

    for dtype, shape, wide in (
        (F32, (3, 48), F32),
        (F16, (2, 3, 64), F16),
        (BF16, (1, 130), BF16),
        (F16, (5, 20), F32),
    ):
        x, w, b = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(wide), torch.randn(shape[-1]).to(wide)
        for scale, shift in ((w, b), (w, None), (None, None), (None, b)):
            wrong = differs("layer_norm", ours(x, scale, shift, 1e-5), truth.layer_norm(x, scale, shift, 1e-5), dtype)
            if wrong:
                return f"{dtype} {shape}: {wrong}"
    far = torch.randn(4, 2, 80)[..., ::2] + 3000.0  # a mean that outweighs the spread, and every other column
    w, b = torch.randn(80)[::2], torch.randn(80)[::2]
    wrong = differs("layer_norm", ours(far, w, b, 1e-5), truth.layer_norm(far.double(), w.double(), b.double(), 1e-5))
    return wrong or (None if ours(torch.empty(0, 8), None, None, 1e-5).shape == (0, 8) else "no rows")


@case("norm gradients")
def norm_gradients():
    from layerzero.backends.reference import norm as truth
    from layerzero_triton import norm

    x, r, w = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    return differs(
        "rms_norm backward",
        gradients(lambda *a: norm.rms_norm(*a, 1e-6), x, w),
        gradients(lambda *a: truth.rms_norm(*a, 1e-6), x, w),
    ) or differs(
        "rms_norm backward",
        gradients(lambda *a: norm.gemma_add_rms_norm(*a, 1e-6), x, r, w),
        gradients(lambda *a: truth.gemma_add_rms_norm(*a, 1e-6), x, r, w),
    )


@case("activations")
def activations():
    from layerzero.backends.reference import mlp as truth
    from layerzero_triton import activation

    for dtype, shape in ((F32, (3, 40)), (F16, (2, 2, 128)), (BF16, (1, 6))):
        x = torch.randn(shape).to(dtype) * 3
        for name, rest in (("silu", ()), ("gelu", ("none",)), ("gelu", ("tanh",)), ("relu", ())):
            op = f"{name}_and_mul"
            wrong = differs(op, getattr(activation, op)(x, *rest), getattr(truth, op)(x, *rest), dtype)
            if wrong:
                return f"{op} {rest}: {wrong}"
    return None


@case("activation gradients")
def activation_gradients():
    from layerzero.backends.reference import mlp as truth
    from layerzero_triton import activation

    x = torch.randn(2, 24) * 2
    for name, rest in (("silu", ()), ("gelu", ("none",)), ("gelu", ("tanh",)), ("relu", ())):
        ours, theirs = getattr(activation, f"{name}_and_mul"), getattr(truth, f"{name}_and_mul")
        got = gradients(lambda t, f=ours, r=rest: f(t, *r), x)
        wrong = differs("backward", got, gradients(lambda t, f=theirs, r=rest: f(t, *r), x))
        if wrong:
            return f"{name} {rest}: {wrong}"
    return None


def rope_case(name, *, interleaved=False, layout="BHSD", full=False, rotary=8, ids=0, inplace=False, key=True):
    @case(f"rope {name}")
    def run():
        from layerzero.backends.reference import positional as truth
        from layerzero_triton import rope

        def heads(count):
            made = torch.randn(2, 3, count, 8)
            return made if layout == "BSHD" else made.transpose(1, 2)

        q, k = heads(3), heads(1) if key else None
        shape = (2, 6, rotary) if full else (6, rotary // 2)
        cos, sin = torch.randn(shape), torch.randn(shape)
        rows = {0: None, 1: torch.randint(0, 6, (3,)), 2: torch.randint(0, 6, (2, 3), dtype=torch.int32)}[ids]
        want = truth.rope(q, k, cos, sin, interleaved, layout, rows, False)
        mine = q.clone(), None if k is None else k.clone()
        got = rope.rope(*mine, cos, sin, interleaved, layout, rows, inplace)
        if inplace and got[0] is not mine[0]:
            return "not in place"
        if wrong := differs("rope", got, want):
            return wrong
        tensors = (q,) if k is None else (q, k)

        def call(module):
            def turned(*given):
                both = given if len(given) == 2 else (given[0], None)
                return module.rope(*both, cos, sin, interleaved, layout, rows, inplace)

            return turned

        return differs("rope backward", gradients(call(rope), *tensors), gradients(call(truth), *tensors))


rope_case("halves")
rope_case("pairs, picked rows", interleaved=True, layout="BSHD", ids=1)
rope_case("part of the head, in place", rotary=6, inplace=True, ids=2)
rope_case("wide tables", full=True, rotary=6, layout="BSHD")
rope_case("wide tables, pairs, no key", full=True, interleaved=True, key=False, ids=2)


@case("rope of a table that wants a gradient")
def rope_tables():
    from layerzero.backends.reference import positional as truth
    from layerzero_triton import rope

    q, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(3, 4), torch.randn(3, 4)

    def call(module):
        return lambda *t: module.rope(t[0], None, t[1], t[2], False, "BHSD", None, False)

    return differs("rope backward", gradients(call(rope), q, cos, sin), gradients(call(truth), q, cos, sin))


@case("rope beyond the table is NaN")
def rope_beyond():
    from layerzero_triton import rope

    q, table = torch.randn(1, 1, 2, 4), torch.ones(3, 2)
    out, _ = rope.rope(q, None, table, table, False, "BHSD", torch.tensor([1, 3]), False)
    return None if bool(out[0, 0, 1].isnan().all()) and bool(out[0, 0, 0].isfinite().all()) else str(out)


def paged_case(
    name, *, dtype=F32, page=4, layout="NHD", heads=4, kv_heads=2, dim=16, splits=2, index=torch.int32, window=None,
    softcap=None, slopes=None, scale=None, last=(),
):  # fmt: skip
    @case(f"paged {name}")
    def run():
        from layerzero.backends.reference.paged import paged_attention as truth
        from layerzero.model.kv_cache import make_paged_batch
        from layerzero_triton import config, paged

        lengths = (5, 0, 37)
        blocks = -(-max(lengths) // page)
        shape = (3 * blocks, page, kv_heads, dim) if layout == "NHD" else (3 * blocks, kv_heads, page, dim)
        k, v, q = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(3, heads, dim).to(dtype)
        table = torch.randperm(3 * blocks).view(3, blocks).to(index)
        batch = make_paged_batch(table, torch.tensor(lengths, dtype=index))
        rest = (scale, window, softcap, slopes, True, layout, *last)
        got = paged.paged_attention(q, k, v, batch, *rest, config=config.PagedConfig(16, 16, splits))
        return differs("attention", got, truth(q, k, v, batch, *rest), dtype)


paged_case("split")
paged_case("whole, other layout", splits=1, layout="HND", page=1, index=torch.int64)
paged_case("window and cap", window=(6, 0), softcap=5.0, page=8)
paged_case("slopes, negative scale", slopes=torch.rand(3, 4), scale=-0.7, heads=4, kv_heads=1)
paged_case("float16, odd head", dtype=F16, dim=24, splits=3)
paged_case("sinks", last=(torch.tensor([-3.0, 0.0, 2.0, 6.0]),))
paged_case("sinks, whole", splits=1, last=(torch.tensor([-3.0, -torch.inf, 2.0, 6.0]),))
paged_case("scales", last=(None, True, 0.5, torch.tensor([0.25, 3.0])))


def latent_case(name, *, dtype=F32, page=4, heads=4, dims=(32, 16), splits=2, index=torch.int32):
    @case(f"latent {name}")
    def run():
        from layerzero.backends.reference.mla import mla_paged_attention as truth
        from layerzero.model.kv_cache import make_paged_batch
        from layerzero_triton import config, mla

        lengths = (5, 0, 37)
        blocks = -(-max(lengths) // page)
        queries = [torch.randn(3, heads, dim).to(dtype) for dim in dims]
        caches = [torch.randn(3 * blocks, page, dim).to(dtype) for dim in dims]
        table = torch.randperm(3 * blocks).view(3, blocks).to(index)
        batch = make_paged_batch(table, torch.tensor(lengths, dtype=index))
        rest = (*queries, *caches, batch, 0.3, True)
        got = mla.mla_paged_attention(*rest, config=config.PagedConfig(16, 16, splits))
        return differs("attention", got, truth(*rest), dtype)


latent_case("split")
latent_case("whole, more heads than a tile", splits=1, heads=20, index=torch.int64)
latent_case("float16, odd widths", dtype=F16, dims=(40, 24), splits=3, page=8)


def sampling_case(name, dtype, *filters, seeds=2):
    @case(f"sampling {name}")
    def run():
        from layerzero.backends.reference import sampling as truth
        from layerzero_triton import sampling

        logits = torch.randn(2, 24, generator=torch.Generator().manual_seed(3)) * 3
        logits[1] = logits[1].round()  # equal logits, at the thresholds too
        logits[0, 4] = -torch.inf
        logits = logits.to(dtype)
        for seed in range(seeds):
            uniform = torch.rand((2, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            got = torch.empty(2, dtype=torch.int64)
            sampling._run(logits, *filters, uniform, got, 16)
            want = truth.sample(logits, *filters, torch.Generator().manual_seed(seed))
            if not torch.equal(got, want):
                return f"seed {seed}: {got.tolist()} instead of {want.tolist()}"
        return None


sampling_case("all tokens", F32, None, None, None, 1.0)
sampling_case("top-k", F32, 7, None, None, 0.8, seeds=1)
sampling_case("top-p", F16, None, 0.9, None, 1.0, seeds=1)
sampling_case("top-k, top-p and min-p", BF16, 20, 0.8, 0.05, 1.3, seeds=1)
sampling_case(
    "one of each a row", F16, torch.tensor([3, 0]), torch.tensor([0.3, 1.0]), None, torch.tensor([1.0, 0.0]), seeds=1,
)  # fmt: skip


def shortlist_case(name, dtype, *filters, vocab=40):
    @case(f"sampling from a shortlist, {name}")
    def run():
        from layerzero.backends.reference import sampling as truth
        from layerzero_triton import sampling
        from layerzero_triton.config import ShortlistConfig

        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3)) * 3
        logits[1] = logits[1].round()  # equal logits, at the threshold and across groups
        logits[2] = 0.0
        logits[2, ::2] = -0.0
        logits[3] = -torch.inf
        logits[3, 9] = 1.0  # fewer tokens than k have any weight
        logits[4, 7] = torch.nan
        logits[5, torch.tensor([3, 11, 12])] = torch.inf
        logits = logits.to(dtype)
        uniform = torch.rand((6, 1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        got = torch.empty(6, dtype=torch.int64)
        plan = sampling._planned(logits, *filters[1:], ShortlistConfig(4, 4, 4, 64, 16, 4))
        sampling._from_shortlist(logits, *filters, uniform, got, plan)
        want = truth.sample(logits, *filters, torch.Generator().manual_seed(1))
        return None if torch.equal(got, want) else f"{got.tolist()} instead of {want.tolist()}"


shortlist_case("top-k", F32, 7, None, None, 0.8)
shortlist_case("one token", F16, 1, None, None, 1.0)
shortlist_case("nearly all tokens, more than groups", BF16, 38, 0.9, None, 1.0)
shortlist_case("top-p and min-p", F32, 6, 0.8, 0.05, 1.3, vocab=45)
shortlist_case(
    "parameters a row", F32, 5, torch.linspace(0.2, 1.0, 6), torch.full((6,), 0.02),
    torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 0.7]),
)  # fmt: skip


@case("sampling takes the shortlist for a small top-k")
def sampling_route():
    from layerzero.backends.reference import sampling as truth
    from layerzero_triton import sampling

    taken = []
    real = sampling._from_shortlist
    sampling._from_shortlist = lambda *args: (taken.append(args[1]), real(*args))
    try:
        logits = torch.randn(2, 70)
        for k in (3, 70, 0):  # as many as there are, and none, are no top-k
            got = sampling.sample(logits, k, None, None, 1.0, torch.Generator().manual_seed(0))
            want = truth.sample(logits, k, None, None, 1.0, torch.Generator().manual_seed(0))
            if not torch.equal(got, want):
                return f"top_k {k}: {got.tolist()} instead of {want.tolist()}"
    finally:
        sampling._from_shortlist = real
    return None if 3 in taken and 70 not in taken and 0 not in taken else str(taken)


@case("sampling calls that differ in numbers alone, and in more than that")
def sampling_plans():
    from layerzero.backends.reference import sampling as truth
    from layerzero_triton import sampling

    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(5)) * 4
    each = torch.tensor([0.2, 0.9, 0.5])
    turned = each.flip(0)
    calls = [
        (9, None, None, 1.0), (9, 0.3, None, 1.0), (9, 0.9, None, 0.4), (9, each, None, 1.0), (9, turned, None, 1.0),
        (9, None, 0.2, 1.0), (9, 0.9, 0.2, 1.5), (9, None, None, each), (4, None, None, turned), (4, 0.3, each, 2.0),
    ]  # fmt: skip
    sampling._plans.clear()
    for seed, filters in enumerate([*calls, *calls]):
        got = sampling.sample(logits, *filters, torch.Generator().manual_seed(seed))
        want = truth.sample(logits, *filters, torch.Generator().manual_seed(seed))
        if not torch.equal(got, want):
            return f"{filters}: {got.tolist()} instead of {want.tolist()}"
    found = len(sampling._plans)
    return None if found == 8 else f"{found} plans"


@case("sampling rows without a distribution")
def sampling_odd():
    from layerzero_triton import sampling

    logits = torch.zeros(4, 8)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    got = sampling.sample(logits, 3, None, None, 1.0, None).tolist()
    greedy = sampling.sample(logits, None, None, None, 0.0, None).tolist()
    right = got[:3] == [-1, -1, 5] and got[3] in (0, 1, 2) and greedy == [-1, -1, 5, 0]
    return None if right else f"{got}, {greedy}"


def linear_case(name, fmt, granularity, *, splits=1, activation=None, bias=True, **options):
    @case(f"linear {name}")
    def run():
        import layerzero as lz
        from layerzero.backends.reference.linear import linear as truth
        from layerzero_triton import config, linear

        weight = lz.quantize(torch.randn(20, 64), fmt, granularity=granularity, **options)
        x, b = torch.randn(3, 64).half(), torch.randn(20).half() if bias else None
        got = linear.dequantized(x, weight, b, activation, config.LinearConfig(16, 16, 32, splits))
        return differs("linear", got, truth(x.double(), weight, None if b is None else b.double(), activation), F16)


linear_case("int8 tensor", "int8", "tensor", bias=False)
linear_case("int8 channel, zero point, split", "int8", "channel", splits=2, symmetric=False, activation="silu")
linear_case("int8 block, zero point", "int8", "block", block_size=32, symmetric=False, activation="gelu_tanh")
linear_case("e4m3 channel", "fp8_e4m3", "channel", activation="gelu")
linear_case("int4 block, zero point", "int4", "block", block_size=32, symmetric=False, activation="silu")
linear_case("int4 channel, split", "int4", "channel", splits=2)
linear_case("mxfp4", "mxfp4", "block", activation="relu")


@case("mxfp4 written out")
def written_out():
    """In float32: the interpreter multiplies bfloat16 wrongly."""
    import layerzero as lz
    from layerzero_triton.linear import _widen

    weight, wide = lz.quantize(torch.randn(20, 96), "mxfp4"), torch.empty(20, 96)
    _widen((3, 1, 1), (weight.data, weight.scale.view(torch.uint8), wide), (20, 3), (8, 512, False), 4)
    return None if torch.equal(wide, lz.dequantize(weight)) else "other numbers"


def few_rows_case(rows, n, k, bias=False, activation=None):
    @case(f"few rows {rows} x {n} x {k} {activation}")
    def run():
        from layerzero.backends.reference import feed_forward, linear
        from layerzero_triton import few_rows

        x, weight = torch.randn(rows, k).half(), (torch.randn(n, k) * k**-0.5).half()
        b = torch.randn(n).half() if bias else None
        apart = (torch.randn(n, 2 * k) * k**-0.5).half()[:, :k]  # rows that are further apart than they are long
        wrong = None
        for given in (weight, apart, (torch.randn(k, n) * k**-0.5).half().t()):
            got = few_rows.linear(x[:1], given, b, activation)
            wrong = wrong or differs("linear", got, linear.linear(x[:1], given, b, activation), F16)
        back = (torch.randn(k, n // 2) * n**-0.5).half()
        rest = (None, activation or "silu", None, None, None)
        made = few_rows.mlp(x[None], weight, back, *rest)
        return wrong or differs("mlp", made, feed_forward.mlp(x[None], weight, back, *rest), F16)


few_rows_case(1, 40, 1024)
few_rows_case(1, 20, 40, bias=True, activation="gelu")
few_rows_case(3, 40, 512, activation="gelu_tanh")
few_rows_case(17, 20, 40, bias=True, activation="relu")


def experts_case(name, tokens=7, experts=6, hidden=40, inner=24, dtype=F32, gated=True, activation="silu", **given):
    @case(f"experts {name}")
    def run():
        from layerzero.backends.reference.moe import moe as truth
        from layerzero_triton.config import ExpertsConfig
        from layerzero_triton.experts import moe

        x = torch.randn(tokens, hidden).to(dtype)
        first = (torch.randn(experts, 2 * inner if gated else inner, hidden) * 0.2).to(dtype)
        second = (torch.randn(experts, hidden, inner) * 0.2).to(dtype)
        if given.get("transposed"):
            first, second = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (first, second))
        biases = (None, None)
        if given.get("bias"):
            biases = (torch.randn(experts, first.shape[1]).to(dtype), torch.randn(experts, hidden).to(dtype))
        offset = experts if given.get("foreign") else 0
        ids = torch.rand(tokens, 3 * experts if offset else experts).topk(3, -1).indices
        ids[:1] = -1 if offset else 2  # a token of no expert, or one that names an expert three times
        limit, interleaved = given.get("limit"), given.get("interleaved", False)
        args = (x, first, second, torch.rand(tokens, 3), ids, activation, offset, *biases, 1.702, limit, interleaved)
        got = moe(*args, config=ExpertsConfig(16, (32, 32, 4, 1), (16, 16, 4, 1)))
        return differs("moe", got, truth(*args), dtype)


experts_case("gated")
experts_case("ungated, of other ranks", gated=False, activation="relu", foreign=True, dtype=F16)
experts_case("of gpt-oss", activation="swigluoai", bias=True, limit=0.5, interleaved=True, transposed=True)
experts_case("of many tokens", tokens=100, experts=5, hidden=32, inner=16, foreign=True)
experts_case("without tokens", tokens=0)
linear_case("e5m2 block, split", "fp8_e5m2", "block", block_size=32, splits=2, activation="relu")


@case("a feed-forward block of such layers")
def fixed_mlp():
    from layerzero.backends.reference.feed_forward import mlp as truth
    from layerzero_triton.experts import fixed_mlp

    up, gate, down = torch.randn(24, 32) * 0.2, torch.randn(24, 32) * 0.2, torch.randn(32, 24) * 0.2
    x, bias = torch.randn(3, 32), torch.randn(24)
    calls = [(up, down, gate, "silu", None, bias, None), (up, down, None, "relu", bias, None, None)]
    calls += [(torch.cat([gate, up]), down, None, "gelu_tanh", None, None, None)]
    return next((bad for args in calls if (bad := differs("mlp", fixed_mlp(x, *args), truth(x, *args)))), None)


@case("attention of queries that are sequences of their own")
def fixed_attention():
    from layerzero.backends.reference.attention import attention as truth
    from layerzero_triton.paged import fixed_attention

    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 9, 2, 32), torch.randn(2, 9, 2, 32)
    for causal in ("bottom_right", True, False):
        rest = (None, 0.0, causal, None, None, None, None, True)
        (got, lse), want = fixed_attention(q, k, v, *rest), truth(*(x.transpose(1, 2) for x in (q, k, v)), *rest)
        wrong = differs("attention", (got.transpose(1, 2), lse), want)
        if wrong:
            return wrong
    rest = (None, 0.0, "bottom_right", None, None, None, None, False)
    whole = fixed_attention(q, k[:, :5], v[:, :5], *rest)
    piece = fixed_attention(q[1:, 2:4], k[1:, :4], v[1:, :4], *rest)
    return None if torch.equal(whole[1:, 2:4], piece) else "a piece of a prompt has other bits than the whole"


@case("a linear layer as one expert")
def fixed_linear():
    from layerzero.backends.reference.linear import linear as truth
    from layerzero_triton.experts import fixed_linear

    weight, bias = torch.randn(40, 48) * 0.2, torch.randn(40)
    for rows, activation in ((1, None), (3, "silu"), (70, "gelu_tanh")):
        x = torch.randn(2, rows, 48)
        got, alone = (fixed_linear(given, weight, bias, activation) for given in (x, x[1:, -1]))
        wrong = differs("linear", got, truth(x, weight, bias, activation))
        if wrong or not torch.equal(got[1:, -1], alone):
            return wrong or "the last row has other bits than alone"
    return None


@case("plans are kept for a shape, not for what the tensors hold")
def planned():
    import layerzero as lz
    from layerzero.backends.reference import norm as true_norm
    from layerzero.backends.reference import positional as true_rope
    from layerzero.backends.reference.linear import linear as true_linear
    from layerzero.backends.reference.paged import paged_attention as true_paged
    from layerzero.model.kv_cache import make_paged_batch
    from layerzero_triton import config, layer_norm, linear, paged, rope

    wrong = []
    for turn in range(3):  # the third one asks for something else in the same shapes
        last = turn == 2
        k, v, q = torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16), torch.randn(2, 4, 16)
        batch = make_paged_batch(torch.randperm(8).view(2, 4).int(), torch.tensor((15, 3 + turn)).int())
        rest = (0.5 if last else None, (4, 0) if last else None, None, None, last, "NHD")
        got = paged.paged_attention(q, k, v, batch, *rest, config=config.PagedConfig(16, 16, 1 if last else 2))
        wrong.append(differs("attention", got, true_paged(q, k, v, batch, *rest)))
        x, y, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(5, 4), torch.randn(5, 4)
        rest = (last, "BHSD", torch.tensor([turn, 1, 2]) if turn else None, False)
        want = true_rope.rope(x, y, cos, sin, *rest)
        wrong.append(differs("rope", rope.rope(x, None if last else y, cos, sin, *rest)[:1], want[:1]))
        kept = x.clone()
        rope.rope(kept, None, cos, sin, *rest[:3], True)
        wrong.append(differs("rope", kept, want[0]))
        weight = lz.quantize(torch.randn(20, 64), "int8", granularity="channel")
        given, bias = torch.randn(3, 64), None if last else torch.randn(20)
        made = linear.dequantized(given, weight, bias, "silu" if last else None)
        wrong.append(
            differs(
                "linear",
                made,
                true_linear(given.double(), weight, None if last else bias.double(), "silu" if last else None),
                F16,
            )
        )
        rows, w, b = torch.randn(3, 20) + turn, torch.randn(20), None if last else torch.randn(20)
        eps = 1e-2 if turn else 1e-5
        wrong.append(
            differs("layer_norm", layer_norm.layer_norm(rows, w, b, eps), true_norm.layer_norm(rows, w, b, eps))
        )
    return next((item for item in wrong if item), None)


@case("health")
def health():
    from layerzero_triton.health import self_test

    report = self_test()
    return None if report.ok else report.detail


@case("custom kernel")
def custom():
    import runpy

    found = runpy.run_path(os.environ["LZ_EXAMPLE"])
    found["main"]()


@pytest.fixture(scope="module")
def found(pytestconfig):
    example = pytestconfig.rootpath / "examples" / "custom_triton_kernel.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "LZ_EXAMPLE": str(example)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.req("R-BK-TR-01")
def test_the_kernel_gives_what_the_reference_gives(found, name):
    assert found[name] is None


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # NumPy's, about NaN and infinity inside the interpreter
    answers = {}
    for title, check in CASES.items():
        torch.manual_seed(0)
        try:
            answers[title] = check()  # type: ignore[operator]
        except Exception as error:
            answers[title] = f"{type(error).__name__}: {error}"
    print(json.dumps(answers))
