"""When a lock counts: read once, signed or named, not over, not older than one seen before, and true to its builds."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from layerzero_cli.root import cli
from layerzero_hub import installing, lockfile, signing
from layerzero_hub.lockfile import Lock, LockedFile, LockedKernel, LockedVariant, digest_of
from layerzero_hub.policy import from_mapping
from layerzero_hub.remote import connect
from layerzero_hub.store import new_file
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
universal_kernel = _kernels.universal_kernel


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """An EC key pair: private and public."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = folder / "release.pem", folder / "release.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def shell(bench, monkeypatch):
    """Run `lz hub …` with this bench's policy; returns (exit code, output)."""
    path = bench.folder / "layerzero.yaml"

    def run(*arguments: str):
        path.write_text(json.dumps({"hub": bench.settings}))
        monkeypatch.setenv("LAYERZERO_CONFIG", str(path))
        monkeypatch.setenv("HF_ENDPOINT", bench.hub.endpoint)
        done = CliRunner(env={"NO_COLOR": "1"}).invoke(cli, ["hub", *arguments])
        return done.exit_code, done.output

    return run


def sign(bench, keys):
    bench.settings["signing_keys"] = [str(keys[1])]
    signing.sign_lock(bench.policy, keys[0])


def forge(bench, repo: str, files, commit: str, **changes) -> None:
    """A lock that somebody wrote by hand for files that the hub serves at a commit; as the bench's own lock."""
    locked = {
        path.removeprefix("build/torch-universal/"): LockedFile(hashlib.sha256(data).hexdigest(), len(data))
        for path, data in files.items()
    }
    changes = {"id": json.loads(files["build/torch-universal/metadata.json"])["id"], **changes}
    variant = LockedVariant("torch-universal", digest_of(locked), changes["id"], (), (), locked)
    kernel = LockedKernel(repo, 1, commit, {"torch-universal": variant})
    lockfile.write(Lock(bench.hub.endpoint, (kernel,), 10**12, "", "f" * 32), bench.policy.lock_path)


def edit(bench, change) -> None:
    data = json.loads(bench.policy.lock_path.read_bytes())
    data["serial"] += 1
    change(data)
    bench.policy.lock_path.write_text(json.dumps(data))


# -- 12: read once --------------------------------------------------------------------------------------------------
def swap_after_first_open(monkeypatch, path: Path, later: bytes) -> None:
    """Whoever opens the file a second time gets other bytes, as from an attacker who may write the folder."""
    opened = []

    def watched(real):
        def call(file, *arguments, **options):
            handle = real(file, *arguments, **options)
            if not isinstance(file, int) and os.path.basename(os.fspath(file)) == path.name and not opened:
                opened.append(file)
                other = path.with_name("other")
                descriptor = os_open(other, os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(descriptor, later)
                os.close(descriptor)
                os.replace(other, path)
            return handle

        return call

    os_open, plain = os.open, io.open
    monkeypatch.setattr(os, "open", watched(os_open))
    monkeypatch.setattr(builtins, "open", watched(plain))
    monkeypatch.setattr(io, "open", watched(plain))


@pytest.mark.fault(12)
@pytest.mark.parametrize("order", ["forged first", "signed first"])
@pytest.mark.parametrize("step", ["load", "install", "verify"])
def test_a_lock_that_changes_between_two_reads(bench, shell, keys, monkeypatch, step, order):
    """The forged lock holds a kernel that is allowed and in the store, and that nobody signed."""
    wanted, other = bench.publish("signed"), bench.publish("unsigned")
    bench.lock(other)
    forged = bench.policy.lock_path.read_bytes()
    bench.policy.lock_path.unlink()
    bench.lock(wanted)
    sign(bench, keys)
    signed = bench.policy.lock_path.read_bytes()
    first, later = (forged, signed) if order == "forged first" else (signed, forged)
    shell("list")  # registering backends reads the lock too: that is behind us
    bench.policy.lock_path.write_bytes(first)
    swap_after_first_open(monkeypatch, bench.policy.lock_path, later)
    bench.mark.unlink(missing_ok=True)
    if step == "load":
        with bench.refused("HUB_SIGNATURE_BAD" if order == "forged first" else "HUB_NOT_LOCKED"):
            bench.load(other)
    else:
        code, text = shell(step, "--json")
        if order == "forged first":
            assert code == 1 and "HUB_SIGNATURE_BAD" in text
        else:
            assert code == 0 and [entry["repo_id"] for entry in json.loads(text)["items"]] == [wanted]
    assert not bench.mark.exists()


@pytest.mark.req("R-HUB-03")
@pytest.mark.fault(12)
def test_an_install_acts_only_on_a_lock_whose_bytes_were_verified(bench, keys):
    bench.lock(bench.publish())
    sign(bench, keys)
    unverified = lockfile.read(bench.policy.lock_path)
    with bench.refused("HUB_SIGNATURE_MISSING"):
        installing.install(unverified, bench.policy, connect=None)


# -- 14: rollback ---------------------------------------------------------------------------------------------------
@pytest.mark.fault(14)
def test_an_older_lock_that_still_holds_what_was_removed(bench, shell):
    """The digests are the newest that were ever seen of their kernels: only the serial says that the lock is old."""
    kept, harmful = bench.publish("kept"), bench.publish("harmful")
    bench.lock(kept, harmful)
    old = bench.policy.lock_path.read_bytes()
    code, text = shell("remove", harmful)
    assert code == 0 and harmful in text
    bench.policy.lock_path.write_bytes(old)
    with bench.refused("HUB_ROLLBACK"):
        bench.load(harmful)
    with bench.refused("HUB_ROLLBACK"):
        bench.install()
    elsewhere = bench.folder / "elsewhere.lock"  # the same old lock under another name: it carries its own id
    elsewhere.write_bytes(old)
    bench.settings["lock"] = str(elsewhere)
    with bench.refused("HUB_ROLLBACK"):
        bench.load(harmful)


@pytest.mark.fault(14)
@pytest.mark.slow
def test_the_newest_lock_may_return_to_an_older_build(bench):
    repo, files = bench.publish(id="_lz_returns_1"), []
    for extra in ("", "WORSE = True", ""):
        bench.put(repo, universal_kernel(extra=extra, id="_lz_returns_1"))
        bench.lock(repo, allow_rollback=True)
        files.append(bench.policy.lock_path.read_bytes())
    shutil.rmtree(bench.store.root)  # a new machine, which is given one after the other
    for raw in files:
        bench.policy.lock_path.write_bytes(raw)
        bench.install()
    bench.load(repo)
    bench.policy.lock_path.write_bytes(files[1])
    with bench.refused("HUB_ROLLBACK"):
        bench.install()


@pytest.mark.fault(14)
def test_a_lock_that_fails_half_way_leaves_the_one_in_force(bench):
    repo = bench.publish(extra="OLD = True")
    bench.lock(repo)
    bench.put(repo, universal_kernel(id="_lz_half_1"))
    with bench.refused("HUB_REVISION_MISSING"):
        bench.lock(repo, bench.publish("other", version=2))
    assert bench.load(repo).OLD


@pytest.mark.fault(14)
@pytest.mark.slow
def test_an_install_that_fails_half_way_leaves_the_lock_before_in_force(bench):
    repo = bench.publish(extra="OLD = True")
    bench.lock(repo)
    old, kept = bench.policy.lock_path.read_bytes(), bench.folder / "kept"
    shutil.copytree(bench.store.root, kept)
    bench.put(repo, universal_kernel(id="_lz_half_2"))
    bench.lock(repo, bench.publish("zz-last"))
    shutil.rmtree(bench.store.root)
    shutil.copytree(kept, bench.store.root)
    bench.hub.attack.body = lambda path, data: data.replace(b"scaled", b"scalex")
    with bench.refused("HUB_HASH_MISMATCH"):
        bench.install()
    bench.policy.lock_path.write_bytes(old)
    assert bench.load(repo).OLD


@pytest.mark.fault(14)
def test_a_lock_that_is_over(bench, shell):
    repo = bench.publish()
    assert shell("lock", f"{repo}@1", "--no-probe", "--expires", "30")[0] == 0
    assert bench.read().expires > "2026"
    edit(bench, lambda data: data.update(expires="2026-01-01T00:00:00Z"))
    for step in (lambda: bench.load(repo), bench.install, lambda: signing.sign_lock(bench.policy, Path("key.pem"))):
        with bench.refused("HUB_LOCK_EXPIRED"):
            step()
    code, text = shell("lock", f"{repo}@1", "--no-probe")
    assert code == 1 and "--expires" in text
    assert shell("lock", f"{repo}@1", "--no-probe", "--expires", "never")[0] == 0
    bench.load(repo)


@pytest.mark.fault(14)
@pytest.mark.slow
def test_a_lock_of_version_1_is_read_and_the_next_lock_is_version_2(bench):
    repo = bench.publish()
    bench.lock(repo)
    data = json.loads(bench.policy.lock_path.read_bytes())
    old = {"lock-version": 1, "endpoint": data["endpoint"], "kernels": data["kernels"]}
    bench.policy.lock_path.write_text(json.dumps(old))
    with bench.refused("HUB_ROLLBACK"):  # this machine has seen a newer one
        bench.load(repo)
    shutil.rmtree(bench.store.root)
    bench.install()
    assert [finding.reasons for finding in bench.verify()] == [()]
    with bench.refused("HUB_LOCK_INVALID") as caught:
        signing.sign_lock(bench.policy, Path("key.pem"))
    assert "lz hub lock" in str(caught.value)
    bench.lock(repo)
    bench.load(repo)
    assert json.loads(bench.policy.lock_path.read_bytes())["lock-version"] == 2


# -- 15: whose word a lock is ---------------------------------------------------------------------------------------
@pytest.mark.fault(15)
def test_an_unsigned_lock_that_merely_lies_in_the_working_directory(bench, monkeypatch, keys):
    repo = bench.publish()
    bench.lock(repo)
    named = bench.settings.pop("lock")
    monkeypatch.chdir(Path(named).parent)
    assert bench.policy.lock_path.exists()
    for step in (lambda: bench.load(repo), bench.install, lambda: bench.lock(bench.publish("another"))):
        if step is not bench.install:
            (bench.store.root / "history.json").unlink(missing_ok=True)  # nor is it one that this machine wrote
        with bench.refused("HUB_LOCK_UNNAMED"):
            step()
    sign(bench, keys)
    bench.load(repo)


@pytest.mark.fault(15)
def test_a_commit_of_a_pull_request(bench, keys):
    repo = bench.publish()
    files = universal_kernel(extra=f"open({str(bench.mark)!r}, 'w').close()\n", id="_lz_proposed_1")
    commit = bench.hub.propose(repo, files)
    forge(bench, repo, files, commit)
    with bench.refused("HUB_COMMIT_UNREACHABLE"):
        bench.install()
    bench.hub.repositories[repo].tags["release"] = commit
    assert [finding.state for finding in bench.install()] == ["installed"]
    del bench.hub.repositories[repo].tags["release"]
    shutil.rmtree(bench.store.root)
    sign(bench, keys)  # whoever signs speaks for the commit
    assert [finding.state for finding in bench.install()] == ["installed"]


# -- 16: what is signed ---------------------------------------------------------------------------------------------
@pytest.mark.req("R-HUB-03")
@pytest.mark.fault(16)
def test_no_entry_of_a_badly_signed_lock_is_kept(bench, shell, keys):
    first, planted, wanted = (bench.publish(name) for name in ("first", "planted", "wanted"))
    bench.lock(planted)
    entry = json.loads(bench.policy.lock_path.read_bytes())["kernels"][0]
    bench.policy.lock_path.unlink()
    bench.lock(first)
    sign(bench, keys)
    edit(bench, lambda data: data["kernels"].append(entry))
    code, text = shell("lock", f"{wanted}@1", "--no-probe")
    assert code == 1 and "HUB_SIGNATURE_BAD" in text
    assert shell("lock", f"{wanted}@1", "--no-probe", "--fresh")[0] == 0
    assert [kernel.repo_id for kernel in lockfile.read(bench.policy.lock_path).kernels] == [wanted]
    assert shell("lock", f"{first}@1", "--no-probe")[0] == 0  # two locks, one signature
    assert len(lockfile.read(bench.policy.lock_path).kernels) == 2


@pytest.mark.fault(16)
@pytest.mark.slow
def test_sign_shows_what_changed_and_diff_does_too(bench, shell, keys):
    one, two = bench.publish("one"), bench.publish("two")
    bench.lock(one)
    bench.settings["signing_keys"] = [str(keys[1])]
    code, text = shell("sign", "--key", str(keys[0]), "--json")
    assert code == 0 and any(one in change["what"] for change in json.loads(text)["changes"])
    bench.lock(two)
    (diff, shown) = json.loads(shell("diff", "--json")[1])["items"], shell("sign", "--key", str(keys[0]))[1]
    assert {change["what"] for change in diff if two in change["what"]} and two in shown
    assert not [change for change in diff if one in change["what"]]
    assert json.loads(shell("diff", "--json")[1])["items"] == []
    bench.load(two)


@pytest.mark.fault(16)
def test_only_whole_and_valid_locks_are_signed(bench, keys):
    base = bench.publish("base")
    repo = bench.publish("top", metadata={"kernel-depends": [{"repo-id": base, "version": 1}]})
    bench.lock(repo)
    whole = bench.policy.lock_path.read_bytes()
    edit(
        bench, lambda data: data["kernels"].pop(next(i for i, k in enumerate(data["kernels"]) if k["repo-id"] == base))
    )
    with bench.refused("HUB_LOCK_INCOMPLETE"):
        sign(bench, keys)
    bench.policy.lock_path.write_bytes(whole[:-50])
    with bench.refused("HUB_LOCK_INVALID"):
        sign(bench, keys)
    bench.policy.lock_path.write_bytes(whole)
    bench.settings["allow"].remove(base)
    with bench.refused("HUB_NOT_ALLOWED"):
        sign(bench, keys)
    assert not signing.signature_path(bench.policy.lock_path).exists()


@pytest.mark.fault(16)
def test_audit_list_and_health_look_at_the_signature(bench, shell, keys):
    from layerzero_hub.plugin import layerzero_health

    bench.lock(bench.publish())
    sign(bench, keys)
    assert shell("audit")[0] == 0 and layerzero_health("hub").ok
    edit(bench, lambda data: data["kernels"][0].update(commit="a" * 40))
    for verb in ("audit", "list", "verify"):
        code, text = shell(verb)
        assert code == 1 and "HUB_SIGNATURE_BAD" in text, verb
    report = layerzero_health("hub")
    assert not report.ok and "HUB_SIGNATURE_BAD" in report.detail


# -- 17: the module's name ------------------------------------------------------------------------------------------
@pytest.mark.fault(17)
@pytest.mark.parametrize("taken", ["json", "flash_attn", "sitecustomize", "usercustomize", "_cffi_backend", "_json"])
def test_a_kernel_that_bears_the_name_of_a_module_that_could_exist(bench, taken):
    with bench.refused("HUB_ID_TAKEN"):
        bench.lock(bench.publish(id=taken))


@pytest.mark.fault(17)
@pytest.mark.parametrize("taken", ["json", "flash_attn"])
def test_a_lock_that_calls_the_module_otherwise_than_the_build(bench, taken):
    """`kernels` puts the metadata's id into sys.modules; checking the lock's would check nothing."""
    repo = bench.publish(id=taken)
    commit, files = next(reversed(bench.hub.repositories[repo].commits.items()))
    forge(bench, repo, files, commit, id="_lz_innocent_1")
    with bench.refused("HUB_ID_MISMATCH"):
        bench.install()
    with bench.store.staging() as staging:  # and where the build is there already
        for path, data in files.items():
            with new_file(staging / path.removeprefix("build/")) as file:
                file.write(data)
        (variant,) = bench.read().find(repo).variants.values()
        bench.store.commit(staging, variant)
    with bench.refused("HUB_ID_MISMATCH"):
        bench.load(repo)
    forge(bench, repo, files, commit)
    with bench.refused("HUB_ID_TAKEN"):
        bench.load(repo)
    assert hasattr(json, "dumps")


# -- 23: tokens -----------------------------------------------------------------------------------------------------
@pytest.mark.fault(23)
def test_a_token_goes_only_to_the_endpoint_it_belongs_to(bench, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    bench.lock(bench.publish())
    assert bench.hub.asked and not bench.hub.tokens  # loopback, and http

    def sent(**settings):
        return "Authorization" in connect(from_mapping(settings)).web.headers

    mirror = ["https://mirror.example"]
    assert sent() and not sent(endpoints=mirror)
    assert sent(endpoints=mirror, token_endpoint=mirror[0]) and not sent(token_endpoint=mirror[0])


@pytest.mark.fault(23)
def test_a_token_does_not_follow_a_redirect_to_http(bench, monkeypatch):
    from layerzero_hub.remote import Web

    web = Web("https://hub.example", timeout=1.0, headers={"Authorization": "Bearer hf_secret"})
    with bench.refused("HUB_REPO_REDIRECTED"):
        web._next("https://hub.example/file", "http://hub.example/file")
    asked = []
    monkeypatch.setattr(web, "_ask", lambda request, deadline: asked.append(request) or io.BytesIO())
    for url in ("http://hub.example/x", "https://elsewhere.example/x", "https://hub.example/x"):
        with web._open("GET", url, time.monotonic() + 60):
            pass
    assert [request.get_header("Authorization") for request in asked] == [None, None, "Bearer hf_secret"]


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://localhost:x@evil.example",
        "http://127.0.0.1:80@evil.example",
        "https://user@hub.example",
        "https://hub.example?x",
        "http://localhost.evil.example",
        "https://hub.example\\@evil.example",
        "https://",
        "https://hub.example:port",
        "ftp://127.0.0.1:2",
    ],
)
def test_addresses_that_look_like_others(bench, endpoint):
    with bench.refused("HUB_POLICY_INVALID"):
        from_mapping({"endpoints": [endpoint]})


def test_loopback_addresses_pass():
    for one in ("http://127.0.0.1:9", "http://localhost:9/hub", "http://[::1]:9", "https://hub.example/mirror"):
        assert from_mapping({"endpoints": [one]}).endpoints == (one,)
