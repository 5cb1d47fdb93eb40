"""Looking after locks and stores: builds for several machines, keys, full disks, versions, prune, publishers."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from layerzero_cli.root import cli
from layerzero_hub import installing, signing
from layerzero_hub.policy import from_mapping
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, universal_kernel = _kernels.build, _kernels.universal_kernel

# Another processor than this machine's, and a GPU.
ELSE = "x86_64" if platform.machine() == "aarch64" else "aarch64"
OTHER, CUDA = f"torch213-cxx11-cpu-{ELSE}-linux", "torch213-cxx11-cu130-x86_64-linux"


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


# -- several machines -----------------------------------------------------------------------------------------------
def everywhere(extra: str = "") -> dict[str, bytes]:
    """A kernel with builds for this machine, for another architecture and for a GPU."""
    files = universal_kernel(id="_lz_machines_any", extra=extra)
    for variant, backend in ((OTHER, "cpu"), (CUDA, "cuda")):
        identity = f"_lz_machines_{backend}_{variant.split('-')[3]}"
        files |= universal_kernel(id=identity, variant=variant, extra=extra, backend={"type": backend})
    return files


@pytest.mark.fault(24)
@pytest.mark.slow
def test_builds_for_several_machines_are_locked_from_one(bench, shell):
    bench.put("org/machines", everywhere())
    code, text = shell("lock", "org/machines@1", "--no-probe", "--variant", "*cpu*", "--variant", CUDA)
    assert code == 0, text
    assert sorted(bench.read().find("org/machines").variants) == sorted(["torch-universal", OTHER, CUDA])
    shutil.rmtree(bench.store.root)
    states = {finding.variant: finding.state for finding in bench.install()}
    assert states == {"torch-universal": "installed", OTHER: installing.ELSEWHERE, CUDA: installing.ELSEWHERE}
    assert shell("verify")[0] == 0 and len(list(bench.store.root.glob("sha256-*"))) == 1
    assert {finding.state for finding in bench.install(everywhere=True)} == {"installed", "present"}
    assert len(list(bench.store.root.glob("sha256-*"))) == 3
    bench.put("org/machines", everywhere("NEWER = True"))
    assert shell("lock", "org/machines@1", "--no-probe")[0] == 0  # all that were locked, at the new commit
    assert len(bench.read().find("org/machines").variants) == 3
    assert bench.load("org/machines").NEWER


@pytest.mark.fault(24)
def test_a_kernel_for_other_machines_alone_is_locked_when_asked_for(bench):
    bench.put("org/other", universal_kernel(id="_lz_other_only", variant=OTHER))
    with bench.refused("HUB_VARIANT_MISSING"):
        bench.lock("org/other")
    bench.lock("org/other", variants=[f"*{ELSE}*"])
    assert [finding.state for finding in bench.install()] == [installing.ELSEWHERE]
    with bench.refused("HUB_VARIANT_MISSING"):
        bench.load("org/other")


# -- keys and disks -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Private keys of many kinds, by name."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    folder = tmp_path_factory.mktemp("keys")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    plain, locked = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"open sesame")
    curve = ec.generate_private_key(ec.SECP256R1())
    public = curve.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    contents = {
        "plain": curve.private_bytes(pem, form, plain),
        "encrypted": curve.private_bytes(pem, form, locked),
        "rsa": rsa.generate_private_key(65537, 2048).private_bytes(pem, form, plain),
        "garbage": b"no key at all",
        "public": public,
        "password": b"open sesame\n",
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("name", "word"),
    [("missing", "no such file"), ("encrypted", "encrypted"), ("rsa", "EC key"), ("garbage", "EC key"), ("", "EC key")],
)
def test_a_key_that_cannot_be_used_is_one_clear_error(bench, shell, keys, name, word):
    bench.lock(bench.publish())
    code, text = shell("sign", "--key", str(keys / name))
    assert code == 1 and "HUB_KEY_INVALID" in text and word in text and "should not happen" not in text
    assert not signing.signature_path(bench.policy.lock_path).exists()


@pytest.mark.fault(24)
@pytest.mark.parametrize("name", ["missing", "garbage", "rsa"])
def test_a_public_key_that_cannot_be_used_is_one_clear_error(bench, shell, keys, name):
    repo = bench.publish()
    bench.lock(repo)
    assert shell("sign", "--key", str(keys / "plain"))[0] == 0
    bench.settings["signing_keys"] = [str(keys / name)]
    with bench.refused("HUB_KEY_INVALID"):
        bench.load(repo)


@pytest.mark.fault(24)
def test_an_encrypted_key_signs_with_its_password(bench, shell, keys):
    repo = bench.publish()
    bench.lock(repo)
    code, text = shell("sign", "--key", str(keys / "encrypted"), "--password-file", str(keys / "password"))
    assert code == 0, text
    bench.settings["signing_keys"] = [str(keys / "public")]
    bench.load(repo)
    code, text = shell("sign", "--key", str(keys / "encrypted"), "--password-file", str(keys / "plain"))
    assert code == 1 and "HUB_KEY_INVALID" in text


@contextmanager
def no_room(limit: int):
    """From here on no file grows past a limit, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault(24)
def test_a_disk_that_is_full_is_one_clear_error_and_changes_nothing(bench, shell):
    repo = bench.publish("small", extra="SMALL = True")
    bench.lock(repo)
    before = bench.policy.lock_path.read_bytes()
    files = {"__init__.py": b"", "table.bin": bytes(300_000)}
    bench.put("org/large", build(files, "torch-universal", id="_lz_large_1"))
    with no_room(100_000):
        code, text = shell("lock", "org/large@1", "--no-probe")
    assert code == 1 and "HUB_WRITE_FAILED" in text and "should not happen" not in text
    assert bench.policy.lock_path.read_bytes() == before
    bench.lock("org/large")
    shutil.rmtree(bench.build("org/large").parent)
    with no_room(100_000):
        code, text = shell("install")
    assert code == 1 and "HUB_WRITE_FAILED" in text and "should not happen" not in text
    written = bench.policy.lock_path.read_bytes()
    with no_room(100), bench.refused("HUB_WRITE_FAILED"):
        bench.lock(bench.publish("third"))
    assert bench.policy.lock_path.read_bytes() == written
    bench.install()
    assert bench.load(repo).SMALL


# -- versions, remove, prune ----------------------------------------------------------------------------------------
@pytest.mark.fault(24)
def test_versions_of_a_kernel(bench, shell):
    repo = bench.publish("many")
    bench.put(repo, universal_kernel(id="_lz_many_2", version=2), version=2)
    bench.put(repo, universal_kernel(id="_lz_many_10", version=10), version=10)
    bench.lock(repo, version=2)
    bench.put(repo, universal_kernel(id="_lz_many_2", version=2, extra="X = 1"), version=2)
    code, text = shell("versions", repo, "--json")
    found = json.loads(text)["items"]
    assert code == 0 and [entry["version"] for entry in found] == [1, 2, 10]
    assert [bool(entry["locked"]) for entry in found] == [False, True, False] and found[1]["locked"] != found[1][
        "commit"
    ]
    assert "older commit" in shell("versions", repo)[1]
    assert "HUB_NOT_ALLOWED" in shell("versions", "nobody/asked")[1]


@pytest.mark.fault(24)
def test_remove_and_prune(bench, shell):
    base = bench.publish("base")
    top = bench.publish("top", metadata={"kernel-depends": [{"repo-id": base, "version": 1}]})
    bench.lock(top)
    code, text = shell("remove", base)
    assert code == 1 and "HUB_STILL_NEEDED" in text
    assert "HUB_NOT_LOCKED" in shell("remove", f"{base}@7")[1]
    gone = [path.parent for path in (bench.build(top), bench.build(base))]
    assert shell("remove", f"{top}@1", base)[0] == 0
    assert bench.read().kernels == () and all(path.exists() for path in gone)
    assert len(json.loads(shell("prune", "--dry-run", "--json")[1])["items"]) == 2 and all(
        path.exists() for path in gone
    )
    code, text = shell("prune", "--json")
    assert code == 0 and all(entry["bytes"] > 100 for entry in json.loads(text)["items"])
    assert not any(path.exists() for path in gone) and json.loads(shell("prune", "--json")[1])["items"] == []


@pytest.mark.fault(24)
def test_prune_leaves_what_another_lock_of_the_store_names(bench, shell):
    mine, other = bench.publish("mine"), bench.publish("other")
    bench.lock(other)
    kept, first = bench.build(other), bench.settings["lock"]
    bench.settings["lock"] = str(bench.folder / "second.lock")
    bench.lock(mine)
    assert json.loads(shell("prune", "--json")[1])["items"] == [] and kept.exists()
    os.unlink(first)
    assert len(json.loads(shell("prune", "--json")[1])["items"]) == 1 and not kept.exists()


# -- publishers -----------------------------------------------------------------------------------------------------
def signed(bench, name: str, bundle: bytes | None, **changes) -> str:
    files = universal_kernel(id=f"_lz_{name}_1", **changes)
    if bundle is not None:
        files["build/torch-universal/metadata.json.sigstore"] = bundle
    bench.put(f"org/{name}", files)
    return f"org/{name}"


@pytest.mark.req("R-HUB-03")
@pytest.mark.fault(24)
def test_a_publishers_signature_that_does_not_hold(bench, keys):
    with bench.refused("HUB_PUBLISHER_SIGNATURE"):
        bench.lock(signed(bench, "garbage", b"{}"))
    bench.lock(bench.publish("other"))
    signing.sign_lock(bench.policy, keys / "plain")  # a real bundle, of somebody who is no publisher
    bundle = signing.signature_path(bench.policy.lock_path).read_bytes()
    with bench.refused("HUB_PUBLISHER_SIGNATURE"):
        bench.lock(signed(bench, "foreign", bundle))
    with bench.refused("HUB_PUBLISHER_SIGNATURE"):
        bench.lock(signed(bench, "undigested", bundle, digest=None))


@pytest.mark.req("R-HUB-03")
@pytest.mark.fault(24)
def test_a_kernel_whose_builds_were_signed_stays_signed(bench, monkeypatch):
    """No signature of the public service can be made here: what the library would answer is put in its place."""
    from sigstore.models import Bundle
    from sigstore.verify import Verifier

    seen = []
    monkeypatch.setattr(Bundle, "from_json", classmethod(lambda cls, raw: raw))
    monkeypatch.setattr(Verifier, "verify_artifact", lambda self, *asked: seen.append(asked))
    workflow = "https://github.com/org/kernels/.github/workflows/build.yaml@refs/heads/main"
    bench.settings["publishers"] = [workflow]
    repo = signed(bench, "published", b"a bundle")
    bench.lock(repo)
    ((raw, bundle, signers),) = seen
    assert json.loads(raw)["id"] == "_lz_published_1" and bundle == b"a bundle"
    assert [one.signer_uris for one in signers._children][-1] == [workflow]
    signed(bench, "published", None, extra="UNSIGNED = True")
    with bench.refused("HUB_PUBLISHER_SIGNATURE"):
        bench.lock(repo)
    with bench.refused("HUB_POLICY_INVALID"):
        from_mapping({"publishers": ["somebody"]})
