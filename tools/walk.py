"""Walks through the documentation as its readers do: every command of every page, in fresh environments.

    python -m tools.walk [--dist dist] [PAGE …]        `make prove NAME=walk`; all pages where none is named

Three readers: the engineer (the README, the tutorials, the other pages), the author of a backend, the operator. Each
has an environment of his own that holds nothing of LayerZero before the pages install it from wheels (torch and other
libraries are shared with the running environment: `tools.fresh`; pip builds as it is set up to on this machine). A page
is walked in an empty folder: its Python blocks as one program, where the first of them stands, and its ```` ```sh ````
blocks line by line. Blocks for a `checkout` run in a clone of this commit, with what was compiled here before and an
environment that their own `make` sets up; the wheels are those of its `make wheels`, or lie in `--dist`. The hub is one
on loopback. Words in capitals stand for what `WORDS` says; what a reader has anyway is made by a comment,
`<!-- sh … -->`. A block under "as `serve.py`:" is the file of that name; what the last command that readers see
printed is the file `$SAID`. A command passes with exit code 0, or with the one that its comment promises ("ends with
exit code 1").

What is not run says why: by a mark behind the language that is in `ABSENT`, or because it takes long and something
else runs it (`ELSEWHERE`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.check_docs import markdown_files
from tools.fresh import fresh
from tools.pytest_fixtures import module_beside
from tools.requirements_doc import ROOT
from tools.snippets import MARKS, Block, blocks

__all__ = ["Ground", "Step", "commands", "main", "readers", "walk"]

AUTHOR = ("docs/learn/backend.md", "docs/learn/new-op.md", "docs/plugins.md")
OPERATOR = ("docs/policy.md", "docs/production.md", "docs/runbooks.md", "docs/health.md", "docs/warmup.md")
INSTALL = "docs/learn/sixty-seconds.md"  # the page that says how to install; every reader begins with its commands
SECONDS = 900
ABSENT = ("gpu", "download", "index", "ranks", "cross")
ELSEWHERE = {
    "make test": "Minutes; .ci/run runs it with every change.",
    "make check": "Minutes; .ci/run runs it with every change.",
    "make lock": "Asks a package index for all platforms.",
    "make wheelhouse": "Minutes; make prove NAME=offline runs it.",
    "make sync": "Minutes; make prove NAME=offline runs it.",
    "make release": "Minutes; make prove NAME=release runs it twice.",
    "make prove": "Minutes; a lane of its own.",
    "sha256sum -c SHA256SUMS": "Wants the files of a release; make prove NAME=release makes and checks them.",
    "python -m tools.release verify": "Wants the files of a release; make prove NAME=release makes and checks them.",
    "python benchmarks/tuned.py": "Minutes on an idle machine; make prove NAME=tuned runs it.",
    "lz tune --grid benchmarks/grid.toml": "Minutes on an idle machine; make prove NAME=tuned runs it.",
    "lz plugin prove cpu": "Minutes; the conformance kit of a backend, which the tests of its package are too.",
    "lz verify --lane full": "Minutes; make prove NAME=correctness runs it.",
    "lz verify --lane stress": "Minutes; the same program as --lane quick with more seeds, lengths and steps.",
}
WORDS = {
    "docs/benchmarks.md": {"NAME": "neoverse-n1"},
    "docs/definitions.md": {"NAME": "rmsnorm_h64", "DATASET": "dataset", "gqa_paged": "rmsnorm"},
    "docs/releases.md": {"NAME": "cpu"},
    "docs/runbooks.md": {"OP": "rms_norm", "BACKEND": "shaky", "KERNEL": "shaky.rms_norm.plain"},
    "docs/tuning.md": {"FILE": "out.json", "DAYS": "30"},
}


class Step(NamedTuple):
    """One command of a page: where it stands, its seconds, its exit status (None: not run), what was said or why not.

    One that is not shown makes what a reader has anyway; in the log it stands in parentheses.
    """

    place: str
    command: str
    seconds: float
    status: int | None
    said: str
    wanted: int = 0
    shown: bool = True

    @property
    def failed(self) -> bool:
        """It ran, and did not end as its page says."""
        return self.status is not None and self.status != self.wanted

    def __str__(self) -> str:
        """One line of the log; for a command that failed, the end of what it said below."""
        if self.status is None:
            return f"     –    {self.command}    [{self.place}: {self.said}]"
        command = self.command if self.shown else f"({textwrap.shorten(self.command, 100, placeholder=' …')})"
        told = f"{self.seconds:6.1f} s  {command}    [{self.place}]"
        told += f" exit {self.status}" if self.status else ""
        return f"{told} and not {self.wanted}\n{self.said[-2000:]}" if self.failed else told


class Ground(NamedTuple):
    """What a reader walks on: his variables, the wheels, a clone, and the variables of somebody at work in it."""

    env: dict[str, str]
    dist: Path
    clone: Path
    at_work: dict[str, str]


def lines(block: Block) -> Iterator[tuple[str, int]]:
    """The commands of a block without their comments, each with the exit code it is to end with."""
    words = WORDS.get(block.name.rpartition(":")[0], {})
    for line in block.code.replace("\\\n", " ").splitlines():
        command = re.sub(r"(?:^|\s+)# .*$", "", line).strip()
        for word, meant in words.items():
            command = re.sub(rf"\b{word}\b", meant, command)
        if command:
            promised = re.search(r"# .*\bends with exit code (\d+)", line)
            yield command, int(promised[1]) if promised else 0


def commands(block: Block) -> Iterator[str]:
    """The lines of a block that are commands, without their comments."""
    return (command for command, _ in lines(block))


def readers(pages: Sequence[Path]) -> dict[str, list[Path]]:
    """Who reads which of the pages, in order: how to install, the README, then as the home page lists them."""
    home = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    order = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", home, re.MULTILINE)
    rank = {(ROOT / "docs" / name).resolve(): number for number, name in enumerate(order)}
    found: dict[str, list[Path]] = {"engineer": [], "author": [], "operator": []}
    for page in sorted(pages, key=lambda page: (page != ROOT / INSTALL, rank.get(page, -1))):
        name = page.relative_to(ROOT).as_posix()
        who = "author" if name in AUTHOR else "operator" if name in OPERATOR else "engineer"
        if any(block.shown for block in blocks(page, "sh")):
            found[who].append(page)
    return found


def _variables(folder: Path, programs: Path, **more: str) -> dict[str, str]:
    """The variables of somebody whose home is in a folder and whose Python is the one in `programs`."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "PYTEST_", "XDG_", "MAKE"))
    }
    path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))
    home = {
        "HOME": str(folder / "home"),
        "SAID": str(folder / "said.txt"),
        "VIRTUAL_ENV": str(programs.parent),
        "PATH": path,
    }
    return {**kept, "PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **home, **more}


@contextlib.contextmanager
def _hub() -> Iterator[str]:
    """A hub on loopback that knows the kernel of the pages and nothing else; its address."""
    tests = ROOT / "packages" / "layerzero-hub" / "tests" / "conftest.py"
    kernel = module_beside(str(tests), "loopback_kernels").universal_kernel(id="_fast_norm_torch_1")
    with module_beside(str(tests), "loopback_hub").LoopbackHub() as hub:
        hub.put("org/fast-norm", 1, kernel)
        yield hub.endpoint


def _ground(folder: Path, clone: Path, dist: Path, hub: str) -> Ground:
    """A fresh environment, and variables under which its programs and our wheels are found."""
    (folder / "home").mkdir(parents=True)
    python = fresh(folder).python
    for name, module in {"pip": "pip", "pytest": "pytest", "torchrun": "torch.distributed.run"}.items():
        shim = python.with_name(name)
        shim.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {dist}".strip()
    env = _variables(folder, python.parent, PIP_FIND_LINKS=links, HF_ENDPOINT=hub)
    git = {f"GIT_{who}_{what}": "walk" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}  # for a tag
    return Ground(env, dist, clone, _variables(folder, clone / ".venv" / "bin", HF_ENDPOINT=hub, **git))


def _clone(into: Path) -> Path:
    """A clone of this commit, with the objects that were compiled here."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", str(ROOT), str(into)], check=True, timeout=100)
    subprocess.run(
        ["git", "-c", "advice.detachedHead=false", "checkout", "-q", commit], cwd=into, check=True, timeout=100
    )
    if (ROOT / "build" / "native").is_dir():
        shutil.copytree(ROOT / "build" / "native", into / "build" / "native")
    return into


def _ran(place: str, command: str, wanted: int, cwd: Path, env: dict[str, str]) -> tuple[Step, Path, int]:
    """Run one line of shell in a folder; and the folder that it ends in, and its process group."""
    note = Path(env["HOME"], ".walked")
    note.unlink(missing_ok=True)
    begun = time.monotonic()
    script = f"{command}\nstatus=$?; pwd > '{note}'; exit $status"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=cwd, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, status = process.communicate(timeout=SECONDS)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, status = f"not done after {SECONDS} seconds", 124
    after = Path(note.read_text(encoding="utf-8").strip()) if note.exists() else cwd
    return Step(place, command, time.monotonic() - begun, status, said, wanted), after, process.pid


def _why_not(block: Block, command: str) -> str:
    """Why a command is not run here; empty where it is."""
    if absent := [MARKS[mark] for mark in block.marks if mark in ABSENT]:
        return " ".join(absent)
    return next((why for begin, why in ELSEWHERE.items() if command.startswith(begin)), "")


def walk(page: Path, folder: Path, ground: Ground, first: int | None = None) -> Iterator[Step]:
    """A page in an empty folder: its Python blocks as one program, and its commands (or its `first` blocks of them)."""
    folder.mkdir(parents=True)
    (folder / "dist").symlink_to(ground.dist)
    text = page.read_text(encoding="utf-8")
    for name, code in re.findall(
        r"as `([\w.-]+\.(?:py|yaml))`:\n\n```[a-z]+\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    ):
        (folder / name).write_text(code, encoding="utf-8")
    python = [block for block in blocks(page) if not block.marks] if first is None else []
    (folder / "page.py").write_text("\n".join(block.code for block in python), encoding="utf-8")
    program = [Block(page, block.line, (), "python page.py") for block in python[:1]]
    shell = list(blocks(page, "sh"))[:first]
    at = {False: folder, True: ground.clone}
    groups: list[int] = []
    for block in sorted([*program, *shell], key=lambda block: block.line):
        inside = "checkout" in block.marks
        for command, wanted in lines(block):
            if command == "make wheels" and ground.dist.is_dir():  # they were given, or made for the reader before
                if (ground.clone / ".venv").is_dir():
                    continue
                command = "make setup"  # what making them would have left in the clone
            if why := _why_not(block, command):
                yield Step(block.name, command, 0.0, None, why)
                continue
            env = ground.at_work if inside else ground.env
            step, at[inside], group = _ran(block.name, command, wanted, at[inside], env)
            groups.append(group)
            if block.shown:
                Path(env["SAID"]).write_text(step.said, encoding="utf-8")
            yield step._replace(shown=block.shown)
    for group in groups:  # what a page has left running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def main(argv: Sequence[str] = ()) -> int:
    """Walk the named pages, or all; 1 when a command failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--dist", type=Path, help="a folder of our wheels; without it the clone makes them")
    asked = parser.parse_args(argv)
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="lz-walk-", ignore_cleanup_errors=True) as base, _hub() as hub:
        clone = _clone(Path(base, "layerzero"))
        dist = asked.dist.resolve() if asked.dist else clone / "dist"
        for who, pages in readers([page.resolve() for page in asked.pages] or markdown_files()).items():
            if not pages:
                continue
            begun = time.monotonic()
            ground = _ground(Path(base, who), clone, dist, hub)
            load = os.getloadavg()[0]
            took = time.monotonic() - begun
            print(f"== {who}: {len(pages)} pages, a fresh environment in {took:.1f} s, load {load:.1f}", flush=True)
            begun = time.monotonic()
            begin = [] if ROOT / INSTALL in pages else [(ROOT / INSTALL, 2)]
            for number, (page, first) in enumerate([*begin, *((page, None) for page in pages)]):
                for step in walk(page, Path(base, who, f"page{number}"), ground, first):
                    steps.append(step)
                    print(step, flush=True)
            print(f"== {who}: {time.monotonic() - begun:.0f} s in all, load {os.getloadavg()[0]:.1f}", flush=True)
    shown = [step for step in steps if step.shown]
    ran, failed = sum(step.status is not None for step in shown), sum(step.failed for step in steps)
    print(
        f"{len(shown)} commands: {ran} ran, {failed} failed, {len(shown) - ran} not run, each with the reason; "
        f"{len(steps) - len(shown)} more made what a reader has"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
