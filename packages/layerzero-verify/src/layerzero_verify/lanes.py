"""The three lanes, how much of each level there is time for; and what a new model architecture has to pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerzero_verify.models import MODELS
from layerzero_verify.weights import CONFIGS

_ALL = tuple(CONFIGS)


@dataclass(frozen=True)
class Lane:
    """What a lane covers. `thorough` adds a line-up for each backend's kernels to the one that selection makes;
    `compositions` prove a kernel that declares batch_invariant, with each seed.

    `kernel_dtypes` are those level 1 tries, None for all that a kernel declares. `threads` is how many torch may use,
    None leaves that as it is: most of the ladder's tensors are so small that a second thread only gets in the way, and
    the stress lane runs with all of them.
    """

    configs: tuple[str, ...]
    dtypes: tuple[str, ...]
    models: tuple[str, ...]
    stage_models: tuple[str, ...]
    training: tuple[str, ...]
    steps: int
    seeds: int
    length: int
    thorough: bool
    cached: bool
    kernel_dtypes: tuple[str, ...] | None = None
    threads: int | None = None
    compositions: int = 24


# Under a minute on two cores: what every change should pass.
_QUICK = Lane(
    configs=("tiny", "gqa"),
    dtypes=("float32",),
    models=("llama", "mistral", "qwen", "gemma", "gpt2", "t5", "vit"),
    stage_models=("llama",),
    training=("tiny",),
    steps=5,
    seeds=1,
    length=12,
    thorough=False,
    cached=False,
    kernel_dtypes=("float32", "float16", "bfloat16"),
    threads=1,
)
# Under ten minutes: every config, model, dtype and backend.
_FULL = Lane(
    configs=_ALL,
    dtypes=("float32", "bfloat16", "float16"),
    models=MODELS,
    stage_models=("llama", "mistral", "qwen"),
    training=_ALL,
    steps=20,
    seeds=3,
    length=24,
    thorough=True,
    cached=True,
    threads=1,
    compositions=334,
)
# As long as it takes: many seeds, long sequences, hundreds of training steps.
_STRESS = replace(_FULL, steps=200, seeds=20, length=96, threads=None)
LANES: dict[str, Lane] = {"quick": _QUICK, "full": _FULL, "stress": _STRESS}

# Before anybody relies on a new architecture, in this order.
STEPS = tuple(
    {"step": step, "command": f"lz verify {options}"}
    for step, options in (
        (
            "Kernels: every op the model calls for, forward and backward; a new op or option gets its own cases",
            "--level 1 --lane full",
        ),
        (
            "Layer: all stages of one layer; one that is not RMSNorm + GQA + SwiGLU gets a test of its own",
            "--level 2 --lane full",
        ),
        ("Weight conversion: the saved weights, loaded and laid out, give the same stages", "--level 3 --model FOLDER"),
        (
            "Forward parity: logits within 1e-3 and the same top-1 at every position",
            "--level 4 --model FOLDER --lane full",
        ),
        ("Training: 5 to 20 steps of SGD, weights within 1e-3 and 1e-2", "--level 5 --lane full"),
        ("Stress: 100 and more steps, the two loss curves together, no drift", "--level 5 --lane stress"),
    )
)
