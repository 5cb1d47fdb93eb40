"""A fresh virtual environment for tests of wheels: what is of LayerZero there was built and pip-installed.

torch and the other dependencies are shared with the running environment through links and a .pth file (installing torch
again would take minutes); nothing of LayerZero comes that way.

Importing torch costs a process seconds. Where a test asks one environment many things, an interpreter that has loaded
torch, and nothing of LayerZero, answers each in a child forked from it (`forking`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tools.workspace import ROOT

__all__ = ["Forked", "Fresh", "build", "forking", "fresh", "sixty_seconds"]

# One line per command. What is forked goes on below the loop and ends as any program does; the first process says how.
_SERVER = """
import gc, importlib, json, os, runpy, signal, sys
import torch
gc.freeze()  # or each child goes through all that torch brought, and copies it
for line in iter(sys.stdin.readline, ""):
    asked = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
    opened = os.open(name, os.O_RDWR)
    os.dup2(opened, number)
    os.close(opened)
sys.stdin = open(0, closefd=False)
signal.alarm(400)
os.chdir(asked["cwd"])
os.environ.update(asked["env"])
sys.path[1:1] = [item for item in asked["path"] if item not in sys.path]
importlib.invalidate_caches()
what, *sys.argv = asked["command"]
if what == "-c":
    program, sys.argv[0] = sys.argv[0], what
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
elif what == "-m":
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv.insert(0, what)
    sys.path[0] = os.path.dirname(what)
    runpy.run_path(what, run_name="__main__")
"""


class Forked(Protocol):
    """Runs Python's `-c PROGRAM`, `-m MODULE` or `FILE` in a child of an interpreter that has loaded torch."""

    def __call__(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@contextlib.contextmanager
def forking(python: Path, env: Mapping[str, str], folder: Path) -> Iterator[Forked]:
    """Start such an interpreter; each command is a process of its own, with the variables `env` names on top.

    A child begins as Python does after `import torch`: of LayerZero it has loaded nothing, and packages installed since
    then are found; only .pth files are not read again. The PYTHONPATH of `env` comes before the paths already there.
    """
    with subprocess.Popen(
        [str(python), "-c", _SERVER], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(
            *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
        ) -> subprocess.CompletedProcess[str]:
            assert server.stdin is not None and server.stdout is not None
            more = dict(env or {})
            with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
                asked = {"command": command, "cwd": str(cwd or folder), "env": more, "out": out.name, "err": err.name}
                asked["path"] = [item for item in more.get("PYTHONPATH", "").split(os.pathsep) if item]
                print(json.dumps(asked), file=server.stdin, flush=True)
                code = int(server.stdout.readline())
                return subprocess.CompletedProcess(command, code, out.read(), err.read())

        yield run


@dataclass(frozen=True)
class Fresh:
    """The environment: its Python, and the folder into which packages are installed."""

    folder: Path
    python: Path
    site: Path

    def run(self, *command: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the environment's Python, with nothing of ours leaking in through variables."""
        full, env = [str(self.python), *command], _clean()
        return subprocess.run(
            full, cwd=cwd or self.folder, env=env, input=stdin, capture_output=True, text=True, timeout=200, check=False
        )

    def forking(self) -> contextlib.AbstractContextManager[Forked]:
        """The same from an interpreter that has loaded torch."""
        return forking(self.python, _clean(), self.folder)

    def pip(self, *command: str) -> None:
        """pip, working on the environment."""
        _pip("--python", str(self.python), *command)

    def install(self, *sources: Path) -> None:
        """Build these packages and install their wheels, without their dependencies being looked for anywhere."""
        self.pip("install", "--no-index", *(str(self.wheel(source)) for source in sources))

    def wheel(self, source: Path) -> Path:
        """The wheel of a package; one of ours is built once for all environments of a process."""
        return _ours(source) if source.parent == ROOT / "packages" else build(source, self.folder / "wheels")


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "COV_", "PYTEST_"))}


def _pip(*command: str) -> None:
    full = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command]
    env = os.environ | {"LAYERZERO_CPU_OBJECTS": str(ROOT / "build" / "native")}
    done = subprocess.run(full, env=env, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])


def build(source: Path, wheels: Path) -> Path:
    """The wheel of a source tree; what `make` has compiled of the same sources serves it."""
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
