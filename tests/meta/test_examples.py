"""Every example runs, as its own program, and says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.workspace import ROOT

EXAMPLES = ROOT / "examples"

# What each prints; an example that is not here has to end well, no more.
SAYS: dict[str, tuple[str, ...]] = {
    "quickstart.py": ("ran: ", "chosen: ", "the others:", "plan: "),
    "policy.py": ("locked and denied", "LOCKED_KERNEL_UNAVAILABLE", "after reset"),
    "paged_decode.py": ("last step: (3, 8, 64)", "80 calls, 3 selections"),
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
    "custom_triton_kernel.py": "packages/layerzero-triton/tests/test_kernels_interpreted.py",
    "text_generation.py": "packages/layerzero-tokenizers/tests/test_pipeline.py",
}
HERE = [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name not in ELSEWHERE]


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_package(*NEEDS.get(name, ("torch",)))) for name in HERE]
)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    home = {key: str(tmp_path) for key in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    env = {**os.environ, **home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    strict = () if name in NEEDS else ("-W", "error")
    done = subprocess.run(
        [sys.executable, *strict, str(EXAMPLES / name)],
        capture_output=True, text=True, timeout=110, check=False, env=env, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for words in SAYS.get(name, ()):
        assert words in done.stdout


def test_every_example_is_run_by_some_test_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(ELSEWHERE) <= names and set(SAYS) <= names
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / file).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if name not in listed} == set()
