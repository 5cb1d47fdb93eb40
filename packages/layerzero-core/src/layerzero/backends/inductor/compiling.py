"""Compile one program in a process of its own, and load the result.

The result is a library that needs neither the compiler nor Dynamo to be loaded: a process that finds it on disk has
it in milliseconds, and a request can never start a compiler. A process apart keeps the interpreter of a server free
while the compiler works, and can be ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from layerzero.plugin import BackendNotAvailableError, DeviceSpec, Reason, artifact_folder, reason

Inputs = tuple[tuple[tuple[int, ...], str, tuple[int, ...]], ...]
"""For each tensor: an example shape, the dtype, and which axes are free."""

LIMIT_S = 600.0
_MISSING = re.compile(r"No module named '([\w.]+)'")


def compiler() -> str | None:
    """The C++ compiler TorchInductor would call for any program, also for a GPU: CXX, else g++, else clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def needs_compiler(device: DeviceSpec) -> list[Reason]:
    """Against compiling anything here; what was compiled before still loads."""
    if compiler() is not None:
        return []
    why = reason("BACKEND_NOT_INSTALLED", "of a C++ compiler")
    return [replace(why, message="no C++ compiler was found", hint="install g++ or clang++, or set CXX to one")]


def path_of(name: str, inputs: Inputs, device: str) -> Path:
    """Where the library of a program lies; its name holds everything it depends on."""
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    isa = sorted(f"{name}={value}" for name, value in features.items())
    machine = torch.cuda.get_device_capability() if device == "cuda" else isa
    text = json.dumps([name, inputs, device, str(machine), torch.__version__, sys.platform])
    return artifact_folder() / f"inductor-{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.pt2"


def load(name: str, inputs: Inputs, device: str) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A function from a list of tensors to a list of tensors; compiles first when the library is not on disk."""
    path = path_of(name, inputs, device)
    if not path.exists():
        _compile(name, inputs, device, path)
    # What the package's own __call__ does around this (flattening arguments by name) costs more than the kernel.
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = _loader(str(path)).boxed_run
    return run


def _loader(path: str) -> Any:
    """Torch's loader of a package, without what stands before it.

    That compares the machine with the one of the compiler, whose vector instructions it finds out by compiling and
    loading a program for each: a minute on an x86. Here the name of the library says which machine it is for.
    """
    kind = getattr(torch._C._aoti, "AOTIModelPackageLoader", None)
    try:
        if kind is not None:
            return kind(path, "model", False, 1, -1)
    except TypeError:  # another torch, with other arguments
        pass
    from torch._inductor import aoti_load_package

    return aoti_load_package(path).loader


def _compile(name: str, inputs: Inputs, device: str, path: Path) -> None:
    against = needs_compiler(DeviceSpec.detect("cpu"))
    if against:
        raise BackendNotAvailableError(f"inductor cannot compile {name}: {against[0].message}", reasons=tuple(against))
    fresh = path.with_name(f"{uuid.uuid4().hex}.pt2")
    order = json.dumps({"name": name, "inputs": inputs, "device": device, "path": str(fresh)})
    places = os.pathsep.join(place for place in sys.path if place)
    command = [sys.executable, "-P", "-m", "layerzero.backends.inductor.compiling", order]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S,
            # A program has a kernel or two: a pool of compilers, one a core, takes longer to start than they take.
            env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, "PYTHONPATH": places},
        )  # fmt: skip
        if done.returncode or not fresh.exists():
            said = done.stderr.strip()[-600:] or str(done.returncode)
            missing = _MISSING.search(said)
            if missing:  # of the compiler's own parts; the program was not looked at, and may compile tomorrow
                text, gone = f"inductor cannot compile {name}: {missing[0]}", f"the module {missing[1]}"
                raise BackendNotAvailableError(text, code="JIT_TOOLCHAIN_MISSING", value=gone)
            raise RuntimeError(f"inductor could not compile {name}: {said}")
        os.replace(fresh, path)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"inductor did not compile {name} within {LIMIT_S:.0f} s") from None
    finally:
        fresh.unlink(missing_ok=True)


def main(order: str) -> None:
    """The process that compiles."""
    from torch._inductor import aoti_compile_and_package, config

    from layerzero.backends.inductor.kernels import PROGRAMS

    given = json.loads(order)
    device = given["device"]
    config.cpp.dynamic_threads = True  # as many threads as the caller has, not as the compiler had
    if device != "cpu":
        # Which vector instructions the host's compiler can use is found out by compiling and loading a program for
        # each of them, a minute in all, one process at a time. A program for a GPU has no use for any.
        config.cpp.vec_isa_ok = False

    class Program(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return PROGRAMS[given["name"]](*tensors)

    sizes: dict[int, Any] = {}

    def free(shape: list[int], axes: list[int]) -> dict[int, Any]:
        # Equal example sizes are one free size: the examples are distinct primes.
        return {axis: sizes.setdefault(shape[axis], torch.export.Dim(f"n{shape[axis]}", min=1)) for axis in axes}

    example = tuple(
        torch.ones(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype, _ in given["inputs"]
    )
    dynamic = tuple(free(shape, axes) for shape, _, axes in given["inputs"])
    with torch.no_grad():
        exported = torch.export.export(Program(), example, dynamic_shapes=(dynamic,))
        aoti_compile_and_package(exported, package_path=given["path"])


if __name__ == "__main__":
    main(sys.argv[1])
