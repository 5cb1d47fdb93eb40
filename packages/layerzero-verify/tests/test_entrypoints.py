"""What the package brings by entry point, and the kit under the name `layerzero.testing`."""

from __future__ import annotations

import subprocess
import sys

import layerzero as lz
from layerzero import companions


def test_the_name_and_the_verbs_are_found():
    from layerzero_verify.ladder import verify

    assert companions.names()["verify"].load() is verify is lz.verify
    assert {"definitions", "verify"} <= set(companions.commands())


_ALIASES = """
from importlib import import_module
from layerzero.testing import fakes
from layerzero.testing.kit import Kit

for name in ("kit", "fakes", "pytest_plugin", "suite", "suite.shards"):
    alias, kit = (import_module(f"{package}.testing.{name}") for package in ("layerzero", "layerzero_verify"))
    assert alias is kit
    assert kit.__spec__.name == kit.__name__ == f"layerzero_verify.testing.{name}"
print(fakes.__name__, Kit.__module__)
"""


def test_every_module_of_the_kit_has_its_name_in_the_core_and_is_loaded_once():
    done = subprocess.run([sys.executable, "-c", _ALIASES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["layerzero_verify.testing.fakes", "layerzero_verify.testing.kit"]


def test_proofs_run_as_a_program_under_both_names():
    for name in ("layerzero.testing.proofs", "layerzero_verify.testing.proofs"):
        done = subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, check=True)
        assert "--dry-run" in done.stdout
