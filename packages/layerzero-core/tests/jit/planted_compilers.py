"""Compilers that do their work, and compilers that do not: imported by the process that compiles, by name."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from layerzero.plugin import CompileOrder, NeedsDevice

SOURCE = 'extern "C" void scale(float* x, long n, float by) { for (long i = 0; i < n; ++i) x[i] *= by; }\n'


def folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The adapter: loads the library, and compiles it where nobody has."""
    library = ctypes.CDLL(str(_library(x.shape[-1])))
    out = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    library.scale(ctypes.c_void_p(out.data_ptr()), ctypes.c_long(out.numel()), ctypes.c_float(1.0))
    return out


def _library(hidden: int) -> Path:
    found = folder() / f"scale_{hidden}.so"
    if not found.exists():
        with open(folder() / "compiled_by.log", "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()}\n")
        part = folder() / f"tmp_{os.getpid()}.so"
        subprocess.run(
            ["g++", "-x", "c++", "-shared", "-fPIC", "-o", str(part), "-"], input=SOURCE, text=True, check=True
        )
        part.replace(found)
    return found


def _told() -> Path:
    return Path(os.environ["PLANTED_TOLD"])


def good(order: CompileOrder) -> None:
    """Compiles, and writes down what it sees of the machine and of the call."""
    x = order.args[0]
    seen = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "memory": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        "x": [x.device.type, list(x.shape), list(x.stride()), str(x.dtype)],
        "kernel": order.kernel_id,
        "device": order.device.signature,
        "hidden": order.context["dims"]["hidden"],
    }
    _told().write_text(json.dumps(seen))
    _library(x.shape[-1])


def _starts(order: CompileOrder) -> None:
    """What every compiler that goes wrong does first: start a program of its own."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    part = _told().with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "started": program.pid}))
    part.replace(_told())


def hang(order: CompileOrder) -> None:
    _starts(order)
    time.sleep(1000)


def hold(order: CompileOrder) -> None:
    """Hold the interpreter: no other thread of the process runs."""
    _starts(order)
    ctypes.PyDLL(None).sleep(1000)


def crash(order: CompileOrder) -> None:
    _starts(order)
    os.kill(os.getpid(), signal.SIGSEGV)


def fill(order: CompileOrder) -> None:
    """A disk that is full: files end at 64 KiB."""
    _starts(order)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with open(folder() / "tmp_large", "wb") as file:
        file.write(bytes(1 << 20))


def eat(order: CompileOrder) -> None:
    """More memory than a compiler may have."""
    _starts(order)
    bytearray(64 << 30)


def refuse(order: CompileOrder) -> None:
    _starts(order)
    raise ValueError("no such instruction")


def declined(order: CompileOrder) -> None:
    raise NeedsDevice("its backward pass is compiled by running it", in_thread=True)


kept: list[CompileOrder] = []


def keep(order: CompileOrder) -> None:
    kept.append(order)


def library(order: CompileOrder) -> list[str]:
    """Compiles, and names what the process that serves is to map."""
    good(order)
    return [str(_library(order.args[0].shape[-1]))]


def tuned(order: CompileOrder) -> None:
    raise NeedsDevice("it is autotuned over 12 configurations")
