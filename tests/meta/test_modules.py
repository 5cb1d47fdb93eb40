"""Every module of the core can be imported alone, keeps to what its floor may import, and is cheap to import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.workspace import ROOT

SRC = ROOT / "packages" / "layerzero-core" / "src"
LOW_FLOORS = {
    "errors", "reasons", "env", "model", "numerics", "device", "registry", "policy", "perfdb", "health", "telemetry",
}  # fmt: skip
FOR_PLUGIN_AUTHORS = {"plugin", "model", "reasons", "errors", "backends"}


def modules() -> list[str]:
    names = []
    for file in sorted(SRC.rglob("*.py")):
        parts = file.relative_to(SRC).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


# One process loads torch, then `layerzero`, which Python loads before any module inside it, and says what that brought;
# then the third-party libraries, once; then each module that is not loaded by now is imported in a child of its own.
_IMPORT_EACH = """
import json, os, sys, torch
assert not [m for m in sys.modules if m.split(".")[0] == "layerzero"]
before = set(sys.modules)
import layerzero
loaded = sorted(set(sys.modules) - before)
functions = [name for name in dir(layerzero) if callable(getattr(layerzero, name, None))]
ours = {name for name in sys.modules if name.split(".")[0] == "layerzero"}
import gc, importlib, traceback, warnings
import pydantic, yaml, click, rich, pytest, hypothesis, sympy, sqlite3, statistics
assert ours == {name for name in sys.modules if name.split(".")[0] == "layerzero"}
gc.disable(), gc.freeze()  # a collection in a child would copy all it shares with this process
failed = {}
for name in json.load(sys.stdin) if hasattr(os, "fork") else ():
    if name in sys.modules:
        continue
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads; torch's are idle here
        child = os.fork()
    if child == 0:
        os.close(read)
        try:
            importlib.import_module(name)
            text = ""
        except BaseException:
            text = traceback.format_exc(limit=-3)
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if text or status:
        failed[name] = text or f"died with status {status}"
print(json.dumps({"loaded": loaded, "functions": functions, "failed": failed}))
"""


@pytest.fixture(scope="module")
def imported_alone() -> dict[str, Any]:
    """What `import layerzero` loads beyond torch, which public names can be called, which modules fail alone."""
    names = modules()
    assert len(names) > 30
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_EACH], input=json.dumps(names), capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(620)
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_every_module_is_importable_alone(imported_alone):
    failed = imported_alone["failed"]
    assert failed == {}, "\n".join(f"--- {name}\n{text}" for name, text in failed.items())


def test_importing_layerzero_loads_no_vendor_and_no_heavy_library(imported_alone):
    loaded = {name.split(".")[0] for name in imported_alone["loaded"]}
    heavy = {"pydantic", "yaml", "click", "rich", "sqlite3", "prometheus_client", "opentelemetry"}
    vendors = {
        "flash_attn",
        "flashinfer",
        "xformers",
        "liger_kernel",
        "triton",
        "transformers",
        "diffusers",
        "tokenizers",
    }
    assert loaded & (heavy | vendors) == set()
    assert "layerzero" in loaded


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not the bodies of functions, not what only a type checker reads."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                waiting += getattr(node, field, [])
            for handler in getattr(node, "handlers", []):
                waiting += handler.body


def imported(nodes: Iterator[ast.stmt] | Iterator[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_low_floors_do_not_import_torch_at_module_level():
    wrong = []
    for file in sorted((SRC / "layerzero").rglob("*.py")):
        room = file.relative_to(SRC / "layerzero").parts[0].removesuffix(".py")
        if room in LOW_FLOORS:
            names = imported(module_level(parsed(file)))
            wrong += [f"{file.relative_to(SRC)}: {n}" for n in sorted(names) if n.split(".")[0] == "torch"]
    assert wrong == []


def test_built_in_backends_import_only_what_a_plugin_author_may():
    wrong = []
    for file in sorted((SRC / "layerzero" / "backends").rglob("*.py")):
        for name in sorted(imported(ast.walk(parsed(file)))):
            parts = name.split(".")
            if parts[0] == "layerzero" and (len(parts) == 1 or parts[1] not in FOR_PLUGIN_AUTHORS):
                wrong.append(f"{file.relative_to(SRC)}: {name}")
    assert wrong == []


def test_no_room_bears_the_name_of_a_public_function(imported_alone):
    rooms = {p.name.removesuffix(".py") for p in (SRC / "layerzero").iterdir()} - {"__init__", "__pycache__"}
    assert imported_alone["functions"] and rooms & set(imported_alone["functions"]) == set()


def test_files_stay_short_enough_to_be_read_in_one_sitting():
    lengths = {f.relative_to(SRC): len(f.read_text(encoding="utf-8").splitlines()) for f in SRC.rglob("*.py")}
    too_long = {str(f): n for f, n in lengths.items() if n > 500}
    assert too_long == {}
