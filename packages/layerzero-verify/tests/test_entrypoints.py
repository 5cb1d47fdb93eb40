"""What the package brings by entry point, and the kit under the name `layerzero.testing`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import layerzero as lz
from layerzero import companions
from layerzero_cli.root import COMMANDS, VERBS


def test_the_name_and_the_verbs_are_found():
    from layerzero_verify.ladder import verify

    assert companions.names()["verify"].load() is verify is lz.verify
    verbs = {name for verbs in VERBS.values() for name, (home, _) in verbs.items() if home == "layerzero-verify"}
    dist = importlib.metadata.distribution("layerzero-verify")
    assert verbs == {entry.name for entry in dist.entry_points if entry.group == COMMANDS}


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
