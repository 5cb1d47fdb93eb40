"""The kernels that go over rows, as AVX-512 compiles them, for the processor at hand with their intrinsics emulated.

    python rows.py OUT [--cache FOLDER] [--sanitize]

Like build.py beside it, with other units; rows.h holds the operations that only these use.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = ("gated", "norm", "norm_grad", "quant", "rope", "sampling")


def made(out: Path, cache: Path | None = None, *, sanitize: bool = False) -> Path:
    """Compile into `out`; `cache` keeps objects between builds."""
    spec = importlib.util.spec_from_file_location("emulated_build", HERE / "build.py")
    assert spec is not None and spec.loader is not None
    emulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)
    emulated.UNITS = {"avx512": ROWS}
    stamp = emulated.build.hashlib.sha256((HERE / "rows.h").read_bytes()).hexdigest()[:12]
    emulated.PRETEND = (*emulated.PRETEND, "-include", str(HERE / "rows.h"), f"-DLZ_ROWS_{stamp}")
    result: Path = emulated.made(out, cache, sanitize=sanitize)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--sanitize", action="store_true")
    given = parser.parse_args()
    try:
        print(made(given.out, given.cache, sanitize=given.sanitize))
    except Exception as error:
        sys.exit(str(error))
