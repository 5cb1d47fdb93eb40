"""The first answer is checked: what a merely installed kernel may do before anything vouches for it."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.dispatch import bind
from layerzero.errors import KernelExecutionError, LockedKernelError, NoKernelFoundError, PolicyValidationError
from layerzero.health.quarantine import Quarantine
from layerzero.plugin.manager import load_plugins
from layerzero.reasons import ReasonCode
from layerzero.registry.proofs import beside, load_proofs, sealed
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero_verify.testing.fakes import FakeDist, FakeEntryPoint, capabilities, plugin

pytestmark = pytest.mark.fault(25)

_module = sys.modules.setdefault("layerzero_first_use_kernels", ModuleType("layerzero_first_use_kernels"))
_numbers = itertools.count()
ALL = ["backward", "no_weight", "mixed_weight", "inplace", "rotate_half", "position_ids", "generator"]
BASE = "torch.rms_norm.native"


def zeros(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    """The wrong kernel."""
    return torch.zeros_like(x)


def right(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    """The right one."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Planted:
    """Third-party kernels of one backend "acme" that record their runs, found by an entry point, nobody vouching."""

    def __init__(self, quarantine: Path) -> None:
        self.quarantine = quarantine
        self.calls: list[str] = []
        self.kernels: list[dict[str, Any]] = []

    def kernel(self, op: str, function: Callable[..., Any], variant: str = "fast", **fields: Any) -> str:
        name, kernel_id = f"kernel_{next(_numbers)}", f"acme.{op}.{variant}"

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(kernel_id)
            return function(*args, **kwargs)

        setattr(_module, name, run)
        self.kernels.append(
            {"op": op, "variant": variant, "function": f"{_module.__name__}:{name}", "priority": 99, "features": ALL}
            | fields
        )
        return kernel_id

    def start(self, version: str = "1.0", source: Path | None = None, **settings: Any) -> None:
        """A process as it begins: what was checked before is only on disk."""
        described = capabilities("acme", *self.kernels)
        if source is not None:
            source.mkdir(exist_ok=True)
            (source / "capabilities.json").write_text(json.dumps(described), encoding="utf-8")
        given: Any = described if source is None else source / "capabilities.json"
        entry = FakeEntryPoint("acme", plugin(given), FakeDist("acme", version))
        lz.reset()
        if settings:
            lz.configure(**settings)
        state.use(load_plugins(entry_points=[entry]).registry, proven=False)
        self.calls.clear()

    def entries(self) -> dict[str, str]:
        return {entry.kernel_id: entry.code for entry in Quarantine(self.quarantine).entries()}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    file = tmp_path / "kept" / "quarantine.json"
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(file))
    yield Planted(file)
    lz.reset()


def call(rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x, weight = torch.randn(rows, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    return x, weight, F.rms_norm(x, (64,), weight, 1e-6)


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


def test_a_large_error_that_a_kernel_declares_itself_is_not_believed(planted: Planted) -> None:
    planted.kernel("rms_norm", zeros, error_bounds={"float32": 1e9})
    planted.start()
    x, weight, expected = call()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.entries()


def test_a_kernel_that_raises_is_charged_and_not_trusted(planted: Planted) -> None:
    def raises(*args: Any) -> Any:
        raise ValueError("not today")

    planted.kernel("rms_norm", raises)
    planted.start()
    x, weight, expected = call()
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.entries() == {} and "not today" in state.health.snapshot().kernels["acme.rms_norm.fast"].last_error


def test_failover_passes_over_what_nobody_has_checked(planted: Planted) -> None:
    planted.kernel("rms_norm", right, "first")
    planted.kernel("rms_norm", zeros, "second", priority=98)
    planted.start()
    x, weight, expected = call()
    lz.rms_norm(x, weight)
    broken = planted.kernels[0]["function"].split(":")[1]

    def raises(*args: Any) -> Any:
        raise RuntimeError("broken now")

    setattr(_module, broken, raises)
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


# -- proofs --------------------------------------------------------------------------------------------------------
def _proofs(source: Path, version: str = "1.0", family: str | None = None, **changed: Any) -> None:
    from layerzero.device.family import family_of
    from layerzero.model.device import DeviceSpec

    here = family or family_of(DeviceSpec.detect("cpu"))
    kernels = [{"ids": ["acme.rms_norm.fast"], "dtypes": ["float32"], "words": []}]
    document = {
        "schema_version": "1.0", "backend": "acme", "version": version, "vendor": "",
        "families": {here: {"made": "by hand", "kernels": kernels}},
    }  # fmt: skip
    text = json.dumps({**sealed(document), **changed})
    beside(source / "capabilities.json").write_text(text, encoding="utf-8")


def test_a_proof_for_this_version_and_family_lets_the_first_call_run(planted: Planted, tmp_path: Path) -> None:
    kernel_id = planted.kernel("rms_norm", right)
    source = tmp_path / "acme"
    planted.start(source=source)
    _proofs(source)
    planted.start(source=source)
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    report = lz.explain("rms_norm", x, weight)
    assert report.ran == kernel_id and report.decision.winner.proof.startswith("kit 1.0 on cpu-")
    grad = x.clone().requires_grad_()
    lz.rms_norm(grad, weight)
    assert lz.explain("rms_norm", grad, weight).ran == BASE, "the kit has not seen a gradient"


@pytest.mark.parametrize(
    "wrong", [{"version": "1.1"}, {"family": "sm90"}, {"hash": "0" * 64}, {"vendor": "libacme 3"}, {"more": 1}]
)
def test_a_proof_of_something_else_or_a_changed_one_counts_for_nothing(
    planted: Planted, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    planted.kernel("rms_norm", right)
    source = tmp_path / "acme"
    planted.start(source=source)
    _proofs(source, **wrong)
    planted.start(source=source)
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == BASE
    said = {check.code for check in lz.doctor(probe=False).checks if check.group == "proofs"}
    assert (ReasonCode.PROOF_INVALID in said) is ("hash" in wrong or "more" in wrong or "vendor" in wrong)


def test_a_measurement_with_its_error_is_a_proof(planted: Planted) -> None:
    kernel_id = planted.kernel("rms_norm", right)
    planted.start()
    state.publish(measurements=Measurements(lambda name, ctx: 1.0 if name == kernel_id else None, "some"))
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == kernel_id


def test_tuning_checks_so_that_the_next_call_of_the_kind_is_trusted(planted: Planted) -> None:
    from layerzero_tune.trial import trial

    kernel_id = planted.kernel("rms_norm", right)
    planted.kernel("rms_norm", zeros, "wrong", priority=1)
    planted.start()
    x, weight, _ = call()
    ctx = lz.explain("rms_norm", x, weight).context
    found = trial(ctx, seconds=0.01, least=3, only=frozenset({kernel_id, "acme.rms_norm.wrong", BASE}), patient=False)
    assert "acme.rms_norm.wrong" in found.refused
    lz.rms_norm(torch.randn(9, 64), weight)
    assert lz.explain("rms_norm", torch.randn(9, 64), weight).ran == kernel_id, "of another bucket, of the same kind"


def test_what_a_kernel_says_of_itself_never_outranks_a_measurement(planted: Planted) -> None:
    kernel_id = planted.kernel("rms_norm", right)
    planted.start()
    times = {BASE: 5.0, "reference.rms_norm.plain": 500.0}
    state.publish(measurements=Measurements(lambda name, ctx: times.get(name), "some"))
    x, weight, _ = call()
    report = lz.explain("rms_norm", x, weight)
    assert report.chosen == BASE
    scores = {item.kernel_id: item.score for item in report.candidates if item.accepted}
    assert scores[kernel_id] < min(scores[name] for name in times), "not even the slowest that was measured"


# -- one at a time, and alike on every rank ------------------------------------------------------------------------
def test_while_one_kernel_is_checked_other_calls_get_the_baseline(planted: Planted) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        if threading.current_thread().name == "first":
            inside.set()
            assert go.wait(60)
        return right(x, weight, eps)

    planted.kernel("rms_norm", slow)
    planted.start()
    x, weight, expected = call()
    first = threading.Thread(target=lambda: lz.rms_norm(x, weight), name="first")
    first.start()
    assert inside.wait(60)
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    assert planted.calls == ["acme.rms_norm.fast"], "only the first thread checks"
    go.set()
    first.join(60)
    lz.rms_norm(x, weight)
    assert len(planted.calls) == 2


class _Store(dict[str, str]):
    """What ranks talk through, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def _as_rank(planted: Planted, store: _Store, rank: int) -> None:
    from layerzero.distributed.choice import RankChoices

    planted.start()
    state.publish(ranks=RankChoices(store, rank, (0, 1), 2, "test", "ranks", wait_s=0.0))  # type: ignore[arg-type]


def test_a_kernel_is_trusted_when_every_rank_found_it_right(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_id, store = planted.kernel("rms_norm", right), _Store()
    x, weight, expected = call()
    ran = []
    for rank in (0, 1, 0, 1):
        monkeypatch.setenv("LAYERZERO_QUARANTINE", str(planted.quarantine.parent / f"rank{rank}" / "quarantine.json"))
        _as_rank(planted, store, rank)
        torch.testing.assert_close(lz.rms_norm(x, weight), expected)
        ran.append(lz.explain("rms_norm", x, weight).ran)
    assert ran == [BASE, BASE, kernel_id, kernel_id], "rank 0 waits for rank 1; both go on at their next call"


def test_a_kernel_that_one_rank_found_wrong_is_quarantined_on_all(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = 0
    planted.kernel("rms_norm", lambda *args: zeros(*args) if rank == 1 else right(*args))
    store = _Store()
    x, weight, expected = call()
    for rank in (0, 1, 0):
        file = planted.quarantine.parent / f"rank{rank}" / "quarantine.json"
        monkeypatch.setenv("LAYERZERO_QUARANTINE", str(file))
        _as_rank(planted, store, rank)
        torch.testing.assert_close(lz.rms_norm(x, weight), expected)
        assert lz.explain("rms_norm", x, weight).ran == BASE
    for rank in (0, 1):
        file = planted.quarantine.parent / f"rank{rank}" / "quarantine.json"
        assert [entry.code for entry in Quarantine(file).entries()] == ["NUMERICS_MISMATCH"]


# -- what we ship --------------------------------------------------------------------------------------------------
def test_the_proofs_we_ship_are_whole_and_of_the_versions_here() -> None:
    loaded = load_plugins()
    seen = 0
    for name, backend in loaded.registry.backends.items():
        if not backend.proofs:
            continue
        seen += 1
        document = json.loads(Path(backend.proofs).read_text(encoding="utf-8"))
        vendor = f"{backend.vendor} {backend.vendor_version}" if backend.vendor else ""
        assert document["version"] == backend.version, f"{name}: lz plugin prove {name}"
        for family in document["families"]:
            for kernel_id in load_proofs(Path(backend.proofs), name, backend.version, vendor, family):
                assert kernel_id in loaded.registry.kernels, f"{backend.proofs}: {kernel_id}"
    assert seen >= 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stranger_proves_his_kernels_with_the_kit(site: Path, tmp_path: Path) -> None:
    import subprocess

    from layerzero.plugin.scaffold import write_plugin

    target = write_plugin("acme", tmp_path)
    (site / "layerzero_acme").symlink_to(target / "src" / "layerzero_acme")
    info = site / "layerzero_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layerzero-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nacme = layerzero_acme.plugin\n")
    command = [sys.executable, "-m", "layerzero.cli", "plugin", "prove", "acme", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    document = json.loads((target / "src" / "layerzero_acme" / "proofs.json").read_text(encoding="utf-8"))
    (family,) = document["families"].values()
    proven = {name: entry for entry in family["kernels"] for name in entry["ids"]}
    assert "acme.rms_norm.plain" in proven and "backward" in proven["acme.rms_norm.plain"]["words"]
    assert "float32" in proven["acme.rms_norm.plain"]["dtypes"] and document == sealed(document)


def test_a_warm_up_checks_before_any_request(planted: Planted) -> None:
    from layerzero.startup.manifest import Item
    from layerzero.startup.warm import warm

    kernel_id = planted.kernel("rms_norm", right)
    planted.start()
    x, weight, _ = call()
    warm([Item(lz.explain("rms_norm", x, weight).context)])
    assert planted.calls, "it was run on a drawn example"
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == kernel_id


def test_what_a_signal_handler_raises_during_a_check_reaches_the_caller(planted: Planted) -> None:
    import signal

    class Timeout(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Timeout

    def struck(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return right(x, weight, eps)

    planted.kernel("rms_norm", struck)
    planted.start()
    x, weight, _ = call()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Timeout):
            lz.rms_norm(x, weight)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert planted.entries() == {} and "acme.rms_norm.fast" not in state.health.snapshot().kernels
