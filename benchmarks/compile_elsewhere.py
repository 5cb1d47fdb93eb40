"""Whether a kernel's `compiler` does what it promises, on the device.

    python benchmarks/compile_elsewhere.py KERNEL…

For each kernel, in an empty cache of compiled kernels: another process compiles it for a call, and has no CUDA context
and no memory of the GPU meanwhile; then this process runs that call, and compiles nothing. Prints a line of JSON each,
and ends with 1 where one is not so. A process of its own for each vendor: vendors remember where their cache is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Options of `lz explain` for a call of each op.
CALLS: dict[str, dict[str, Any]] = {
    "rms_norm": {"shape": (24, 2048)},
    "add_rms_norm": {"shape": (24, 2048)},
    "gemma_rms_norm": {"shape": (24, 2048)},
    "gemma_add_rms_norm": {"shape": (24, 2048)},
    "layer_norm": {"shape": (24, 2048)},
    "silu_and_mul": {"shape": (24, 12288)},
    "gelu_and_mul": {"shape": (24, 12288)},
    "cross_entropy": {"shape": (24, 32768)},
    "rope": {"q": (1, 16, 500, 128), "k": (1, 8, 500, 128)},
    "sampling_probs": {"shape": (4, 32768), "top_k": 50},
    "attention": {"q": (1, 16, 500, 128), "k": (1, 8, 500, 128), "causal": "bottom_right"},
    "varlen_attention": {"q": (500, 16, 128), "k": (500, 8, 128), "causal": "bottom_right"},
    "paged_attention": {"q": (4, 16, 128), "k": (256, 16, 8, 128), "context": 500},
}
DECODE: dict[str, Any] = {"q": (1, 16, 1, 128), "k": (1, 8, 500, 128)}
BATCHED: dict[str, Any] = {"q": (4, 16, 500, 128), "k": (4, 8, 500, 128), "causal": "bottom_right"}
BATCHED_DECODE: dict[str, Any] = {"q": (4, 16, 1, 128), "k": (4, 8, 500, 128)}
_COMPILED = (".so", ".o", ".cubin", ".ptx")
_EVERY_S = 0.02


def main(argv: Sequence[str]) -> int:
    """Prove each kernel; the exit code."""
    well = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAYERZERO_JIT_CACHE_DIR"] = folder
        for kernel_id in argv:
            found = prove(kernel_id, Path(folder))
            well = well and found["ok"]
            print(json.dumps(found), flush=True)
    return 0 if well else 1


def prove(kernel_id: str, folder: Path) -> dict[str, Any]:
    """What became of one kernel's order and of its load; `ok` when all of it is as it should be."""
    from layerzero.dispatch.beside import _at_hand, order_for
    from layerzero.dispatch.compiling import compile_now
    from layerzero.dispatch.run import current_world
    from layerzero.isolation.compilers import compilers
    from layerzero.jit import cache
    from layerzero.runtime.state import state
    from layerzero.tuning.inputs import build
    from layerzero_cli.calls import context

    cache.prepare()
    world = current_world()
    kernel = world.registry.kernels[kernel_id]
    ctx = context(kernel.op, {**_options(kernel_id, kernel.op), "device": "cuda", "backend": kernel_id})
    args, spec = build(ctx, device="cuda", seed=0).args, world.ops[kernel.op]
    order = order_for(spec, ctx, kernel, args, world)
    found: dict[str, Any] = {"kernel": kernel_id, "ok": False}
    if order is None:
        return {**found, "why": "this call has no order: the kernel is not eligible, or its arguments cannot be sent"}
    torch.cuda.synchronize()
    try:
        with _watching() as seen:
            said = compilers.ask(order, 600.0, cache.variables())
    except Exception as error:
        return {**found, "why": f"the compiler failed: {error}"}
    found |= {"said": said, **seen}
    if "needs_device" in said:
        return {**found, "why": "the compiler says that it needs the device"}
    made = _files(folder)
    why = _at_hand(kernel, said["libraries"], world, state.generation)
    began = time.monotonic()
    why = why or compile_now(spec, ctx, kernel_id, args, state.generation)
    found |= {"load_ms": round((time.monotonic() - began) * 1e3, 1), "made": len(made)}
    again = sorted(path for path, when in _files(folder).items() if made.get(path) != when)
    wrong = {
        "it could not be loaded": str(why) if why is not None else None,
        "nothing was compiled": None if made else True,
        "this process compiled": again,
        "the compiler took memory of the GPU": seen["gpu_bytes"],
        "the compiler had a CUDA context": seen["contexts"],
    }
    told = {words: what for words, what in wrong.items() if what}
    return {**found, **told, "ok": not told}


def _options(kernel_id: str, op: str) -> dict[str, Any]:
    """A call that the kernel is for."""
    if op == "attention" and ".batch_" in kernel_id:
        return BATCHED_DECODE if "decode" in kernel_id else BATCHED
    return DECODE if op == "attention" and "decode" in kernel_id else CALLS[op]


def _files(folder: Path) -> dict[str, int]:
    """Compiled files and when they were written."""
    found = (path for path in folder.rglob("*") if path.suffix in _COMPILED and "tmp" not in path.name)
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in found}


@contextmanager
def _watching() -> Iterator[dict[str, Any]]:
    """Look at the GPU while the block runs: memory taken, contexts added, device files that compilers have open."""
    from layerzero.isolation.compilers import compilers

    free, contexts = torch.cuda.mem_get_info()[0], _contexts()
    seen: dict[str, Any] = {"gpu_bytes": 0, "contexts": 0, "device_files": []}
    done = threading.Event()

    def look() -> None:
        files: set[str] = set()
        while True:
            last = done.wait(_EVERY_S)
            seen["gpu_bytes"] = max(seen["gpu_bytes"], free - torch.cuda.mem_get_info()[0])
            seen["contexts"] = max(seen["contexts"], _contexts() - contexts)
            for pid in compilers.pids:
                files |= {name for name in _open_files(pid) if name.startswith("/dev/nvidia")}
            seen["device_files"] = sorted(files)
            if last:
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _contexts() -> int:
    """Processes with a context, as the driver counts them; 0 where nobody can be asked."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        return len(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split())
    except (OSError, subprocess.TimeoutExpired):
        return 0


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:  # it has ended, or the file was closed meanwhile
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
