"""A kernel that breaks costs one call a detour: next candidate, breaker, log line; never a wrong or repeated result."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.dispatch.bind import resolve
from layerzero.errors import (
    BackendNotAvailableError,
    InvalidInputError,
    KernelExecutionError,
    LayerZeroError,
    LockedKernelError,
    NoKernelFoundError,
    UnknownNameError,
)
from layerzero.health.breaker import BreakerPhase
from layerzero.runtime.state import state
from tools import faulty_plugins as faults
from tools.threads import wait_until

X = torch.linspace(-1, 1, 24).reshape(3, 8)
W = torch.ones(8)
REFERENCE = "reference.rms_norm.plain"


def boom(*args: Any) -> Any:
    raise AssertionError("must not run")


def phase(kernel_id: str) -> BreakerPhase:
    return state.health.snapshot().state(kernel_id).phase


def three(lab: Any, **settings: Any) -> None:
    """first > second > torch's own > reference."""
    lab.use(lab.kernel("bad.rms_norm.first", priority=90), lab.kernel("bad.rms_norm.second", priority=80), **settings)


# -- whose turn is next ---------------------------------------------------------------------------
@pytest.mark.req("R-SEL-14")
def test_a_raising_kernel_hands_over_to_the_next_candidate(lab: Any) -> None:
    three(lab)
    lab.faults["bad.rms_norm.first"] = RuntimeError("device exploded")
    out, ran = lab.run(lz.rms_norm, X, W)
    assert lab.tries == ["bad.rms_norm.first", "bad.rms_norm.second"]
    assert ran == ["bad.rms_norm.second"]
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))


@pytest.mark.req("R-SEL-04")
def test_the_reference_is_the_last_resort(lab: Any) -> None:
    three(lab)
    for kernel_id in ("bad.rms_norm.first", "bad.rms_norm.second", "torch.rms_norm.native"):
        lab.faults[kernel_id] = RuntimeError("broken")
    out, ran = lab.run(lz.rms_norm, X, W)
    assert ran == [REFERENCE]
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))
    assert lab.tries == ["bad.rms_norm.first", "bad.rms_norm.second", "torch.rms_norm.native", REFERENCE]
    assert lz.which("rms_norm", X, W) == REFERENCE


@pytest.mark.req("R-EXC-04")
def test_when_every_candidate_raises_the_error_names_each_and_nobody_is_blamed(lab: Any) -> None:
    three(lab)
    for kernel in lab.registry.by_op("rms_norm"):
        lab.faults[kernel.kernel_id] = RuntimeError(f"no {kernel.kernel_id}")
    # What another test has compiled is a candidate here or not: left out, so that the count is known.
    with lz.scoped(deny=["inductor"]):
        candidates = lz.select("rms_norm", X, W).ranking  # kernels for mixed dtypes or not compiled stay out
        with pytest.raises(KernelExecutionError) as caught:
            lz.rms_norm(X, W)
    assert caught.value.code == "KERNEL_RAISED"
    assert len(caught.value.reasons) == len(candidates) == 4
    assert all(kernel_id in str(caught.value) for kernel_id in candidates)
    assert not state.health.snapshot().kernels


def test_a_hot_kernel_that_starts_to_raise_hands_over_too(lab: Any) -> None:
    three(lab)
    for _ in range(3):
        lz.rms_norm(X, W)
    lab.faults["bad.rms_norm.first"] = RuntimeError("later")
    _, ran = lab.run(lz.rms_norm, X, W)
    assert ran == ["bad.rms_norm.second"]


def test_candidates_whose_breaker_is_open_are_not_tried(lab: Any) -> None:
    three(lab)
    state.health.kernel_failed("bad.rms_norm.second", "earlier")
    lab.faults["bad.rms_norm.first"] = RuntimeError("now")
    lz.rms_norm(X, W)
    assert lab.tries == ["bad.rms_norm.first", "torch.rms_norm.native"]


# -- report and log -------------------------------------------------------------------------------
def test_the_report_tells_chosen_from_ran(lab: Any) -> None:
    three(lab, breaker={"failures": 5})
    lab.faults["bad.rms_norm.first"] = RuntimeError("flaky")
    lz.rms_norm(X, W)
    report = lz.explain("rms_norm", X, W)
    assert (report.chosen, report.ran) == ("bad.rms_norm.first", "bad.rms_norm.second")
    assert report.to_dict()["ran"] == "bad.rms_norm.second"
    assert "last ran: bad.rms_norm.second" in str(report)


@pytest.mark.req("R-SEL-14")
def test_a_failover_is_logged_once_with_context_and_reason(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    three(lab)
    lab.faults["bad.rms_norm.first"] = RuntimeError("shared memory misconfigured")
    with caplog.at_level(logging.ERROR, logger="layerzero.dispatch"):
        for _ in range(5):
            lz.rms_norm(X, W)
    (record,) = [item for item in caplog.records if item.levelno >= logging.ERROR]
    text = record.getMessage()
    for part in ("rms_norm", "bad.rms_norm.first", "bad.rms_norm.second", "KERNEL_RAISED", "shared memory"):
        assert part in text
    for part in ("'rows': ", "'hidden': 8", "'dtype': 'float32'", "'device': 'cpu'"):
        assert part in text.rpartition("context")[2]
    assert record.exc_info is not None and record.exc_info[1] is lab.faults["bad.rms_norm.first"]


def test_a_retry_that_fails_as_before_is_one_line_and_another_failure_has_its_traceback(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    three(lab, breaker={"failures": 9})
    with caplog.at_level(logging.ERROR, logger="layerzero.dispatch"):
        for words in ("boom", "boom", "boom", "other"):
            lab.faults["bad.rms_norm.first"] = RuntimeError(words)
            lz.rms_norm(X, W)
    told = [item for item in caplog.records if item.levelno >= logging.ERROR]
    assert [item.exc_info is not None for item in told] == [True, False, False, True]
    assert all("bad.rms_norm.first" in item.getMessage() for item in told)


@pytest.mark.req("R-SEL-04")
def test_falling_back_to_the_reference_warns_with_the_reasons(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    lab.use(only=True)
    lab.use(lab.kernel("narrow.rms_norm.half", dtypes=frozenset({"float16"})), only=True)
    with caplog.at_level(logging.WARNING, logger="layerzero.selection"):
        out, ran = lab.run(lz.rms_norm, X, W)
    assert ran == [REFERENCE]
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))
    assert "DTYPE_UNSUPPORTED" in caplog.text
    report = lz.explain("rms_norm", X, W)
    assert report.is_fallback
    assert [item.code for item in report.reasons["narrow.rms_norm.half"]] == ["DTYPE_UNSUPPORTED"]
    assert any(note.code == "FALLBACK_USED" for note in report.decision.notes)


def test_asking_for_the_reference_is_no_reason_to_warn(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="layerzero.selection"):
        lz.rms_norm(X, W, backend="reference")
    assert not caplog.records


# -- breakers and the clock -----------------------------------------------------------------------
def test_a_timer_ends_the_rest_without_any_call(lab: Any) -> None:
    three(lab, breaker={"failures": 1, "cooldown_s": 0.1})
    lab.faults["bad.rms_norm.first"] = RuntimeError("transient")
    lz.rms_norm(X, W)
    wait_until(lambda: phase("bad.rms_norm.first") is BreakerPhase.HALF_OPEN)


@pytest.mark.req("R-SEL-14", "R-REG-03")
def test_breaker_opens_rests_and_closes_again_by_the_clock(lab: Any, hand_clock: Any) -> None:
    three(lab, breaker={"failures": 1, "cooldown_s": 0.15})
    first = "bad.rms_norm.first"
    lab.faults[first] = RuntimeError("transient")
    lz.rms_norm(X, W)
    hand_clock.move(0.14)
    assert phase(first) is BreakerPhase.OPEN
    assert lab.run(lz.rms_norm, X, W)[1] == ["bad.rms_norm.second"]
    assert lz.validate(first, X, W)[0].code == "CIRCUIT_OPEN"
    lab.faults.clear()
    hand_clock.move(0.02)
    assert phase(first) is BreakerPhase.HALF_OPEN
    assert lab.run(lz.rms_norm, X, W)[1] == [first]
    assert phase(first) is BreakerPhase.CLOSED
    assert lab.run(lz.rms_norm, X, W)[1] == [first]


def test_a_failure_while_half_open_opens_the_breaker_again(lab: Any, hand_clock: Any) -> None:
    three(lab, breaker={"failures": 1, "cooldown_s": 0.1})
    first = "bad.rms_norm.first"
    lab.faults[first] = RuntimeError("still broken")
    lz.rms_norm(X, W)
    hand_clock.move(0.11)
    assert phase(first) is BreakerPhase.HALF_OPEN
    lz.rms_norm(X, W)
    assert phase(first) is BreakerPhase.OPEN
    hand_clock.move(0.11)
    assert phase(first) is BreakerPhase.HALF_OPEN


@pytest.mark.req("R-REG-03")
def test_settings_say_how_many_failures_open_and_how_many_successes_close(lab: Any, hand_clock: Any) -> None:
    three(lab, breaker={"failures": 3, "cooldown_s": 0.05, "successes": 2})
    first = "bad.rms_norm.first"
    lab.faults[first] = RuntimeError("x")
    for _ in range(2):
        lz.rms_norm(X, W)
    assert phase(first) is BreakerPhase.CLOSED
    lab.faults.clear()
    lz.rms_norm(X, W)  # one success forgives
    lab.faults[first] = RuntimeError("x")
    for _ in range(3):
        assert phase(first) is BreakerPhase.CLOSED
        lz.rms_norm(X, W)
    assert phase(first) is BreakerPhase.OPEN
    lab.faults.clear()
    hand_clock.move(0.06)
    assert phase(first) is BreakerPhase.HALF_OPEN
    lz.rms_norm(X, W)
    assert phase(first) is BreakerPhase.HALF_OPEN
    lz.rms_norm(X, W)
    assert phase(first) is BreakerPhase.CLOSED


def test_breaker_settings_of_the_environment_hold_from_the_first_call(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERZERO_BREAKER_FAILURES", "2")
    three(lab)
    lab.faults["bad.rms_norm.first"] = RuntimeError("x")
    lz.rms_norm(X, W)
    assert phase("bad.rms_norm.first") is BreakerPhase.CLOSED
    lz.rms_norm(X, W)
    assert phase("bad.rms_norm.first") is BreakerPhase.OPEN


# -- not the kernel's fault -----------------------------------------------------------------------
def test_user_errors_never_open_a_breaker(lab: Any) -> None:
    ids, table = torch.tensor([0, 99]), torch.randn(4, 3)
    with pytest.raises(InvalidInputError):
        lz.embedding(ids, table)  # an index outside the table
    lz.embedding(torch.tensor([0, 1]), table, 1)
    with pytest.raises(InvalidInputError) as caught:
        lz.embedding(torch.tensor([0, 1]), table, 7)  # the same hot key, another value
    assert caught.value.code == "VALUE_INVALID"
    lz.rms_norm(X, W)
    with pytest.raises(InvalidInputError):
        lz.rms_norm(X, W, "tiny")  # type: ignore[arg-type]
    q = torch.randn(1, 2, 4, 8)
    lz.attention(q, q, q, dropout_p=0.1)
    with pytest.raises(InvalidInputError):
        lz.attention(q, q, q, dropout_p=float("nan"))
    assert not state.health.snapshot().kernels


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through(lab: Any, interrupt: type[BaseException]) -> None:
    three(lab)
    lz.rms_norm(X, W)
    lab.faults["bad.rms_norm.first"] = interrupt()
    lab.clear()
    with pytest.raises(interrupt):
        lz.rms_norm(X, W)
    assert lab.tries == ["bad.rms_norm.first"]
    lab.faults.clear()
    assert phase("bad.rms_norm.first") is BreakerPhase.CLOSED
    assert lab.run(lz.rms_norm, X, W)[1] == ["bad.rms_norm.first"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_running_out_of_memory_moves_on_without_a_charge(
    lab: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    three(lab)
    lab.faults["bad.rms_norm.first"] = error
    _, ran = lab.run(lz.rms_norm, X, W)
    assert ran == ["bad.rms_norm.second"]
    assert phase("bad.rms_norm.first") is BreakerPhase.CLOSED
    assert "OUT_OF_MEMORY" in caplog.text


def test_inside_vmap_no_kernel_is_blamed(lab: Any) -> None:
    def needs_storage(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x.data_ptr()  # raises for a tensor that vmap wraps
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)

    lab.use(lab.kernel("strict.rms_norm.native", needs_storage, priority=90))
    row = X[0].clone()
    lz.rms_norm(row, W)  # hot for exactly the shape that vmap shows
    out = torch.vmap(lambda item: lz.rms_norm(item, W))(X)
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))
    assert not state.health.snapshot().kernels
    assert lz.which("rms_norm", row, W) == "strict.rms_norm.native"
    grad = torch.func.grad(lambda item: lz.rms_norm(item, W).square().sum())(X)
    leaf = X.clone().requires_grad_()
    torch.rms_norm(leaf, (8,), W, 1e-6).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)


def test_vmap_works_where_a_kernel_asks_for_aligned_pointers(lab: Any) -> None:
    lab.use(lab.kernel("strict.rms_norm.aligned", priority=90, pointer_alignment=16))
    out = torch.vmap(lambda item: lz.rms_norm(item, W))(X)
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))


@pytest.mark.req("R-PT-02")
def test_a_graph_is_traced_where_a_kernel_asks_for_aligned_pointers(lab: Any) -> None:
    """A tensor that is only described has no address; asking for it is an error of torch's."""
    lab.use(lab.kernel("strict.rms_norm.aligned", priority=90, pointer_alignment=16))
    wide = torch.randn(4, 16)
    for x, fits in ((X, True), (wide[:, :8], True), (wide[:, 1:9], False)):  # four bytes beyond its storage's beginning
        call = torch.compile(lambda item: lz.rms_norm(item, W), fullgraph=True, backend="eager", dynamic=False)
        out, ran = lab.run(call, x)
        torch.testing.assert_close(out, torch.rms_norm(x, (8,), W, 1e-6))
        assert (ran == ["strict.rms_norm.aligned"]) is fits, ran
        with FakeTensorMode() as mode:
            found = lz.select("rms_norm", mode.from_tensor(x), mode.from_tensor(W))
        assert found.context.aligned_pointers is fits


# -- what must not be repeated --------------------------------------------------------------------
def test_an_in_place_kernel_is_not_retried(lab: Any) -> None:
    def half_done(q: Tensor, k: Tensor, *rest: Any) -> Any:
        q.zero_()
        raise RuntimeError("power cut")

    lab.use(lab.kernel("bad.rope.inplace", half_done, priority=90))
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    cos, sin = torch.ones(3, 4), torch.zeros(3, 4)
    with pytest.raises(KernelExecutionError) as caught:
        lz.rope(q, k, cos, sin, inplace=True)
    assert "in place" in str(caught.value)
    assert lab.tries == ["bad.rope.inplace"]
    q = torch.randn(1, 2, 3, 8)
    _, ran = lab.run(lz.rope, q, k, cos, sin, inplace=True)
    assert ran == ["torch.rope.halves"]  # its breaker is open now


def test_an_in_place_call_never_runs_on_a_copy(lab: Any) -> None:
    lab.use(
        lab.kernel(
            "fast.rope.packed", priority=90, contiguous=True, adapt=frozenset({"contiguous"}), layouts=frozenset()
        )
    )
    q = torch.randn(1, 2, 3, 16)[..., ::2]
    k = torch.randn(1, 2, 3, 16)[..., ::2]
    before = q.clone()
    angles = torch.rand(3, 4)
    expected = lz.rope(q, k, angles.cos(), angles.sin())[0]
    (out, _), ran = lab.run(lz.rope, q, k, angles.cos(), angles.sin(), inplace=True)
    assert ran == ["torch.rope.halves"]
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(out, expected)
    assert not torch.equal(q, before)


def test_an_expanded_tensor_in_place_is_refused_and_the_reference_stays(lab: Any) -> None:
    q = torch.randn(1, 1, 3, 8).expand(1, 2, 3, 8)
    cos, sin = torch.ones(3, 4), torch.zeros(3, 4)
    with pytest.raises(InvalidInputError) as caught:
        lz.rope(q, None, cos, sin, inplace=True)
    assert caught.value.code == "INPLACE_UNSUPPORTED"
    assert not state.health.snapshot().kernels
    lz.rope(q, None, cos, sin)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_random_numbers_drawn_by_a_failed_kernel_are_given_back(lab: Any, own_generator: bool, hot: bool) -> None:
    generator = torch.Generator() if own_generator else torch.default_generator

    def draws_then_dies(logits: Tensor, k: int, temperature: float, given: torch.Generator | None) -> Tensor:
        torch.rand(17, generator=given)
        if state_of["broken"]:
            raise RuntimeError("after the draw")
        return logits.argmax(-1)

    state_of = {"broken": not hot}
    logits = torch.randn(6, 50)
    lab.use(lab.kernel("bad.sample_topk.greedy", draws_then_dies, priority=90), only=True)
    extra = {"generator": generator} if own_generator else {}
    if hot:
        lz.sample_topk(logits, 5, **extra)
        state_of["broken"] = True
    generator.manual_seed(11)
    expected = lz.sample_topk(logits, 5, backend="reference", **extra)
    generator.manual_seed(11)
    out, ran = lab.run(lz.sample_topk, logits, 5, **extra)
    assert ran == ["reference.sample_topk.plain"]
    assert torch.equal(out, expected)
    after = torch.rand(3, generator=generator)
    generator.manual_seed(11)
    lz.sample_topk(logits, 5, backend="reference", **extra)
    assert torch.equal(after, torch.rand(3, generator=generator))


def test_dropout_draws_the_same_after_a_failover(lab: Any) -> None:
    def dies_late(*args: Any) -> Tensor:
        torch.rand(100)
        raise RuntimeError("late")

    lab.use(lab.kernel("bad.attention.noisy", dies_late, priority=90))
    q = torch.randn(1, 2, 6, 8)
    torch.manual_seed(3)
    wanted = lz.attention(q, q, q, dropout_p=0.5, backend="sdpa.attention.math")
    torch.manual_seed(3)
    out, ran = lab.run(lz.attention, q, q, q, dropout_p=0.5)
    assert ran == ["sdpa.attention.math"]
    torch.testing.assert_close(out, wanted)


# -- locks and denials ----------------------------------------------------------------------------
@pytest.mark.req("R-POL-03")
def test_a_locked_kernel_that_raises_is_not_replaced(lab: Any) -> None:
    three(lab)
    lz.lock("rms_norm", "bad.rms_norm.second")
    lab.faults["bad.rms_norm.second"] = RuntimeError("no")
    for _ in range(2):
        with pytest.raises(KernelExecutionError) as caught:
            lz.rms_norm(X, W)
        assert "locked" in str(caught.value)
    assert set(lab.tries) == {"bad.rms_norm.second"}
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.req("R-POL-03")
def test_a_locked_kernel_that_cannot_run_is_refused(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.half", dtypes=frozenset({"float16"})))
    lz.lock("rms_norm", "mine.rms_norm.half")
    with pytest.raises(LockedKernelError) as caught:
        lz.rms_norm(X, W)
    assert caught.value.code == "LOCKED_KERNEL_UNAVAILABLE"
    assert "DTYPE_UNSUPPORTED" in str(caught.value)
    assert lab.tries == []


def test_on_fault_fallback_lets_others_stand_in_for_a_lock(lab: Any) -> None:
    three(lab, on_fault="fallback")
    lz.lock("rms_norm", "bad.rms_norm.second")
    assert lab.run(lz.rms_norm, X, W)[1] == ["bad.rms_norm.second"]
    lab.faults["bad.rms_norm.second"] = RuntimeError("no")
    assert lab.run(lz.rms_norm, X, W)[1] == ["bad.rms_norm.first"]


def test_deny_is_stronger_than_everything(lab: Any) -> None:
    three(lab)
    lz.lock("rms_norm", "bad.rms_norm.first")
    with lz.scoped(deny=["bad.rms_norm.first"]):
        with pytest.raises(LockedKernelError):
            lz.rms_norm(X, W)
        with pytest.raises(NoKernelFoundError) as caught:
            lz.rms_norm(X, W, backend="bad.rms_norm.first")
        assert any(item.code == "POLICY_DENIED" for item in caught.value.reasons)
    lz.unlock()
    lz.configure(deny=["bad.rms_norm.*"])
    lab.clear()
    with lz.prefer("bad"), lz.scoped(allow=["bad.*"], boosts={"bad.*": 500.0}):
        assert lab.run(lz.rms_norm, X, W)[1] == [REFERENCE]
    assert lab.tries == [REFERENCE]


# -- kernels that cannot be bound -----------------------------------------------------------------
@pytest.mark.req("R-FAIL-01", "R-EXC-06")
def test_a_kernel_whose_module_cannot_be_imported_is_set_aside_with_the_reason(lab: Any, tmp_path: Any) -> None:
    broken = replace(lab.kernel("lost.rms_norm.a", priority=99), function="no_such_vendor_module:kernel")
    nameless = replace(lab.kernel("lost.rms_norm.b", priority=98), function="math:no_such_function")
    lab.use(broken, nameless)
    _, ran = lab.run(lz.rms_norm, X, W)
    assert ran == ["torch.rms_norm.native"]
    for kernel_id in ("lost.rms_norm.a", "lost.rms_norm.b"):
        (why,) = lz.validate(kernel_id, X, W)
        assert why.code == "KERNEL_FUNCTION_MISSING"
    assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]
    assert not state.health.snapshot().kernels
    assert {k.kernel_id for k in lz.list_kernels("rms_norm", available=False)} == {"lost.rms_norm.a", "lost.rms_norm.b"}


@pytest.mark.req("R-FAIL-01", "R-HLTH-03")
@pytest.mark.parametrize(
    "source", ["raise ImportError('libvendor.so.12: not found')", "raise SystemExit('no licence')"]
)
def test_a_vendor_that_dies_at_import_costs_only_itself(
    lab: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "dying_vendor.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 40  # more than any fixed number of attempts
    kernels = [
        replace(lab.kernel(f"dying.rms_norm.k{i}", priority=60 + i / 10), function="dying_vendor:kernel")
        for i in range(count)
    ]
    lab.use(*kernels)
    assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]
    (why,) = lz.validate("dying.rms_norm.k0", X, W)
    assert why.code == "BACKEND_IMPORT_FAILED"


def test_a_check_of_a_plugin_that_raises_costs_only_its_kernel(lab: Any) -> None:
    lab.use(
        lab.kernel("odd.rms_norm.raises", priority=99, predicate="math:sqrt"),
        lab.kernel("odd.rms_norm.missing", priority=98, predicate="no_such_module:check"),
    )
    assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]
    assert lz.validate("odd.rms_norm.raises", X, W)[0].code == "VENDOR_REFUSED"
    assert lz.validate("odd.rms_norm.missing", X, W)[0].code == "VENDOR_REFUSED"


def test_a_plan_that_fails_asks_the_present_policy_who_is_next(lab: Any) -> None:
    three(lab)
    planned = lz.plan("rms_norm", X, W)
    assert planned.kernel_id == "bad.rms_norm.first"
    lz.configure(deny=["bad.rms_norm.second"])
    lab.faults["bad.rms_norm.first"] = RuntimeError("gone")
    lab.clear()
    planned(X, W)
    assert lab.tries == ["bad.rms_norm.first", "torch.rms_norm.native"]


@pytest.mark.parametrize("halves", [1, 99], ids=["another thread was in the middle of it", "it is broken"])
def test_an_adapter_whose_library_was_half_imported_is_imported_again(tmp_path, monkeypatch, halves):
    """Two threads that import libraries which import each other: Python lets one see the other's half."""
    from layerzero.dispatch import bind

    monkeypatch.setattr(bind, "_PAUSE_S", 0.01)
    name = f"half_imported_{halves}"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "seen = Path(__file__).with_suffix('.seen')\n"
        "seen.write_text(seen.read_text() + 'x' if seen.exists() else 'x')\n"
        f"if len(seen.read_text()) <= {halves}:\n"
        "    raise AttributeError(\"module 'triton' has no attribute 'knobs'\")\n"
        "def run(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if halves == 1:
        assert bind._import(f"{name}:run")(7) == 7
        return
    with pytest.raises(AttributeError, match="knobs"):
        bind._import(f"{name}:run")
    assert len((tmp_path / f"{name}.seen").read_text()) == bind._TRIES


@pytest.mark.req("R-EXC-06")
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [
        ("raises_at_import", "PLUGIN_IMPORT_FAILED", "broken install"),
        ("missing_dependency", "PLUGIN_IMPORT_FAILED", "a_module_that_nobody_has"),
        ("exits_at_register", "PLUGIN_REGISTER_FAILED", "no licence found"),
    ],
)
def test_a_backend_that_is_asked_for_and_cannot_be_used_is_an_error_with_its_own_reason(
    site: Any, monkeypatch: pytest.MonkeyPatch, kind: str, code: str, word: str
) -> None:
    """An installed package whose plugin fails: a call without `backend=` runs, one that asks for it raises."""
    faults.install(site, kind)
    monkeypatch.setenv("LAYERZERO_PLUGINS", kind)
    lz.reset()
    torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, W.shape, W, 1e-6))
    for _ in range(2):
        with pytest.raises(BackendNotAvailableError) as caught:
            lz.rms_norm(X, W, backend=kind)
        assert isinstance(caught.value, LayerZeroError) and not isinstance(caught.value, UnknownNameError)
        assert caught.value.code == code and caught.value.reasons[0].code == code
        assert kind in str(caught.value) and word in caught.value.reasons[0].message
    with pytest.raises(UnknownNameError) as unknown:  # one that nobody has installed is another matter
        lz.rms_norm(X, W, backend="nobody")
    assert unknown.value.code == "BACKEND_UNKNOWN"


@pytest.mark.req("R-EXC-06")
def test_a_kernel_whose_vendor_is_gone_raises_it_where_it_is_bound_by_hand(lab: Any) -> None:
    gone = replace(lab.kernel("lost.rms_norm.a"), function="no_such_vendor_module:kernel")
    with pytest.raises(BackendNotAvailableError, match="no_such_vendor_module") as caught:
        resolve(gone)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError) and "lost.rms_norm.a" in str(caught.value)
