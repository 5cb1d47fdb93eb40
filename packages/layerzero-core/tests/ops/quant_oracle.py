"""The storage formats from their definitions, in Python numbers and NumPy; nothing of LayerZero's own code.

E2M1, E4M3, E5M2, E8M0 are read bit by bit (OCP MX 1.0, OCP FP8 1.0), NF4 from its published table. `value_of` gives the
number a stored element stands for in float64, `matmul` a product in exact integers where the codes are integers.
"""

from __future__ import annotations

import math

import numpy as np
import torch

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def small_float(code, exponent_bits, mantissa_bits, *, infinities):
    """The number behind the bits; `infinities` tells E5M2, which has them, from E4M3FN, which has one NaN."""
    bits = 1 + exponent_bits + mantissa_bits
    sign = -1.0 if code >> (bits - 1) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    full, bias = (1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1
    if infinities and exponent == full:
        return sign * math.inf if mantissa == 0 else math.nan
    if not infinities and exponent_bits > 2 and exponent == full and mantissa == (1 << mantissa_bits) - 1:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def e2m1(code):
    return small_float(code, 2, 1, infinities=False)


def e4m3(code):
    return small_float(code, 4, 3, infinities=False)


def e5m2(code):
    return small_float(code, 5, 2, infinities=True)


def e8m0(code):
    return math.nan if code == 255 else 2.0 ** (code - 127)


def signed(code, bits):
    return code - (1 << bits) if code >> (bits - 1) else code


CODES = {
    "int8": {code: float(signed(code, 8)) for code in range(256)},
    "int4": {code: float(signed(code, 4)) for code in range(16)},
    "fp8_e4m3": {code: e4m3(code) for code in range(256)},
    "fp8_e5m2": {code: e5m2(code) for code in range(256)},
    "mxfp4": {code: e2m1(code) for code in range(16)},
    "nvfp4": {code: e2m1(code) for code in range(16)},
    "nf4": dict(enumerate(NF4)),
}
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "mxfp4": 6.0, "nvfp4": 6.0, "nf4": 1.0}
PACKED = ("int4", "mxfp4", "nvfp4", "nf4")


def nearest(fmt, number):
    """The code of the nearest value by exhaustive search; a tie goes to the even code (in NF4 to the lower one)."""
    best = []
    for code, value in CODES[fmt].items():
        if math.isfinite(value) and not (fmt in ("int8", "int4") and value < -LARGEST[fmt]):
            distance = abs(value - number)  # exact: differences of small floats near each other are
            if not best or distance < best[0][0]:
                best = [(distance, code)]
            elif distance == best[0][0]:
                best.append((distance, code))
    negative = math.copysign(1.0, number) < 0
    if fmt not in ("int8", "int4", "nf4"):  # of two zeros the one with the sign of the number
        best = [b for b in best if CODES[fmt][b[1]] != 0.0 or (math.copysign(1.0, CODES[fmt][b[1]]) < 0) == negative]
    codes = [code for _, code in best]
    return min(codes) if fmt == "nf4" else min(codes, key=lambda code: (code & 1, code))


def unpacked(qt):
    """Stored codes as unsigned integers, one for each element."""
    raw = qt.data.contiguous().view(torch.uint8).cpu().numpy().astype(np.int64)
    if qt.fmt.value not in PACKED:
        return raw
    return np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)


def scales(qt):
    """The scale of each element in float64, the tensor scale included."""
    kind = qt.scale.dtype
    if kind == torch.float32:
        found = qt.scale.detach().cpu().numpy().astype(np.float64)
    else:
        read = e4m3 if kind == torch.float8_e4m3fn else e8m0
        bits = qt.scale.contiguous().view(torch.uint8).cpu().numpy()
        found = np.vectorize(read, otypes=[np.float64])(bits) if bits.size else bits.astype(np.float64)
    if qt.tensor_scale is not None:
        found = found * float(qt.tensor_scale)
    return _spread(found, qt.shape)


def _spread(per_group, shape):
    if per_group.ndim == 0:
        return np.broadcast_to(per_group, shape)
    groups = per_group.shape[-1]
    return np.repeat(per_group, shape[-1] // groups if groups else 0, axis=-1)


def value_of(qt):
    """What each element stands for, float64."""
    table = CODES[qt.fmt.value]
    codes = unpacked(qt)
    values = np.array([table[code] for code in range(len(table))])[codes]
    if qt.zero_point is not None:
        values = values - _spread(qt.zero_point.cpu().numpy().astype(np.float64), qt.shape)
    return values * scales(qt)


def half_gap(fmt, normed):
    """Half the distance between the two values of a format around each number; for one beyond them half the last."""
    values = np.array(sorted({v for v in CODES[fmt].values() if math.isfinite(v) and abs(v) <= LARGEST[fmt]}))
    above = np.clip(np.searchsorted(values, normed), 1, len(values) - 1)
    return (values[above] - values[above - 1]) / 2


def matmul(x, qt):
    """x @ weight.T, element by element. Where x is whole and codes are integers the sums are exact int64."""
    rows = x.detach().cpu().double().numpy()
    weight = value_of(qt)
    out = np.zeros((rows.shape[0], weight.shape[0]))
    for i in range(rows.shape[0]):
        for j in range(weight.shape[0]):
            out[i, j] = math.fsum(rows[i] * weight[j])
    return out
