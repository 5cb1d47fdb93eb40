"""Several processes, started as a program would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each of N ranks of `ranks_program.py` found; each N is run once."""
    known: dict[int, list[dict[str, Any]]] = {}

    def run(ranks: int) -> list[dict[str, Any]]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            env = {**os.environ, "OMP_NUM_THREADS": "1", "LAYERZERO_JIT": "off", "LAYERZERO_PLUGINS": ""}
            program = [str(HERE / "ranks_program.py"), str(folder)]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            done = subprocess.run(
                [*command, *program], env=env, capture_output=True, text=True, timeout=400, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            known[ranks] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        return known[ranks]

    return run
