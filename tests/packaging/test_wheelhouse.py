"""The lock files hold no address and agree, and a wheel that is not the locked one is refused."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import wheelhouse
from tools.workspace import ROOT, packages

UV = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
MEMBERS = {package.name for package in packages()}


@pytest.mark.parametrize("name", ["requirements.lock", "uv.lock", "constraints.txt"])
def test_no_lock_holds_an_address(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"\S*(?://|@|file:)\S*", text) == []
    assert not re.search(r"^-", text, flags=re.MULTILINE)


def test_uv_lock_names_files_of_the_folder_and_members_of_the_workspace_only():
    for package in UV["package"]:
        if package["name"] in MEMBERS:
            assert package["source"] == {"editable": f"packages/{package['name']}"}
        elif package["name"] != "layerzero-workspace":
            assert package["source"] == {"registry": "wheelhouse"}
            assert all(set(wheel) == {"path"} and "/" not in wheel["path"] for wheel in package["wheels"])


def test_every_member_comes_from_the_workspace():
    assert set(SETTINGS["sources"]) == MEMBERS
    assert all(source == {"workspace": True} for source in SETTINGS["sources"].values())
    assert set(UV["manifest"]["members"]) == {*MEMBERS, "layerzero-workspace"}


def test_uv_lock_pins_what_requirements_lock_pins_and_leaves_out_torch_and_vendors():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.removesuffix("\\").strip()) for line in lines if line and not line.startswith(("#", " "))]
    pinned = {(canonicalize_name(pin.name), next(iter(pin.specifier)).version) for pin in pins}
    third = {(p["name"], p["version"]) for p in UV["package"] if p["name"] not in {*MEMBERS, "layerzero-workspace"}}
    assert third <= pinned
    assert not {name for name, _ in third} & {"torch", *SETTINGS["exclude-dependencies"]}


def test_uv_lock_has_every_wheel_for_every_processor_family_of_pyproject():
    families = wheelhouse.machines()
    assert families == re.findall(r"platform_machine == '(\w+)'", " ".join(UV["supported-markers"]))
    for package in UV["package"]:
        files = [wheel["path"] for wheel in package.get("wheels", ())]
        for family in families if files else ():
            assert any(file.endswith("-any.whl") or family in file for file in files), (package["name"], family)


def test_uv_lock_knows_every_dependency_of_every_member():
    """Fails when a pyproject file asks for something new and `make lock` was not run."""
    left_out = {"torch", *SETTINGS["exclude-dependencies"]}
    locked = {p["name"]: p for p in UV["package"]}
    for package in packages():
        asked = {canonicalize_name(Requirement(line).name) for line in package.data["project"].get("dependencies", ())}
        assert {d["name"] for d in locked[package.name].get("dependencies", ())} == asked - left_out, package.name
        assert locked[package.name]["version"] == package.data["project"]["version"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one wheel that the lock knows and one that only the sums know."""
    (tmp_path / "acme-1.0-py3-none-any.whl").write_bytes(b"as it was locked")
    (tmp_path / "torch-2.13.0-py3-none-any.whl").write_bytes(b"as it was downloaded")
    acme, torch = (hashlib.sha256(text).hexdigest() for text in (b"as it was locked", b"as it was downloaded"))
    (tmp_path / "requirements.lock").write_text(f"acme==1.0 \\\n    --hash=sha256:{acme}\n", encoding="utf-8")
    (tmp_path / wheelhouse.SUMS).write_text(f"{torch}  torch-2.13.0-py3-none-any.whl\n", encoding="utf-8")
    return tmp_path


def test_a_folder_as_it_was_locked_passes(folder: Path):
    assert wheelhouse.check(folder, folder / "requirements.lock") == 2


@pytest.mark.parametrize("name", ["acme-1.0-py3-none-any.whl", "torch-2.13.0-py3-none-any.whl"])
def test_a_flipped_byte_is_refused(folder: Path, name: str):
    data = bytearray((folder / name).read_bytes())
    data[3] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(wheelhouse.Refused, match=f"{name}: its SHA-256 is not in") as refused:
        wheelhouse.check(folder, folder / "requirements.lock")
    assert "make wheelhouse" in str(refused.value)


def test_a_wheel_nobody_wrote_down_is_refused(folder: Path):
    (folder / "stranger-1.0-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(wheelhouse.Refused, match="stranger"):
        wheelhouse.check(folder, folder / "requirements.lock")


def test_the_sums_cannot_stand_in_for_the_lock(folder: Path):
    other = b"another build of a locked wheel"
    (folder / "acme-1.0-py3-none-any.whl").write_bytes(other)
    with (folder / wheelhouse.SUMS).open("a", encoding="utf-8") as sums:
        sums.write(f"{hashlib.sha256(other).hexdigest()}  acme-1.0-py3-none-any.whl\n")
    with pytest.raises(wheelhouse.Refused, match="acme"):
        wheelhouse.check(folder, folder / "requirements.lock")


def test_an_empty_folder_is_refused(tmp_path: Path):
    (tmp_path / "requirements.lock").write_text("", encoding="utf-8")
    with pytest.raises(wheelhouse.Refused, match="there is no wheel"):
        wheelhouse.check(tmp_path, tmp_path / "requirements.lock")
