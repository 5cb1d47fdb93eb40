"""The first answer is checked: what a merely installed kernel may do before anything vouches for it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero.dispatch import bind
from layerzero.errors import KernelExecutionError, LockedKernelError, NoKernelFoundError, PolicyValidationError
from layerzero.reasons import ReasonCode
from layerzero.runtime.state import state
from layerzero_verify.testing.fakes import capabilities
from tools.pytest_fixtures import module_beside

pytestmark = pytest.mark.fault(25)

lab = module_beside(__file__, "first_use_lab")
ALL, BASE, Planted, call, planted, right, zeros = (
    lab.ALL, lab.BASE, lab.Planted, lab.call, lab.planted, lab.right, lab.zeros,
)  # fmt: skip


# -- the attack ----------------------------------------------------------------------------------------------------
_PLUGIN = """
from pathlib import Path
from layerzero.plugin import hookimpl, vendor_status
CAPABILITIES = Path(__file__).with_name("capabilities.json")
@hookimpl
def layerzero_register(registrar):
    registrar.backend(CAPABILITIES)
@hookimpl
def layerzero_capabilities(device):
    return vendor_status(CAPABILITIES, device)
"""


def install(site: Path, body: str, version: str = "1.0") -> None:
    """A stranger's package as pip leaves it behind: a module, a descriptor, metadata with an entry point."""
    package = site / "layerzero_acme"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(_PLUGIN)
    (package / "kernels.py").write_text(f"import torch\nCALLS = []\ndef rms_norm(x, weight, eps):\n{body}")
    entry = {"variant": "fast", "function": "layerzero_acme.kernels:rms_norm", "priority": 99}
    (package / "capabilities.json").write_text(json.dumps(capabilities("acme", entry)))
    info = site / f"layerzero_acme-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: layerzero-acme\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nacme = layerzero_acme.plugin\n")


@pytest.fixture
def stranger(site: Path, planted: Planted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LAYERZERO_PLUGINS", "acme")
    bind._import.cache_clear()
    yield site
    bind._import.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "layerzero_acme"]:
        del sys.modules[name]


def test_an_installed_kernel_that_returns_zeros_never_answers(stranger: Path, planted: Planted) -> None:
    install(stranger, "    CALLS.append(1)\n    return torch.zeros_like(x)\n")
    lz.reset()
    x, weight, expected = call()
    assert lz.which("rms_norm", x, weight) == "acme.rms_norm.fast", "its priority would choose it"
    assert [
        check.code for check in lz.doctor(probe=False).checks if check.name == "acme" and check.group == "proofs"
    ] == [ReasonCode.FIRST_USE_UNCHECKED], "doctor names what nothing vouches for"
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.entries() == {"acme.rms_norm.fast": "NUMERICS_MISMATCH"}
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert lz.explain("rms_norm", x, weight).reasons["acme.rms_norm.fast"][0].code is ReasonCode.QUARANTINED
    report = lz.doctor(probe=False)
    assert not report.ok and report.check("acme", "proofs").code is ReasonCode.NUMERICS_MISMATCH
    assert not lz.doctor("acme", probe=False).ok, "nor is it healthy by itself"
    with lz.scoped(deny=["acme"]):
        assert lz.doctor(probe=False).ok, "what the policy denies keeps nobody from health"
    lz.reset()  # the next process
    ran = len(sys.modules["layerzero_acme.kernels"].CALLS)
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert len(sys.modules["layerzero_acme.kernels"].CALLS) == ran


def test_a_right_kernel_runs_the_second_call_and_the_first_of_the_next_process(stranger: Path) -> None:
    install(stranger, "    CALLS.append(1)\n    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)\n")
    lz.reset()
    x, weight, expected = call()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    report = lz.explain("rms_norm", x, weight)
    assert (report.chosen, report.ran) == ("acme.rms_norm.fast", BASE), "the caller got the baseline's result"
    calls = sys.modules["layerzero_acme.kernels"].CALLS
    assert len(calls) == 1
    lz.rms_norm(x, weight)
    assert len(calls) == 2 and report.decision.op == "rms_norm"
    report = lz.explain("rms_norm", x, weight)
    assert report.decision.winner.proof == "checked here"
    lz.reset()
    lz.rms_norm(x, weight)
    assert len(calls) == 3 and lz.explain("rms_norm", x, weight).ran == "acme.rms_norm.fast"


def test_a_call_that_was_checked_is_recorded_like_any_other(planted: Planted) -> None:
    planted.kernel("rms_norm", right)
    planted.start()
    x, weight, _ = call()
    with lz.record() as found:
        for _ in range(3):
            lz.rms_norm(x, weight)
    assert [item.count for item in found.traffic.calls] == [3]


def test_another_version_or_another_kind_of_call_is_checked_again(planted: Planted) -> None:
    kernel_id = planted.kernel("rms_norm", right, dtypes=["float32", "float16"])
    planted.start()
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    lz.rms_norm(x, weight)
    half = [item.half() for item in (x, weight)]
    lz.rms_norm(*half)
    assert lz.explain("rms_norm", *half).ran == BASE, "float16 was never checked"
    planted.start(version="1.1")
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == BASE
    planted.start(version="1.1")
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == kernel_id


def test_off_uses_kernels_as_they_come(planted: Planted, tmp_path: Path) -> None:
    planted.kernel("rms_norm", zeros)
    planted.start(on_first_use="off")
    x, weight, _ = call()
    assert not lz.rms_norm(x, weight).any() and planted.entries() == {}
    file = tmp_path / "layerzero.yaml"
    file.write_text("on_first_use: 'off'\n")
    from layerzero.policy.load import load_file

    assert load_file(file).settings["on_first_use"] == "off"
    with pytest.raises(PolicyValidationError, match="widen"):
        load_file(file, trusted=False)


# -- what is remembered --------------------------------------------------------------------------------------------
def test_what_was_checked_is_kept_in_a_folder_of_ours_alone(planted: Planted) -> None:
    planted.kernel("rms_norm", right)
    planted.start()
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    folder = planted.quarantine.parent / "first_use"
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.glob("*.json")
    assert list(json.loads(file.read_text())["kinds"]) == ["float32"]
    os.chmod(folder, 0o777)
    planted.start()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == BASE, "others may write there: not believed"
    os.chmod(folder, 0o700)
    file.write_text('{"schema_version": "1.0", "kernel_id": "acme.rms')
    planted.start()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == BASE, "half a file says nothing"
    planted.start()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == "acme.rms_norm.fast", "and was written anew"


# -- where nothing can be checked ----------------------------------------------------------------------------------
def test_nothing_unproven_is_a_candidate_in_a_capture_or_a_graph(planted: Planted) -> None:
    kernel_id = planted.kernel("rms_norm", right, graph_safe=True)
    planted.start()
    x, weight, _ = call()
    ctx = lz.explain("rms_norm", x, weight).context
    captured = lz.explain("rms_norm", replace(ctx, capturing=True))
    assert captured.chosen != kernel_id
    assert [item.code for item in captured.reasons[kernel_id]] == [ReasonCode.FIRST_USE_UNCHECKED]
    traced = lz.explain("rms_norm", x, weight, compiled=True)
    assert traced.chosen != kernel_id and traced.reasons[kernel_id][0].code is ReasonCode.FIRST_USE_UNCHECKED
    assert not traced.decision.candidate(kernel_id).accepted
    lz.rms_norm(x, weight)
    assert lz.which("rms_norm", replace(ctx, capturing=True)) == kernel_id


def test_nothing_unproven_draws(planted: Planted) -> None:
    kernel_id = planted.kernel("sample_topk", lambda logits, *rest: logits.argmax(-1))
    planted.start()
    logits = torch.randn(2, 50)
    lz.sample_topk(logits, 5)
    report = lz.explain("sample_topk", logits, 5)
    assert not planted.calls and report.reasons[kernel_id][0].code is ReasonCode.FIRST_USE_UNCHECKED
    with pytest.raises(NoKernelFoundError, match="FIRST_USE_UNCHECKED"):
        lz.sample_topk(logits, 5, backend="acme")


# -- how it is checked ---------------------------------------------------------------------------------------------
def test_a_kernel_that_writes_in_place_is_checked_on_copies(planted: Planted) -> None:
    def turned(q: Any, k: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        torch.rand(3)  # and it draws, which nobody may notice
        return q.zero_(), k.zero_()

    planted.kernel("rope", turned)
    planted.start()
    q, k = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    angles = torch.randn(6, 8)
    cos, sin = angles.cos(), angles.sin()
    expected = lz.rope(q, k, cos, sin, backend="reference")
    ours = (q.clone(), k.clone())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    lz.rope(*ours, cos, sin, inplace=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(ours, expected)
    assert planted.calls and planted.entries() == {"acme.rope.fast": "NUMERICS_MISMATCH"}


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return right(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.sum(0), None


def test_a_wrong_gradient_is_found_and_the_callers_gradients_are_the_baselines(planted: Planted) -> None:
    planted.kernel("rms_norm", lambda *args: _WrongBackward.apply(*args))
    planted.start()
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    assert planted.entries() == {}, "without a gradient it is right"
    theirs, ours = (item.clone().requires_grad_() for item in (x, x))
    F.rms_norm(theirs, (64,), weight, 1e-6).square().sum().backward()
    out = lz.rms_norm(ours, weight)
    assert ours.grad is None, "the check leaves nothing in the caller's tensors"
    out.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert planted.entries() == {"acme.rms_norm.fast": "NUMERICS_MISMATCH"}


def _in_steps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right, and more tensors are saved for its gradient than for the baseline's."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("function", [_in_steps, zeros, lambda *args: _WrongBackward.apply(*args)])
def test_a_checkpoint_sees_nothing_of_a_check_and_one_kernel_in_both_passes(planted: Planted, function: Any) -> None:
    kernel_id = planted.kernel("rms_norm", function)
    planted.start()
    x, weight, _ = call()
    theirs, ours = (item.clone().requires_grad_() for item in (x, x))
    F.rms_norm(theirs, (64,), weight, 1e-6).square().sum().backward()
    out = checkpoint(lz.rms_norm, ours, weight, use_reentrant=False)
    assert lz.explain("rms_norm", ours, weight).ran == (kernel_id if function is _in_steps else BASE)
    out.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert planted.entries() == ({} if function is _in_steps else {kernel_id: "NUMERICS_MISMATCH"})


@pytest.mark.parametrize("given", ["zeros", "constant", "nan"])
def test_inputs_that_show_nothing_prove_nothing(planted: Planted, given: str) -> None:
    """On zeros the wrong kernel is right; a drawn example shows it."""
    planted.kernel("rms_norm", zeros)
    planted.start()
    value = {"zeros": 0.0, "constant": 2.0, "nan": float("nan")}[given]
    x, weight = torch.full((4, 64), value), torch.zeros(64)
    out = lz.rms_norm(x, weight)
    torch.testing.assert_close(out, F.rms_norm(x, (64,), weight, 1e-6), equal_nan=True)
    assert planted.entries() == {"acme.rms_norm.fast": "NUMERICS_MISMATCH"}


@pytest.mark.parametrize("why", ["long", "no memory"])
def test_a_baseline_that_takes_too_much_is_not_run(planted: Planted, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.dispatch import first_use

    seen: list[int] = []

    def counted(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        seen.append(x.shape[0])
        return right(x, weight, eps)

    kernel_id = planted.kernel("rms_norm", counted)
    planted.start()
    if why == "long":
        monkeypatch.setattr(first_use, "price_us", lambda op, ctx, args: 20_001.0)
    else:
        monkeypatch.setattr(first_use, "free_bytes", lambda device: 1000)
    x, weight, expected = call(rows=300)
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert min(seen) < 300, "a smaller call was drawn"
    assert seen[-1] == 300 and lz.explain("rms_norm", x, weight).ran == kernel_id, "then the kernel ran, proven"


def test_a_check_that_finds_out_nothing_is_made_ever_less_often(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerzero.dispatch import first_use

    drawn: list[int] = []
    planted.kernel("rms_norm", right)
    planted.start()
    monkeypatch.setattr(first_use, "price_us", lambda op, ctx, args: 20_001.0)
    monkeypatch.setattr(first_use, "example", lambda *_: drawn.append(len(drawn)))
    for rows in range(1, 101):
        x, weight, expected = call(rows=rows)
        torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert len(drawn) == 6, "after 2, 4, 8, 16, 32 calls"
    assert not planted.entries() and lz.explain("rms_norm", x, weight).ran != "acme.rms_norm.fast"


def test_a_kernel_that_changes_its_inputs_is_wrong(planted: Planted) -> None:
    def changes(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        out = right(x, weight, eps)
        x.mul_(2)
        return out

    planted.kernel("rms_norm", changes)
    planted.start()
    x, weight, expected = call()
    kept = x.clone()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert torch.equal(x, kept) and planted.entries() == {"acme.rms_norm.fast": "NUMERICS_MISMATCH"}


@pytest.mark.parametrize("told", [True, False], ids=("call", "example"))
@pytest.mark.parametrize("how", ["dtype", "input"])
def test_a_result_of_another_dtype_or_a_changed_input_is_wrong_on_an_example_too(
    planted: Planted, how: str, told: bool
) -> None:
    def odd(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        out = right(x, weight, eps)
        return out.double() if how == "dtype" else (out, x.zero_())[0]

    planted.kernel("rms_norm", odd)
    planted.start()
    x, weight, _ = call()
    weight = weight if told else torch.ones_like(weight)  # numbers that show nothing: an example is drawn
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x, weight), right(x, weight, 1e-6))
    assert planted.entries() == {"acme.rms_norm.fast": "NUMERICS_MISMATCH"}


def test_a_large_error_that_a_kernel_declares_itself_is_not_believed(planted: Planted) -> None:
    planted.kernel("rms_norm", zeros, error_bounds={"float32": 1e9})
    planted.start()
    x, weight, expected = call()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.entries()


@pytest.mark.parametrize("forgotten", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0])
def test_large_numbers_put_no_right_kernel_away_and_hide_no_wrong_one(
    planted: Planted, scale: float, forgotten: int
) -> None:
    """One that rounds probabilities to bfloat16, as kernels on GPUs do, is off by their step times the largest value:
    beyond the table's bounds, but not much further off than torch's."""

    def rounding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        scores = q.float() @ k.float().mT / 8
        scores[..., scores.shape[-1] - forgotten :] = -torch.inf
        return (scores.softmax(-1).to(v.dtype).float() @ v.float()).to(v.dtype)

    planted.kernel("attention", rounding, dtypes=["bfloat16"], features=["mha"])
    for seed in range(3):
        planted.start()
        torch.manual_seed(seed)
        q, k, v = ((torch.randn(1, 4, 128, 64) * scale).bfloat16() for _ in range(3))
        wide = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        assert (lz.attention(q, k, v) - wide).abs().max() < 0.02 * scale
        assert planted.calls[:1] == ["acme.attention.fast"]
        assert bool(planted.entries()) == bool(forgotten)
        planted.quarantine.unlink(missing_ok=True)


def test_a_kernel_that_raises_is_charged_and_not_trusted(planted: Planted) -> None:
    def raises(*args: Any) -> Any:
        raise ValueError("not today")

    planted.kernel("rms_norm", raises)
    planted.start()
    x, weight, expected = call()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.entries() == {} and "not today" in state.health.snapshot().kernels["acme.rms_norm.fast"].last_error


def test_a_check_that_raises_as_before_is_one_line_and_another_failure_has_its_traceback(
    planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    words = itertools.chain(["not today"] * 3, itertools.repeat("nor tomorrow"))

    def raises(*args: Any) -> Any:
        raise ValueError(next(words))

    planted.kernel("rms_norm", raises)
    planted.start(breaker={"failures": 9})
    x, weight, expected = call()
    with caplog.at_level(logging.ERROR, logger="layerzero"):
        for _ in range(64):  # such a check is made ever less often
            torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    told = [item for item in caplog.records if "raised when it was checked" in item.getMessage()]
    assert [item.exc_info is not None for item in told[:5]] == [True, False, False, True, False]


def test_failover_passes_over_what_nobody_has_checked(planted: Planted) -> None:
    planted.kernel("rms_norm", right, "first")
    planted.kernel("rms_norm", zeros, "second", priority=98)
    planted.start()
    x, weight, expected = call()
    lz.rms_norm(x, weight)
    broken = planted.kernels[0]["function"].split(":")[1]

    def raises(*args: Any) -> Any:
        raise RuntimeError("broken now")

    setattr(lab._module, broken, raises)
    bind._import.cache_clear()
    state.publish()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert "acme.rms_norm.second" not in planted.calls


# -- kernels asked for by name -------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["locked", "named"])
def test_a_kernel_asked_for_by_name_is_checked_and_raises_when_wrong(planted: Planted, how: str) -> None:
    planted.kernel("rms_norm", zeros)
    planted.start(**({"locks": {"rms_norm": "acme.rms_norm.fast"}} if how == "locked" else {}))
    x, weight, _ = call()
    backend = "acme" if how == "named" else None
    with pytest.raises(KernelExecutionError, match=r"differs from the reference") as raised:
        lz.rms_norm(x, weight, backend=backend)
    assert raised.value.reasons[0].code is ReasonCode.NUMERICS_MISMATCH
    with pytest.raises((LockedKernelError, NoKernelFoundError), match="QUARANTINED"):
        lz.rms_norm(x, weight, backend=backend)


def test_a_right_kernel_asked_for_by_name_gives_the_baselines_result_first(planted: Planted) -> None:
    kernel_id = planted.kernel("rms_norm", right)
    planted.start(locks={"rms_norm": kernel_id})
    x, weight, expected = call()
    for ran in (BASE, kernel_id):
        torch.testing.assert_close(lz.rms_norm(x, weight), expected)
        assert lz.explain("rms_norm", x, weight).ran == ran


def test_a_plan_holds_a_kernel_that_was_checked(planted: Planted) -> None:
    planted.kernel("rms_norm", zeros)
    planted.start()
    x, weight, expected = call()
    plan = lz.plan("rms_norm", x, weight)
    assert plan.kernel_id != "acme.rms_norm.fast" and planted.entries()
    torch.testing.assert_close(plan(x, weight), expected)


# -- lengths that only the device knows ----------------------------------------------------------------------------
def _paged(rows: int, heads: int = 2, places: int = 64, dim: int = 16) -> tuple[Any, ...]:
    """A step over a static cache seen as pages, as patched models make it: the host has only a bound of the lengths."""
    cache = torch.randn(2, rows, heads, places, dim)
    size, per = 32, places // 32
    count = (rows - 1) * heads * per + per
    pages = [item.as_strided((count, heads, size, dim), (size * dim, places * dim, dim, 1)) for item in cache]
    first = torch.arange(rows, dtype=torch.int32) * heads * per
    lengths = torch.arange(5, 5 + rows, dtype=torch.int32)
    tables = first[:, None] + torch.arange(per, dtype=torch.int32)
    bounds = lz.paged_batch(tables, torch.full_like(lengths, places))
    batch = replace(bounds, context_lens=lengths)
    assert batch.context_lens_host == (places,) * rows
    query = torch.randn(rows, heads, dim)
    expected = torch.stack(
        [
            F.scaled_dot_product_attention(query[row, :, None], *(item[row, :, : 5 + row] for item in cache))[:, 0]
            for row in range(rows)
        ]
    )
    return query, *pages, batch, expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_lengths_of_which_the_host_has_a_bound_are_read_before_another_kernel_answers(
    planted: Planted, rows: int, raises: bool
) -> None:
    """What reads them on the device is right; a baseline that believed the bound would accuse it and answer wrongly."""
    query, keys, values, batch, expected = _paged(rows)
    broken: list[bool] = []

    def on_device(query: Any, keys: Any, values: Any, batch: Any, scale: Any, *rest: Any, **words: Any) -> Any:
        if broken:
            raise RuntimeError("broken")
        size, out = keys.shape[2], torch.empty_like(query)
        for row, length in enumerate(batch.context_lens.tolist()):
            pages = batch.block_tables[row, : -(-length // size)].long()
            both = (item[pages].transpose(0, 1).flatten(1, 2)[:, :length] for item in (keys, values))
            out[row] = F.scaled_dot_product_attention(query[row, :, None], *both)[:, 0]
        return out

    features = [*ALL, "gqa", "decode", "hnd"]
    name = planted.kernel("paged_attention", on_device, features=features, layouts=["NHD", "HND"])
    planted.start()
    words: dict[str, Any] = {"layout": "HND"}
    torch.testing.assert_close(lz.paged_attention(query, keys, values, batch, **words), expected)
    assert planted.entries() == {} and name in planted.calls, lz.explain("paged_attention", query, keys, values, batch)
    if raises:
        broken.append(True)
    torch.testing.assert_close(lz.paged_attention(query, keys, values, batch, **words), expected)
    assert len(planted.calls) == 2 and planted.entries() == {}
