"""The install of docs/offline.md, played on a machine made for it: a few files, the folder of wheels, no network.

`make prove NAME=offline` fills the folder first. The network is taken away with a namespace of its own (`unshare`);
where that is not allowed, by `--no-index`, no settings and a proxy that nobody answers, and the test says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.fresh import sixty_seconds
from tools.workspace import ROOT, packages

WHEELHOUSE = ROOT / "wheelhouse"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not WHEELHOUSE.is_dir(), reason="no folder of wheels: make prove NAME=offline fills it"),
]
# what docs/offline.md has a person carry over, beside the folder
CARRIED = ["Makefile", "pyproject.toml", "uv.lock", "requirements.lock", "constraints.txt", "tools"]


@dataclass(frozen=True)
class Machine:
    """A folder that holds only what was carried over, and a way to run programs there without a network."""

    folder: Path
    cut_off: tuple[str, ...]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program with nothing of this machine's settings for pip and uv, and with empty caches."""
        prefixes = ("PIP_", "UV_", "PYTHON", "LAYERZERO_", "COV_", "PYTEST_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and not k.lower().endswith("_proxy")}
        env |= {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        if not self.cut_off:
            env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
        command = (*self.cut_off, *command)
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600, check=False
        )


def unshare() -> tuple[str, ...]:
    command = ("unshare", "--map-root-user", "--net")
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return command if allowed else ()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, tmp_path / name)
    for package in packages():
        (tmp_path / "packages" / package.name).mkdir(parents=True)
        shutil.copy2(package.path / "pyproject.toml", tmp_path / "packages" / package.name)
    (tmp_path / "home").mkdir()
    (tmp_path / "wheelhouse").mkdir()
    for file in WHEELHOUSE.iterdir():
        shutil.copy2(file, tmp_path / "wheelhouse")
    cut_off = unshare()
    print(
        "the network is taken away by", " ".join(cut_off) or "--no-index and a dead proxy: unshare is not allowed here"
    )
    return Machine(tmp_path, cut_off)


def test_a_machine_without_a_network_is_installed_from_the_folder_and_the_doctor_passes(machine: Machine):
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)"
    assert machine.run(sys.executable, "-c", connect).returncode != 0
    done = machine.run("make", "sync", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    doctor = machine.run(".venv/bin/lz", "doctor")
    print(doctor.stdout[-600:])
    assert doctor.returncode == 0, doctor.stdout[-2000:] + doctor.stderr[-2000:]
    assert "doctor: ok" in doctor.stdout
    ask = "from importlib.metadata import distributions as d; print(*sorted(x.name.lower() for x in d()))"
    installed = machine.run(".venv/bin/python", "-c", ask).stdout.split()
    assert {package.name for package in packages()} <= set(installed)
    assert not {"pytest", "mypy", "ruff", "uv"} & set(installed), "the tools of developers are no part of it"


def test_one_backend_beside_the_core_brings_nothing_else_of_ours_and_runs_the_sixty_seconds_of_the_readme(
    machine: Machine,
):
    chosen = "ARGS=--package layerzero-core --package layerzero-flashinfer"
    done = machine.run("make", "sync", f"PYTHON={sys.executable}", "VENV=deployed", chosen)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ask = "from importlib.metadata import distributions as d; print(*sorted(x.name.lower() for x in d()))"
    installed = machine.run("deployed/bin/python", "-c", ask).stdout.split()
    ours = [name for name in installed if name.startswith("layerzero")]
    assert ours == ["layerzero-core", "layerzero-flashinfer"]
    assert machine.run("deployed/bin/lz", "doctor").returncode == 0
    readme = machine.run("deployed/bin/python", "-c", sixty_seconds())
    assert readme.returncode == 0, readme.stderr[-2000:]
    tune = machine.run("deployed/bin/python", "-c", "import layerzero as lz; lz.tune()")
    assert "lz.tune needs layerzero-tune" in tune.stderr and "pip install layerzero-tune" in tune.stderr


def test_a_flipped_byte_stops_the_install_before_anything_is_written(machine: Machine):
    wheel = next((machine.folder / "wheelhouse").glob("pydantic_core-*.whl"))
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    done = machine.run("make", "sync", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert f"{wheel.name}: its SHA-256 is not in requirements.lock" in done.stderr
    assert "nothing was installed" in done.stderr
    assert not (machine.folder / ".venv").exists()
