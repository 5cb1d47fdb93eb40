"""The contracts of .importlinter name every package and every room, and no import by string goes around them."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import circles, imports
from tools.workspace import ROOT, Package, packages

CONTRACTS = configparser.ConfigParser(comment_prefixes=("#",), interpolation=None)
CONTRACTS.read(ROOT / ".importlinter", encoding="utf-8")
PACKAGES = [package for package in packages() if package.has_code]
CORE = ROOT / "packages" / "layerzero-core" / "src" / "layerzero"
COMMAND_LINE = {"layerzero_cli"}  # in the core's distribution, above everything
FOR_PLUGIN_AUTHORS = {"plugin", "model", "errors", "reasons", "files"}
# Modules of another package that are named in a string: where they may be absent, and the core says so.
BY_NAME = {
    # the hot path in C, where it is installed
    "layerzero-core": {"layerzero_accel._hot"},
}


def listed(contract: str, field: str) -> set[str]:
    return set(CONTRACTS[f"importlinter:contract:{contract}"][field].split())


def modules(package: Package) -> set[str]:
    return {folder.name for folder in (package.path / "src").iterdir() if (folder / "__init__.py").exists()}


def rooms() -> set[str]:
    found = {item.stem for item in CORE.iterdir() if item.suffix == ".py" or (item / "__init__.py").exists()}
    return found - {"__init__"}


def test_every_package_is_looked_at() -> None:
    assert set(CONTRACTS["importlinter"]["root_packages"].split()) == set().union(*map(modules, PACKAGES))


def test_the_core_imports_none_of_the_others_and_they_keep_to_a_contract_of_their_own() -> None:
    others = set().union(*map(modules, PACKAGES[1:]))
    assert listed("core-alone", "forbidden_modules") == others | COMMAND_LINE
    sections = (section for section in CONTRACTS.values() if "source_modules" in section)
    sources = {name for section in sections for name in section["source_modules"].split()}
    assert others - {"layerzero_tune"} <= sources  # its floors are a contract of layers


def test_every_room_of_the_core_is_open_to_backends_or_closed() -> None:
    forbidden = listed("backends", "forbidden_modules")
    assert forbidden >= COMMAND_LINE
    closed = {name.removeprefix("layerzero.") for name in forbidden - COMMAND_LINE}
    assert closed | FOR_PLUGIN_AUTHORS | {"backends"} == rooms()
    assert closed.isdisjoint(FOR_PLUGIN_AUTHORS)


def test_no_two_rooms_of_the_core_may_import_each_other() -> None:
    floors = CONTRACTS["importlinter:contract:floors"]
    assert set(re.findall(r"\w+", floors["layers"])) == rooms()
    assert ":" not in floors["layers"] and "ignore_imports" not in floors
    assert circles(imports()) == []


def named(file: Path) -> Iterator[str]:
    """Modules of ours that a file names in a string; loggers have the same names and are none."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loggers = {id(item) for node in calls if ast.unparse(node.func).endswith("getLogger") for item in node.args}
    for node in ast.walk(tree):
        if id(node) not in loggers and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(layerzero\w*\.\w[\w.]*)(?::\w+)?$", node.value)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_no_module_of_another_package_is_imported_by_its_name_in_a_string(package: Package) -> None:
    own, found = modules(package), set()
    for file in sorted((package.path / "src").rglob("*.py")):
        if "template" not in file.parts:
            found |= {name for name in named(file) if name.partition(".")[0] not in own and importable(name)}
    assert found == BY_NAME.get(package.name, set())


def importable(name: str) -> bool:
    """Whether there is such a module, or a name in one, in any package here."""
    path = Path(*name.split("."))
    return any(
        (package.path / "src" / place).with_suffix(".py").exists() or (package.path / "src" / place).is_dir()
        for package in PACKAGES
        for place in (path, path.parent)
        if len(place.parts) > 1
    ) or name.endswith("._hot")
