"""`lz.rope_tables`: the cos and sin tables that `lz.rope` takes, for every scaling models are published with.

Since a scaling only changes the numbers in the tables, every RoPE kernel computes every variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError, invalid, nearest

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
        if not isinstance(self.rope_type, str) or self.rope_type not in _VARIANTS:
            raise invalid("VALUE_INVALID", f"rope_type {self.rope_type!r}", f"one of {', '.join(ROPE_TYPES)}")
        for name in _VARIANTS[self.rope_type][1]:
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
                shown, limit = f"{name}: {type(item).__name__}", f"the entry of one layer type, scaling[{name!r}]"
                message = f"scaling[{name!r}] is a mapping: this configuration scales layer types apart"
                raise invalid("TYPE_INVALID", shown, limit, message)
            if name not in _NAMES:
                near = nearest(str(name), _NAMES, 1) or _NAMES
                raise invalid("SCHEMA_FIELD_UNKNOWN", name, near[0])
            if isinstance(item, list):
                given[name] = tuple(item)
        return cls(**given)

    def original_length(self) -> int:
        """The pretraining context; as in transformers the model's own where the entry does not say."""
        found = self.original_max_position_embeddings or self.max_position_embeddings
        if found is None:
            name = "original_max_position_embeddings"
            raise invalid("SCHEMA_FIELD_MISSING", name, message=f"{self.rope_type} scaling needs {name}")
        if found < 2:
            raise _refusal("original_max_position_embeddings", found, "at least 2")
        return found


_NAMES = tuple(field.name for field in fields(RopeScaling))
_POSITIVE = (
    "factor", "rope_theta", "original_max_position_embeddings", "max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _refusal(name: str, value: Any, limit: str) -> InvalidInputError:
    return invalid("VALUE_INVALID", f"{name} {value!r}", limit)


def rope_tables(
    rotary_dim: int,
    length: int,
    *,
    base: float | None = None,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, rotary_dim / 2], for positions 0 … length - 1.

    `base` is 10000 unless the scaling names its `rope_theta`. `scaling` is a `RopeScaling` or the mapping
    `rope_parameters` (`rope_scaling` in older files) of a transformers configuration: default, linear, ntk (static),
    dynamic (NTK), yarn, llama3, longrope or proportional; anything else is refused with the known names.
    `max_position_embeddings` is the configuration's; dynamic needs it. dynamic and longrope depend on how long the
    present sequence is: `seq_len`, or `length` where it is not given.

    In float32, the default, the angles are computed as in transformers, bit for bit on the CPU: models were trained
    with those, and their rounding shows at far positions. `dtype=torch.float64` computes everything in float64; a
    narrower dtype rounds the float32 tables.
    """
    whole = {"length": length, "seq_len": seq_len, "max_position_embeddings": max_position_embeddings}
    for name, value in {"rotary_dim": rotary_dim, **whole}.items():
        low = 2 if name == "rotary_dim" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise invalid("VALUE_INVALID", f"{name} {value!r}", f"an integer >= {low}")
    if rotary_dim % 2:
        raise invalid("VALUE_INVALID", f"rotary_dim {rotary_dim}", "even: pairs are turned")
    out = torch.float32 if dtype is None else dtype
    if not isinstance(out, torch.dtype) or not out.is_floating_point:
        raise invalid("DTYPE_UNSUPPORTED", str(out), "a floating dtype")
    rule = RopeScaling.parse(scaling)
    if max_position_embeddings is not None:
        rule = replace(rule, max_position_embeddings=max_position_embeddings)
    wide = torch.float64 if out == torch.float64 else torch.float32
    request = _Request(rotary_dim, _base(base, rule), rule, length if seq_len is None else seq_len, wide)
    frequencies, factor = _VARIANTS[rule.rope_type][0](request)
    # Frequencies are made on the CPU whatever the device: pow rounds differently elsewhere, and every angle scales it.
    positions = torch.arange(length, dtype=request.wide, device=device)
    angles = positions[:, None] * frequencies.to(positions.device)[None, :]
    return (angles.cos() * factor).to(out), (angles.sin() * factor).to(out)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the frequencies depend on. `wide` is the dtype they are computed in."""

    dim: int
    base: float
    rule: RopeScaling
    seq_len: int
    wide: torch.dtype


def _base(base: float | None, rule: RopeScaling) -> float:
    found = base if base is not None else rule.rope_theta if rule.rope_theta is not None else 10000.0
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 1 < found < math.inf:
        raise invalid("VALUE_INVALID", f"base {found!r}", "a number above 1")
    if rule.rope_theta is not None and found != rule.rope_theta:
        raise invalid("VALUE_INVALID", f"base {base!r}", f"the scaling's rope_theta, {rule.rope_theta!r}")
    return found


def _wavelengths(request: _Request, base: float) -> Tensor:
    """base ** (2i / dim) for each pair i: the inverse of its frequency."""
    result: Tensor = base ** (torch.arange(0, request.dim, 2).to(request.wide) / request.dim)
    return result


def _default(request: _Request) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(request, request.base), 1.0


def _linear(request: _Request) -> tuple[Tensor, float]:
    """Position interpolation: every angle divided by the factor."""
    return _default(request)[0] / _factor(request), 1.0


def _ntk(request: _Request) -> tuple[Tensor, float]:
    """A larger base: the fastest pair keeps its frequency, the slowest is divided by the factor."""
    base = request.base * _factor(request) ** _base_exponent(request)
    return 1.0 / _wavelengths(request, base), 1.0


def _dynamic(request: _Request) -> tuple[Tensor, float]:
    """NTK with a factor that grows with the sequence once that is longer than the model's context."""
    longest = request.rule.max_position_embeddings or request.rule.original_max_position_embeddings
    if longest is None:
        name = "max_position_embeddings"
        raise invalid("SCHEMA_FIELD_MISSING", name, message=f"dynamic scaling needs {name}")
    factor = _factor(request)
    growth = factor * max(request.seq_len, longest) / longest - (factor - 1)
    return 1.0 / _wavelengths(request, request.base * growth ** _base_exponent(request)), 1.0


def _yarn(request: _Request) -> tuple[Tensor, float]:
    """Fast pairs stay, slow pairs are interpolated, those between are mixed; cos and sin grow a little."""
    rule = request.rule
    original = rule.original_length()
    factor = _factor(request, original)

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original context."""
        return request.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(request.base))

    low, high = pair_turning(rule.beta_fast or 32), pair_turning(rule.beta_slow or 1)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, request.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(request.dim // 2, dtype=request.wide) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    waves = _wavelengths(request, request.base)
    mixed = 1.0 / (factor * waves) * (1 - keep) + 1.0 / waves * keep
    if rule.attention_factor is not None:
        return mixed, rule.attention_factor
    if rule.mscale and rule.mscale_all_dim:
        return mixed, _mscale(factor, rule.mscale) / _mscale(factor, rule.mscale_all_dim)
    return mixed, _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(request: _Request) -> tuple[Tensor, float]:
    """Long waves are divided by the factor, short ones stay, those between are mixed by their wavelength."""
    rule = request.rule
    assert rule.low_freq_factor is not None and rule.high_freq_factor is not None
    original = rule.original_length()
    frequencies = _default(request)[0]
    rotations = original / (2 * math.pi / frequencies)
    keep = ((rotations - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / _factor(request) + keep * frequencies, 1.0


def _longrope(request: _Request) -> tuple[Tensor, float]:
    """A divisor for each pair, found by search: one set up to the original context, one beyond."""
    rule = request.rule
    original = rule.original_length()
    name = "long_factor" if request.seq_len > original else "short_factor"
    divisors = getattr(rule, name)
    if len(divisors) != request.dim // 2:
        raise invalid("SHAPE_INVALID", f"{name} of {len(divisors)}", f"rotary_dim / 2 = {request.dim // 2} numbers")
    attention = rule.attention_factor
    if attention is None:
        factor = _factor(request, original)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretched = torch.tensor(divisors, dtype=request.wide) * _wavelengths(request, request.base)
    return 1.0 / stretched, attention


def _proportional(request: _Request) -> tuple[Tensor, float]:
    """Only the fastest share of the pairs turns; the others stand still inside the same table."""
    share = request.rule.partial_rotary_factor
    turning = int((1.0 if share is None else share) * request.dim // 2)
    frequencies = _default(request)[0]
    still = torch.arange(request.dim // 2) >= turning
    return frequencies.masked_fill(still, 0.0) / (request.rule.factor or 1.0), 1.0


def _factor(request: _Request, original: int | None = None) -> float:
    """The factor; where the entry has none, the model's context over the original one."""
    if request.rule.factor is not None:
        return request.rule.factor
    longest = request.rule.max_position_embeddings
    if longest is None or original is None:
        needed = f"{request.rule.rope_type} scaling needs a factor, or max_position_embeddings to take it from"
        raise invalid("SCHEMA_FIELD_MISSING", "factor", message=needed)
    return longest / original


def _base_exponent(request: _Request) -> float:
    if request.dim <= 2:
        raise invalid("VALUE_INVALID", f"rotary_dim {request.dim}", "above 2, as NTK scaling needs")
    return request.dim / (request.dim - 2)


# variant -> how its frequencies are made, and the fields without which it means nothing
_VARIANTS: dict[str, tuple[Callable[[_Request], tuple[Tensor, float]], tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "ntk": (_ntk, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "yarn": (_yarn, ()),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "longrope": (_longrope, ("short_factor", "long_factor")),
    "proportional": (_proportional, ()),
}
ROPE_TYPES = tuple(_VARIANTS)
