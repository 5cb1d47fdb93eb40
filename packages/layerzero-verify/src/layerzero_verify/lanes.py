"""The three lanes: how much of each level there is time for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerzero_verify.configs import CONFIGS
from layerzero_verify.models import MODELS

__all__ = ["LANES", "Lane"]

_ALL = tuple(CONFIGS)


@dataclass(frozen=True)
class Lane:
    """What a lane covers. `thorough` adds a line-up for each backend's kernels to the one that selection makes.

    `kernel_dtypes` are those level 1 tries, None for all that a kernel declares. `threads` is how many torch may use,
    None leaves that as it is: most of the ladder's tensors are so small that a second thread only gets in the way, and
    the stress lane runs with all of them.
    """

    name: str
    about: str
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


_QUICK = Lane(
    "quick",
    "under a minute on two cores: what every change should pass",
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
_FULL = Lane(
    "full",
    "under ten minutes: every config, model, dtype and backend",
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
)
_STRESS = replace(
    _FULL,
    name="stress",
    about="as long as it takes: many seeds, long sequences, hundreds of training steps",
    steps=200,
    seeds=20,
    length=96,
    threads=None,
)
LANES: dict[str, Lane] = {lane.name: lane for lane in (_QUICK, _FULL, _STRESS)}
