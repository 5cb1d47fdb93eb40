"""A call of an op from shapes alone: `--shape 1,32,4096,128 --causal` becomes the arguments of `lz.attention`.

Tensors are made on torch's meta device, where they have shapes and strides but no memory, so any size and any device
can be asked about. On an accelerator that is here, real ones are made: torch's own checks look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero.cli import calls_more
from layerzero.cli.words import device as device_of
from layerzero.cli.words import dtype as dtype_of
from layerzero.cli.words import is_here
from layerzero.dispatch.run import current_world, describe
from layerzero.model.context import Context
from layerzero.model.kv_cache import make_paged_batch
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits, resolve_granularity
from layerzero.tuning.inputs import build as build_call

__all__ = ["BUILDERS", "context"]

Args = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Made:
    """The options of a call, and the means to make its tensors. Every option that is read is struck off."""

    op: str
    options: dict[str, Any]
    where: str
    dtype: torch.dtype

    def take(self, name: str, default: Any = None) -> Any:
        """An option's value; asking for it says that this op understands it."""
        value = self.options.pop(name, None)
        return default if value is None else value

    def shape(self, name: str, ranks: tuple[int, ...], form: str, default: tuple[int, ...] | None = None) -> Any:
        """A shape that must be given (unless there is a default), of one of these ranks; any when there are none."""
        given = self.take(name, default)
        if given is None:
            raise click.UsageError(f"lz needs --{name} {form} for {self.op}")
        if ranks and len(given) not in ranks:
            shown = ",".join(str(size) for size in given)
            raise click.UsageError(f"--{name} {shown} has {len(given)} sizes; {self.op} takes {form}")
        return given

    def tensor(self, *sizes: int, dtype: torch.dtype | None = None, grad: bool = False) -> Tensor:
        """A tensor of the call."""
        made = torch.empty(sizes, dtype=dtype or self.dtype, device=self.where)
        return made.requires_grad_() if grad else made


def _attention(made: Made) -> Args:
    form = "B,H,S,D"
    whole = made.take("shape")
    query_shape = made.shape("q", (3, 4), f"{form} (or --shape for query, key and value alike)", whole)
    key_shape = made.shape("k", (3, 4), form, whole or query_shape)
    value_shape = made.shape("v", (3, 4), form, key_shape)
    layout, grad = made.take("layout", "BHSD"), bool(made.take("grad"))
    query, key, value = (made.tensor(*shape, grad=grad) for shape in (query_shape, key_shape, value_shape))
    seq, heads = (1, 2) if layout == "BSHD" or len(query_shape) == 3 else (2, 1)
    mask = made.take("mask")
    slopes = made.take("alibi")
    options = {
        "layout": layout,
        "is_causal": {None: False, "top_left": True}.get(made.take("causal"), "bottom_right"),
        "dropout_p": made.take("dropout", 0.0),
        "window": _window(made.take("window")),
        "softcap": made.take("softcap"),
        "return_lse": bool(made.take("lse")),
        "attn_mask": None,
    }
    if mask is not None:
        kind = torch.bool if mask == "bool" else made.dtype
        options["attn_mask"] = made.tensor(query_shape[seq], key_shape[seq], dtype=kind)
    if slopes:
        options["alibi_slopes"] = made.tensor(query_shape[heads], dtype=torch.float32)
    return (query, key, value), options


def _window(given: tuple[int, ...] | None) -> Any:
    if given is None:
        return None
    if len(given) > 2:
        raise click.UsageError("--window takes LEFT or LEFT,RIGHT")
    return given[0] if len(given) == 1 else given


def _paged(made: Made) -> Args:
    tokens, heads, dim = made.shape("q", (3,), "TOKENS,H,D", made.take("shape"))
    cache = made.shape("k", (4,), "BLOCKS,PAGE,HKV,D")
    layout, grad = made.take("layout", "NHD"), bool(made.take("grad"))
    blocks, page = cache[0], cache[1] if layout == "NHD" else cache[2]
    batch = max(1, tokens)  # decode: one new token for each sequence
    columns = max(1, blocks // batch)
    length = made.take("context", columns * page)
    columns = max(columns, -(-length // page) if page else columns)
    index = torch.int32
    tables = make_paged_batch(
        made.tensor(batch, columns, dtype=index), made.tensor(batch, dtype=index), None, [length] * batch
    )
    options = {
        "layout": layout,
        "window": _window(made.take("window")),
        "softcap": made.take("softcap"),
        "return_lse": bool(made.take("lse")),
    }
    if made.take("alibi"):
        options["alibi_slopes"] = made.tensor(heads, dtype=torch.float32)
    return (made.tensor(tokens, heads, dim, grad=grad), made.tensor(*cache), made.tensor(*cache), tables), options


def _varlen(made: Made) -> Args:
    query_shape = made.shape("q", (3,), "TOKENS,H,D", made.take("shape"))
    key_shape = made.shape("k", (3,), "TOKENS,HKV,D", query_shape)
    value_shape = made.shape("v", (3,), "TOKENS,HKV,D", key_shape)
    grad = bool(made.take("grad"))
    query, key, value = (made.tensor(*shape, grad=grad) for shape in (query_shape, key_shape, value_shape))
    length = made.take("context", key_shape[0])  # of the longest sequence; one sequence unless it is said
    count = max(1, -(-key_shape[0] // length)) if length else 1
    offsets = made.tensor(count + 1, dtype=torch.int32)
    options = {
        "max_seqlen_q": min(length, query_shape[0]),
        "max_seqlen_k": length,
        "is_causal": {None: False, "top_left": True}.get(made.take("causal"), "bottom_right"),
        "window": _window(made.take("window")),
        "softcap": made.take("softcap"),
        "return_lse": bool(made.take("lse")),
    }
    if made.take("alibi"):
        options["alibi_slopes"] = made.tensor(query_shape[1], dtype=torch.float32)
    same = query_shape[0] == key_shape[0]
    return (query, key, value, offsets, offsets if same else made.tensor(count + 1, dtype=torch.int32)), options


def _norm(made: Made) -> Args:
    shape = made.shape("shape", (), "ROWS,HIDDEN")
    grad = bool(made.take("grad"))
    x = made.tensor(*shape, grad=grad)
    weight = None if made.take("no_weight") else made.tensor(shape[-1], grad=grad)
    if made.op in ("add_rms_norm", "gemma_add_rms_norm"):
        return (x, made.tensor(*shape), weight), {}
    if made.op == "layer_norm":
        return (x, weight, made.tensor(shape[-1], grad=grad) if made.take("bias") else None), {}
    return (x, weight), {}


def _rope(made: Made) -> Args:
    form = "B,H,S,D"
    whole = made.take("shape")
    query_shape = made.shape("q", (4,), form, whole)
    key_shape = made.shape("k", (4,), form, query_shape)
    layout, grad = made.take("layout", "BHSD"), bool(made.take("grad"))
    seq, dim = query_shape[1 if layout == "BSHD" else 2], query_shape[3]
    table = (seq, made.take("rotary_dim", dim) // 2)
    cos, sin = (made.tensor(*table, dtype=torch.float32) for _ in range(2))
    tensors = (made.tensor(*query_shape, grad=grad), made.tensor(*key_shape, grad=grad), cos, sin)
    return tensors, {"layout": layout, "interleaved": bool(made.take("interleaved"))}


def _gated(made: Made) -> Args:
    x = made.tensor(*made.shape("shape", (), "ROWS,2*HIDDEN"), grad=bool(made.take("grad")))
    return (x, made.take("approximate", "none")) if made.op == "gelu_and_mul" else (x,), {}


def _linear(made: Made) -> Args:
    shape, weight_shape = made.shape("shape", (), "ROWS,K"), made.shape("weight", (2,), "N,K")
    grad = bool(made.take("grad"))
    bias = made.tensor(weight_shape[0], grad=grad) if made.take("bias") else None
    x, fmt = made.tensor(*shape, grad=grad), made.take("format")
    weight: Any = made.tensor(*weight_shape, grad=grad)
    if fmt is not None:
        weight = _stored(made, weight_shape, fmt, made.take("granularity", "channel"))
    return (x, weight, bias, made.take("activation")), {}


def _embedding(made: Made) -> Args:
    ids = made.tensor(*made.shape("shape", (), "B,S"), dtype=torch.int64)
    weight = made.tensor(*made.shape("weight", (2,), "VOCAB,HIDDEN"), grad=bool(made.take("grad")))
    return (ids, weight), {}


def _sampling(made: Made) -> Args:
    logits = made.tensor(*made.shape("shape", (2,), "B,VOCAB"))
    if made.op == "sample_topk":
        return (logits, made.take("top_k", 50)), {}
    if made.op == "sample_topp":
        return (logits, made.take("top_p", 0.9)), {}
    return (logits,), {"top_k": made.take("top_k"), "top_p": made.take("top_p")}


def _speculative(made: Made) -> Args:
    batch, length, vocab = made.shape("shape", (3,), "B,LENGTH,VOCAB")
    ids = made.tensor(batch, length, dtype=torch.int64)
    judged = (ids, made.tensor(batch, length, vocab), made.tensor(batch, length + 1, vocab))
    return (*judged, list(range(-1, length - 1))) if made.op == "sample_tree" else judged, {}


def _cross_entropy(made: Made) -> Args:
    shape = made.shape("shape", (), "ROWS,VOCAB")
    logits = made.tensor(*shape, grad=bool(made.take("grad")))
    labels = made.tensor(*shape[:-1], dtype=torch.int64)
    return (logits, labels), {"softcap": made.take("softcap"), "return_lse": bool(made.take("lse"))}


def _cast(made: Made) -> Args:
    x = made.tensor(*made.shape("shape", (), "any sizes"), grad=bool(made.take("grad")))
    return (x, getattr(torch, dtype_of(made.take("format", "float8_e4m3fn")))), {}


def _quantize(made: Made) -> Args:
    x = made.tensor(*made.shape("shape", (), "ROWS,HIDDEN"))
    fmt, _ = format_traits(made.take("format", "int8"))
    return (x, fmt.value), {"granularity": resolve_granularity(fmt, made.take("granularity", "tensor"))}


def _dequantize(made: Made) -> Args:
    shape = made.shape("shape", (), "ROWS,HIDDEN")
    return (_stored(made, shape, made.take("format", "int8"), made.take("granularity", "tensor")),), {}


def _stored(made: Made, shape: Sequence[int], word: str, granularity: str) -> QuantizedTensor:
    fmt, traits = format_traits(word)
    scheme = QuantScheme(fmt, "block" if traits.block_only else granularity)
    codes = (*shape[:-1], (shape[-1] + 1) // 2) if traits.packed else shape
    return QuantizedTensor(
        made.tensor(*codes, dtype=getattr(torch, traits.data_dtype)),
        made.tensor(*scheme.scales_for(tuple(shape)), dtype=getattr(torch, traits.scale_dtype)),
        fmt, scheme.granularity, tuple(shape), made.dtype, scheme.block_size,
        tensor_scale=made.tensor(dtype=torch.float32) if traits.tensor_scale else None,
    )  # fmt: skip


def _example(made: Made) -> Args:
    """A call of an op that says itself how one is made: --shape gives its sizes, in the order of their names."""
    op = public_op(made.op)
    shape = made.shape("shape", (len(op.sizes),), ",".join(name.upper() for name in op.sizes))
    ctx = Context(
        op=made.op,
        dtype=str(made.dtype).removeprefix("torch."),
        dims=tuple(zip(op.sizes, shape, strict=True)),
        rank=len(op.sizes),
        needs_grad=bool(made.take("grad")),
    )
    call = build_call(ctx, device=made.where)
    return (), dict(call.kwargs)


BUILDERS: Mapping[str, Callable[[Made], Args]] = {
    "attention": _attention,
    "paged_attention": _paged,
    "varlen_attention": _varlen,
    "grouped_attention": calls_more.grouped_attention,
    "mla_paged_attention": calls_more.latent,
    "mlp": calls_more.mlp,
    "topk_gate": calls_more.gate,
    "grouped_gemm": calls_more.grouped_gemm,
    "moe": calls_more.moe,
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm"), _norm),
    **dict.fromkeys(("rope", "xpos"), _rope),
    "cross_entropy": _cross_entropy,
    "cast": _cast,
    **dict.fromkeys(("silu_and_mul", "gelu_and_mul", "relu_and_mul"), _gated),
    "linear": _linear,
    "embedding": _embedding,
    **dict.fromkeys(("sample", "sample_topk", "sample_topp", "sampling_probs"), _sampling),
    **dict.fromkeys(("sample_speculative", "sample_tree"), _speculative),
    "quantize": _quantize,
    "dequantize": _dequantize,
}


def context(op: str, options: Mapping[str, Any]) -> Context:
    """The Context of the call that the options describe. Raises UsageError for an option the op does not have."""
    public = public_op(op)
    build = BUILDERS.get(op) or (_example if public.example is not None and public.sizes else None)
    if build is None:
        raise click.UsageError(f"lz does not know the shapes of {op}; use lz.explain({op!r}, ...) from Python")
    given = {name: value for name, value in options.items() if value not in (None, False)}
    word = dtype_of(given.pop("dtype", "bfloat16"))
    spec = device_of(given.pop("device", None))
    backend = given.pop("backend", None)
    where = f"{spec.device_type}:{spec.index}" if is_here(spec) else "meta"
    try:
        args, kwargs = _built(build, op, dict(given), where, word)
    except torch.OutOfMemoryError:  # too large to be real here; then without torch's own checks
        args, kwargs = _built(build, op, dict(given), "meta", word)
    canonical, layout, asked = public.normalize(args, {**kwargs, "backend": backend})
    return describe(public, canonical, layout, asked, current_world(), spec)


def _built(build: Callable[[Made], Args], op: str, given: dict[str, Any], where: str, word: str) -> Args:
    made = Made(op, given, where, getattr(torch, word))
    found = build(made)
    if made.options:
        extra = ", ".join(f"--{name.replace('_', '-')}" for name in made.options)
        raise click.UsageError(f"{op} has no {extra}")
    return found
