"""`lz.rope_tables`: the cos and sin tables that `lz.rope` takes, for every scaling models are published with.

Since a scaling only changes the numbers in the tables, every RoPE kernel computes every variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero.errors import invalid
from layerzero_models.rope_scaling import RopeScaling

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
    import torch

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
    request = _Request(
        dim=rotary_dim,
        base=_base(base, rule),
        rule=rule,
        seq_len=length if seq_len is None else seq_len,
        max_position_embeddings=max_position_embeddings,
        wide=torch.float64 if out == torch.float64 else torch.float32,
    )
    frequencies, factor = _VARIANTS[rule.rope_type](request)
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
    max_position_embeddings: int | None
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
    import torch

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
    longest = request.rule.model_length(request.max_position_embeddings)
    longest = request.rule.original_max_position_embeddings if longest is None else longest
    if longest is None:
        raise invalid(
            "SCHEMA_FIELD_MISSING", "max_position_embeddings", message="dynamic scaling needs max_position_embeddings"
        )
    factor = _factor(request)
    growth = factor * max(request.seq_len, longest) / longest - (factor - 1)
    return 1.0 / _wavelengths(request, request.base * growth ** _base_exponent(request)), 1.0


def _yarn(request: _Request) -> tuple[Tensor, float]:
    """Fast pairs stay, slow pairs are interpolated, those between are mixed; cos and sin grow a little."""
    import torch

    rule = request.rule
    original = rule.original_length(request.max_position_embeddings)
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
    attention = rule.attention_factor
    if attention is None and rule.mscale and rule.mscale_all_dim:
        attention = _mscale(factor, rule.mscale) / _mscale(factor, rule.mscale_all_dim)
    return (
        1.0 / (factor * waves) * (1 - keep) + 1.0 / waves * keep,
        _mscale(factor, 1.0) if attention is None else attention,
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(request: _Request) -> tuple[Tensor, float]:
    """Long waves are divided by the factor, short ones stay, those between are mixed by their wavelength."""
    rule = request.rule
    assert rule.low_freq_factor is not None and rule.high_freq_factor is not None
    original = rule.original_length(request.max_position_embeddings)
    frequencies = _default(request)[0]
    rotations = original / (2 * math.pi / frequencies)
    keep = ((rotations - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / _factor(request) + keep * frequencies, 1.0


def _longrope(request: _Request) -> tuple[Tensor, float]:
    """A divisor for each pair, found by search: one set up to the original context, one beyond."""
    import torch

    rule = request.rule
    original = rule.original_length(request.max_position_embeddings)
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
    import torch

    share = request.rule.partial_rotary_factor
    turning = int((1.0 if share is None else share) * request.dim // 2)
    frequencies = _default(request)[0]
    still = torch.arange(request.dim // 2) >= turning
    return frequencies.masked_fill(still, 0.0) / (request.rule.factor or 1.0), 1.0


def _factor(request: _Request, original: int | None = None) -> float:
    """The factor; where the entry has none, the model's context over the original one."""
    if request.rule.factor is not None:
        return request.rule.factor
    longest = request.rule.model_length(request.max_position_embeddings)
    if longest is None or original is None:
        raise invalid(
            "SCHEMA_FIELD_MISSING",
            "factor",
            message=f"{request.rule.rope_type} scaling needs a factor, or max_position_embeddings to take it from",
        )
    return longest / original


def _base_exponent(request: _Request) -> float:
    if request.dim <= 2:
        raise invalid("VALUE_INVALID", f"rotary_dim {request.dim}", "above 2, as NTK scaling needs")
    return request.dim / (request.dim - 2)


_VARIANTS: dict[str, Callable[[_Request], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
