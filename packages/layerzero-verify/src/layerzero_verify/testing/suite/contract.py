"""The plugin as a whole: does it load, say known things, and keep its hands off the vendor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from layerzero.errors import ConfigurationError
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.manager import call_hook
from layerzero_verify.testing.kit import Kit

# Libraries that take long to import or start a device; registration has no business with any of them.
_HEAVY = (
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
    "xformers",
    "liger_kernel",
    "triton",
    "cutlass",
    "zentorch",
    "vllm",
)

_REGISTER = """
import json, pkgutil, sys
from layerzero.plugin.manager import call_hook
from layerzero.plugin.registrar import Registrar
before = set(sys.modules)
plugin = pkgutil.resolve_name(sys.argv[1])
call_hook(plugin, "layerzero_register", registrar=Registrar("under_test"))
print("LOADED " + json.dumps(sorted(set(sys.modules) - before)))
"""


def test_entry_point_loads(lz_kit: Kit) -> None:
    """The entry point exists and what it names can be imported."""
    assert lz_kit.load_error is None, lz_kit.describe_error(lz_kit.load_error)


def test_hooks_are_known(lz_kit: Kit) -> None:
    """Every `layerzero_*` function is a hook of the contract, marked, with arguments the hook has."""
    assert lz_kit.hook_error is None, lz_kit.describe_error(lz_kit.hook_error)


def test_capabilities_are_valid(lz_kit: Kit) -> None:
    """capabilities.json fits the schema and the kernel ids are well formed and unique."""
    if isinstance(lz_kit.register_error, ConfigurationError):
        pytest.fail(lz_kit.describe_error(lz_kit.register_error))
    for capabilities in lz_kit.capabilities.values():
        for spec in capabilities.kernels:
            assert spec.kernel_id.startswith(f"{capabilities.backend}."), spec.kernel_id


def test_registration_succeeds(lz_kit: Kit) -> None:
    """`layerzero_register` returns and leaves at least one backend, kernel or op."""
    if lz_kit.load_error is not None:
        pytest.skip("the plugin does not load")
    assert lz_kit.register_error is None, lz_kit.describe_error(lz_kit.register_error)
    assert lz_kit.capabilities or lz_kit.kernels or lz_kit.registrar.ops, "nothing was registered"


def test_registration_imports_no_vendor(lz_kit: Kit) -> None:
    """A fresh process that imports and registers the plugin has not imported the vendor library."""
    if lz_kit.entry is None or lz_kit.load_error is not None:
        pytest.skip("the plugin does not load")
    vendors = {c.vendor.module.split(".")[0] for c in lz_kit.capabilities.values() if c.vendor and c.vendor.module}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _REGISTER, lz_kit.entry.value]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert answers, f"registration ended with code {done.returncode}: {done.stderr.strip()[-400:]}"
    modules = {name.split(".")[0] for name in json.loads(answers[-1].removeprefix("LOADED "))}
    assert not modules & {*vendors, *_HEAVY}, f"registration imported {sorted(modules & {*vendors, *_HEAVY})}"


def test_capabilities_hook_answers_for_this_device(lz_kit: Kit) -> None:
    """`layerzero_capabilities` gives a status for a backend of the plugin, naming only kernels it registered."""
    if lz_kit.plugin is None or not hasattr(lz_kit.plugin, "layerzero_capabilities"):
        pytest.skip("layerzero_capabilities is not implemented")
    said = call_hook(lz_kit.plugin, "layerzero_capabilities", device=DeviceSpec.detect("cpu"))
    known = {spec.kernel_id for spec in lz_kit.kernels}
    for status in said if isinstance(said, (list, tuple)) else (said,):
        assert isinstance(status, BackendStatus), f"expected a BackendStatus, got {type(status).__name__}"
        assert status.backend in lz_kit.capabilities, f"{status.backend!r} is not a backend of this plugin"
        assert set(status.kernels) <= known, f"unknown kernels: {sorted(set(status.kernels) - known)}"
        assert status.available or status.reasons, "an unavailable backend has to say why"


def test_health_self_test_passes(lz_kit: Kit) -> None:
    """`layerzero_health` says ok wherever the backend has a kernel that runs here."""
    if lz_kit.plugin is None or not hasattr(lz_kit.plugin, "layerzero_health"):
        pytest.skip("layerzero_health is not implemented")
    usable = {spec.backend for spec in lz_kit.kernels if not isinstance(lz_kit.device_for(spec), str)}
    if not usable:
        pytest.skip("no kernel of this plugin runs on this machine")
    for backend in sorted(usable):
        report = call_hook(lz_kit.plugin, "layerzero_health", backend=backend)
        assert isinstance(report, HealthReport), f"expected a HealthReport, got {type(report).__name__}"
        assert report.ok, f"{backend}: {report.detail}"
