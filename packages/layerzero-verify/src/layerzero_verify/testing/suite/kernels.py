"""How the kernels behave: inputs, gradients, threads, strides, refusals; and results, one capability at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.enums import Layout, OpKind
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import assert_close, tolerance
from layerzero.reasons import ReasonCode
from layerzero.tuning.truth import UNLIKELY, chi_square, flat, gradients
from layerzero_verify.testing.cases import GROUPS, Case, cases_of, dtypes_of
from layerzero_verify.testing.compositions import VARYING, unkept
from layerzero_verify.testing.kit import Kit, operation
from layerzero_verify.testing.run import bounds, call, check, context, counts_of, expected, place, refusal, tensors


def _plain_case(kit: Kit, spec: KernelSpec, needs_grad: bool = False) -> Case:
    """The first plain case of a kernel that its predicate takes; skips where there is none."""
    if dtypes_of(spec):
        for found in GROUPS["result"]:
            if found.op == spec.op and found.requires <= spec.features:
                for case in cases_of(found, spec):
                    args = case.arguments(place(kit, spec))
                    if not refusal(case, context(kit, case, args, needs_grad=needs_grad)):
                        return case
    pytest.skip(f"no plain case that {spec.kernel_id} takes for {spec.op} in {', '.join(sorted(spec.dtypes))}")


def test_adapter_can_be_imported(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """The function named in capabilities.json exists and is callable."""
    try:
        lz_kit.function(lz_kernel)
    except Exception as error:
        pytest.fail(f"{lz_kernel.function}: {type(error).__name__}: {error}")


def test_attention_kernel_names_one_layout(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """An attention kernel cannot see the layout, so it declares the one it wants."""
    if lz_kernel.op != "attention":
        pytest.skip("only attention kernels take a fixed layout")
    assert lz_kernel.layouts in ({Layout.BHSD}, {Layout.BSHD}), "declare layouts: ['BHSD'] or ['BSHD']"


def test_inputs_are_not_changed(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """The kernel leaves its inputs bit for bit as they were."""
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))
    before = [item.clone() for item in tensors(args)]
    with torch.no_grad():
        call(lz_kit, case, args)
    for index, (old, new) in enumerate(zip(before, tensors(args), strict=True)):
        assert torch.equal(old, new), f"tensor argument {index} was changed"


def test_a_changed_weight_is_seen(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """A weight that is written to between two calls counts with its new numbers; a stale pack may only be refused."""
    if lz_kernel.op != "linear":
        pytest.skip("only linear layers keep a weight that might be packed")
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))
    weight = args[1]
    with torch.no_grad():
        call(lz_kit, case, args)
        written = weight if isinstance(weight, Tensor) else getattr(weight, "source", weight).data
        written.copy_(written.flip(0))
        try:
            got = call(lz_kit, case, args)
        except InvalidInputError as error:
            if error.code is not ReasonCode.WEIGHT_PACK_STALE:
                raise
            return
    assert_close(got, expected(lz_kit, case, args), bounds(case))


def test_same_inputs_give_the_same_bits(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Where deterministic is declared, three runs agree exactly."""
    if not lz_kernel.deterministic:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare deterministic")
    case = _plain_case(lz_kit, lz_kernel)
    device = place(lz_kit, lz_kernel)
    with torch.no_grad():
        runs = [call(lz_kit, case, case.arguments(device)) for _ in range(3)]
    for other in runs[1:]:
        for left, right in zip(flat(runs[0]), flat(other), strict=True):
            assert torch.equal(left, right), "two runs on equal inputs differ"


def test_a_row_keeps_its_bits_in_any_batch(lz_kit: Kit, lz_kernel: KernelSpec, pytestconfig: pytest.Config) -> None:
    """Where batch_invariant is declared, rows in any company have the bits they have alone."""
    if not lz_kernel.batch_invariant:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare batch_invariant")
    limited = sorted(VARYING & dict(lz_kernel.limits).keys())
    assert not limited, f"limits on {', '.join(limited)} leave some batches to another kernel, and its bits"
    case, count = Case(lz_kernel, lz_kernel.op, "", "", {}), pytestconfig.getoption("--lz-compositions")
    found = unkept(lambda args: call(lz_kit, case, args), lz_kernel, place(lz_kit, lz_kernel), count)
    assert found is None, f"{lz_kernel.kernel_id} declares batch_invariant: {found}"


def test_gradients_match_the_reference(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Where backward is declared, the gradients of all floating inputs are the reference's."""
    if "backward" not in lz_kernel.features:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare backward")
    case = _plain_case(lz_kit, lz_kernel, needs_grad=True)
    device = place(lz_kit, lz_kernel)

    def leaves(dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        return tuple(
            item.to(dtype or item.dtype).requires_grad_()
            if isinstance(item, Tensor) and item.is_floating_point()
            else item
            for item in case.arguments(device)
        )

    ours, wide = leaves(), leaves(torch.float64)
    result = call(lz_kit, case, ours)
    assert all(item.requires_grad for item in flat(result) if item.is_floating_point()), "the result has no gradient"
    got, want = gradients(result, ours), gradients(expected(lz_kit, case, wide), wide)
    # An op that copies has exact results, but its gradient is a sum all the same.
    limit = bounds(case, factor=20.0)
    assert_close(got, want, tolerance("gradient", case.dtype) if limit.exact else limit, path="gradient")


def test_strided_inputs_are_understood(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Without `contiguous`, inputs that lie in memory otherwise give the same result."""
    if lz_kernel.contiguous or lz_kernel.aligned_strides:
        pytest.skip(f"{lz_kernel.kernel_id} declares contiguous or aligned_strides")
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))

    def spread(item: Any) -> Any:
        """The same numbers inside a larger tensor, rows apart (and the last axis too where that is allowed)."""
        if not isinstance(item, Tensor) or item.ndim < 2 or not item.is_floating_point():
            return item
        step = 1 if lz_kernel.stride_last_dim == 1 else 2
        room = item.new_full((*item.shape[:-1], item.shape[-1] * step + 8), float("nan"))
        view = room[..., : item.shape[-1] * step : step]
        view.copy_(item)
        return view

    with torch.no_grad():
        got = call(lz_kit, case, tuple(spread(item) for item in args))
    assert_close(got, expected(lz_kit, case, args), bounds(case))


def test_kernel_is_thread_safe(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Four threads calling at once get what one thread gets."""
    case = _plain_case(lz_kit, lz_kernel)
    device = place(lz_kit, lz_kernel)
    args = case.arguments(device)
    inputs = [
        tuple(item * scale if isinstance(item, Tensor) and item.is_floating_point() else item for item in args)
        for scale in (1.0, 0.5, 2.0, 0.25)
    ]
    with torch.no_grad():
        alone = [call(lz_kit, case, one) for one in inputs]
    start = threading.Barrier(len(inputs))

    def work(args: tuple[Any, ...], wanted: Any) -> None:
        device = next((item.device for item in args if isinstance(item, Tensor)), None)
        if device is not None:
            torch.zeros(1, device=device)  # a new thread has no CUDA context yet, and cuBLAS would warn of it
        start.wait()
        for _ in range(5):
            with torch.no_grad():
                assert_close(call(lz_kit, case, args), wanted, bounds(case))

    with ThreadPoolExecutor(len(inputs)) as pool:
        running = [pool.submit(work, *one) for one in zip(inputs, alone, strict=True)]
    errors = [done.exception() for done in running]
    problems = [f"thread {index}: {type(error).__name__}: {error}" for index, error in enumerate(errors) if error]
    assert not problems, "\n".join(problems)


def test_undeclared_features_are_rejected(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """A call that needs what the kernel does not declare, a gradient included, is refused with a reason."""
    for found in (one for groups in GROUPS.values() for one in groups if one.op == lz_kernel.op):
        if found.requires <= lz_kernel.features:
            continue
        # Both causal alignments agree on equal lengths, so a square call is rightly accepted.
        agreed = "square" if found.name.startswith("causal") else None
        case = next((case for case in cases_of(found, lz_kernel) if case.label != agreed), None)
        if case is not None:
            ctx = context(lz_kit, case, case.arguments(place(lz_kit, lz_kernel)))
            assert lz_kernel.check(ctx), f"{found.name} is not declared, yet a call that needs it is accepted"
    op = lz_kit.operation(lz_kernel.op)
    if "backward" not in lz_kernel.features and op is not None and op.op_kind is OpKind.TENSOR:
        case = _plain_case(lz_kit, lz_kernel)
        ctx = context(lz_kit, case, case.arguments(place(lz_kit, lz_kernel)), needs_grad=True)
        assert lz_kernel.check(ctx), "backward is not declared, yet a call that needs a gradient is accepted"


def test_sizes_outside_the_limits_are_rejected(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """One more than a maximum, one less than a minimum, and no multiple: each is refused with a reason."""
    if not lz_kernel.limits:
        pytest.skip(f"{lz_kernel.kernel_id} declares no limits")
    case = _plain_case(lz_kit, lz_kernel)
    ctx = context(lz_kit, case, case.arguments(place(lz_kit, lz_kernel)))
    for name, limit in lz_kernel.limits:
        outside = [value + 1 for value in (limit.max,) if value is not None]
        outside += [value - 1 for value in (limit.min,) if value]
        outside += [value + 1 for value in (limit.multiple_of,) if value and value > 1]
        outside += [max(limit.one_of) + 1] if limit.one_of else []
        for value in outside:
            assert lz_kernel.check(ctx.with_dims(**{name: value})), f"{name}={value} is outside the limits but accepted"


# -- results, one declared capability at a time, against the reference in float64 ------------------------------
def _checks(group: str, doc: str) -> Callable[[Kit, Case], None]:
    """The test that every case of a group is accepted and gives the reference's result."""

    @pytest.mark.lz_group(group)
    def test(lz_kit: Kit, lz_case: Case) -> None:
        check(lz_kit, lz_case)

    test.__doc__ = doc
    return test


test_result_matches_the_reference = _checks("result", "Plain calls, in every declared dtype.")


@pytest.mark.lz_group("result")
def test_result_has_the_dtype_and_shape_of_the_op(lz_kit: Kit, lz_case: Case) -> None:
    """The result's dtype is the reference's for the same inputs; nothing is quietly widened or narrowed."""
    args = lz_case.arguments(place(lz_kit, lz_case.spec))
    op = lz_kit.operation(lz_case.spec.op)
    assert op is not None and op.fallback_impl is not None
    with torch.no_grad():
        got, want = call(lz_kit, lz_case, args), op.fallback_impl(*args)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for index, (left, right) in enumerate(pairs):
        if isinstance(right, Tensor):
            assert (left.dtype, tuple(left.shape)) == (right.dtype, tuple(right.shape)), f"result {index}"


test_scale_is_applied = _checks("scale", "An explicit scale, and 1/sqrt(head_dim) without one.")
test_gqa_maps_query_heads_to_their_kv_head = _checks("gqa", "Query head h uses KV head h // (Hq / Hkv).")
test_bool_mask_is_honoured = _checks("mask_bool", "True means attend.")
test_fully_masked_row_gives_zeros = _checks("dead_row", "A query that may attend nothing gives zeros, not NaN.")
test_float_mask_is_added = _checks("mask_float", "A float mask is added to the scaled scores; -inf masks.")
test_causal_top_left_is_as_declared = _checks("causal_top_left", "is_causal=True aligns to the top left.")
test_causal_on_equal_lengths_is_right = _checks("causal_square", "On equal lengths both alignments are one.")
test_causal_bottom_right_is_as_declared = _checks("causal_bottom_right", 'is_causal="bottom_right" does.')
test_window_is_honoured = _checks("window", "(left, right) keys around the query's position, -1 for unlimited.")
test_block_mask_is_honoured = _checks("block_mask", "A block-sparse mask as it is, partial blocks at the ends too.")
test_chunks_are_attended_by_themselves = _checks("chunk_mask", "Causal in chunks, queries aligned to the end.")
test_softcap_is_applied = _checks("softcap", "Scores become cap * tanh(score / cap), after the scale.")
test_sinks_join_the_denominator = _checks("sinks", "One more score per head, without a value, under the fraction line.")
test_paged_queries_see_the_whole_context = _checks("non_causal", "is_causal=False: also the keys behind a query.")
test_scales_of_the_cache_are_applied = _checks("kv_scales", "Keys and values are the cache times its scales.")
test_alibi_bias_is_right = _checks("alibi", "-slope * distance, positions aligned to the end.")


@pytest.mark.lz_group("lse")
def test_lse_is_the_natural_logarithm(lz_kit: Kit, lz_case: Case) -> None:
    """The log-sum-exp is natural, float32, one per query and head."""
    check(lz_kit, lz_case)
    args = lz_case.arguments(place(lz_kit, lz_case.spec))
    with torch.no_grad():
        result = call(lz_kit, lz_case, args)
    assert isinstance(result, tuple) and result[1].dtype is torch.float32, "expected (out, lse) with lse in float32"


@pytest.mark.lz_group("dropout")
def test_dropout_keeps_the_expectation(lz_kit: Kit, lz_case: Case) -> None:
    """With value all ones the mean stays near one, and something was dropped; torch's seed decides what."""
    args = list(lz_case.arguments(place(lz_kit, lz_case.spec)))
    args[2] = torch.ones_like(args[2])
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            results.append(call(lz_kit, lz_case, tuple(args)).float())
    assert abs(results[0].mean().item() - 1.0) < 0.05
    assert (results[0] - 1.0).abs().max().item() > 0.05, "nothing was dropped"
    assert torch.equal(results[0], results[1]), "equal seeds gave different results"
    assert not torch.equal(results[0], results[2]), "the seed does not matter"


test_sizes_hold_up_to_the_declared_limits = _checks("sizes", "Every declared minimum, maximum and listed size.")
test_eps_stands_inside_the_root = _checks("eps", "sqrt(mean + eps), not sqrt(mean) + eps.")
test_missing_weight_means_one = _checks("no_weight", "weight=None is allowed and scales by one.")
test_rope_options_are_right = _checks("rope_options", "Partial rotation and explicit positions.")
test_weights_may_be_of_another_dtype = _checks("mixed_weight", "It counts in full, the result has x's dtype.")
test_loss_options_are_right = _checks("loss_options", "Smoothing, softcap, z-loss, log-sum-exp: alone and together.")
test_casts_round_clamp_and_wrap_as_defined = _checks("cast_options", "Every declared pair of dtypes, bit for bit.")
test_activation_is_applied = _checks("activation", "Each activation of linear.")
test_quantized_weights_count_as_the_numbers_they_stand_for = _checks("quantized_weight", "In every declared form.")
test_long_sums_are_kept_in_a_wide_type = _checks("accumulation", "Hundreds of numbers of one sign.")


@pytest.mark.lz_group("sampling")
def test_sampling_is_seeded_and_stays_inside_the_filter(lz_kit: Kit, lz_case: Case) -> None:
    """Equal seeds give equal tokens; no token outside what the filter leaves; each as often as it should be."""
    device = place(lz_kit, lz_case.spec)
    args = lz_case.arguments(device)
    first, again = call(lz_kit, lz_case, args), call(lz_kit, lz_case, lz_case.arguments(device))
    assert first.dtype is torch.int64 and first.shape == args[0].shape[:1]
    assert torch.equal(first, again), "equal seeds gave different tokens"
    assert first.unique().numel() > 1, "only one token was ever drawn"
    probs = _probabilities(lz_case.spec.op, args)[0].cpu()  # the rows are alike
    drawn = set(first.tolist())
    assert not drawn - set(probs.nonzero().flatten().tolist()), f"drew {sorted(drawn)} from outside the filter"
    chance = chi_square(counts_of(first, probs.numel()), probs)
    assert chance > UNLIKELY, f"the draws do not follow the distribution: chi-square probability {chance:.1e}"


def _probabilities(op: str, args: tuple[Any, ...]) -> Tensor:
    """What the reference draws with for these arguments, in float64."""
    reference = operation("sampling_probs")
    assert reference is not None and reference.fallback_impl is not None
    *filters, temperature, _ = args[1:]
    alone = {"sample_topk": (*filters, None, None), "sample_topp": (None, *filters, None)}
    top_k, top_p, min_p = alone.get(op, filters)
    out: Tensor = reference.fallback_impl(args[0].double(), top_k, top_p, min_p, temperature)
    return out


@pytest.mark.lz_group("speculation")
def test_speculation_keeps_the_distribution_of_the_target(lz_kit: Kit, lz_case: Case) -> None:
    """Equal seeds give equal tokens, and at each place the tokens follow the target, whatever the draft was."""
    device = place(lz_kit, lz_case.spec)
    args = lz_case.arguments(device)
    tokens = call(lz_kit, lz_case, args)[0]
    assert torch.equal(tokens, call(lz_kit, lz_case, lz_case.arguments(device))[0]), "equal seeds gave different tokens"
    # Rows are alike and the target looks at the depth alone: node 0 is always at depth 1, the last place deepest.
    target = args[2][0]
    for depth, probs in enumerate((target[0], target[1], target[-1])):
        drawn = tokens[:, depth][tokens[:, depth] >= 0]
        chance = chi_square(counts_of(drawn, probs.numel()), probs)
        assert chance > UNLIKELY, f"place {depth}: {drawn.numel()} tokens, chi-square probability {chance:.1e}"


test_dequantized_values_match_the_reference = _checks(
    "dequantized", "What the codes of every declared format stand for, in every declared dtype."
)


@pytest.mark.lz_group("quantized")
def test_quantized_values_match_the_reference(lz_kit: Kit, lz_case: Case) -> None:
    """What the codes stand for is within the declared bound (one step of the format by default) of the reference."""
    args = lz_case.arguments(place(lz_kit, lz_case.spec))
    dequantize = lz_kit.operation("dequantize")
    assert dequantize is not None and dequantize.fallback_impl is not None
    op = lz_kit.operation("quantize")
    assert op is not None and op.fallback_impl is not None
    got, want = call(lz_kit, lz_case, args), op.fallback_impl(*args)
    assert (got.fmt, got.granularity, got.shape) == (want.fmt, want.granularity, want.shape)
    assert tensors(args)[0].dtype == got.dtype
    left, right = (dequantize.fallback_impl(item, torch.float32) for item in (got, want))
    declared = dict(lz_case.spec.error_bounds).get(args[1].fmt.value)
    if declared is None:
        assert_close(left, right, tolerance("quantize", "float16"))
        return
    original = args[0].float()
    error = (left - original).abs().max().item() / original.abs().max().item()
    assert error <= declared, f"error {error:.3g} exceeds the declared bound {declared:.3g} of {args[1].fmt}"
