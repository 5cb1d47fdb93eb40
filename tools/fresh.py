"""A fresh virtual environment for tests of wheels: what is of LayerZero there was built and pip-installed.

torch and the other dependencies are shared with the running environment through links and a .pth file (installing torch
again would take minutes); nothing of LayerZero comes that way.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT

__all__ = ["Fresh", "build", "fresh", "sixty_seconds"]


@dataclass(frozen=True)
class Fresh:
    """The environment: its Python, and the folder into which packages are installed."""

    folder: Path
    python: Path
    site: Path

    def run(self, *command: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the environment's Python, with nothing of ours leaking in through variables."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "COV_", "PYTEST_"))}
        full = [str(self.python), *command]
        return subprocess.run(
            full, cwd=cwd or self.folder, env=env, input=stdin, capture_output=True, text=True, timeout=200, check=False
        )

    def pip(self, *command: str) -> None:
        """pip, working on the environment."""
        _pip("--python", str(self.python), *command)

    def install(self, *sources: Path) -> None:
        """Build these packages and install their wheels, without their dependencies being looked for anywhere."""
        self.pip("install", "--no-index", *(str(self.wheel(source)) for source in sources))

    def wheel(self, source: Path) -> Path:
        """The wheel of a package; one of ours is built once for all environments of a process."""
        return _ours(source) if source.parent == ROOT / "packages" else build(source, self.folder / "wheels")


def _pip(*command: str) -> None:
    full = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command]
    done = subprocess.run(full, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])


def build(source: Path, wheels: Path) -> Path:
    """The wheel of a source tree."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(source))
    return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)


@functools.cache
def _ours(source: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="layerzero-wheels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(source, folder)


def fresh(folder: Path) -> Fresh:
    """A virtual environment that shares third-party libraries with the running one and holds nothing of LayerZero."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=100)
    python = folder / "venv" / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(ask, text=True).strip())
    shared = folder / "shared"
    shared.mkdir()
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.origin).parents[1])}
    for item in (item for place in places for item in Path(place).iterdir()):
        ours = item.name.lower().replace("-", "_").lstrip("_").startswith(("layerzero", "editable"))
        if not ours and item.suffix != ".pth" and not (shared / item.name).exists():
            (shared / item.name).symlink_to(item)
    (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    return Fresh(folder, python, site)


def sixty_seconds() -> str:
    """The Python program under README's heading `Sixty seconds`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## Sixty seconds\n+```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, "README has no program under `Sixty seconds`"
    return found[1]
