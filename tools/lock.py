"""`make lock` writes the pins from the pyproject files: constraints.txt, requirements.lock, its part for servers
(requirements-runtime.lock) and uv.lock.

    python -m tools.lock runtime layerzero-core layerzero-triton     prints that part for some of the packages

constraints.txt (versions) and requirements.lock (versions and hashes) are universal, valid on every platform.
constraints.txt also pins the group `tools`; the lock is resolved within it, so they always agree. Releases younger than
two weeks are left alone (the root's `exclude-newer`). torch is pinned in constraints.txt but stands in no resolution:
which build of it fits (CPU, CUDA, ROCm) is the machine's matter, and its CUDA wheels would pull in gigabytes that the
CPU build does not need. uv.lock is made from the wheels of requirements.lock, downloaded to the folder `wheelhouse`
(tools/wheelhouse.py). No file holds an address: where packages come from is the installer's configuration.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from tools import wheelhouse
from tools.workspace import ROOT, dev_requirements, group, project_name, run_requirements

__all__ = ["TORCH", "main", "resolve", "torch_requirements"]

TORCH = "2.13.0"
RUNTIME = ROOT / "requirements-runtime.lock"
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"

# Not a choice between equals: importlib-metadata 10 brings a package that patches builtins.__import__; soupsieve 3
# wants Python 3.11.5, so two versions of it would be pinned for Python 3.11, and the folder of wheels holds one.
_EXTRA_LIMITS = ("importlib-metadata>=8,<9", "soupsieve<3")
_ACCELERATOR = re.compile(r"^(nvidia-|cuda-|triton|pytorch-triton|rocm)")

_CONSTRAINTS_HEAD = f"""\
# Made by `make lock` (tools/lock.py); do not edit. Versions for every platform and Python, used by `make setup`.
# torch: the plain version, so that a CPU build (2.13.0+cpu) offered by the machine is taken where there is one.
torch=={TORCH}
"""
_LOCK_HEAD = """\
# Made by `make lock` (tools/lock.py); do not edit. For `pip install --require-hashes -r requirements.lock`, with the
# wheels of all platforms. torch is not in it: its builds (CPU, CUDA, ROCm) differ from machine to machine and some are
# never published on an index, so there is no one set of hashes; install torch first, as constraints.txt names it.
"""


def torch_requirements() -> list[str]:
    """What the installed torch needs besides accelerator libraries; it is left out of the resolution, they are not."""
    wanted = [line for line in requires("torch") or () if "extra ==" not in line]
    return [line for line in wanted if not _ACCELERATOR.match(project_name(line))]


def resolve(lines: list[str], *, hashes: bool, within: str = "") -> str:
    """One universal resolution by uv, without header, comments or addresses; `within` holds pins to keep to."""
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    env = dict(os.environ)
    if "PIP_FIND_LINKS" in env:  # uv does not read pip's variables
        env.setdefault("UV_FIND_LINKS", ",".join(env["PIP_FIND_LINKS"].split()))
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.in")
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        overrides = Path(folder, "overrides.txt")
        overrides.write_text("torch ; python_version < '3'\n", encoding="utf-8")  # never true: leaves torch out
        pins = Path(folder, "pins.txt")
        pins.write_text(within, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", str(wanted), "--universal", "--python-version", "3.11"]
        command += ["--constraints", str(pins)]
        command += ["--overrides", str(overrides), "--exclude-newer", uv["exclude-newer"], "--no-config", "--quiet"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        # a constraint may not name extras; a hashed requirement must
        command += ["--generate-hashes", "--no-strip-extras"] if hashes else ["--strip-extras"]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"uv could not resolve:\n{done.stderr}")
    if re.search(r"://|^-", done.stdout, flags=re.MULTILINE):
        raise SystemExit("the resolution holds an address or an option; nothing was written")
    return done.stdout


_RUNTIME_HEAD = """\
# Made by `make lock` (tools/lock.py); do not edit. The part of requirements.lock that a server needs: what our packages
# ask for, without the tools of developers; `python -m tools.lock runtime layerzero-core …` prints that of some.
# torch is not in it, as there; vendors (FlashInfer, FlashAttention, …) are in no lock.
"""


def runtime(names: Sequence[str] = ()) -> str:
    """The entries of requirements.lock that some of our packages need to run, as uv.lock knows their dependencies."""
    wanted = [word for name in names for word in ("--package", name)] or ["--all-packages"]
    command = [sys.executable, "-m", "uv", "--quiet", "export", "--frozen", "--offline", "--no-default-groups"]
    command += ["--no-emit-workspace", "--no-hashes", "--no-header", "--no-annotate", *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"uv could not read uv.lock:\n{done.stderr}")
    # numpy: torch warns at import when it is missing; and what torch itself asks for
    needed = {project_name(line) for line in (*done.stdout.splitlines(), "numpy") if line.strip()}
    waiting = [project_name(line) for line in torch_requirements()]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            waiting += [project_name(line) for line in requires(name) or () if "extra ==" not in line]
    blocks = re.split(r"\n(?=[a-z0-9])", LOCK.read_text(encoding="utf-8").removeprefix(_LOCK_HEAD).rstrip("\n"))
    return "".join(f"{block}\n" for block in blocks if project_name(block) in needed)


def main(argv: Sequence[str] = ()) -> int:
    """Write the four files, or print the runtime lock of some packages."""
    if argv[:1] == ["runtime"]:
        print(_RUNTIME_HEAD + runtime(argv[1:]), end="")
        return 0
    lines = sorted({*run_requirements(), *dev_requirements(), *torch_requirements(), *_EXTRA_LIMITS})
    pins = resolve(sorted({*lines, *group("tools")}), hashes=False)
    lock = resolve(lines, hashes=True, within=pins)
    CONSTRAINTS.write_text(_CONSTRAINTS_HEAD + pins, encoding="utf-8")
    LOCK.write_text(_LOCK_HEAD + lock, encoding="utf-8")
    wheelhouse.download(*wheelhouse.machines())
    wheelhouse.lock()
    RUNTIME.write_text(_RUNTIME_HEAD + runtime(), encoding="utf-8")
    print(f"wrote {CONSTRAINTS.name}, {LOCK.name}, {RUNTIME.name} and uv.lock")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
