"""A lock that was edited, rolled back, revoked or signed by nobody we know."""

from __future__ import annotations

import json
import subprocess

import pytest

from layerzero_hub import lockfile, signing
from layerzero_hub.errors import HubError
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
universal_kernel = _kernels.universal_kernel

TRAVERSAL = pytest.mark.req("R-HUB-04")


@pytest.fixture
def locked(bench):
    repo = bench.publish()
    bench.lock(repo)
    return bench, repo


def edit(bench, change):
    path = bench.policy.lock_path
    data = json.loads(path.read_text())
    data["serial"] += 1  # as whoever edits a lock would
    change(data)
    path.write_text(json.dumps(data))


def variant_of(data):
    return next(iter(data["kernels"][0]["variants"].values()))


def test_the_lock_is_stable_and_reads_back(locked):
    bench, repo = locked
    first = bench.policy.lock_path.read_bytes()
    lockfile.write(lockfile.parse(first), bench.policy.lock_path)
    assert bench.policy.lock_path.read_bytes() == first
    bench.lock(repo)
    assert bench.policy.lock_path.read_bytes() == first


@pytest.mark.req("R-HUB-02")
def test_a_hash_that_was_edited(locked):
    bench, repo = locked
    edit(bench, lambda data: variant_of(data)["files"]["detail.py"].update(sha256="0" * 64))
    with bench.refused("HUB_LOCK_STALE"):
        bench.load(repo)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data["kernels"][0].update(commit="main"), "HUB_LOCK_INVALID"),
        (lambda data: data["kernels"][0].update(commit="ABCDEF" + "0" * 34), "HUB_LOCK_INVALID"),
        (lambda data: data.update(extra=1), "HUB_LOCK_INVALID"),
        (lambda data: data["kernels"][0].update(trust=True), "HUB_LOCK_INVALID"),
        (lambda data: data.pop("endpoint"), "HUB_LOCK_INVALID"),
        (lambda data: data.update({"lock-version": 3}), "HUB_LOCK_INVALID"),
        (lambda data: data.update({"lock-version": 1}), "HUB_LOCK_INVALID"),
        (lambda data: data.update(serial=0), "HUB_LOCK_INVALID"),
        (lambda data: data.update({"lock-id": "mine"}), "HUB_LOCK_INVALID"),
        (lambda data: data.update(expires="tomorrow"), "HUB_LOCK_INVALID"),
        (lambda data: data.update(expires=7), "HUB_LOCK_INVALID"),
        (lambda data: data.update({"lock-version": True}), "HUB_LOCK_INVALID"),
        (lambda data: data["kernels"].append(data["kernels"][0]), "HUB_LOCK_INVALID"),
        pytest.param(lambda data: data["kernels"][0].update({"repo-id": "../x"}), "HUB_ID_INVALID", marks=TRAVERSAL),
        pytest.param(
            lambda data: variant_of(data)["files"].update({"../x.py": {"sha256": "0" * 64, "size": 1}}),
            "HUB_PATH_UNSAFE",
            marks=TRAVERSAL,
        ),
        (
            lambda data: variant_of(data)["files"].update({"x.pyc": {"sha256": "0" * 64, "size": 1}}),
            "HUB_FILE_KIND_REFUSED",
        ),
        pytest.param(
            lambda data: data["kernels"][0].update(variants={"../up": variant_of(data)}),
            "HUB_PATH_UNSAFE",
            marks=TRAVERSAL,
        ),
        (lambda data: variant_of(data).update(id="os.path"), "HUB_LOCK_INVALID"),
        (lambda data: variant_of(data)["files"].pop("metadata.json"), "HUB_LOCK_INVALID"),
    ],
)
def test_a_lock_of_another_shape(locked, change, code):
    bench, repo = locked
    edit(bench, change)
    with bench.refused(code):
        bench.load(repo)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100000, b'{"a": NaN}', b"9" * 5000])
def test_bytes_that_are_no_lock(raw):
    with pytest.raises(HubError) as caught:
        lockfile.parse(raw)
    assert caught.value.code.value == "HUB_LOCK_INVALID"


def test_a_key_that_stands_twice(locked):
    bench, repo = locked
    text = bench.policy.lock_path.read_text().replace('"endpoint"', '"endpoint": "https://evil.example", "endpoint"', 1)
    bench.policy.lock_path.write_text(text)
    with bench.refused("HUB_LOCK_INVALID"):
        bench.load(repo)


@pytest.mark.req("R-HUB-02")
def test_a_kernel_that_is_not_in_the_lock(locked):
    bench, _ = locked
    other = bench.publish("other")
    with bench.refused("HUB_NOT_LOCKED"):
        bench.load(other)


def test_no_lock_at_all(bench):
    repo = bench.publish()
    with bench.refused("HUB_LOCK_MISSING"):
        bench.load(repo)


def test_a_lock_from_another_endpoint(locked):
    bench, repo = locked
    edit(bench, lambda data: data.update(endpoint="https://evil.example"))
    with bench.refused("HUB_ENDPOINT_REFUSED"):
        bench.load(repo)


def test_a_rollback_to_an_older_build(bench):
    repo = bench.publish()
    bench.lock(repo)
    old = bench.policy.lock_path.read_bytes()
    bench.put(repo, universal_kernel(extra="FIXED = True", id="_lz_fixed"))
    bench.lock(repo)
    bench.policy.lock_path.write_bytes(old)  # a whole, honest, older lock, whose build is still in the store
    with bench.refused("HUB_ROLLBACK"):
        bench.load(repo)
    with bench.refused("HUB_ROLLBACK"):
        bench.install()
    bench.install(allow_rollback=True)
    bench.load(repo)


@pytest.mark.req("R-HUB-02")
def test_a_revoked_digest(locked):
    bench, repo = locked
    (variant,) = bench.read().find(repo).variants.values()
    bench.settings["revoked"] = [variant.digest]
    for step in (lambda: bench.load(repo), lambda: bench.install(), lambda: bench.lock(repo)):
        with bench.refused("HUB_REVOKED"):
            step()


def test_switched_off(locked):
    bench, repo = locked
    bench.settings["enabled"] = False
    with bench.refused("HUB_DISABLED"):
        bench.load(repo)


# -- signatures -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two EC key pairs, ours and a stranger's."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, found = tmp_path_factory.mktemp("keys"), {}
    for name in ("ours", "stranger"):
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        found[name] = (private, public)
    return found


@pytest.mark.req("R-HUB-03")
def test_a_signed_lock_loads_and_an_edited_one_does_not(locked, keys):
    bench, repo = locked
    bench.settings["signing_keys"] = [str(keys["ours"][1])]
    with bench.refused("HUB_SIGNATURE_MISSING"):
        bench.load(repo)
    signing.sign_lock(bench.policy, keys["ours"][0])
    bench.load(repo)
    edit(bench, lambda data: data.update(endpoint=data["endpoint"] + "/"))
    with bench.refused("HUB_SIGNATURE_BAD"):
        bench.load(repo)


@pytest.mark.req("R-HUB-03")
def test_a_signature_by_a_stranger(locked, keys):
    bench, repo = locked
    bench.settings["signing_keys"] = [str(keys["ours"][1])]
    signing.sign_lock(bench.policy, keys["stranger"][0])
    with bench.refused("HUB_SIGNATURE_FOREIGN"):
        bench.load(repo)
    bench.settings["signing_keys"] = [str(keys["ours"][1]), str(keys["stranger"][1])]
    bench.load(repo)


def test_a_signature_that_is_garbage(locked, keys):
    bench, repo = locked
    bench.settings["signing_keys"] = [str(keys["ours"][1])]
    signing.signature_path(bench.policy.lock_path).write_text('{"not": "a bundle"}')
    with bench.refused("HUB_SIGNATURE_BAD"):
        bench.load(repo)


def test_keys_that_openssl_makes_work(locked, tmp_path):
    bench, repo = locked
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private], check=True)
    subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    signing.sign_lock(bench.policy, private)
    bench.settings["signing_keys"] = [str(public)]
    bench.load(repo)
