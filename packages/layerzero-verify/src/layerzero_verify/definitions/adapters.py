"""From a definition's inputs to a call of one of our ops, and back: which op an op_type is, and how it is spelled.

An adapter holds the op's name and a function that makes the call with whatever implementation of the op it is given;
so the very same spelling serves every kernel. What no op of ours computes raises `Unsupported`, which becomes a skip
with that reason.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.paged import paged_batch
from layerzero._ops.signature import public_op
from layerzero.errors import LayerZeroError
from layerzero_verify.definitions.schema import Definition, torch_dtype

Op = Callable[..., Any]
Inputs = Mapping[str, Any]
NORMED = ("hidden_states", "input", "x")  # names of what a norm takes


class Unsupported(LayerZeroError, code="FEATURE_UNSUPPORTED"):
    """No op of ours computes this, or not in this form."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`call(op, inputs)` calls the op on a definition's inputs and gives the outputs in the definition's order.

    That of sampling takes `generator=` besides, and its results are judged as draws.
    """

    op: str
    call: Callable[..., Any]


def takes(definition: Definition, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Refuse a definition that lacks an input, or has one whose meaning is not known: it would be left out unseen."""
    for name in needed:
        if name not in definition.inputs:
            raise Unsupported(
                f"{definition.name} has no input {name}", value=f"{definition.op_type} without {name}", limit=needed
            )
    for name in definition.inputs:
        if name not in (*needed, *optional):
            raise Unsupported(
                f"{definition.name}: what the input {name} means to {definition.op_type} is not known",
                value=f"{definition.op_type} with {name}",
                limit=(*needed, *optional),
            )


def first_of(definition: Definition, *names: str) -> str:
    """The name, of several in use for one thing, that this definition has."""
    for name in names:
        if name in definition.inputs:
            return name
    raise Unsupported(f"{definition.name} has none of the inputs {', '.join(names)}", value=names[0], limit=names)


def epsilon(definition: Definition, inputs: Inputs) -> float:
    """The eps of a norm: an input, or the number the reference assigns to EPS."""
    given = inputs.get("eps", definition.constant("eps"))
    if given is None:
        raise Unsupported(
            f"{definition.name} says its eps neither as an input nor as a number in its code",
            code="CONTEXT_FIELD_MISSING",
            value="eps",
            limit="a norm",
        )
    return float(given)


def widened(definition: Definition, name: str, inputs: Inputs) -> Tensor:
    """An input times its scale: low-bit numbers are brought to the dtype of the result, which our op then takes.

    A scale belongs to a row, or to a block of rows and columns; scales of tokens may come transposed.
    """
    tensor: Tensor = inputs[name]
    scale = inputs.get(f"{name}_scale")
    if scale is None:
        return tensor
    axes, own = definition.inputs[f"{name}_scale"].shape or (), definition.inputs[name].shape or ()
    if len(axes) == 2 == len(own) and axes[0] != own[0] and axes[1] == own[0]:
        scale = scale.transpose(0, 1)
    while scale.ndim < tensor.ndim:
        scale = scale[..., None]
    for axis, size in enumerate(tensor.shape):
        scale = scale.repeat_interleave(-(-size // scale.shape[axis]), dim=axis).narrow(axis, 0, size)
    out = torch_dtype(next(iter(definition.outputs.values())).dtype)
    wide: Tensor = tensor.to(torch.float32) * scale.to(torch.float32)
    return wide.to(out)


# -- attention -----------------------------------------------------------------------------------
def last_page_len(inputs: Inputs, page_size: int) -> Tensor:
    """Tokens in the last page of each sequence: as given, or full pages. Some definitions have a slot to spare."""
    sequences: Tensor = inputs["kv_indptr"][1:]
    given = inputs.get("kv_last_page_len")
    return torch.full_like(sequences, page_size) if given is None else given[: len(sequences)]


def block_tables(inputs: Inputs, page_size: int) -> tuple[Tensor, Tensor]:
    """Page numbers as a padded table [B, most], and the keys of each sequence, from offsets and a list of pages."""
    counts = inputs["kv_indptr"].diff()
    last = last_page_len(inputs, page_size)
    tokens = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    rows = torch.zeros((len(counts), max(1, int(counts.max()) if len(counts) else 1)), dtype=torch.int32)
    pages = inputs["kv_indices"].cpu()
    start = inputs["kv_indptr"].tolist()
    for row, (first, end) in enumerate(itertools.pairwise(start)):
        rows[row, : end - first] = pages[first:end]
    return rows.to(counts.device), tokens.to(torch.int32)


def is_causal(definition: Definition) -> bool:
    """Every published prefill is causal, aligned at the end; another one says so in its name."""
    return re.search(r"non_?causal|bidirectional", definition.name) is None


_LOGITS = ("routing_logits", "gating_output", "router_logits")
_ROUTING = (*_LOGITS, "routing_bias", "routed_scaling_factor", "local_expert_offset", "topk_ids", "topk_weights")


def adapter_for(definition: Definition) -> Adapter:
    """The adapter of a definition; raises Unsupported with the reason where there is none."""
    make = ADAPTERS.get(definition.op_type)
    if make is None:
        raise Unsupported(
            f"no op of ours stands for op_type {definition.op_type!r}",
            code="OP_UNKNOWN",
            value=definition.op_type,
            limit=", ".join(ADAPTERS),
        )
    return make(definition)


# -- norms, positions, products, draws --------------------------------------------------------
def _norm(definition: Definition) -> Adapter:
    gemma = "gemma_" if "gemma" in definition.name else ""
    main = first_of(definition, *NORMED)
    takes(definition, (main, "weight"), ("residual", "eps"))
    if "residual" not in definition.inputs:
        return Adapter(f"{gemma}rms_norm", lambda op, i: op(i[main], i["weight"], epsilon(definition, i)))

    def added(op: Op, i: Inputs) -> Any:
        return op(i[main], i["residual"], i["weight"], epsilon(definition, i))[: len(definition.outputs)]

    return Adapter(f"{gemma}add_rms_norm", added)


def _rope(definition: Definition) -> Adapter:
    interleaved = bool(re.search(r"gpt_?j|interleave", definition.name))
    if "cos_sin_cache" in definition.inputs:
        takes(definition, ("q", "k", "cos_sin_cache", "positions"), ("is_neox",))

        def cached(op: Op, i: Inputs) -> Any:
            cos, sin = i["cos_sin_cache"].chunk(2, dim=-1)
            pairs = not i["is_neox"] if "is_neox" in i else interleaved
            q, k = op(
                i["q"][None], i["k"][None], cos, sin,
                interleaved=pairs, layout="BSHD", position_ids=i["positions"][None],
            )  # fmt: skip
            return q[0], k[0]

        return Adapter("rope", cached)
    takes(definition, ("q", "k", "cos", "sin"))

    def tabled(op: Op, i: Inputs) -> Any:
        q, cos, sin = i["q"], i["cos"], i["sin"]
        if cos.shape[-1] == q.shape[-1] and cos.ndim == 2:  # one angle per element: the form with a batch axis
            cos, sin = (table[None].expand(q.shape[0], *table.shape) for table in (cos, sin))
        return op(q, i["k"], cos, sin, interleaved=interleaved, layout="BHSD")

    return Adapter("rope", tabled)


def _gemm(definition: Definition) -> Adapter:
    takes(definition, ("A", "B"), ("A_scale", "B_scale"))
    return Adapter("linear", lambda op, i: op(widened(definition, "A", i), widened(definition, "B", i)))


def _sampling(definition: Definition) -> Adapter:
    takes(definition, ("probs",), ("top_k", "top_p", "min_p"))

    def call(op: Op, i: Inputs, generator: torch.Generator | None = None) -> Any:
        given = {name: i[name] for name in ("top_k", "top_p", "min_p") if name in i}
        return op(i["probs"].log(), **given, generator=generator)

    return Adapter("sample", call)


# -- attention: pages as tables, and the log-sum-exp in base 2 ------------------------------------
def _outputs(definition: Definition, result: Any) -> Any:
    """(out, lse), the lse in base 2 as the definitions have it, as many as the definition wants."""
    out, lse = result
    return (out, lse / math.log(2.0))[: len(definition.outputs)]


def _paged(kind: str, tensors: tuple[str, ...], more: tuple[str, ...], definition: Definition) -> Adapter:
    """Attention over pages: decode without `qo_indptr`, prefill with it."""
    takes(definition, (*tensors, "kv_indptr", "kv_indices", *more), ("qo_indptr", "kv_last_page_len", "sm_scale"))
    if not is_causal(definition):
        raise Unsupported(f"{definition.name}: paged attention is causal here", value="attention that is not causal")

    def call(op: Op, i: Inputs) -> Any:
        tables, tokens = block_tables(i, i[tensors[-1]].shape[1])
        queries = i["qo_indptr"].diff() if "qo_indptr" in i else None
        batch = paged_batch(tables, tokens, query_lens=queries)
        result = op(*(i[name] for name in tensors), batch, scale=i.get("sm_scale"), return_lse=True)
        return _outputs(definition, result)

    return Adapter(kind, call)


def _gqa_ragged(definition: Definition) -> Adapter:
    takes(definition, ("q", "k", "v", "qo_indptr", "kv_indptr"), ("sm_scale",))
    causal = is_causal(definition)

    def call(op: Op, i: Inputs) -> Any:
        result = op(
            i["q"], i["k"], i["v"], i["qo_indptr"], i["kv_indptr"],
            is_causal="bottom_right" if causal else False, scale=i.get("sm_scale"), return_lse=True,
        )  # fmt: skip
        return _outputs(definition, result)

    return Adapter("varlen_attention", call)


# -- experts -------------------------------------------------------------------------------------
def _moe(definition: Definition) -> Adapter:
    first = first_of(definition, "w1", "w13", "gemm1_weights", "gate_up_proj")
    second = first_of(definition, "w2", "gemm2_weights", "down_proj")
    scales = [f"{name}_scale" for name in ("hidden_states", first, second)]
    takes(definition, ("hidden_states", first, second), (*scales, *_ROUTING))
    route = _router(definition)
    # TensorRT-LLM's experts, which FlashInfer's fused kernels follow, hold the up half before the gate.
    up_first = any(tag.startswith("fi_api:") and "trtllm" in tag for tag in definition.tags)

    def call(op: Op, i: Inputs) -> Any:
        x, gate_up, down = (widened(definition, name, i) for name in ("hidden_states", first, second))
        if up_first:
            gate_up = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)
        weights, ids = route(i)
        return op(x, gate_up, down, weights, ids, expert_offset=int(i.get("local_expert_offset", 0)))

    return Adapter("moe", call)


def _router(definition: Definition) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """How the experts of a token are found: given, by DeepSeek's groups with a bias, or by the renormalised best k."""
    if {"topk_ids", "topk_weights"} <= set(definition.inputs):
        return lambda i: (i["topk_weights"], i["topk_ids"])
    logits = first_of(definition, *_LOGITS)
    grouped, plain = "ds_routing" in definition.name, "renorm" in definition.name
    if not (grouped or plain):
        raise Unsupported(
            f"{definition.name}: the way tokens are routed is not known",
            value="its routing",
            hint="topk_ids and topk_weights as inputs, or ds_routing or renorm in the name",
        )
    k = _count(definition, "top_k", "topk")
    gate = public_op("topk_gate").function
    if plain:
        return lambda i: gate(i[logits].float(), k, scoring="softmax", renormalize=True)
    groups, best = _count(definition, "n_group", "ng"), _count(definition, "topk_group", "kg")
    return lambda i: gate(
        i[logits].float(), k, scoring="sigmoid", renormalize=True, bias=i["routing_bias"].float(),
        num_groups=groups, top_groups=best, scale=float(i.get("routed_scaling_factor", 1.0)),
    )  # fmt: skip


def _count(definition: Definition, constant: str, word: str) -> int:
    """A whole number the definition fixes: as an axis, in its code, or in its name (topk8, ng8)."""
    found = definition.constant(constant)
    named = re.search(rf"(?<![a-z]){word}(\d+)", definition.name)
    if found is None and named is None:
        raise Unsupported(f"{definition.name} does not say {constant}", code="CONTEXT_FIELD_MISSING", value=constant)
    return int(found if found is not None else named[1])  # type: ignore[index]


ADAPTERS: Mapping[str, Callable[[Definition], Adapter]] = {
    "rmsnorm": _norm,
    "fused_add_rmsnorm": _norm,
    "gqa_paged": partial(_paged, "paged_attention", ("q", "k_cache", "v_cache"), ()),
    "gqa_ragged": _gqa_ragged,
    "mla_ragged": _gqa_ragged,
    "mla_paged": partial(_paged, "mla_paged_attention", ("q_nope", "q_pe", "ckv_cache", "kpe_cache"), ("sm_scale",)),
    "moe": _moe,
    "gemm": _gemm,
    "sampling": _sampling,
    "rope": _rope,
}
