"""Ground truths besides a definition's own code: FlashInfer, SGLang, and plain PyTorch where neither is there.

FlashInfer comes first, SGLang beside it where both are installed (they are then compared with each other too), PyTorch
only when neither is. A library that is missing, or needs a GPU that is not there, is named with its reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.reasons import Reason, reason
from layerzero_verify.definitions.adapting import NORMED, block_tables, epsilon, first_of, is_causal, lengths_of
from layerzero_verify.definitions.schema import Definition
from layerzero_verify.definitions.vendors import FLASHINFER, SGLANG

# What has to be importable, and the distribution that brings it.
_MODULES = {"flashinfer": ("flashinfer", "flashinfer-python"), "sglang": ("sgl_kernel", "sgl-kernel")}
_EXPERTS = ("sglang", "sglang")
_NEEDS_GPU = frozenset({"flashinfer", "sglang"})

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Truth:
    """Somebody else's result for a definition's inputs. `partial` ones give only the first outputs."""

    source: str
    run: Callable[[Inputs], Any]
    partial: bool = False


def find_truths(definition: Definition, device: torch.device) -> tuple[list[Truth], dict[str, Reason]]:
    """The ground truths to use here, in order, and why each of the others is not used."""
    found: list[Truth] = []
    missing: dict[str, Reason] = {}
    for source, table in (("flashinfer", FLASHINFER), ("sglang", SGLANG)):
        refused = _refusal(source, table, definition, device)
        if refused is None:
            run = functools.partial(table[definition.op_type], definition)
            found.append(Truth(source, run))
        else:
            missing[source] = refused
    plain = _PYTORCH.get(definition.op_type)
    if not found and plain is None:
        missing["pytorch"] = reason("FEATURE_UNSUPPORTED", definition.op_type, detail="PyTorch has no op for it")
    elif not found:
        assert plain is not None
        found.append(Truth("pytorch", functools.partial(plain, definition), partial=definition.op_type in _PARTIAL))
    return found, missing


def _refusal(source: str, table: Mapping[str, Any], definition: Definition, device: torch.device) -> Reason | None:
    if definition.op_type not in table:
        return reason("FEATURE_UNSUPPORTED", definition.op_type, detail=f"no function of {source} is known for it")
    module, dist = _EXPERTS if (source, definition.op_type) == ("sglang", "moe") else _MODULES[source]
    if importlib.util.find_spec(module) is None:
        return reason("BACKEND_NOT_INSTALLED", dist, dist)
    if source in _NEEDS_GPU and device.type != "cuda":
        return reason("PLATFORM_MISMATCH", device.type, "cuda")
    try:
        importlib.import_module(module)
    except Exception as error:  # a vendor may fail in its own ways; that it cannot be used is all that counts here
        return reason("BACKEND_IMPORT_FAILED", f"{type(error).__name__}: {error}")
    return None


# -- PyTorch -------------------------------------------------------------------------------------
def _linear(definition: Definition, i: Inputs) -> Tensor:
    if "A_scale" in i or "B_scale" in i:
        raise NotImplementedError("torch.nn.functional.linear takes no scales")
    return F.linear(i["A"], i["B"])


def _rms_norm(definition: Definition, i: Inputs) -> Any:
    weight = i["weight"].float() + (1.0 if "gemma" in definition.name else 0.0)
    x = i[first_of(definition, *NORMED)]
    stream = x.float() + i["residual"].float() if "residual" in i else x.float()
    out = F.rms_norm(stream, (stream.shape[-1],), weight, epsilon(definition, i)).to(x.dtype)
    return (out, stream.to(x.dtype))[: len(definition.outputs)]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool = True) -> Tensor:
    """One sequence, [tokens, heads, dim] each; causal means aligned at the end."""
    rows, columns = q.shape[0], k.shape[0]
    if columns == 0:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    mask = mask.tril(columns - rows) if causal else mask
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _paged(definition: Definition, i: Inputs) -> tuple[Tensor]:
    tables, tokens = block_tables(i, i["k_cache"].shape[1])
    counts = lengths_of(i["qo_indptr"]) if "qo_indptr" in i else torch.ones_like(tokens)
    outs = []
    for q, row, length in zip(i["q"].split(counts.tolist()), tables, tokens.tolist(), strict=True):
        k, v = (i[name][row.long()].flatten(0, 1)[:length] for name in ("k_cache", "v_cache"))
        outs.append(_attend(q, k, v, i.get("sm_scale")))
    return (torch.cat(outs),)


def _ragged(definition: Definition, i: Inputs) -> tuple[Tensor]:
    queries, keys = (lengths_of(i[name]).tolist() for name in ("qo_indptr", "kv_indptr"))
    parts = zip(i["q"].split(queries), i["k"].split(keys), i["v"].split(keys), strict=True)
    causal = is_causal(definition)
    return (torch.cat([_attend(q, k, v, i.get("sm_scale"), causal) for q, k, v in parts]),)


_PYTORCH: Mapping[str, Callable[[Definition, Inputs], Any]] = {
    "gemm": _linear,
    "rmsnorm": _rms_norm,
    "fused_add_rmsnorm": _rms_norm,
    "gqa_paged": _paged,
    "gqa_ragged": _ragged,
    "mla_ragged": _ragged,
}
# PyTorch's attention gives no log-sum-exp.
_PARTIAL = frozenset({"gqa_paged", "gqa_ragged", "mla_ragged"})
