"""`lz.cross_entropy` against torch's own in float64 and a formula for what torch lacks, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The loss is float32 whatever the logits are: against the same rounded logits it is held to float32's bounds.
LOSS = tolerance("cross_entropy", "float32")


def draw(*shape, dtype=torch.float64, seed=0, scale=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def targets(*shape, vocab, ignore=-100, share=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < share, torch.tensor(ignore), labels)


def formula(logits, labels, ignore=-100, smoothing=0.0, cap=None, z=0.0, reduction="mean"):
    """Row by row, from the probabilities: -(sum over classes of target share x log probability) + z lse^2."""
    x = logits.double().reshape(-1, logits.shape[-1])
    if cap is not None:
        x = cap * torch.tanh(x / cap)
    losses = []
    for row, label in zip(x, labels.reshape(-1).tolist(), strict=True):
        if label == ignore:
            losses.append(row.sum() * 0.0)
            continue
        top = row.max()
        total = (row - top).exp().sum()
        share = torch.full_like(row, smoothing / row.numel())
        share[label] += 1.0 - smoothing
        lse = top + total.log()
        losses.append(-(share * (row - lse)).sum() + z * lse**2)
    losses = torch.stack(losses)
    counted = int((labels != ignore).sum())
    if reduction == "none":
        return losses.reshape(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / max(counted, 1)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 4.0},
    "z loss": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 1e-3},
}


def known(options):
    return {
        "smoothing": options.get("label_smoothing", 0.0), "cap": options.get("softcap"), "z": options.get("z_loss", 0.0)
    }  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.req("R-TOL-06")
def test_loss_and_gradient_are_torchs(reduction, dtype, smoothing, backend):
    logits, labels = draw(2, 7, 29, dtype=dtype).requires_grad_(), targets(2, 7, vocab=29)
    got = lz.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction, backend=backend)
    assert got.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(wide.reshape(14, 29), labels.reshape(14), label_smoothing=smoothing, reduction=reduction)
    want = want.reshape(got.shape)
    assert_close(got, want, LOSS)
    weight = draw(*got.shape, seed=3)
    (grad,) = torch.autograd.grad((got * weight).sum(), logits)
    (exact,) = torch.autograd.grad((want * weight).sum(), wide)
    assert grad.dtype == dtype
    assert_close(grad, exact, tolerance("cross_entropy", dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.req("R-TOL-06")
def test_every_option_is_the_formula(reduction, name, dtype, backend):
    logits, labels = draw(3, 4, 11, dtype=dtype).requires_grad_(), targets(3, 4, vocab=11)
    got, lse = lz.cross_entropy(logits, labels, reduction=reduction, return_lse=True, backend=backend, **OPTIONS[name])
    wide = logits.detach().double().requires_grad_()
    want = formula(wide, labels, reduction=reduction, **known(OPTIONS[name]))
    assert_close(got, want, LOSS)
    capped = (
        wide
        if "softcap" not in OPTIONS[name]
        else OPTIONS[name]["softcap"] * torch.tanh(wide / OPTIONS[name]["softcap"])
    )
    assert_close(lse, torch.logsumexp(capped, -1), LOSS)
    weight = draw(*got.shape, seed=4)
    beside = draw(*lse.shape, seed=5)  # and a gradient through the log-sum-exp
    (grad,) = torch.autograd.grad((got * weight).sum() + (lse * beside).sum(), logits)
    (exact,) = torch.autograd.grad((want * weight).sum() + (torch.logsumexp(capped, -1) * beside).sum(), wide)
    assert_close(grad, exact, tolerance("cross_entropy", dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_pass_gradcheck(options):
    logits, labels = draw(3, 4).requires_grad_(), torch.tensor([2, -100, 0])
    for lse in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, lse=lse: lz.cross_entropy(x, labels, return_lse=lse, **options), (logits,)
        )
    assert torch.autograd.gradgradcheck(lambda x: lz.cross_entropy(x, labels, **options), (logits,))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bfloat16_losses_are_summed_in_float32(backend):
    """Ten thousand losses near 10: a sum in bfloat16 stops growing long before the end."""
    logits = torch.zeros(10_000, 8, dtype=torch.bfloat16)
    labels = torch.zeros(10_000, dtype=torch.int64)
    total = lz.cross_entropy(logits, labels, reduction="sum", backend=backend)
    assert total.item() == pytest.approx(10_000 * math.log(8), rel=1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_row_that_counts_the_loss_is_zero_and_so_is_the_gradient(backend, dtype):
    """torch gives NaN, which spoils the weights of a whole step for a batch of padding."""
    logits = draw(4, 5, dtype=dtype).requires_grad_()
    for labels in (torch.full((4,), -100), torch.full((4,), 2)):
        ignore = int(labels[0])
        for reduction in ("mean", "sum"):
            loss = lz.cross_entropy(logits, labels, ignore_index=ignore, reduction=reduction, backend=backend)
            assert loss.item() == 0.0
            (grad,) = torch.autograd.grad(loss, logits)
            assert torch.count_nonzero(grad) == 0 and grad.isfinite().all()
    empty = lz.cross_entropy(torch.zeros(0, 5, dtype=dtype), torch.zeros(0, dtype=torch.int64), backend=backend)
    assert empty.item() == 0.0


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_ignored_rows_have_no_loss_no_gradient_and_do_not_count(backend):
    logits, labels = draw(6, 9, dtype=torch.float32).requires_grad_(), torch.tensor([3, -100, 0, 8, -100, 1])
    losses = lz.cross_entropy(logits, labels, reduction="none", backend=backend)
    assert losses[1].item() == losses[4].item() == 0.0
    mean = lz.cross_entropy(logits, labels, backend=backend)
    assert mean.item() == pytest.approx(losses.sum().item() / 4, rel=1e-6)
    (grad,) = torch.autograd.grad(mean, logits)
    assert torch.count_nonzero(grad[[1, 4]]) == 0 and (grad[[0, 2, 3, 5]].abs().sum(-1) > 0).all()


def test_labels_of_both_widths_and_any_rank():
    logits, labels = draw(2, 3, 4, 7, dtype=torch.float32), targets(2, 3, 4, vocab=7)
    want = F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))
    for kind in (torch.int32, torch.int64):
        assert_close(lz.cross_entropy(logits, labels.to(kind)), want, LOSS)
    one = lz.cross_entropy(logits[0, 0, 0], torch.tensor(5))
    assert_close(one, F.cross_entropy(logits[0, 0, 0], torch.tensor(5)), LOSS)


@pytest.mark.req("R-OP-15")
def test_the_fused_kernel_runs_and_the_reference_takes_over_when_it_fails(lab):
    logits, labels = draw(4, 6, dtype=torch.float32), targets(4, vocab=6)
    native, plain = "torch.cross_entropy.native", "reference.cross_entropy.plain"
    every = [
        {},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"softcap": 3.0},
        {"z_loss": 1e-3},
        {"return_lse": True},
    ]
    for options in every:
        assert lab.run(lz.cross_entropy, logits, labels, **options)[1] == [native]
    lab.faults[native] = RuntimeError("no fused kernel for this device")
    for options in every:
        out, ran = lab.run(lz.cross_entropy, logits[:3], labels[:3], **options)
        assert ran == [plain]
        want = formula(logits[:3], labels[:3], reduction=options.get("reduction", "mean"), **known(options))
        assert_close(out[0] if "return_lse" in options else out, want, LOSS)


BAD = {
    "label too large": ({"labels": torch.tensor([0, 9])}, "VALUE_INVALID", "labels"),
    "label negative": ({"labels": torch.tensor([0, -1])}, "VALUE_INVALID", "labels"),
    "labels float": ({"labels": torch.zeros(2)}, "DTYPE_UNSUPPORTED", "labels"),
    "labels of another shape": ({"labels": torch.zeros(3, dtype=torch.int64)}, "SHAPE_INVALID", "labels"),
    "labels no tensor": ({"labels": [0, 1]}, "TYPE_INVALID", "labels"),
    "no classes": ({"logits": torch.zeros(2, 0)}, "SHAPE_INVALID", "vocab"),
    "integer logits": ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "DTYPE_UNSUPPORTED", "int64"),
    "smoothing": ({"label_smoothing": 1.5}, "VALUE_INVALID", "label_smoothing"),
    "smoothing nan": ({"label_smoothing": math.nan}, "VALUE_INVALID", "label_smoothing"),
    "smoothing text": ({"label_smoothing": "0"}, "VALUE_INVALID", "label_smoothing"),
    "z loss": ({"z_loss": -1.0}, "VALUE_INVALID", "z_loss"),
    "z loss infinite": ({"z_loss": math.inf}, "VALUE_INVALID", "z_loss"),
    "softcap": ({"softcap": 0.0}, "VALUE_INVALID", "softcap"),
    "reduction": ({"reduction": "batchmean"}, "VALUE_INVALID", "batchmean"),
    "ignore index": ({"ignore_index": -1.0}, "TYPE_INVALID", "ignore_index"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_means_nothing_is_refused(name):
    change, code, word = BAD[name]
    given = {"logits": torch.zeros(2, 5), "labels": torch.tensor([0, 1]), **change}
    with pytest.raises(InvalidInputError) as caught:
        lz.cross_entropy(given.pop("logits"), given.pop("labels"), **given)
    assert caught.value.code == code and word in str(caught.value)


def test_a_label_outside_the_vocabulary_is_the_callers_error_on_a_hot_call_too():
    logits = draw(3, 5, dtype=torch.float32)
    for _ in range(3):
        lz.cross_entropy(logits, torch.tensor([0, 1, 4]))
    with pytest.raises(InvalidInputError, match="labels hold 5"):
        lz.cross_entropy(logits, torch.tensor([0, 1, 5]))


def test_explain_and_plan_take_the_public_arguments():
    logits, labels = draw(3, 5, dtype=torch.float32), torch.tensor([0, 1, 4])
    assert lz.which("cross_entropy", logits, labels) == "torch.cross_entropy.native"
    assert "softcap" in str(lz.explain("cross_entropy", logits, labels, softcap=2.0))
    plan = lz.plan("cross_entropy", logits, labels, label_smoothing=0.1)
    assert_close(plan(logits, labels, label_smoothing=0.1), F.cross_entropy(logits, labels, label_smoothing=0.1), LOSS)


# -- properties ------------------------------------------------------------------------------------
cases = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(0, 99))


@given(cases, st.sampled_from([0.0, 1e4, -1e4, 3.25]), st.sampled_from([0.0, 0.3]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_adding_a_number_to_all_logits_changes_nothing_but_the_lse(case, shift, smoothing, strided):
    rows, vocab, seed = case
    logits = draw(rows, 2 * vocab, seed=seed)[:, ::2] if strided else draw(rows, vocab, seed=seed)
    labels = targets(rows, vocab=vocab, seed=seed)
    one, lse = lz.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none", return_lse=True)
    two, moved = lz.cross_entropy(logits + shift, labels, label_smoothing=smoothing, reduction="none", return_lse=True)
    assert_close(two, one, tolerance("cross_entropy", "float64"))
    assert_close(moved, lse + shift, tolerance("cross_entropy", "float64"))
    assert (one >= 0).all()


@given(cases, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_a_vocabulary_in_parts_is_put_together_from_their_lses(case, parts):
    rows, vocab, seed = case
    logits, labels = draw(rows, vocab * parts, seed=seed), targets(rows, vocab=vocab * parts, share=0.0, seed=seed)
    zeros = torch.zeros(rows, dtype=torch.int64)
    lses = [lz.cross_entropy(part, zeros, return_lse=True)[1] for part in logits.chunk(parts, -1)]
    whole = torch.logsumexp(torch.stack(lses), 0) - logits.gather(1, labels[:, None])[:, 0]
    assert_close(whole, lz.cross_entropy(logits, labels, reduction="none"), tolerance("cross_entropy", "float64"))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_values_are_torchs(backend, dtype):
    logits = torch.zeros(7, 4, dtype=dtype)
    logits[1] = torch.tensor([1e4, -1e4, 0.0, 5.0])
    logits[2] = torch.tensor([-math.inf, 0.0, 1.0, -math.inf])  # a masked vocabulary
    logits[3, 0] = math.nan
    logits[4, 0] = math.inf
    logits[5] = torch.finfo(dtype).smallest_normal / 4
    logits[6] = -math.inf
    labels = torch.tensor([0, 1, 0, 1, 1, 2, 3])
    got = lz.cross_entropy(logits, labels, reduction="none", backend=backend)
    assert_close(got, F.cross_entropy(logits.double(), labels, reduction="none"), LOSS)
    assert torch.equal(got[:3], lz.cross_entropy(logits[:3], labels[:3], reduction="none", backend=backend))
