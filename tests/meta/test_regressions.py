"""The correctness gate sees a kernel gone wrong, a kernel gone, and a check gone; and lets new ones in."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import layerzero as lz
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world
from layerzero.runtime.state import state
from layerzero_verify.ladder import verify
from layerzero_verify.lineup import resolve as under_test
from tools import regressions as gate
from tools.regressions import Key, Outcome, Removal, baselines, device_name, regressions, removals, spent

pytestmark = pytest.mark.req("R-GATE-01")

OPS = ("relu_and_mul", "embedding")
_numbers = itertools.count()
NATIVE = "torch.relu_and_mul.native"


@pytest.fixture
def fresh() -> Iterator[None]:
    lz.reset()
    yield
    lz.reset()


def outcome(*ops: str, **options: Any) -> Outcome:
    """What the quick lane finds about these ops, each kernel alone."""
    found = [verify(op=op, level=1, device="cpu", **options).to_json() for op in ops]
    report = {
        "levels": [level for item in found for level in item["levels"]],
        "absent": [item for report in found for item in report["absent"]],
    }
    return Outcome.of_report(json.loads(json.dumps(report)), device_name("cpu"))


def kept_here() -> Outcome:
    kept = next((item for item in baselines().values() if item.device == device_name("cpu")), None)
    if kept is None:
        pytest.skip("no outcome is kept for a CPU like this one; see tools/regressions.py")
    return kept


def plant(kernel: str, wrong: Any) -> None:
    """Let a kernel of the registry compute something else."""
    module = sys.modules.setdefault("layerzero_planted_regressions", ModuleType("layerzero_planted_regressions"))
    spec = current_world().registry.kernels[kernel]
    right = resolve(spec)
    name = f"kernel_{next(_numbers)}"  # a name of its own: what was imported once is remembered
    setattr(module, name, lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    planted = replace(spec, function=f"layerzero_planted_regressions:{name}")
    state.use(current_world().registry.replace([planted]))


# -- real runs ---------------------------------------------------------------------------------------------
def test_what_passed_when_the_outcome_was_kept_passes_now(fresh: None) -> None:
    kept = kept_here()
    now = outcome(*OPS)
    assert len(now.kernels) >= 5 and sum(now.passed.values()) > 50
    assert list(map(str, regressions(kept.only(now.kernels), now, removals()))) == []


def test_every_kernel_that_ran_here_when_the_outcome_was_kept_still_can(fresh: None) -> None:
    kept = kept_here()
    target = under_test(device="cpu", compiles=False)
    here = {kernel.kernel_id for kernel in target.kernels}
    gone = {key.kernel for key in kept.passed if "." in key.kernel} - here
    named = {name for name in gone if any(item.covers(Key(name, "*")) for item in removals())}
    assert gone - named == set(), {name: dict(target.absent).get(name, "not registered") for name in gone - named}


def test_a_kernel_gone_wrong_is_named_with_its_check(fresh: None) -> None:
    before = outcome("relu_and_mul")
    plant(NATIVE, lambda out: out * 1.01)
    found = regressions(before, outcome("relu_and_mul"))
    assert found and {item.kind for item in found} == {"passed before, fails now"}
    assert all(NATIVE in item.what for item in found) and any("1 forward float32" in item.what for item in found)


def test_a_kernel_that_gives_its_last_bit_another_value_is_no_regression(fresh: None) -> None:
    before = outcome("relu_and_mul")
    plant(NATIVE, lambda out: out * (1 + 2**-24))
    assert regressions(before, outcome("relu_and_mul")) == []


def test_a_kernel_that_is_gone_is_named_unless_its_removal_is(fresh: None) -> None:
    before = outcome("relu_and_mul")
    state.use(current_world().registry.without(kernels=[NATIVE]))
    now = outcome("relu_and_mul")
    assert [str(item) for item in regressions(before, now)] == [f"kernel vanished: {NATIVE} (no longer registered)"]
    assert regressions(before, now, [Removal(NATIVE, "nobody chose it on any machine")]) == []
    assert regressions(before, now, [Removal("sdpa.*", "another kernel than the one gone")])
    # and back: what is new and passes is no regression
    assert regressions(now, before) == []


# -- the comparison alone ----------------------------------------------------------------------------------
A, B = Key("x.op.a", "1 forward float32", "result: plain"), Key("x.op.b", "1 forward float32", "result: plain")


def test_a_check_that_is_made_less_often_has_vanished() -> None:
    before, now = Outcome("cpu", {A: 3, B: 1}), Outcome("cpu", {A: 2, B: 1})
    assert [str(item) for item in regressions(before, now)] == [f"check vanished: {A} (1 of 3)"]
    assert regressions(before, now, [Removal("x.op.a", "it was the same call twice", "1 forward *")]) == []
    assert regressions(before, now, [Removal("x.op.a", "it was the same call twice", "1 backward *")])


def test_a_level_that_was_left_out_says_why_its_checks_are_gone() -> None:
    key = Key("layers and models", "4 full forward float32", "llama")
    now = Outcome("cpu", {A: 1}, skipped={4: "transformers is not installed"})
    (item,) = regressions(Outcome("cpu", {A: 1, key: 1}), now)
    assert str(item) == f"check vanished: {key} (1 of 1; transformers is not installed)"


def test_no_removal_excuses_a_wrong_result_and_a_new_kernel_must_be_right() -> None:
    before = Outcome("cpu", {A: 1})
    wrong = Outcome("cpu", {}, {A: "off by 1"})
    assert regressions(before, wrong, [Removal("x.op.*", "gone because nobody used it")])[0].kind.endswith("fails now")
    assert regressions(before, Outcome("cpu", {A: 1, B: 1})) == []
    assert regressions(before, Outcome("cpu", {A: 1}, {B: "off by 1"}))[0].kind == "new and wrong"
    assert regressions(None, wrong) and not regressions(None, before)


def test_a_removal_has_a_reason_and_goes_when_its_work_is_done(tmp_path: Path) -> None:
    file = tmp_path / "removals.toml"
    for text in ('kernel = "x.op.a"\nwhy = "so"', 'kernel = "*"\nwhy = "a reason of five words"'):
        file.write_text(f"[[removed]]\n{text}\n")
        with pytest.raises(ValueError, match="gives no reason, or names every kernel"):
            removals(file)
    mine, other = Removal("x.op.a", "a reason of five words"), Removal("x.op.c", "a reason of five words")
    assert spent([mine, other], [Outcome("cpu", {A: 1})]) == [other]
    assert spent(removals(), baselines().values()) == [], "take them out: nothing kept needs them"


# -- the command -------------------------------------------------------------------------------------------
def a_report(status: str) -> dict[str, Any]:
    check = {"name": "forward", "status": status, "kernel": "x.op.a", "dtype": "float32", "stage": "result: plain"}
    return {
        "device": "cpu", "lane": "quick", "seed": 0, "versions": {}, "absent": [{"kernel": "x.op.g", "why": "a GPU"}],
        "levels": [{"level": 1, "checks": [check, check], "reason": ""}],
    }  # fmt: skip


def test_the_command_keeps_compares_and_leaves_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "baselines", lambda: baselines(tmp_path))
    report = tmp_path / "report.json"
    report.write_text(json.dumps(a_report("ok")))
    assert gate.main(["--report", str(report)]) == 0
    assert "no outcome is kept" in capsys.readouterr().out
    assert gate.main(["--report", str(report), "--keep", "--machine", "m"]) == 0
    (kept,) = baselines(tmp_path).values()
    assert kept == Outcome(device_name("cpu"), {A: 2}, {}, {"x.op.g": "a GPU"})
    assert gate.main(["--report", str(report)]) == 0
    report.write_text(json.dumps(a_report("fail")))
    assert gate.main(["--report", str(report), "--keep", "--machine", "m"]) == 1, "a regression is never kept"
    assert "passed before, fails now: x.op.a" in capsys.readouterr().out
    assert baselines(tmp_path)["m"] == kept


def test_a_kept_outcome_says_what_made_it() -> None:
    for path in sorted(gate.RESULTS.glob("*/verify.json")):
        data = json.loads(path.read_bytes())
        assert data["commit"] and data["command"].startswith("python -m tools.regressions")
        assert sum(Outcome.of_json(data).passed.values()) > 1000
