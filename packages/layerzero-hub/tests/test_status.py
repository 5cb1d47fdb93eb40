"""What the backend says about itself with the vendor absent, wrong, broken and there."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from layerzero.plugin.probing import probe
from layerzero_cli.root import cli
from layerzero_hub.plugin import DEFAULT_LOCK, layerzero_capabilities, layerzero_health
from layerzero_hub.policy import HubPolicy
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.cpu()


@pytest.fixture(autouse=True)
def nothing_locked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LAYERZERO_CONFIG", raising=False)


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.req("R-BK-HF-01")
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"kernels": None}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status)[0] == "BACKEND_NOT_INSTALLED"
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-hub[kernels]'"


def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend({"kernels": "0.14.0"}, {"kernels": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status)[0] == "BACKEND_VERSION_MISMATCH"
    assert (status.reasons[0].value, status.reasons[0].limit) == ("kernels 0.14.0", ">=0.17.2,<0.18")
    assert (status.version, imported) == ("0.14.0", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend({"kernels": "0.17.2"}, {"kernels": ImportError("undefined symbol")}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status)[0] == "BACKEND_IMPORT_FAILED"
    assert "import kernels" in status.fix


@pytest.mark.req("R-BK-HF-01")
def test_the_real_library_is_found_and_nothing_is_locked():
    result = probe("hub", timeout=60.0)
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.status.version == "0.17.2" and result.status.kernels == ()
    assert (result.status.available, codes(result.status)) == (False, ["BACKEND_STUB"])
    report = layerzero_health("hub")
    assert (report.ok, report.detail) == (True, "nothing is locked")


def test_a_library_with_nothing_locked_is_no_problem_for_the_doctor():
    """Package metadata and probe say the same, and what to do comes with it."""
    done = CliRunner().invoke(cli, ["doctor", "hub", "--json"])
    found = [item for item in json.loads(done.output)["checks"] if item["group"] == "backends"]
    told = [(item["status"], item["code"], item["message"]) for item in found]
    assert (done.exit_code, told) == (0, [("warn", "BACKEND_STUB", "no kernel is locked yet")])
    assert found[0]["fix"].startswith("lz hub lock ")


def test_a_broken_policy_is_said_and_costs_only_the_hub(tmp_path, monkeypatch):
    path = tmp_path / "named.yaml"
    path.write_text("hub: {allow: ['org/*']}")
    monkeypatch.setenv("LAYERZERO_CONFIG", str(path))
    status = layerzero_capabilities(DEVICE)
    assert not status.available and codes(status) == ["HUB_POLICY_INVALID"]
    assert not layerzero_health("hub").ok


def test_the_plugin_looks_for_the_lock_where_the_policy_would():
    assert str(HubPolicy().lock_path) == DEFAULT_LOCK
