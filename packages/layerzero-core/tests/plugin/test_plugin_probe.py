from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from layerzero.model.status import BackendStatus
from layerzero.plugin import probing
from layerzero.plugin.manager import load_plugins
from layerzero.plugin.probing import ProbeResult, answer, probe
from layerzero_verify.testing import fakes
from tools import faulty_plugins as faults

CPU = fakes.cpu()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which every faulty backend is installed."""
    folder = tmp_path_factory.mktemp("site")
    for kind in faults.SOURCES:
        faults.install(folder, kind)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def code(result: ProbeResult) -> str:
    return result.status.reasons[0].code.value


def test_a_healthy_backend_answers_through_all_its_noise(environment: dict[str, str]) -> None:
    result = probe("chatters_in_probe", 60, device=CPU, env=environment)
    assert result.status == BackendStatus("chatters_in_probe", True, None, ("chatters_in_probe.rms_norm.plain",))
    assert result.health is not None and result.health.ok and result.health.detail == "2 + 2 = 4"


@pytest.mark.req("R-REG-04")
def test_a_crashing_backend_is_reported_by_its_signal(environment: dict[str, str]) -> None:
    result = probe("crashes_in_probe", 60, device=CPU, env=environment)
    assert not result.status.available and code(result) == "BACKEND_PROBE_CRASHED"
    assert "SIGSEGV" in result.status.reasons[0].message and result.status.fix


@pytest.mark.req("R-REG-04")
def test_a_hanging_backend_is_ended_at_the_time_limit(environment: dict[str, str]) -> None:
    result = probe("hangs_in_probe", 4, device=CPU, env=environment)
    assert code(result) == "BACKEND_PROBE_TIMEOUT" and result.seconds >= 4


def test_hooks_that_raise_or_talk_nonsense_become_reasons() -> None:
    kinds = ("raises_in_probe", "answers_nonsense", "fails_health", "raises_at_import", "healthy")
    loaded = load_plugins([faults.entry_point(kind) for kind in kinds], {})
    said = {kind: answer(loaded, kind, CPU) for kind in (*kinds, "nobody")}
    codes = {kind: [item["code"] for item in found["status"]["reasons"]] for kind, found in said.items()}
    assert codes["raises_in_probe"] == ["BACKEND_IMPORT_FAILED"]
    assert codes["answers_nonsense"] == ["PLUGIN_REGISTER_FAILED"]
    assert codes["raises_at_import"] == ["PLUGIN_IMPORT_FAILED"]
    assert codes["nobody"] == ["BACKEND_NOT_INSTALLED"]
    assert said["healthy"]["status"]["available"] and said["healthy"]["health"] is None
    assert said["fails_health"]["health"]["ok"] is False and "got 5" in said["fails_health"]["health"]["detail"]


@pytest.mark.parametrize(
    "data", [b"", b"null", b"{}", b"[" * 50_000, b'{"status": {}, "health": null}', b"x" * (2 << 20)]
)
def test_garbage_from_the_child_is_a_crash(data: bytes) -> None:
    assert code(probing._parse("x", 0, data, "")) == "BACKEND_PROBE_CRASHED"
    assert "exit code 3; boom" in probing._parse("x", 3, b"", "boom").status.reasons[0].message


@pytest.mark.req("R-CAP-06")
def test_readiness_is_refused_while_a_descriptor_is_invalid(environment: dict[str, str]) -> None:
    script = "import json, layerzero as lz; print(json.dumps([c.to_json() for c in lz.readiness_check().failed]))"
    only = {**environment, "LAYERZERO_PLUGINS": "bad_capabilities"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=only, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-1500:]
    failed = {check["name"]: check["code"] for check in json.loads(done.stdout.splitlines()[-1])}
    assert failed["bad_capabilities"] == "SCHEMA_FIELD_UNKNOWN"
