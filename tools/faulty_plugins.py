"""Backends that break, each in one way: what discovery, doctor and dispatch must survive.

`entry_point(kind)` gives a fake for in-process tests. `install(folder, kind)` writes a real importable package with
metadata into a folder, for tests with subprocesses: put the folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from layerzero_verify.testing.fakes import FakeDist, FakeEntryPoint, capabilities, loader

__all__ = ["EXPECTED", "SOURCES", "entry_point", "install"]

_HEAD = """
from pathlib import Path
from layerzero.plugin import BackendStatus, HealthReport, hookimpl, reason, vendor_status

CAPABILITIES = Path(__file__).with_name("capabilities.json")
"""
_REGISTER = """
@hookimpl
def layerzero_register(registrar):
    registrar.backend(CAPABILITIES)
"""

# kind -> the plugin's source
SOURCES: dict[str, str] = {
    "healthy": _HEAD + _REGISTER,
    "raises_at_import": "raise RuntimeError('broken install')",
    "exits_at_import": "raise SystemExit(3)",
    "missing_dependency": "import a_module_that_nobody_has",
    "syntax_error": "def broken(:",
    "raises_at_register": _HEAD
    + """
@hookimpl
def layerzero_register(registrar):
    registrar.backend(CAPABILITIES)
    raise ValueError("half-way")
""",
    "exits_at_register": _HEAD
    + """
@hookimpl
def layerzero_register(registrar):
    raise SystemExit("no licence found")
""",
    "bad_capabilities": _HEAD + _REGISTER,
    "unknown_hook": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_registre(registrar):
    pass
""",
    "wrong_arguments": _HEAD
    + """
@hookimpl
def layerzero_register(registrar, colour):
    pass
""",
    "wraps_others": _HEAD
    + """
@hookimpl(wrapper=True)
def layerzero_register(registrar):
    return (yield)
""",
    "api_too_new": _HEAD + _REGISTER,
    "hangs_in_probe": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    import time
    time.sleep(600)
""",
    "crashes_in_probe": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)
""",
    "raises_in_probe": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    raise ImportError("libvendor.so: cannot open shared object file")
""",
    "chatters_in_probe": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    print("vendor banner {{{ not json")
    return vendor_status(CAPABILITIES, device)

@hookimpl
def layerzero_health(backend):
    print("more noise")
    return HealthReport(backend, True, "2 + 2 = 4", 0.0)
""",
    "answers_nonsense": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    return "everything is fine"
""",
    "fails_health": _HEAD
    + _REGISTER
    + """
@hookimpl
def layerzero_capabilities(device):
    return vendor_status(CAPABILITIES, device)

@hookimpl
def layerzero_health(backend):
    raise ArithmeticError("got 5, expected 4")
""",
}

# kind -> the reason code its record bears after loading; kinds that load well are not listed
EXPECTED: dict[str, str] = {
    "raises_at_import": "PLUGIN_IMPORT_FAILED",
    "exits_at_import": "PLUGIN_IMPORT_FAILED",
    "missing_dependency": "PLUGIN_IMPORT_FAILED",
    "syntax_error": "PLUGIN_IMPORT_FAILED",
    "raises_at_register": "PLUGIN_REGISTER_FAILED",
    "exits_at_register": "PLUGIN_REGISTER_FAILED",
    "bad_capabilities": "SCHEMA_FIELD_UNKNOWN",
    "unknown_hook": "PLUGIN_HOOK_UNKNOWN",
    "wrong_arguments": "PLUGIN_REGISTER_FAILED",
    "wraps_others": "PLUGIN_REGISTER_FAILED",
    "api_too_new": "PLUGIN_API_MISMATCH",
}


def _descriptor(kind: str, name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(given) if given is not None else capabilities(name)
    if kind == "bad_capabilities":
        found["platfroms"] = ["cpu"]
    if kind == "api_too_new":
        found["api"] = ">=7"
    return found


def entry_point(kind: str, name: str | None = None, descriptor: Mapping[str, Any] | None = None) -> FakeEntryPoint:
    """A fake entry point whose plugin breaks in this way."""
    backend = name or kind
    described = _descriptor(kind, backend, descriptor)

    @loader
    def load() -> Any:
        module = ModuleType(f"faulty_{backend}")
        module.__file__ = __file__
        source = SOURCES[kind].replace('CAPABILITIES = Path(__file__).with_name("capabilities.json")', "")
        vars(module)["CAPABILITIES"] = described
        exec(compile(source, f"<{kind}>", "exec"), vars(module))
        return module

    return FakeEntryPoint(backend, load, FakeDist(f"layerzero-{backend}"), value=f"faulty_{backend}.plugin")


def install(
    folder: Path, kind: str, name: str | None = None, version: str = "1.0", descriptor: Mapping[str, Any] | None = None
) -> str:
    """Write the backend as an importable package with metadata into `folder`; returns its name."""
    backend = name or kind
    package = folder / f"faulty_{backend}"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "plugin.py").write_text(textwrap.dedent(SOURCES[kind]), encoding="utf-8")
    text = json.dumps(_descriptor(kind, backend, descriptor))
    (package / "capabilities.json").write_text(text, encoding="utf-8")
    for old in folder.glob(f"layerzero_{backend}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = folder / f"layerzero_{backend}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: layerzero-{backend}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = f"[layerzero.backends]\n{backend} = faulty_{backend}.plugin\n"
    (info / "entry_points.txt").write_text(lines, encoding="utf-8")
    for module in [key for key in sys.modules if key.split(".")[0] == f"faulty_{backend}"]:
        del sys.modules[module]  # so that a reinstalled backend is imported anew
    return backend
