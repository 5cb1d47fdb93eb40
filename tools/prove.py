"""Runs a long lane of tools/prove.toml and keeps its log: `make prove NAME=stress` writes build/prove/stress.log.

The log opens with the commit and the machine and closes with exit code and time, so that a figure in it can be traced.
Without a name: the list of lanes.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template

from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT

__all__ = ["Lane", "header", "lanes", "main", "prove"]

TABLE = ROOT / "tools" / "prove.toml"
FOLDER = ROOT / "build" / "prove"


@dataclass(frozen=True)
class Lane:
    """One long lane: what it shows, its commands, and values of the variables they name."""

    name: str
    what: str
    run: Sequence[str]
    defaults: Mapping[str, str] = field(default_factory=dict)

    def commands(self, environ: Mapping[str, str]) -> list[list[str]]:
        """Its commands as lists of words: variables filled in, test files found. An unknown one is an error."""
        filled = (Template(line).substitute({**self.defaults, **environ, "PWD": str(ROOT)}) for line in self.run)
        return [[place for word in shlex.split(line) for place in _places(word)] for line in filled]


def _places(word: str) -> list[str]:
    """Where the test file of that name lies; any other word is itself."""
    if re.fullmatch(r"test_\w+\.py", word) is None:
        return [word]
    found = sorted(file for folder in ("tests", "packages/*/tests") for file in ROOT.glob(f"{folder}/**/{word}"))
    if not found:
        raise ValueError(f"{TABLE.name}: there is no {word}")
    return [str(file.relative_to(ROOT)) for file in found]


def lanes(table: Path = TABLE) -> dict[str, Lane]:
    """Every long lane by name."""
    return {name: Lane(name, **entry) for name, entry in tomllib.loads(table.read_text(encoding="utf-8")).items()}


def header(name: str, command: Sequence[str]) -> str:
    """What the run was made from and on."""
    cpu = platform.machine()
    try:
        torch = version("torch")
        from layerzero.model.device import DeviceSpec  # which imports it

        cpu = f"{DeviceSpec.detect('cpu').name}, {cpu}"
    except PackageNotFoundError:
        torch = "absent"
    return (
        f"# lane {name}\n# commit {current_commit()}\n# started {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n"
        f"# machine {cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch}\n"
        f"# command {shlex.join(command)}\n"
    )


def prove(name: str, commands: Sequence[Sequence[str]], folder: Path = FOLDER) -> int:
    """Run the commands until one fails, show and keep what they print, return the last exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environ = {"LAYERZERO_PROVE": "1", **os.environ, "PATH": path}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:

        def say(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()
            log.write(text)

        code = 0
        for command in commands:
            started = time.monotonic()
            say(header(name, command))
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environ,
                cwd=ROOT,
            )
            assert process.stdout is not None
            for line in process.stdout:
                say(line)
            code = process.wait()
            say(f"# exit {code} after {time.monotonic() - started:.1f} s\n")
            if code != 0:
                break
    return code


def main(argv: Sequence[str]) -> int:
    """[NAME]; a name that is not there is answered with the list."""
    known = lanes()
    if len(argv) == 1 and argv[0] in known:
        lane = known[argv[0]]
        return prove(lane.name, lane.commands(os.environ))
    if argv:
        print(f"no long lane of the name {' '.join(argv)}", file=sys.stderr)
    for lane in known.values():
        print(f"make prove NAME={lane.name:<14}{lane.what}")
    return 2 if argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
