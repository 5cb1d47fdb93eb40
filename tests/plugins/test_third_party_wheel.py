"""A stranger's backend, from `lz plugin new` to a wheel, in a fresh virtual environment beside layerzero-core alone.

Core and the plugin are really built and pip-installed. torch and the other dependencies are shared with the running
environment through links and a .pth file (installing torch again would take minutes); nothing of LayerZero comes that
way, which the first test checks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import faulty_plugins as faults

pytest.importorskip("hatchling", reason="missing tool: hatchling")
pytest.importorskip("pip", reason="missing tool: pip")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]

_ASK = """
import json
import torch
import layerzero as lz
from layerzero.plugin.manager import load_plugins

x, w = torch.randn(4, 64), torch.randn(64)
q = torch.randn(1, 2, 8, 64)
out = lz.rms_norm(x, w)
try:
    from layerzero_acme.kernels import CALLS
except ImportError:
    CALLS = None
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
loaded = load_plugins()
print("ANSWER " + json.dumps({
    "rms_norm": lz.which("rms_norm", x, w),
    "chosen": lz.explain("rms_norm", x, w).chosen,
    "attention": lz.which("attention", q, q, q),
    "right": bool(torch.allclose(out, expected, atol=1e-5)),
    "calls": CALLS,
    "records": {
        r.name: [r.state, [item.code.value for item in r.reasons], r.dist, r.dist_version] for r in loaded.records
    },
    "core": lz.__file__,
}))
"""


@dataclass(frozen=True)
class Place:
    """The fresh environment."""

    folder: Path
    python: Path
    site: Path

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python, with nothing of ours leaking in through variables."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "COV_", "PYTEST_"))}
        return subprocess.run(
            [str(self.python), *command],
            cwd=cwd or self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def pip(self, *command: str) -> None:
        """pip, working on the environment."""
        full = [sys.executable, "-m", "pip", "--python", str(self.python), *command]
        done = subprocess.run(full, cwd=self.folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]

    def ask(self) -> dict[str, Any]:
        """What LayerZero in the environment selects, runs and has loaded."""
        done = self.run("-c", _ASK)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert lines, done.stdout[-1500:] + done.stderr[-3000:]
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWER "))
        return found


def _build(source: Path, wheels: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(wheels),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A virtual environment with core, built and installed from a wheel, and shared third-party dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=100)
    python = folder / "venv" / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    shared = folder / "shared"
    shared.mkdir()
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for item in Path(path).iterdir():
            ours = item.name.lower().replace("-", "_").lstrip("_").startswith(("layerzero", "editable"))
            if not ours and item.suffix != ".pth" and not (shared / item.name).exists():
                (shared / item.name).symlink_to(item)
    (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    found = Place(folder, python, site)
    found.pip("install", "--no-index", str(_build(ROOT / "packages" / "layerzero-core", folder / "wheels")))
    return found


@pytest.fixture(scope="module")
def package(place: Place) -> Path:
    """The package a stranger makes: scaffold, then a higher priority and a kernel that leaves a trace."""
    # What `lz plugin new acme` calls; the command itself is tested with the other commands.
    write = "import sys; from layerzero.plugin.scaffold import write_plugin; write_plugin('acme', sys.argv[1])"
    done = place.run("-c", write, str(place.folder))
    target = place.folder / "layerzero-acme"
    assert done.returncode == 0 and target.is_dir(), done.stdout[-1500:] + done.stderr[-1500:]
    descriptor = target / "src" / "layerzero_acme" / "capabilities.json"
    document = json.loads(descriptor.read_text(encoding="utf-8"))
    document["ops"]["rms_norm"][0]["priority"] = 95
    descriptor.write_text(json.dumps(document), encoding="utf-8")
    kernels = target / "src" / "layerzero_acme" / "kernels.py"
    text = kernels.read_text(encoding="utf-8")
    head = "    wide = x if"
    assert head in text
    text = text.replace(head, f'    CALLS.append("rms_norm")\n{head}').replace(
        "def rms_norm", "CALLS = []\n\n\ndef rms_norm", 1
    )
    kernels.write_text(text, encoding="utf-8")
    return target


def test_core_alone_is_installed_and_knows_no_stranger(place: Place) -> None:
    answer = place.ask()
    assert Path(answer["core"]).is_relative_to(place.site), "core runs from the wheel, not from the source tree"
    assert sorted(answer["records"]) == ["inductor", "reference", "sdpa", "torch"]
    assert answer["rms_norm"].split(".")[0] in ("torch", "reference") and answer["right"]


@pytest.mark.req("R-REG-05")
def test_the_wheel_is_found_selected_run_and_gone_after_uninstalling(place: Place, package: Path) -> None:
    before = place.ask()
    place.pip("install", "--no-index", str(_build(package, place.folder / "wheels")))
    try:
        with_it = place.ask()
        assert with_it["records"]["acme"] == ["ok", [], "layerzero-acme", "0.1.0"]
        assert with_it["rms_norm"] == with_it["chosen"] == "acme.rms_norm.plain", "selected where its score wins"
        assert with_it["attention"] == before["attention"], "and not where it does not"
        assert with_it["right"] and with_it["calls"], "it ran: its own list says so"

        # what the package's extra `test` asks for
        place.pip("install", "--no-index", str(_build(ROOT / "packages" / "layerzero-verify", place.folder / "wheels")))
        kit = place.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
        assert kit.returncode == 0, kit.stdout[-3000:]
        assert int(kit.stdout.split(" passed")[0].split()[-1]) >= 80
    finally:
        place.pip("uninstall", "-y", "layerzero-acme")
    after = place.ask()
    assert "acme" not in after["records"] and after["calls"] is None
    assert {key: after[key] for key in ("rms_norm", "attention", "records")} == {
        key: before[key] for key in ("rms_norm", "attention", "records")
    }


@pytest.mark.req("R-REG-04")
def test_installed_packages_that_break_in_every_way_cost_only_themselves(place: Place) -> None:
    before = place.ask()
    for kind in faults.SOURCES:
        faults.install(place.folder / "faulty", kind)
    extra = place.site / "faulty.pth"
    extra.write_text(f"{place.folder / 'faulty'}\n", encoding="utf-8")
    try:
        broken = place.ask()
    finally:
        extra.unlink()
    for kind in faults.SOURCES:
        state, codes, _, _ = broken["records"][kind]
        assert (state, codes) == (("failed", [faults.EXPECTED[kind]]) if kind in faults.EXPECTED else ("ok", [])), kind
    assert {name: broken["records"][name] for name in before["records"]} == before["records"]
    assert broken["attention"] == before["attention"] and broken["right"]
