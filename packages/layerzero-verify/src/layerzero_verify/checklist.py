"""What a new model architecture has to pass before anybody relies on it, in this order."""

from __future__ import annotations

__all__ = ["STEPS"]

STEPS: tuple[dict[str, str], ...] = (
    {
        "step": "Kernels: every op the model calls for, forward and backward; a new op or option gets its own cases",
        "command": "lz verify --level 1 --lane full",
    },
    {
        "step": "Layer: all stages of one layer; one that is not RMSNorm + GQA + SwiGLU gets a test of its own",
        "command": "lz verify --level 2 --lane full",
    },
    {
        "step": "Weight conversion: the saved weights, loaded and laid out, give the same stages",
        "command": "lz verify --level 3 --model FOLDER",
    },
    {
        "step": "Forward parity: logits within 1e-3 and the same top-1 at every position",
        "command": "lz verify --level 4 --model FOLDER --lane full",
    },
    {
        "step": "Training: 5 to 20 steps of SGD, weights within 1e-3 and 1e-2",
        "command": "lz verify --level 5 --lane full",
    },
    {
        "step": "Stress: 100 and more steps, the two loss curves together, no drift",
        "command": "lz verify --level 5 --lane stress",
    },
)
