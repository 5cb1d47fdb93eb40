"""The seam of layerzero-accel in the core: found, left aside or refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero.dispatch.accel as seam
from layerzero.errors import BackendNotAvailableError, ConfigurationError

TESTS = Path(__file__).parent


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LAYERZERO_PLUGINS": "", "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)


# -- found or not ----------------------------------------------------------------------------------------------------
def test_off_leaves_every_function_in_python() -> None:
    code = "import layerzero as lz; print({type(f).__name__ for f in (lz.attention, lz.rms_norm, lz.rope)})"
    assert python(code, LAYERZERO_ACCEL="off").stdout.strip() == "{'function'}"


def test_a_word_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_ACCEL", "perhaps")
    with pytest.raises(ConfigurationError, match="LAYERZERO_ACCEL"):
        seam.look()


class Hidden:
    """A finder that refuses the accelerator's modules."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "layerzero_accel" or name.startswith("layerzero_accel."):
            raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModuleNotFoundError("No module named 'layerzero_accel'", name="layerzero_accel"), "BACKEND_NOT_INSTALLED"),
        (ModuleNotFoundError("No module named 'layerzero_accel._hot'", name="layerzero_accel._hot"), "ACCEL_NOT_BUILT"),
        (ImportError("wrong ELF class"), "ACCEL_UNFIT"),
    ],
    ids=["not installed", "not compiled", "not loadable"],
)
def test_what_is_missing_is_a_reason_and_on_makes_it_an_error(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, code: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("layerzero_accel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(error), *sys.meta_path])
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    found = seam.look()
    assert found.native is None and found.why is not None
    assert found.why.code == code and found.why.hint
    monkeypatch.setenv("LAYERZERO_ACCEL", "on")
    with pytest.raises(BackendNotAvailableError, match="LAYERZERO_ACCEL=on") as raised:
        seam.look()
    assert raised.value.reasons[0].code == code


def library(**fields: Any) -> Any:
    return SimpleNamespace(**{"SEAM": seam.SEAM, "setup": lambda *args: None, "forget": lambda: None, **fields})


def refuse(*args: Any) -> None:
    raise ValueError("the exchange table is not of DLPack 1")


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"SEAM": seam.SEAM + 1}, "of the interface"), ({"setup": refuse}, "not of DLPack 1")],
    ids=["another release", "another DLPack"],
)
def test_a_library_that_does_not_fit_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "layerzero_accel._hot", library(**fields))
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    found = seam.look()
    assert found.native is None and found.why is not None
    assert found.why.code == "ACCEL_UNFIT" and says in found.why.message


def test_a_torch_without_the_exchange_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "layerzero_accel._hot", library())
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    found = seam.look()
    assert found.why is not None and torch.__version__ in found.why.message


def test_doctor_warns_of_a_missing_library_and_stays_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.model.status import BackendStatus
    from layerzero.plugin.probing import ProbeResult
    from layerzero.public.check_backends import judge_probe
    from layerzero.reasons import reason

    why = reason("ACCEL_NOT_BUILT")
    status = BackendStatus("accel", False, "0.1.0", (), (why,), why.hint)
    record: Any = SimpleNamespace(name="accel", kernels=(), dist="layerzero-accel")
    check = judge_probe("accel", None, record, ProbeResult(status=status, health=None))
    assert (check.status, check.code) == ("warn", "ACCEL_NOT_BUILT")
    assert "layerzero_accel.build" in check.fix


# -- the same tests without it ---------------------------------------------------------------------------------------
@pytest.mark.timeout(300)
def test_the_dispatch_tests_pass_with_the_other_setting() -> None:
    """A quick part; `make prove NAME=accel` runs all of them both ways."""
    other = "off" if seam.accelerator.native is not None else "on"
    if other == "on" and seam.accelerator.wanted is not False:
        pytest.skip(f"layerzero-accel cannot be used here: {seam.accelerator.why}")
    files = [str(TESTS / "test_hot_key.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *files]
    env = {**os.environ, "LAYERZERO_ACCEL": other, "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS.parents[3])
    assert done.returncode == 0, done.stdout[-4000:]
