"""Say what you want: prefer, lock, forbid, switch off. The narrowest word wins; a denial beats them all.

Run it: python examples/policy.py
"""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.errors import LayerZeroError

x = torch.randn(4, 256)
weight = torch.ones(256)


def show(what: str) -> None:
    """Name the kernel that rms_norm would run now, and how the kernels score."""
    report = lz.explain("rms_norm", x, weight)
    scores = ", ".join(f"{c.kernel_id} {c.score:g}" for c in report.candidates if c.score is not None)
    print(f"{what:<20} {report.chosen:<26} scores: {scores}")


show("by itself")
best = lz.which("rms_norm", x, weight)

# Inside the block only, and only in this thread or task. A preference is 20 points: it settles a close race ...
with lz.prefer("reference"):
    show("prefer reference")

# ... and a boost is as many points as you say.
with lz.scoped(boosts={"reference": 100}):
    show("boost reference")

# Plain PyTorch everywhere: for comparison, or in an emergency.
with lz.disabled():
    show("disabled")

# Exactly this kernel until unlocked, whatever the scores say.
lz.lock("rms_norm", "reference.rms_norm.plain")
show("locked")
lz.unlock("rms_norm")

# For the whole process. Takes what a policy file takes; settings not named stay as they are.
lz.configure(deny=[best])
show("first one denied")

# A locked kernel that may not run is an error with a reason, never a silent second choice.
lz.lock("rms_norm", best)
try:
    lz.rms_norm(x, weight)
except LayerZeroError as error:
    print(f"{'locked and denied':<20} {error.code}")

lz.reset()
show("after reset")
