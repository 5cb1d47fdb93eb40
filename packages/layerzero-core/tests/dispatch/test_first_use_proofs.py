"""Proofs of kernels: what is believed, how ranks agree, what we ship, and checks ahead of the first call."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.health.quarantine import Quarantine
from layerzero.plugin.manager import load_plugins
from layerzero.reasons import ReasonCode
from layerzero.registry.proofs import beside, load_proofs, sealed, sources
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from tools.pytest_fixtures import module_beside

pytestmark = pytest.mark.fault(25)

lab = module_beside(__file__, "first_use_lab")
ALL, BASE, Planted, call, planted, right, zeros = (
    lab.ALL, lab.BASE, lab.Planted, lab.call, lab.planted, lab.right, lab.zeros,
)  # fmt: skip


# -- proofs --------------------------------------------------------------------------------------------------------
def _proofs(
    source: Path, version: str = "1.0", family: str | None = None, of: str | None = None, **changed: Any
) -> None:
    from layerzero.device.signature import family_of
    from layerzero.model.device import DeviceSpec

    here = family or family_of(DeviceSpec.detect("cpu"))
    kernels = [{"ids": ["acme.rms_norm.fast"], "dtypes": ["float32"], "words": []}]
    document = {
        "schema_version": "1.0", "backend": "acme", "version": version, "vendor": "",
        **({} if of is None else {"sources": of}), "families": {here: {"made": "by hand", "kernels": kernels}},
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


def test_a_proof_of_these_sources_outlives_a_new_version_and_no_change_of_them(
    planted: Planted, tmp_path: Path
) -> None:
    kernel_id = planted.kernel("rms_norm", right)
    source = tmp_path / "acme"
    planted.start(source=source)
    code = source / "kernels.py"
    code.write_text("FAST = 1\n", encoding="utf-8")
    _proofs(source, version="0.9", of=sources(source / "proofs.json"))
    planted.start(source=source)
    x, weight, _ = call()
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).decision.winner.proof.startswith("kit 0.9 on cpu-")
    code.write_text("FAST = 2\n", encoding="utf-8")
    _proofs(source, version="1.0", of="0" * 64)  # this very version, and other code
    planted.start(source=source)
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == BASE != kernel_id


def test_what_a_proof_is_over(tmp_path: Path) -> None:
    top = tmp_path / "layerzero_acme"
    proofs = top / "sm90" / "proofs.json"
    proofs.parent.mkdir(parents=True)
    for name in ("__init__.py", "sm90/__init__.py", "sm90/capabilities.json", "native/fast.cpp"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text("1", encoding="utf-8")
    first = sources(proofs)
    for name in ("sm90/proofs.json", "sm90/measurements.json", "_native.so", "__pycache__/x.pyc", "../outside.py"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text("1", encoding="utf-8")
    assert sources(proofs) == first and first is not None
    for name in ("__init__.py", "sm90/capabilities.json", "native/fast.cpp", "new.py"):
        (top / name).write_text("2", encoding="utf-8")
        assert sources(proofs) != first, name
        first = sources(proofs)
    (top / "native" / "fast.cpp").unlink()
    assert sources(proofs) is None, "a compiled file whose source is not there: its version has to vouch for it"


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
def test_the_proofs_we_ship_are_whole_and_of_kernels_there_are() -> None:
    loaded = load_plugins()
    seen = 0
    for name, backend in loaded.registry.backends.items():
        if backend.proofs:
            seen += 1
            load_proofs(Path(backend.proofs), name, backend.version, "", "")
            for family in json.loads(Path(backend.proofs).read_text(encoding="utf-8"))["families"].values():
                proven = {kernel_id for entry in family["kernels"] for kernel_id in entry["ids"]}
                assert proven <= loaded.registry.kernels.keys(), backend.proofs
    assert seen >= 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stranger_proves_his_kernels_with_the_kit(site: Path, tmp_path: Path) -> None:
    import subprocess

    from layerzero_verify.scaffold import write_plugin

    target = write_plugin("acme", tmp_path)
    (site / "layerzero_acme").symlink_to(target / "src" / "layerzero_acme")
    info = site / "layerzero_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layerzero-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nacme = layerzero_acme.plugin\n")
    command = [sys.executable, "-m", "layerzero_cli", "plugin", "prove", "acme", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    document = json.loads((target / "src" / "layerzero_acme" / "proofs.json").read_text(encoding="utf-8"))
    (family,) = document["families"].values()
    proven = {name: entry for entry in family["kernels"] for name in entry["ids"]}
    assert "acme.rms_norm.plain" in proven and "backward" in proven["acme.rms_norm.plain"]["words"]
    assert "float32" in proven["acme.rms_norm.plain"]["dtypes"] and document == sealed(document)


def test_a_warm_up_checks_before_any_request(planted: Planted) -> None:
    from layerzero.startup.warm import Item, warm

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
