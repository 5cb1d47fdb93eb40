"""Every example runs, as its own program, and says what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from layerzero import env as environ
from tools.workspace import ROOT

EXAMPLES = ROOT / "examples"

# What each prints; an example that is not here has to end well, no more.
SAYS: dict[str, tuple[str, ...]] = {
    "quickstart.py": ("ran: ", "chosen: ", "the others:", "plan: "),
    "policy.py": ("locked and denied", "LOCKED_KERNEL_UNAVAILABLE", "after reset"),
    "paged_decode.py": ("last step: (3, 8, 64)", "78 more calls, 2 selections"),
    "serving_loop.py": ("every request got the tokens it gets alone",),
    "training_step.py": ("gradients of 15 weights", "in 30 steps", "rms_norm with a gradient: "),
    "transformers_generate.py": ("LlamaDecoderLayer: add_rms_norm", "the same tokens: True", "unpatched: None"),
    "diffusers_pipeline.py": ("FluxAttnProcessor: attention + rope", "attention: 7 calls", "rope: 6 calls"),
}
# Libraries besides torch. Their own warnings are not ours, so with them warnings stay warnings.
NEEDS: dict[str, tuple[str, ...]] = {
    "diffusers_pipeline.py": ("diffusers", "transformers", "PIL"),
    "transformers_generate.py": ("transformers",),
}
# Run by the tests of the package they show, with what that package needs.
ELSEWHERE = {
    "custom_triton_kernel.py": "packages/layerzero-triton/tests/test_rows_interpreted.py",
    "text_generation.py": "packages/layerzero-tokenizers/tests/test_pipeline.py",
}
HERE = [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name not in ELSEWHERE]


# A process that has loaded torch and nothing of ours, and runs each program it is asked for in a child: loading torch
# takes longer than most of them. `make prove NAME=long` starts an interpreter for each.
_STAGE = """
import json, os, runpy, sys, traceback, warnings
import torch
for line in sys.stdin:
    asked = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads; torch's are idle here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            if not asked["strict"]:
                warnings.resetwarnings()
            out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1), os.dup2(out, 2)
            os.environ.update(asked["home"])
            os.chdir(asked["home"]["HOME"])
            sys.argv, sys.path[0] = [asked["file"]], os.path.dirname(asked["file"])
            runpy.run_path(asked["file"], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Callable[[str, Path], tuple[int, str]]]:
    """Runs an example in a folder; gives its exit code and what it said."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started: list[subprocess.Popen[str]] = []

    def run(name: str, folder: Path) -> tuple[int, str]:
        home = {key: str(folder) for key in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
        strict, file = name not in NEEDS, str(EXAMPLES / name)
        if environ.read().prove:
            command = [sys.executable, *(("-W", "error") if strict else ()), file]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=280, check=False, env={**env, **home}, cwd=folder
            )
            return done.returncode, done.stdout + done.stderr
        if not started:
            command = [sys.executable, "-W", "error", "-c", _STAGE]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
        process, out = started[0], folder / "said"
        assert process.stdin is not None and process.stdout is not None
        asked = {"file": file, "strict": strict, "home": home, "out": str(out)}
        print(json.dumps(asked), file=process.stdin, flush=True)
        code = process.stdout.readline()
        return int(code or -1), out.read_text(errors="replace") if out.exists() else "it did not begin"

    yield run
    for process in started:
        process.communicate()


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_package(*NEEDS.get(name, ("torch",)))) for name in HERE]
)
def test_the_example_runs(name: str, tmp_path: Path, stage: Callable[[str, Path], tuple[int, str]]) -> None:
    code, said = stage(name, tmp_path)
    assert code == 0, said[-6000:]
    for words in SAYS.get(name, ()):
        assert words in said


def test_every_example_is_run_by_some_test_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(ELSEWHERE) <= names and set(SAYS) <= names
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / file).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if name not in listed} == set()
