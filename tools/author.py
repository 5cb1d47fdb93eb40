"""Follows the two tutorials of an author as they stand: a backend and a new op, from scaffold to a chosen wheel.

    python -m tools.author [--dist dist] [--lang c python triton]        `make prove NAME=author`

For each language an environment with nothing of LayerZero but the wheels in `--dist` (`tools.fresh`); every command of
docs/learn/backend.md and docs/learn/new-op.md, and every edit: of two blocks of C or JSON that follow each other the
first is what stands in a file of the scaffold, the second what takes its place. In another language than the page's the
edits of C are left out and `--lang` says which. Triton's kernels need a GPU; on a CPU its interpreter runs them, and
what the commands say of the missing device is part of the log. Exit code 1 when a command fails, when what should be
chosen is not, when a wheel bears another tag, or when a tutorial takes more than ten minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.fresh import fresh
from tools.requirements_doc import ROOT
from tools.snippets import Block, blocks
from tools.walk import INSTALL, commands

BACKEND, NEW_OP = ROOT / "docs" / "learn" / "backend.md", ROOT / "docs" / "learn" / "new-op.md"
MINUTES = 10
# what follows --lang, the kernel that the scaffold brings, and how its wheel ends
LANGUAGES = {"c": ("c", r"cp311-abi3-\w+"), "python": ("plain", "py3-none-any"), "triton": ("triton", "py3-none-any")}
# of the commands on these pages, those that no machine without a GPU can answer for a kernel in Triton
NEEDS_GPU = re.compile(r"lz (bench|tune|explain|verify)|LAYERZERO_RECORD|lz which|pytest")
INTERPRETED = """python - <<'END'
import torch
from layerzero_{name} import kernels
x = torch.randn(5, 96)
if hasattr(kernels, "rms_norm"):
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, None, 1e-6), wanted)
else:
    torch.testing.assert_close(kernels.squared_relu(x, 2.0), 2.0 * torch.relu(x) ** 2)
print("right")
END"""


class Step(NamedTuple):
    """A command or an edit: where it stands, what it is, its seconds, its exit status (None: not run), what it said."""

    place: str
    what: str
    seconds: float = 0.0
    status: int | None = 0
    said: str = ""

    def __str__(self) -> str:
        if self.status is None:
            return f"     –    {self.what}    [{self.place}: {self.said}]"
        told = f"{self.seconds:6.1f} s  {self.what}    [{self.place}]"
        return f"{told} exit {self.status}\n{self.said[-2000:]}" if self.status else told


def environment(folder: Path, dist: Path) -> dict[str, str]:
    """The variables of somebody who has an environment of his own, and our wheels to install from."""
    programs = fresh(folder).python.parent
    (folder / "home").mkdir()
    for name in ("pip", "pytest"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{programs}/python" -m {name} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "PYTEST_", "XDG_"))}
    path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {dist}".strip()
    home = {"HOME": str(folder / "home"), "VIRTUAL_ENV": str(programs.parent), "PATH": path}
    return {**kept, **home, "PIP_FIND_LINKS": links, "PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(place: str, command: str, cwd: Path, env: dict[str, str], name: str = "") -> Step:
    """One command in a folder, in the log under its own words or another name."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=MINUTES * 60, check=False,
        )  # fmt: skip
        status, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, said = 124, f"not done after {MINUTES} minutes"
    return Step(place, name or command, time.monotonic() - begun, status, said)


def edits(page: Path) -> list[tuple[Block, str, str]]:
    """What a page has its reader change: where it stands, what is there, what takes its place."""
    found = []
    for language in ("c", "json"):
        shown = list(blocks(page, language))
        if len(shown) % 2:
            raise ValueError(f"{page.name}: {len(shown)} blocks in {language}; an edit has two: before, after")
        found += [(new, old.code, new.code) for old, new in zip(shown[::2], shown[1::2], strict=True)]
    return sorted(found, key=lambda edit: edit[0].line)


def edited(text: str, old: str, new: str) -> str | None:
    """The text with some of its lines replaced, at whatever depth they are indented; None where they are not there."""
    lines = old.rstrip().splitlines()
    there = re.search(r"^( *)" + r"\n\1".join(map(re.escape, lines)), text, re.MULTILINE)
    if there is None:
        return None
    return text[: there.start()] + textwrap.indent(new.rstrip(), there[1]) + text[there.end() :]


def apply(edit: tuple[Block, str, str], package: Path) -> Path:
    """Make one change in the one file of a package that has the lines; which it was."""
    _, old, new = edit
    made = {file: edited(file.read_text(encoding="utf-8"), old, new) for file in sorted(package.glob("src/**/*.*"))
            if file.suffix in (".c", ".json")}  # fmt: skip
    found = {file: text for file, text in made.items() if text is not None}
    if len(found) != 1:
        raise ValueError(f"{edit[0].name}: {len(found)} files of {package.name} hold\n{old}")
    (file, text), *_ = found.items()
    file.write_text(text, encoding="utf-8")
    return file


def _typed(command: str, lang: str) -> str:
    """A command of a page, for another language of the kernel."""
    command = re.sub(r"--lang \w+", f"--lang {lang}", command)
    if (
        lang == "python"
    ):  # the scaffold's plain PyTorch is no faster than torch's own kernel, so that times do not choose it
        command = command.replace("LAYERZERO_DENY=cpu", "LAYERZERO_PREFER=mybackend")
    if "plugin new" in command and "--lang" not in command:
        command += f" --lang {lang}"
    return command


def follow(page: Path, lang: str, folder: Path, env: dict[str, str]) -> Iterator[Step]:
    """The commands and edits of a page in their order, in an empty folder; steps that only a GPU can do are named."""
    folder.mkdir()
    changes = {edit[0]: edit for edit in edits(page)}
    python = [block for block in blocks(page) if not block.marks]
    (folder / "page.py").write_text("\n".join(block.code for block in python), encoding="utf-8")
    program = [Block(page, block.line, (), "python page.py") for block in python[:1]]
    for block in sorted([*program, *blocks(page, "sh"), *changes], key=lambda item: item.line):
        if block in changes:
            (package,) = folder.glob("layerzero-*")
            if lang == "c" or not changes[block][1].startswith("double"):
                yield Step(block.name, f"edit {apply(changes[block], package).relative_to(folder)}")
            continue
        for command in commands(block):
            if lang == "triton" and NEEDS_GPU.search(command):
                yield Step(block.name, command, 0.0, None, "needs a GPU for a kernel in Triton")
            else:
                yield run(block.name, _typed(command, lang), folder, env)
    if lang == "triton":
        name = "mybackend" if page == BACKEND else "relu2"
        told = f"TRITON_INTERPRET=1: layerzero_{name}.kernels on a CPU, against torch"
        yield run(page.name, INTERPRETED.format(name=name), folder, {**env, "TRITON_INTERPRET": "1"}, told)


def problems(page: Path, lang: str, folder: Path, steps: Sequence[Step]) -> Iterator[str]:
    """What a tutorial did not come to."""
    word, tag = LANGUAGES[lang]
    yield from (f"{step.what}: exit {step.status}" for step in steps if step.status)
    if page == BACKEND:
        names = [file.name for file in folder.glob("layerzero_mybackend-*.whl")]
        if len(names) != 1 or not re.fullmatch(rf"layerzero_mybackend-0\.1\.0-{tag}\.whl", names[0]):
            yield f"the wheels are {names}, not one that ends in {tag}"
    if lang == "triton":
        return
    wanted = f"mybackend.rms_norm.{word}" if page == BACKEND else f"relu2.squared_relu.{word}"
    asked = [step for step in steps if "lz which" in step.what or (page == NEW_OP and "lz explain" in step.what)]
    if not asked:
        yield "nothing on the page asks which kernel is chosen"
    for step in asked:
        if not re.search(rf"^(→ )?{re.escape(wanted)}\b", step.said, re.MULTILINE):
            yield f"{step.what} does not choose {wanted}:\n{step.said[-1500:]}"


def main(argv: Sequence[str] = ()) -> int:
    """Follow the pages in each language; 1 when one of them did not lead where it says, or took too long."""
    parser = argparse.ArgumentParser(prog="python -m tools.author")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--lang", nargs="+", choices=LANGUAGES, default=[*LANGUAGES])
    asked = parser.parse_args(argv)
    wrong: list[str] = []
    first = next(block for block in blocks(ROOT / INSTALL, "sh") if not block.marks)
    for lang in asked.lang:
        with tempfile.TemporaryDirectory(prefix=f"lz-author-{lang}-", ignore_cleanup_errors=True) as place:
            env, folder = environment(Path(place), asked.dist.resolve()), Path(place)
            (folder / "dist").symlink_to(asked.dist.resolve())
            print(f"== {lang}", run(first.name, next(commands(first)), folder, env), sep="\n", flush=True)
            for page in (BACKEND, NEW_OP):
                steps = []
                for step in follow(page, lang, folder / page.stem, env):
                    steps.append(step)
                    print(step, flush=True)
                seconds = sum(step.seconds for step in steps)
                found = [*problems(page, lang, folder / page.stem, steps)]
                if seconds > MINUTES * 60:
                    found.append(f"more than {MINUTES} minutes")
                load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
                verdict = "; ".join(found) or "leads where it says"
                print(f"== {lang}, {page.relative_to(ROOT)}: {seconds:.0f} s, {load}: {verdict}", flush=True)
                wrong += found
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
