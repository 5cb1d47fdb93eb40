"""The files of a release: built twice they are equal, one that was changed is noticed, a version is written whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import release
from tools.workspace import ROOT, packages

pytest.importorskip("hatchling", reason="missing tool: hatchling")

VERSION = packages()[0].data["project"]["version"]


def built(name: str, into: Path) -> Path:
    (package,) = [package for package in packages() if package.name == name]
    release.build(package, into)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_builds_of_the_release_give_equal_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_CPU_OBJECTS", str(ROOT / "build" / "native"))
    for folder in ("one", "two"):
        assert release.release(tmp_path / folder) == 0
    first, second = ((tmp_path / folder / release.MANIFEST).read_text() for folder in ("one", "two"))
    assert first == second and len(first.splitlines()) == 2 * len(packages()) + 1


def test_a_wheel_bears_the_time_of_the_commit_and_is_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, two = (built("layerzero-kernels", tmp_path / folder) for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as opened:
        assert {item.date_time for item in opened.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    sdists = [next((tmp_path / folder).glob("*.tar.gz")).read_bytes() for folder in ("one", "two")]
    assert sdists[0] == sdists[1]

    folder = one.parent
    said = "\n".join(release.problems(folder, VERSION))
    assert "layerzero-core: no wheel" in said and one.name not in said
    assert f"{one.name}: version {VERSION}, not 9.9.9" in "\n".join(release.problems(folder, "9.9.9"))
    parts = release.parts(folder, VERSION)
    assert parts == json.loads(json.dumps(parts)) and parts["bomFormat"] == "CycloneDX"
    assert {"layerzero-kernels", "layerzero-core"} <= {item["name"] for item in parts["components"]}


def test_what_two_kinds_of_machine_built_is_joined_and_a_file_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pure package both have the same files; a native wheel bears the name of its machine."""
    made = {}
    for folder, when in (("x86", "1700000000"), ("arm", "1700000000"), ("later", "1700000100")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", when)
        made[folder] = tmp_path / folder
        wheel = built("layerzero-kernels", made[folder])
        if folder != "later":
            shutil.copy2(wheel, wheel.with_name(wheel.name.replace("none-any", f"none-linux_{folder}")))
        (made[folder] / release.MANIFEST).write_text(release.manifest(made[folder]))
    into = tmp_path / "dist"
    assert list(release.join([made["x86"], made["arm"]], into)) == []
    names = {file.name for folder in ("x86", "arm") for file in made[folder].iterdir()} - {release.MANIFEST}
    assert {file.name for file in into.iterdir()} == names and len(names) == 4
    (part,) = [item for item in release.parts(into, VERSION)["components"] if item["name"] == "layerzero-kernels"]
    assert len(part["hashes"]) == 3, "one for each wheel"
    wheel = f"layerzero_kernels-{VERSION}-py3-none-any.whl"
    assert f"{wheel}: {made['later']} has other bytes" in "\n".join(release.join([made["x86"], made["later"]], into))
    (made["arm"] / wheel).write_bytes(b"changed on the way")
    assert f"{made['arm']}: not as in its SHA256SUMS" in list(release.join([made["arm"]], into))
    (made["x86"] / release.MANIFEST).unlink()
    assert f"{made['x86']}: not as in its SHA256SUMS" in list(release.join([made["x86"]], into))


def test_a_release_that_is_refused_does_not_end_well(tmp_path: Path) -> None:
    """`make wheels RELEASE=yes` whose build or checks fail leaves with an error, and no other wheels in their place."""
    shutil.copy2(ROOT / "Makefile", tmp_path)
    made = ["-o", "setup", "-o", "build/venv-release/.stamp"]
    for asked in (["wheels", "RELEASE=yes"], ["release", "FROM=one two"]):
        done = subprocess.run(["make", *made, *asked, "PY=false"], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 2 and b"tools.release" in done.stdout, done


def test_a_changed_file_and_a_foreign_signature_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from layerzero.tables.signing import sign

    keys = []
    for name in ("ours", "theirs"):
        private = Ed25519PrivateKey.generate()
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (tmp_path / f"{name}.pem").write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
        keys.append(tmp_path / f"{name}.pub")
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "a.whl").write_bytes(b"a")
    text = release.manifest(folder)
    (folder / release.MANIFEST).write_text(text)
    digest = release.hashlib.sha256(text.encode()).hexdigest()
    (folder / release.SIGNATURE).write_text(sign(digest, tmp_path / "ours.pem", "release"))
    assert release.verify(folder, keys[0]) == 0
    assert release.verify(folder, keys[1]) == 1 and "not by this key" in capsys.readouterr().err
    (folder / "a.whl").write_bytes(b"b")
    (folder / "more.whl").write_bytes(b"c")
    assert release.verify(folder, None) == 1
    assert capsys.readouterr().out.split("\n")[:2] == [
        "a.whl: not as in SHA256SUMS", "more.whl: not as in SHA256SUMS",
    ]  # fmt: skip


def test_a_version_is_written_into_every_package_and_every_range(tmp_path: Path) -> None:
    for file in ("pyproject.toml", "uv.lock", "packages/layerzero-core/src/layerzero/version.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tmp_path / file)
    for package in packages():
        target = tmp_path / "packages" / package.name / "pyproject.toml"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(package.path / "pyproject.toml", target)
    before = VERSION.rsplit(".", 1)[0]
    release.set_version("7.3.1", tmp_path)
    assert {package.data["project"]["version"] for package in packages(tmp_path)} == {"7.3.1"}
    for package in packages(tmp_path):
        ours = [line for line in (*package.data["project"].get("dependencies", ()),) if line.startswith("layerzero")]
        assert all(line.endswith(">=7.3,<7.4") for line in ours), package.name
        assert f">={before}," not in (package.path / "pyproject.toml").read_text().replace("pytest", "")
    assert '__version__ = "7.3.1"' in (tmp_path / "packages/layerzero-core/src/layerzero/version.py").read_text()
    assert (tmp_path / "uv.lock").read_text().count('version = "7.3.1"') >= len(packages())
    bad = subprocess.run(
        [sys.executable, "-m", "tools.release", "version", "next"], cwd=ROOT, capture_output=True, check=False
    )
    assert bad.returncode == 2
