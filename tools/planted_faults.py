"""Backends that are wrong in one way each, as `lz verify` has to find them. Used by test_verify_faults.py.

Every fault is one kernel of a plugin package: its source is right but for the part that `old` and `new` replace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import faulty_plugins as faults

__all__ = ["FAULTS", "STANDING_IN", "Fault", "install", "install_standing_in"]

_ATTENTION = """
import math
import torch

def attention(query, key, value, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, return_lse):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.float() @ key.float().transpose(-1, -2)) * factor
    rows, columns = scores.shape[-2:]
    shift = 0 if is_causal is True else columns - rows
    ahead = torch.arange(columns) - torch.arange(rows)[:, None] - shift
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if is_causal:
        hidden |= ahead > 0
    if window is not None and window[0] >= 0:
        hidden |= ahead < -window[0]
    if window is not None and window[1] >= 0:
        hidden |= ahead > window[1]
    scores = scores.masked_fill(hidden, -math.inf)
    dead = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return (weights @ value.float()).to(query.dtype)
"""
_ATTENTION_FIELDS = {
    "layouts": ["BHSD"], "backward": True, "gqa": True, "causal": ["top_left", "bottom_right"], "window": True,
    "deterministic": True, "dtypes": ["float32"],
}  # fmt: skip

_ROPE = """
import torch

def rope(q, k, cos, sin, interleaved, layout, position_ids, inplace):
    half = q.shape[-1] // 2
    axis = 1 if layout == "BHSD" else 2
    cos, sin = (t[..., :half] for t in (cos, sin))
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    elif layout == "BSHD":
        cos, sin = cos[:, None], sin[:, None]

    def turn(x):
        wide = x.float()
        a, b = wide[..., :half], wide[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return turn(q), None if k is None else turn(k)
"""
_PAIRS = """        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
"""
_HALVES = """        a, b = wide[..., :half], wide[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
"""
_ROPE_FIELDS = {
    "layouts": ["BHSD", "BSHD"], "backward": True, "mixed_dtypes": True, "deterministic": True,
    "features": ["rotate_half", "mixed_tables", "no_key"], "dtypes": ["float32"],
}  # fmt: skip

_RMS_NORM = """
import torch

def rms_norm(x, weight, eps):
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (out if weight is None else out * weight.float()).to(x.dtype)
"""
_NORM_FIELDS = {"backward": True, "deterministic": True, "features": ["no_weight"], "dtypes": ["float32", "bfloat16"]}

_LINEAR = """
import torch

def linear(x, weight, bias, activation):
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
"""
_NARROW_SUM = """    out = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for start in range(0, x.shape[-1], 8):
        out = out + x[..., start : start + 8] @ weight[:, start : start + 8].t()
"""
_STALE = """    key = (weight.data_ptr(), weight.shape, weight.dtype)
    if key not in _packed:
        _packed[key] = weight.float().t().contiguous()
    out = x.float() @ _packed[key]
"""
_PACKED = """
import torch

def pack(source):
    return ((source.data.float() * source.scale).t().contiguous(),)

def linear(x, weight, bias, activation):
    (columns,) = weight.ready()
    out = x.float() @ columns
    return (out if bias is None else out + bias.float()).to(x.dtype)
"""
_LINEAR_FIELDS = {"backward": True, "deterministic": True, "features": ["bias"], "dtypes": ["float32", "bfloat16"]}

_PAGED = """
import math
import torch

def paged_attention(query, key_cache, value_cache, batch, scale, window, softcap, slopes, return_lse, layout, *rest):
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    page = key_cache.shape[1]
    groups = query.shape[1] // key_cache.shape[2]
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    outs, start = [], 0
    for row, (context, new) in enumerate(zip(batch.context_lens_host, batch.query_lens_host)):
        pages = batch.block_tables[row, : -(-context // page)].long()
        k, v = (c[pages].flatten(0, 1)[:context].repeat_interleave(groups, 1) for c in (key_cache, value_cache))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + new].float(), k.float()) * factor
        later = torch.ones(new, context, dtype=torch.bool).triu(1 + context - new)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v.float()).to(query.dtype))
        start += new
    return torch.cat(outs)
"""
_PAGED_FIELDS = {
    "gqa": True, "deterministic": True, "dtypes": ["float32"], "features": ["paged_prefill"],
    "paged": {"layouts": ["NHD", "HND"], "index_dtypes": ["int32", "int64"]},
}  # fmt: skip

_SAMPLE = """
import torch

def sample_topk(logits, k, temperature, generator):
    best = logits.float().topk(k).indices if temperature else logits.float().topk(1).indices
    if not temperature:
        return best[:, 0]
    odds = (logits.float().gather(1, best) / temperature).softmax(-1)
    return best.gather(1, torch.multinomial(odds, 1, generator=generator))[:, 0]
"""

_SWIGLU = """
import torch

class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        share = torch.sigmoid(gate)
        slope = share * (1 + gate * (1 - share))
        return torch.cat((grad.float() * up * slope, grad.float() * gate * share), dim=-1).to(x.dtype)

def silu_and_mul(x):
    return Gated.apply(x)
"""


@dataclass(frozen=True)
class Fault:
    """One mistake: where it is in the source, and what the report has to say of it."""

    op: str
    source: str
    old: str
    new: str
    fields: dict[str, Any] = field(default_factory=dict)
    stage: str = ""  # a part of the stage's name
    check: str = "forward"  # the check that finds it


FAULTS: dict[str, Fault] = {
    "rope_pairs": Fault("rope", _ROPE, _HALVES, _PAIRS, _ROPE_FIELDS, "rotate_half"),
    "causal_off_by_one": Fault("attention", _ATTENTION, "ahead > 0\n", "ahead > 1\n", _ATTENTION_FIELDS, "causal"),
    "top_left": Fault(
        "attention", _ATTENTION, "0 if is_causal is True else columns - rows", "0 if is_causal else columns - rows",
        _ATTENTION_FIELDS, "causal_bottom_right",
    ),
    "missing_scale": Fault(
        "attention", _ATTENTION, "factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale",
        "factor = 1.0 if scale is None else scale", _ATTENTION_FIELDS, "prefill",
    ),
    "wrong_gqa": Fault(
        "attention", _ATTENTION, "key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)",
        "key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)", _ATTENTION_FIELDS, "gqa",
    ),
    "ignored_window": Fault(
        "attention", _ATTENTION, "    hidden = torch", "    window = None\n    hidden = torch", _ATTENTION_FIELDS,
        "window",
    ),
    "swapped_cache": Fault(
        "paged_attention", _PAGED, 'if layout == "HND"', 'if layout == "nobody"', _PAGED_FIELDS, "HND", "KV layout"
    ),
    "unseeded": Fault(
        "sample_topk", _SAMPLE, ", generator=generator", "", {"features": ["generator"], "dtypes": ["float32"]},
        "seeded", "seeded",
    ),
    "narrow_sum": Fault(
        "linear", _LINEAR, "    out = x.float() @ weight.float().t()\n", _NARROW_SUM, _LINEAR_FIELDS, "long_product"
    ),
    "stale_weight": Fault(
        "linear", "_packed = {}\n" + _LINEAR, "    out = x.float() @ weight.float().t()\n", _STALE,
        {**_LINEAR_FIELDS, "backward": False}, "rewritten", "no stale state",
    ),
    "stale_parts": Fault(
        "linear", _PACKED, "weight.ready()", "weight.parts",
        {
            "deterministic": True, "features": ["bias", "weight_only"], "dtypes": ["float32"],
            "quant_formats": ["int8"], "granularities": ["channel"], "weight_layout": "columns",
            "packer": "faulty_{backend}.kernels:pack",
        },
        "source rewritten", "packed weight",
    ),
    "eps_outside": Fault(
        "rms_norm", _RMS_NORM, "torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)",
        "1.0 / (wide.square().mean(-1, keepdim=True).sqrt() + eps)", _NORM_FIELDS, "eps",
    ),
    "wrong_gradient": Fault(
        "silu_and_mul", _SWIGLU, "slope = share * (1 + gate * (1 - share))", "slope = share",
        {"backward": True, "deterministic": True, "dtypes": ["float32"]}, "result", "backward",
    ),
    "restless": Fault(
        "rms_norm", _RMS_NORM, "    wide = x.float()\n",
        # noise of the size of float32's rounding, another for each element: a common factor would cancel
        "    wide = x.float() * (1 + 1e-7 * torch.randn(x.shape[-1]))\n",
        _NORM_FIELDS, "result", "determinism",
    ),
    "overwrites": Fault(
        "rms_norm", _RMS_NORM, "    wide = x.float()\n", "    wide = x.float().clone()\n    x.zero_()\n",
        _NORM_FIELDS, "inputs", "inputs unchanged",
    ),
}  # fmt: skip


def install(folder: Path, name: str, *, right: bool = False) -> str:
    """Write the backend into `folder` (with its kernel put right, if asked) and return its name."""
    fault = FAULTS[name]
    assert fault.source.count(fault.old) == 1, f"{name}: {fault.old!r} is not in the source once"
    backend = f"{name}_right" if right else name
    source = fault.source if right else fault.source.replace(fault.old, fault.new)
    _write(folder, backend, fault.op, source, fault.fields)
    return backend


def _write(folder: Path, backend: str, op: str, source: str, fields: dict[str, Any]) -> None:
    kernel = {
        "kernel_id": f"{backend}.{op}.fast", "function": f"faulty_{backend}.kernels:{op}", "priority": 90, **fields
    }  # fmt: skip
    if "packer" in kernel:
        kernel["packer"] = kernel["packer"].replace("{backend}", backend)
    faults.install(
        folder, "healthy", backend,
        descriptor={"schema_version": "1.0", "backend": backend, "platforms": ["cpu"], "ops": {op: [kernel]}},
    )  # fmt: skip
    (folder / f"faulty_{backend}" / "kernels.py").write_text(source, encoding="utf-8")


# -- the bug of a convention that is right by its own measure ---------------------------------------------
STANDING_IN = "twisted"

_OP = """
from layerzero.model.op import OperationSpec
from layerzero.model.enums import OpKind
from layerzero._ops.positional import ROPE
from dataclasses import replace

def describe(call):
    return replace(ROPE.describe(call), op="{op}")

def reference(*args):
    from faulty_{backend}.kernels import {op}
    return {op}(*args)

@hookimpl
def layerzero_register(registrar):
    registrar.backend(CAPABILITIES)
    registrar.op(OperationSpec(
        op_id="{op}", op_kind=OpKind.TENSOR, arguments=ROPE.arguments, input_kinds=ROPE.input_kinds,
        output_kind="tensors", describe=describe, fallback_impl=reference,
        fallback_id="{backend}.{op}.fast", growing=("seq_len_q",), stands_for="rope",
    ))
"""


def install_standing_in(folder: Path, *, right: bool = False) -> str:
    """A backend with a rotation of its own that stands in for `rope`: its kernel agrees with its own reference.

    The wrong one turns neighbouring elements, which is a rotary embedding too, but not the one Llama's weights were
    trained with: kernel and layer are consistent, the model is not.
    """
    backend = f"{STANDING_IN}_right" if right else STANDING_IN
    op = f"{backend}_rope"
    source = (_ROPE if right else _ROPE.replace(_HALVES, _PAIRS)).replace("def rope(", f"def {op}(")
    features = ["rotate_half", "mixed_tables", "no_key", "batched_tables"]
    _write(folder, backend, op, source, {**_ROPE_FIELDS, "features": features})
    plugin = folder / f"faulty_{backend}" / "plugin.py"
    head = plugin.read_text(encoding="utf-8").partition("@hookimpl")[0]
    plugin.write_text(head + _OP.replace("{backend}", backend).replace("{op}", op), encoding="utf-8")
    return backend
