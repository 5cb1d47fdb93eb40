"""The compatibility matrix says what the packages declare, what is pinned, and what this process runs on."""

from __future__ import annotations

import platform
import re
import tomllib

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from layerzero.public import check_machine
from tools.workspace import ROOT

MATRIX = tomllib.loads((ROOT / "docs" / "compatibility.toml").read_text(encoding="utf-8"))
PROJECTS = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in sorted((ROOT / "packages").glob("*/pyproject.toml"))
}
PINS = dict(re.findall(r"^([\w.-]+)==([^\s;]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
# Extras that are tools of ours, not libraries whose kernels or models are used.
OURS = {"telemetry", "testing"}


def vendors(project: dict[str, object]) -> dict[str, str]:
    """Library -> range, as the extras of a package name them."""
    extras = project.get("optional-dependencies", {})
    assert isinstance(extras, dict)
    found = [Requirement(line) for name, lines in extras.items() if name not in OURS for line in lines]
    return {item.name: str(item.specifier) for item in found if item.name not in PROJECTS}


def same(one: str, other: str) -> bool:
    return SpecifierSet(one) == SpecifierSet(other)


@pytest.mark.req("R-ENV-06")
def test_every_package_asks_for_the_python_the_matrix_names_and_this_one_is_met() -> None:
    python = MATRIX["python"]
    assert {project["requires-python"] for project in PROJECTS.values()} == {python["range"]}
    assert all(SpecifierSet(python["range"]).contains(version) for version in python["met"])
    assert SpecifierSet(python["range"]).contains(platform.python_version())
    assert check_machine._FLOORS == {"python": python["range"], "torch": MATRIX["torch"]["range"]}  # doctor's word


@pytest.mark.req("R-ENV-06")
@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_package_takes_python_from_3_11_on_and_no_older_one(name: str) -> None:
    takes = SpecifierSet(str(PROJECTS[name]["requires-python"]))
    assert all(takes.contains(version) for version in ("3.11", "3.11.7", "3.12.0", "3.13.5", "3.14.0", "3.99"))
    assert not any(takes.contains(version) for version in ("2.7", "3.9.21", "3.10", "3.10.99"))


@pytest.mark.req("R-ENV-07")
def test_torch_is_asked_for_once_as_the_matrix_says_and_this_one_is_met() -> None:
    wanted = MATRIX["torch"]
    named = [Requirement(line) for project in PROJECTS.values() for line in project.get("dependencies", ())]
    assert [str(item.specifier) for item in named if item.name == "torch"] == [wanted["range"]]
    running = Version(torch.__version__).base_version
    assert SpecifierSet(wanted["range"]).contains(running) and PINS["torch"] in wanted["met"]
    assert all(SpecifierSet(wanted["range"]).contains(version) for version in wanted["met"])


def test_doctor_calls_those_versions_tested_that_the_matrix_has_met() -> None:
    minors = {
        name: tuple(re.match(r"\d+\.\d+", version)[0] for version in MATRIX[name]["met"])
        for name in ("python", "torch")
    }
    assert minors == check_machine._MET


@pytest.mark.req("R-ENV-08", "R-ENV-09")
def test_the_matrix_has_every_vendor_library_with_the_range_its_package_declares() -> None:
    declared = {
        (name, library): limits for name, project in PROJECTS.items() for library, limits in vendors(project).items()
    }
    matrix = {(by, library): row["range"] for library, row in MATRIX["libraries"].items() for by in row["by"]}
    missing = {key for key in declared if key not in matrix and key[1] not in ("pyOpenSSL",)}
    assert missing == set()
    for key, limits in declared.items():
        if key in matrix:
            assert same(limits, matrix[key]), key


@pytest.mark.req("R-ENV-09")
@pytest.mark.parametrize("library", sorted(MATRIX["libraries"]))
def test_what_was_met_and_what_is_pinned_lies_in_the_range(library: str) -> None:
    row = MATRIX["libraries"][library]
    limits = SpecifierSet(row["range"])
    assert all(limits.contains(version, prereleases=True) for version in row["met"])
    if library in PINS:
        assert PINS[library] in row["met"]


@pytest.mark.req("R-ENV-08")
@pytest.mark.parametrize("name", ["cuda", "cudnn", "rocm", "triton"])
def test_the_matrix_has_a_row_for_the_platform_and_none_of_the_outdated_versions(name: str) -> None:
    rows = MATRIX["platforms"] | MATRIX["libraries"]
    assert name in rows, f"docs/compatibility.toml has no row {name}"
    outdated = {"cuda": "<12.5", "cudnn": "<9", "rocm": "<6.1", "triton": "<3"}[name]
    assert [version for version in rows[name]["met"] if version in SpecifierSet(outdated)] == []
    if "range" in rows[name]:
        assert not any(SpecifierSet(rows[name]["range"]).contains(old) for old in ("2.1.0", "2.2.0", "2.3.0"))


@pytest.mark.req("R-ENV-08")
def test_no_module_of_the_core_compares_versions_of_cuda_cudnn_rocm_or_triton() -> None:
    """They are the backends' matter, in their data; the core asks the device and reports."""
    pattern = re.compile(r"(cuda|cudnn|hip|rocm|triton)[\w.]*(\(\))?\s*(<|>|<=|>=|==)\s*(\(\s*\d+,|[\"'(]?\d+[.\d])")
    sources = (ROOT / "packages" / "layerzero-core" / "src" / "layerzero").rglob("*.py")
    found = [f"{file.name}: {m[0]}" for file in sources for m in pattern.finditer(file.read_text(encoding="utf-8"))]
    assert found == []
    compared = ('if cuda_version >= "12.4":', "torch.version.cuda < (12.1)", "torch.version.hip >= (6, 0)",
                "if torch.backends.cudnn.version() >= 90100:", 'triton.__version__ == "3.5.1"')  # fmt: skip
    assert [line for line in compared if not pattern.search(line)] == []
