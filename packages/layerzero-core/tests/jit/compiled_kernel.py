"""A kernel that is really compiled at run time: RMSNorm in C, one library per dtype and hidden size.

It behaves as Triton and FlashInfer do: it looks in its folder on disk first, and calls the compiler named by CXX when
nothing is there. Tests count the compiler's runs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from pathlib import Path

import torch
from torch import Tensor

SOURCE = """
#include <math.h>
extern "C" void rms_norm(const float* x, const float* w, float* out, long rows, float eps) {
  for (long r = 0; r < rows; ++r) {
    double sum = 0;
    for (long i = 0; i < HIDDEN; ++i) sum += (double)x[r * HIDDEN + i] * x[r * HIDDEN + i];
    float scale = 1.0 / sqrt(sum / HIDDEN + eps);
    for (long i = 0; i < HIDDEN; ++i) out[r * HIDDEN + i] = x[r * HIDDEN + i] * scale * w[i];
  }
}
"""
_loaded: dict[int, ctypes.CDLL] = {}


def folder() -> Path:
    """Where its libraries lie."""
    return Path(os.environ["TRITON_CACHE_DIR"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The adapter."""
    hidden = x.shape[-1]
    library = _loaded.get(hidden)
    if library is None:
        library = _loaded[hidden] = ctypes.CDLL(str(_compiled(hidden)))
    out = torch.empty_like(x)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, weight, out))
    library.rms_norm(*pointers, ctypes.c_long(x.numel() // hidden), ctypes.c_float(eps))
    return out


def _compiled(hidden: int) -> Path:
    found = folder() / f"rms_norm_{hidden}.so"
    if found.exists():
        return found
    fresh = folder() / f"{uuid.uuid4().hex}.so"
    source = fresh.with_suffix(".cpp")
    source.write_text(SOURCE)
    command = [
        os.environ.get("CXX", "g++"),
        "-O1",
        "-shared",
        "-fPIC",
        f"-DHIDDEN={hidden}",
        str(source),
        "-o",
        str(fresh),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the compiler said: {error.stderr.strip()[-200:]}") from None
    os.replace(fresh, found)
    source.unlink()
    return found


def forget() -> None:
    """As in a new process."""
    _loaded.clear()
