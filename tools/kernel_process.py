"""Whole processes that go wrong: a script with one bad kernel, run apart, so that it may crash, hang or lose its GPU.

`run_with_kernel` starts Python with a World of the built-in kernels and one more, whose source is given. What the
script prints as its last line is JSON, and comes back; how the process ended comes back as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "run_with_kernel"]

_HEAD = """
import json, os, signal, sys, time
import torch
import layerzero as lz
from layerzero.errors import LayerZeroError
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state

KERNEL = "bad.rms_norm.kernel"
SPEC = KernelSpec(
    kernel_id=KERNEL, op="rms_norm", backend="bad", version="1.0", function="bad_kernel:rms_norm", priority=95.0,
    platforms=frozenset({{Platform.CPU, Platform.CUDA}}), dtypes=frozenset({{"float16", "bfloat16", "float32"}}),
    features=frozenset({{"no_weight", "mixed_weight"}}), grid_layout="library",
)
state.use(load_plugins(entry_points=()).registry.add([SPEC]))
DEVICE = {device!r}
X, W = torch.linspace(-1, 1, 24, device=DEVICE).reshape(3, 8), torch.ones(8, device=DEVICE)

def why(x=X, w=W):
    return [item.code.value for item in lz.explain("rms_norm", x, w).decision.candidate(KERNEL).reasons]

def caught(call, *args):
    try:
        call(*args)
        return None
    except LayerZeroError as error:
        return [type(error).__name__, error.code.value]

def right(x, out):
    return bool(torch.allclose(out, torch.rms_norm(x, (x.shape[-1],), None, 1e-6), atol=1e-5))

"""


@dataclass(frozen=True)
class Ended:
    """How the process ended: its exit code (negative: the signal), the JSON it printed last, and the rest."""

    code: int
    said: Any
    out: str
    err: str


def run_with_kernel(
    folder: Path,
    kernel: str,
    script: str,
    *,
    device: str = "cpu",
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
) -> Ended:
    """Run `script` in a process whose best rms_norm kernel is `kernel`, the source of `rms_norm(x, weight, eps)`.

    The quarantine of these processes lies in `folder`, so a second one starts where the first ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bad_kernel.py").write_text(textwrap.dedent(kernel), encoding="utf-8")
    main = folder / "main.py"
    main.write_text(_HEAD.format(device=device) + textwrap.dedent(script), encoding="utf-8")
    given = {
        **os.environ,
        "LAYERZERO_QUARANTINE": str(folder / "quarantine.json"),
        "LAYERZERO_PLUGINS": "",
        "PYTHONPATH": os.pathsep.join([str(folder), *(place for place in sys.path if place)]),
        **(env or {}),
    }
    given.pop("PYTHONFAULTHANDLER", None)
    done = subprocess.run(
        [sys.executable, str(main)], env=given, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder
    )
    lines = done.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    return Ended(done.returncode, said, done.stdout, done.stderr[-4000:])
