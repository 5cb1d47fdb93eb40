"""The gate: `lz verify --hostile`, and what `lz hub lock` and tuning ask of kernels from outside.

    for finding in find_cheats(backend="mine"):
        print(finding["kernel"], finding["code"], finding["message"])

No code of a plugin runs in the process that asks.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from layerzero.errors import LayerZeroError, UnknownNameError

__all__ = ["find_cheats", "outside", "refusals"]

# Our own packages, but for the hub's: its kernels are other people's.
_OURS = {"layerzero-core", *(f"layerzero-{name}" for name in ("accel", "cpu", "flashattn", "flashinfer", "liger"))}
_OURS |= {f"layerzero-{name}" for name in ("linear-attention", "models", "tokenizers", "triton", "vllm", "xformers")}


def find_cheats(
    *,
    backend: str | None = None,
    kernel: str | None = None,
    op: str | None = None,
    device: str | None = None,
    kernels: Iterable[str] | None = None,
    compiles: bool = True,
    seed: int = 0,
    env: dict[str, str] | None = None,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Look for cheats in the kernels that are named, or in all; one finding each, with the `code` of a refused one.

    `compiles=False` leaves out kernels that are compiled at run time; seed 0 is a fresh one, that no kernel can know.
    """
    request = {
        "backend": backend, "kernel": kernel, "op": op, "device": device, "compiles": compiles,
        "kernels": None if kernels is None else sorted(kernels), "seed": seed or secrets.randbits(31),
    }  # fmt: skip
    around = {**os.environ, **(env or {})}
    around["PYTHONPATH"] = os.pathsep.join(place for place in sys.path if place)
    command = [sys.executable, "-m", "layerzero_hostile.judge", json.dumps(request)]
    found: list[dict[str, Any]] = []
    with (  # a file and no pipe: a plugin that prints much would fill one, and wait for ever
        tempfile.TemporaryFile() as printed,
        subprocess.Popen(command, env=around, stdout=subprocess.PIPE, stderr=printed, text=True) as judge,
    ):
        assert judge.stdout is not None
        for line in judge.stdout:
            said = json.loads(line)
            if "error" in said:
                raise UnknownNameError(said["error"], code=said["code"], hint=said["hint"])
            found.append({**said, "seed": request["seed"]})
            if told is not None:
                told(found[-1])
        if judge.wait():
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - 800))
            said = printed.read().decode(errors="replace").strip()
            raise LayerZeroError(f"the gate failed: {said}", code="VALUE_INVALID", value=judge.returncode)
    return found


def refusals(kernels: Iterable[str], device: str | None, env: dict[str, str] | None = None) -> dict[str, str]:
    """Why some of these kernels are refused, by kernel: the code of the cheat and what was seen."""
    found = find_cheats(kernels=kernels, device=device, env=env)
    return {item["kernel"]: f"{item['code']}: {item['message']}" for item in found if item["code"]}


def outside(backend: Any) -> bool:
    """Whether a backend's kernels were written by others: its package is not ours, or brings what others publish."""
    name = str(backend.dist).lower().replace("_", "-")
    return bool(name) and name not in _OURS
