"""Runs one long lane and keeps its log: `python -m tools.prove NAME -- command …` writes build/prove/NAME.log.

The log opens with the commit and the machine and closes with exit code and time, so that a figure in it can be traced.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT

__all__ = ["header", "main", "prove"]


def header(name: str, command: Sequence[str]) -> str:
    """What the run was made from and on."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "absent"
    return (
        f"# lane {name}\n# commit {current_commit()}\n# started {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n"
        f"# machine {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch}\n"
        f"# command {shlex.join(command)}\n"
    )


def prove(name: str, command: Sequence[str], folder: Path) -> int:
    """Run the command, show and keep what it prints, return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:

        def say(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()
            log.write(text)

        say(header(name, command))
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            say(line)
        code = process.wait()
        say(f"# exit {code} after {time.monotonic() - started:.1f} s\n")
    return code


def main(argv: Sequence[str]) -> int:
    """NAME -- command …"""
    if len(argv) < 3 or argv[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    return prove(argv[0], argv[2:], ROOT / "build" / "prove")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
