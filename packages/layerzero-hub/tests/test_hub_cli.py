"""`lz hub …` as people type it: five commands from nothing to a frozen, signed deployment; exit codes; JSON; doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import layerzero as lz
from layerzero_cli.root import cli
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
universal_kernel = _kernels.universal_kernel

QUIET = {"NO_COLOR": "1"}


@pytest.fixture
def shell(bench, monkeypatch):
    """Run `lz` with this bench's policy; returns (exit code, output)."""
    path = bench.folder / "layerzero.yaml"

    def run(*arguments: str):
        path.write_text(json.dumps({"hub": bench.settings}))
        monkeypatch.setenv("LAYERZERO_CONFIG", str(path))
        monkeypatch.setenv("HF_ENDPOINT", bench.hub.endpoint)
        done = CliRunner(env=QUIET).invoke(cli, ["hub", *arguments])
        return done.exit_code, done.output

    return run


@pytest.mark.req("R-HUB-02", "R-HUB-03")
def test_from_nothing_to_a_signed_frozen_deployment(bench, shell, tmp_path):
    repo = bench.publish("deployed", extra="DEPLOYED = True")
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private], check=True)
    subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    code, text = shell("lock", f"{repo}@1")
    assert code == 0 and "locked" in text, text
    assert (bench.folder / "kernels.lock").exists()
    bench.settings["signing_keys"] = [str(public)]
    code, text = shell("verify")
    assert code != 0 and "HUB_SIGNATURE_MISSING" in text
    assert shell("sign", "--key", str(private))[0] == 0
    bench.hub.attack.hang = True  # from here on nobody answers
    assert shell("install", "--frozen")[0] == 0
    code, text = shell("verify", "--offline", "--json")
    assert code == 0 and [entry["state"] for entry in json.loads(text)["items"]] == ["verified"]
    code, text = shell("list", "--json")
    assert json.loads(text)["items"][0]["state"] == "in store"
    assert bench.load(repo).DEPLOYED


def test_a_refusal_is_exit_code_1_with_its_reason(bench, shell):
    repo = bench.publish("changed")
    shell("lock", f"{repo}@1", "--no-probe")
    (bench.build(repo) / "detail.py").write_text("other")
    code, text = shell("verify")
    assert code == 1 and "HUB_STORE_TAMPERED" in text and "lz hub install" in text
    code, text = shell("verify", "--json")
    assert code == 1 and json.loads(text)["items"][0]["reasons"][0]["code"] == "HUB_STORE_TAMPERED"


@pytest.mark.fault(21)
def test_a_quarantine_is_shown_and_lifted(bench, shell):
    repo = bench.publish("lifted", extra="LIFTED = True")
    shell("lock", f"{repo}@1", "--no-probe")
    (variant,) = bench.read().find(repo).variants.values()
    bench.store.quarantine(variant.digest, "it changed aten::relu6")
    code, text = shell("quarantine", "--json")
    assert (code, json.loads(text)["quarantined"]) == (0, {variant.digest: "it changed aten::relu6"})
    with bench.refused("HUB_REVOKED"):
        bench.load(repo)
    assert shell("quarantine", "--lift", variant.digest)[0] == 0
    assert bench.load(repo).LIFTED
    code, text = shell("quarantine", "--lift", variant.digest)
    assert code == 1 and "not in quarantine" in text


def test_audit_speaks_of_the_hub_today(bench, shell):
    repo = bench.publish("audited")
    shell("lock", f"{repo}@1", "--no-probe")
    assert shell("audit")[0] == 0
    bench.put(repo, universal_kernel(id="_lz_newer"))
    code, text = shell("audit")
    assert code == 1 and "HUB_BRANCH_MOVED" in text
    bench.hub.trusted[repo.split("/")[0]] = False
    assert "HUB_PUBLISHER_UNTRUSTED" in shell("audit")[1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("lock",), "owner/name@version"),
        (("lock", "org/name"), "HUB_ID_INVALID"),
        (("lock", "../x@1"), "HUB_ID_INVALID"),
        (("lock", "nobody/asked@1"), "HUB_NOT_ALLOWED"),
        (("install",), "HUB_LOCK_MISSING"),
        (("verify",), "HUB_LOCK_MISSING"),
        (("sign", "--key", "/nowhere.pem"), "HUB_LOCK_MISSING"),
    ],
)
def test_mistakes_get_one_clear_error(shell, arguments, word):
    code, text = shell(*arguments)
    assert code != 0 and word in text and "Traceback" not in text


def test_a_policy_in_the_working_directory_cannot_allow(tmp_path):
    (tmp_path / "layerzero.yaml").write_text('hub: {allow: ["org/evil"]}')
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LAYERZERO_")}
    clean |= {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-m", "layerzero_cli", "hub", "lock", "org/evil@1"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0 and "never widen" in done.stdout + done.stderr


def test_refusals_of_several_files_add_up(tmp_path, monkeypatch):
    from layerzero_hub.policy import discovered

    user, here = tmp_path / "user" / "layerzero", tmp_path / "here"
    user.mkdir(parents=True)
    here.mkdir()
    one, two = (f"sha256:{digit * 64}" for digit in "12")
    (user / "layerzero.yaml").write_text(f'hub: {{allow: ["a/b", "c/d"], deny: ["e/*"], revoked: ["{one}"]}}')
    (here / "layerzero.yaml").write_text(f'hub: {{deny: ["c/*"], revoked: ["{two}"]}}')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("LAYERZERO_CONFIG", raising=False)
    policy = discovered(cwd=here)
    assert policy.deny == {"e/*", "c/*"} and policy.revoked == {one, two} and policy.allow == {"a/b", "c/d"}


@pytest.mark.parametrize(
    "hub",
    [
        {"allow": ["org/*"]},
        {"allow": "org/a"},
        {"endpoints": ["http://hub.example"]},
        {"unknown": 1},
        {"timeout": 0},
        {"max_bytes": True},
        {"kernels": [{"repo": "a/b", "op": "rms_norm"}]},
        {"kernels": [{"repo": "a/b", "op": "rms_norm", "function": "__import__('os')"}]},
        {"kernels": {"a": 1}},
        {"revoked": [1]},
    ],
)
def test_a_policy_that_is_wrong(bench, hub):
    from layerzero_hub.policy import from_mapping

    with bench.refused("HUB_POLICY_INVALID"):
        from_mapping(hub)


@pytest.fixture
def reset():
    yield
    lz.reset()


def test_doctor_and_readiness_speak_of_the_hub(bench, shell, reset):
    repo = bench.publish("doctored")
    bench.settings["kernels"] = [{"repo": repo, "op": "rms_norm", "function": "rms_norm"}]
    shell("lock", f"{repo}@1", "--no-probe")
    from layerzero.plugin.probing import probe

    def ready():
        lz.reset()  # as in a process that has just started
        done = CliRunner(env=QUIET).invoke(cli, ["readiness", "--json"])
        (found,) = [check for check in json.loads(done.stdout)["checks"] if check["group"] == "hub"]
        return found

    assert ready()["status"] == "ok"
    result = probe("hub", timeout=60.0)
    assert result.status.available and result.status.kernels == (f"hub.rms_norm.{repo.replace('/', '-')}-v1",)
    assert result.health is not None and result.health.ok and "1 locked" in result.health.detail
    (bench.build(repo) / "detail.py").write_text("other")
    hurt = probe("hub", timeout=60.0).status
    assert not hurt.available and "HUB_STORE_TAMPERED" in hurt.reasons[-1].message
    from layerzero_hub.plugin import layerzero_health

    report = layerzero_health("hub")
    assert not report.ok and "HUB_STORE_TAMPERED" in report.detail
    assert ready()["status"] == "fail"


@pytest.mark.slow
@pytest.mark.needs_package("layerzero_hostile")
def test_a_kernel_that_cheats_is_not_locked(bench, shell):
    """It is right for new pointers and returns its old answer for known ones: one call shows nothing of it."""
    cheat = (
        "_answers = {}\n_honest = rms_norm\n"
        "def rms_norm(x, weight, eps):\n"
        "    if x.data_ptr() not in _answers:\n"
        "        _answers[x.data_ptr()] = _honest(x, weight, eps)\n"
        "    return _answers[x.data_ptr()].clone()\n"
    )
    mapping = {"op": "rms_norm", "function": "rms_norm", "arguments": ["x", "weight", "eps"]}
    good, bad = bench.publish("honest"), bench.publish("cheating", extra=cheat)
    bench.settings["kernels"] = [{"repo": repo, **mapping} for repo in (good, bad)]
    code, text = shell("lock", f"{good}@1")
    assert code == 0, text
    code, text = shell("lock", f"{bad}@1")
    assert code == 1 and "HUB_KERNEL_CHEATS" in text and "HOSTILE_STALE" in text, text
    assert [kernel.repo_id for kernel in bench.read().kernels] == [good]
