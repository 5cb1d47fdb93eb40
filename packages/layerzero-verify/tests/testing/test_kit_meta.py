"""The kit tested: each deliberately broken backend has to be caught by the kit test made for its mistake."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from layerzero import env

_FOLDER = Path(__file__).parent

# Runs the kit over several backends in one process and prints which tests failed for each.
_DRIVER = """
import json, sys, pytest

class Collect:
    def __init__(self):
        self.failed = {}
        self.ran = 0
    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call"
        if report.failed:
            name = report.nodeid.split("::")[-1].split("[")[0]
            self.failed.setdefault(name, report.nodeid.split("::")[-1])
    def pytest_collectreport(self, report):
        if report.failed:
            self.failed["collection"] = str(report.longrepr)

found = {}
for folder, module, choice in json.loads(sys.argv[1]):
    sys.path.insert(0, folder + "/src")
    collect = Collect()
    config = ["--rootdir", folder, "-c", folder + "/pyproject.toml", "--lz-plugin", module]
    plain = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:logging"]
    args = [*plain, *config, *choice, folder + "/tests"]
    code = pytest.main(args, plugins=[collect])
    if code not in (0, 1):
        collect.failed["collection"] = f"pytest ended with code {code}"
    found[module] = {"failed": collect.failed, "ran": collect.ran}
print("RESULT " + json.dumps(found))
"""


def _broken_backends() -> ModuleType:
    spec = importlib.util.spec_from_file_location("broken_backends", _FOLDER / "broken_backends.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["broken_backends"] = module
    spec.loader.exec_module(module)
    return module


broken_backends = _broken_backends()
NAMES = sorted(broken_backends.BROKEN)
# These go through the whole kit, to see that it points at one place; the others only meet their catcher. Two of them in
# `make check`, all in `make prove NAME=long`.
WHOLE = ("ignores_scale", "health_always_fails")
if env.read().prove:
    WHOLE += ("wrong_lse_base", "eps_outside_the_root", "wrong_head_dim_limit")


def _choice(name: str) -> list[str]:
    # The registration test starts an interpreter with torch each time: seconds, and only one mistake concerns it.
    return ["-k", "not imports_no_vendor" if name in WHOLE else broken_backends.BROKEN[name].caught_by]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the kit says about every broken backend; one process for all of them."""
    folder = tmp_path_factory.mktemp("broken")
    jobs = [(str(broken_backends.build(name, folder)), f"layerzero_{name}.plugin", _choice(name)) for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, json.dumps(jobs)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(answers[-1].removeprefix("RESULT "))
    return found


def test_there_are_enough_mistakes_and_enough_catchers() -> None:
    assert len(NAMES) >= 12
    assert len({item.caught_by for item in broken_backends.BROKEN.values()}) >= 12


@pytest.mark.timeout(520)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_backend_is_caught_by_name(reports: dict[str, dict[str, Any]], name: str) -> None:
    report = reports[f"layerzero_{name}.plugin"]
    expected = broken_backends.BROKEN[name].caught_by
    assert "collection" not in report["failed"], report["failed"].get("collection")
    assert expected in report["failed"], f"the kit missed it; it failed {sorted(report['failed'])}"


@pytest.mark.req("R-CAP-04")
@pytest.mark.timeout(520)
def test_a_quantized_kernel_is_held_to_the_very_bound_of_its_descriptor(reports: dict[str, dict[str, Any]]) -> None:
    """Of two kernels that compute the same the first declares the true bound, the second a tighter one."""
    report = reports["layerzero_quantizes_worse_than_it_says.plugin"]
    assert list(report["failed"]) == ["test_quantized_values_match_the_reference"] and report["ran"] >= 4
    first = report["failed"]["test_quantized_values_match_the_reference"]
    assert "too_good" in first and "a_true_bound" not in first, "kernels are tried in order"


@pytest.mark.timeout(520)
def test_a_mistake_in_one_place_is_not_reported_everywhere(reports: dict[str, dict[str, Any]]) -> None:
    for name in WHOLE:
        report = reports[f"layerzero_{name}.plugin"]
        assert report["ran"] > 20 and len(report["failed"]) <= 3, report


def test_a_module_that_a_library_may_not_compile_is_skipped_not_failed() -> None:
    """FlashInfer says it with an error of its own, which adapters may wrap; any other error stays one."""
    from layerzero_verify.testing.kit import uncompiled

    missing = type("MissingJITCacheError", (RuntimeError,), {})("the module is missing. Build it")
    wrapped = ValueError("the adapter's own words")
    wrapped.__cause__ = missing
    assert uncompiled(wrapped) == uncompiled(missing) == "the module is missing"
    assert uncompiled(ValueError("wrong")) is None
