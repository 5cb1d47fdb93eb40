from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.model.status import BackendStatus
from layerzero.plugin import probing
from layerzero.plugin.manager import load_plugins
from layerzero.plugin.probe import answer
from layerzero.plugin.probing import ProbeResult, probe
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


def test_good_answers_are_kept_by_version_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run(backend: str, *_: object) -> ProbeResult:
        runs.append(backend)
        return ProbeResult(BackendStatus(backend, backend != "bad"))

    monkeypatch.setattr(probing, "_run", run)
    folder = tmp_path / "probes"

    def ask(backend: str = "good", **given: object) -> ProbeResult:
        return probe(backend, cache=True, cache_dir=folder, **{"device": CPU, **given})  # type: ignore[arg-type]

    assert not ask().cached and ask().cached and ask().status.available
    assert not ask(device=fakes.gpu(90)).cached, "another device"
    assert not ask(dists=["pluggy"]).cached, "another set of versions"
    monkeypatch.setattr(probing, "dist_version", lambda name: "99")
    assert not ask().cached, "an upgrade"
    assert not ask("bad").cached and not ask("bad").cached, "a bad answer is asked for again"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        file.write_text(json.dumps({"status": 7}), encoding="utf-8")
    assert not ask().cached, "a damaged file is a miss"


def test_a_cache_folder_others_may_write_to_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_run", lambda backend, *_: ProbeResult(BackendStatus(backend, True)))
    tmp_path.chmod(0o777)
    assert not probe("x", cache=True, cache_dir=tmp_path).cached
    assert not probe("x", cache=True, cache_dir=tmp_path).cached
    assert list(tmp_path.iterdir()) == []


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
