"""Our Triton kernels over rows (norms, activations, RoPE, sampling), run by Triton's interpreter; no GPU is needed.

`interpreted_lab.py` says how: the cases run in a child process, which is this file as a script.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tools.pytest_fixtures import module_beside

pytest.importorskip("triton")

lab = module_beside(__file__, "interpreted_lab")
cases = lab.Cases()
case, differs, gradients = cases.add, lab.differs, lab.gradients
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


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
    from layerzero.backends.reference import feed_forward as truth
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
    from layerzero.backends.reference import feed_forward as truth
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


@case("health")
def health():
    from layerzero_triton.health import self_test

    report = self_test()
    return None if report.ok else report.detail


@case("custom kernel")
def custom():
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "custom_triton_kernel.py"))["main"]()


@pytest.fixture(scope="module")
def found():
    return lab.answers(__file__)


@pytest.mark.parametrize("name", cases)
@pytest.mark.req("R-BK-TR-01")
def test_the_kernel_gives_what_the_reference_gives(found, name):
    assert found[name] is None


if __name__ == "__main__":
    cases.tell()
