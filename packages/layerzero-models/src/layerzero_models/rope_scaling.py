"""How a model stretches its rotary embedding to longer contexts, in the words of its configuration.

`RopeScaling` is the `rope_parameters` (or, in older files, `rope_scaling`) entry of a transformers configuration as a
checked value. `layerzero_models.rope_tables` turns it into tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from layerzero.errors import InvalidInputError, invalid, nearest

# variant -> fields without which it means nothing
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
ROPE_TYPES = tuple(_REQUIRED)

_OLDER_NAMES = {"su": "longrope"}  # as the first Phi-3 configurations spell it
_WITHOUT_EFFECT = ("finetuned",)  # written by YaRN's own tools; says nothing about the angles


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One way to scale rotary frequencies; fields are named as in configuration files.

    rope_type                         default, linear, ntk, dynamic, yarn, llama3, longrope or proportional
    factor                            how many times longer the context becomes
    rope_theta                        base of the frequencies, where the configuration keeps it here
    original_max_position_embeddings  the context length of pretraining (yarn, llama3, longrope)
    max_position_embeddings           the context length of the model (dynamic; yarn and longrope without a factor)
    attention_factor                  multiplies cos and sin (yarn, longrope); None follows the paper
    beta_fast, beta_slow, truncate    where yarn's ramp begins and ends, in rotations over the original context
    mscale, mscale_all_dim            yarn's attention factor as DeepSeek writes it
    low_freq_factor, high_freq_factor where llama3's ramp begins and ends
    short_factor, long_factor         longrope's divisor of each frequency
    partial_rotary_factor             proportional: the share of the pairs that turn. For all others the rotary width
                                      is an argument of its own, and this is not read
    """

    rope_type: str = "default"
    factor: float | None = None
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = None
    max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in _REQUIRED:
            raise invalid("VALUE_INVALID", f"rope_type {self.rope_type!r}", f"one of {', '.join(ROPE_TYPES)}")
        for name in _REQUIRED[self.rope_type]:
            if getattr(self, name) is None:
                raise invalid("SCHEMA_FIELD_MISSING", name, message=f"{self.rope_type} scaling needs {name}")
        for name in _POSITIVE:
            found = getattr(self, name)
            if found is not None and not _positive(found):
                raise _refusal(name, found, "a positive number")
        for name in ("mscale", "mscale_all_dim"):
            found = getattr(self, name)
            if found is not None and found != 0 and not _positive(found):  # 0 means, as in the files, not given
                raise _refusal(name, found, "zero or a positive number")
        for name in ("short_factor", "long_factor"):
            found = getattr(self, name)
            if found is not None and not (isinstance(found, tuple) and all(_positive(number) for number in found)):
                raise _refusal(name, found, "a list of positive numbers")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise _refusal("high_freq_factor", high, f"above low_freq_factor {low}")

    @classmethod
    def parse(cls, value: RopeScaling | Mapping[str, Any] | None) -> RopeScaling:
        """The value itself, None (no scaling), or a configuration's entry."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise invalid("TYPE_INVALID", f"scaling: {type(value).__name__}", "a RopeScaling, a mapping or None")
        given = {name: item for name, item in value.items() if item is not None and name not in _WITHOUT_EFFECT}
        older = given.pop("type", None)
        word = given.pop("rope_type", older if older is not None else "default")
        given["rope_type"] = _OLDER_NAMES.get(word, word) if isinstance(word, str) else word
        for name, item in given.items():
            if isinstance(item, Mapping):
                raise invalid(
                    "TYPE_INVALID",
                    f"{name}: {type(item).__name__}",
                    f"the entry of one layer type, scaling[{name!r}]",
                    f"scaling[{name!r}] is a mapping: this configuration scales layer types apart",
                )
            if name not in _NAMES:
                near = nearest(str(name), _NAMES, 1) or _NAMES
                raise invalid("SCHEMA_FIELD_UNKNOWN", name, near[0])
            if isinstance(item, list):
                given[name] = tuple(item)
        return cls(**given)

    def original_length(self, max_position_embeddings: int | None) -> int:
        """The pretraining context; as in transformers the model's own where the entry does not say."""
        found = self.original_max_position_embeddings or self.model_length(max_position_embeddings)
        if found is None:
            name = "original_max_position_embeddings"
            raise invalid("SCHEMA_FIELD_MISSING", name, message=f"{self.rope_type} scaling needs {name}")
        if found < 2:
            raise _refusal("original_max_position_embeddings", found, "at least 2")
        return found

    def model_length(self, max_position_embeddings: int | None) -> int | None:
        """The model's context, from the call or from the entry."""
        return max_position_embeddings if max_position_embeddings is not None else self.max_position_embeddings


_NAMES = tuple(field.name for field in fields(RopeScaling))
_POSITIVE = (
    "factor", "rope_theta", "original_max_position_embeddings", "max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _refusal(name: str, value: Any, limit: str) -> InvalidInputError:
    return invalid("VALUE_INVALID", f"{name} {value!r}", limit)
