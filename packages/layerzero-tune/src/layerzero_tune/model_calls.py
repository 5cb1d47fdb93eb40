"""The calls of a model from its configuration: prefill and decode of every op a decoder layer makes.

A configuration is what transformers writes into `config.json`: hidden_size, num_attention_heads, … . Lengths and batch
sizes are powers of two up to the model's own limit, so that every bucket of its traffic is met once; nested text
configurations (`text_config`) are looked into. Tensors are made on torch's meta device: nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world, describe
from layerzero.errors import ConfigurationError
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.recording.traffic import Recorded, Traffic

PREFILL = (512, 2048, 8192)
DECODE = (512, 2048, 8192)
BATCHES = (1, 8, 32)
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_LAYER_NORMS = ("gpt2", "gpt_neox", "opt", "bloom", "phi", "falcon", "stablelm", "starcoder2", "mpt", "gptj", "codegen")
_WITHOUT_ROPE = ("gpt2", "opt", "bloom", "mpt")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder model that decide which calls it makes."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    layers: int = 1
    longest: int = 8192
    dtype: str = "bfloat16"
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms_norm"
    rotary_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    experts: int = 0
    top_k: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelShape:
        """From a transformers-style configuration. Raises ConfigurationError naming what is missing or wrong."""
        inner = config.get("text_config") or config.get("llm_config")
        if isinstance(inner, Mapping) and "hidden_size" not in config:
            config = {**{key: config[key] for key in ("torch_dtype", "dtype") if key in config}, **inner}
        hidden = _size(config, "hidden_size", "n_embd", "d_model")
        heads = _size(config, "num_attention_heads", "n_head", "num_heads")
        head_dim = _size(config, "head_dim", default=hidden // heads if heads else 0)
        kind = str(config.get("model_type", ""))
        activation = str(config.get("hidden_act") or config.get("activation_function") or "silu")
        plain = kind.startswith(_LAYER_NORMS) or ("layer_norm_eps" in config and "rms_norm_eps" not in config)
        norm = "layer_norm" if plain else "gemma_rms_norm" if kind.startswith("gemma") else "rms_norm"
        share = config.get("partial_rotary_factor", 1.0)
        window = config.get("sliding_window")
        return ModelShape(
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads),
            head_dim=head_dim,
            inner=_size(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
            vocab=_size(config, "vocab_size"),
            layers=_size(config, "num_hidden_layers", "n_layer", default=1),
            longest=_size(config, "max_position_embeddings", "n_positions", "max_seq_len", default=8192),
            dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."),
            activation=_ACTIVATIONS.get(activation, "silu"),
            gated=not plain,
            norm=norm,
            rotary_dim=None if kind in _WITHOUT_ROPE else int(head_dim * float(share or 1.0)) // 2 * 2,
            window=window if isinstance(window, int) and config.get("use_sliding_window", True) else None,
            softcap=config.get("attn_logit_softcapping"),
            experts=_size(config, "num_local_experts", "num_experts", "n_routed_experts", default=0),
            top_k=_size(config, "num_experts_per_tok", "moe_topk", default=0),
        )  # fmt: skip


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigurationError(
                f"{name} is {value!r}", code="SCHEMA_INVALID", value=f"{name}={value}", limit="a whole number"
            )
        return value
    if default is None:
        raise ConfigurationError(
            f"the model configuration has no {names[0]}", code="SCHEMA_FIELD_MISSING", value=names[0],
            hint="give the config.json of a decoder model",
        )  # fmt: skip
    return default


def model_traffic(
    config: Mapping[str, Any],
    *,
    device: DeviceSpec | None = None,
    prefill: Sequence[int] = PREFILL,
    decode: Sequence[int] = DECODE,
    batches: Sequence[int] = BATCHES,
) -> Traffic:
    """The calls that serving such a model makes, counted as one prefill of each length and one step of each batch."""
    shape = ModelShape.of(config)
    if shape.dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ConfigurationError(
            f"torch_dtype is {shape.dtype!r}", code="SCHEMA_INVALID", value=shape.dtype, limit="a floating dtype"
        )
    calls = _Calls(shape, probe_device() if device is None else device)
    lengths, contexts = (sorted({min(n, shape.longest) for n in given}) for given in (prefill, decode))
    steps = [(1, length, length) for length in lengths] + [
        (batch, 1, length) for batch in batches for length in contexts
    ]
    with torch.no_grad():
        found = [Recorded(ctx, count) for step in steps for ctx, count in calls.step(*step)]
    return Traffic() + Traffic(tuple(found))


class _Calls:
    """The calls of one forward step."""

    def __init__(self, shape: ModelShape, device: DeviceSpec) -> None:
        self._shape, self._device = shape, device
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._world = current_world()

    def _tensor(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(sizes, dtype=dtype or self._dtype, device="meta")

    def _ctx(self, op: str, *args: Any, layout: str | None = None) -> Context:
        return describe(self._world.ops[op], args, layout, None, self._world, self._device)

    def step(self, batch: int, new: int, total: int) -> Iterator[tuple[Context, int]]:
        """Contexts of a step over `batch` sequences with `new` tokens each, `total` of them in the cache."""
        s, rows = self._shape, batch * new
        layers = s.layers
        yield self._attention(batch, new, total), layers
        if s.rotary_dim:
            q, k = (self._tensor(batch, new, n, s.head_dim).transpose(1, 2) for n in (s.heads, s.kv_heads))
            cos, sin = (self._tensor(new, s.rotary_dim // 2, dtype=torch.float32) for _ in range(2))
            yield self._ctx("rope", q, k, cos, sin, False, "BHSD", None, False, layout="BHSD"), layers
        yield from ((ctx, layers * count) for ctx, count in self._norms(batch, new))
        heads = (s.heads + 2 * s.kv_heads) * s.head_dim
        x = self._tensor(batch, new, s.hidden)
        yield self._linear(x, heads), layers
        yield self._linear(self._tensor(batch, new, s.heads * s.head_dim), s.hidden), layers
        if s.experts:
            yield self._moe(rows), layers
        else:
            yield self._linear(x, (2 if s.gated else 1) * s.inner), layers
            if s.gated and s.activation != "none":
                yield self._gated(batch, new), layers
            yield self._linear(self._tensor(batch, new, s.inner), s.hidden), layers
        ids = self._tensor(batch, new, dtype=torch.int64)
        yield self._ctx("embedding", ids, self._tensor(s.vocab, s.hidden), None), 1
        yield self._linear(self._tensor(batch, s.hidden), s.vocab), 1
        logits = self._tensor(batch, s.vocab, dtype=torch.float32)
        yield self._ctx("sample", logits, 50, 0.9, None, 1.0, None), 1

    def _attention(self, batch: int, new: int, total: int) -> Context:
        s = self._shape
        # As models hold them: projections are [B, S, H, D] and viewed as [B, H, S, D]; a cache is longer than its use.
        q = self._tensor(batch, new, s.heads, s.head_dim).transpose(1, 2)
        if new == total:
            k, v = (self._tensor(batch, new, s.kv_heads, s.head_dim).transpose(1, 2) for _ in range(2))
        else:
            k, v = (self._tensor(batch, s.kv_heads, total, s.head_dim) for _ in range(2))
        causal: Any = True if new == total and new > 1 else "bottom_right" if new > 1 else False
        window = None if s.window is None or s.window >= total else (s.window, 0)
        return self._ctx("attention", q, k, v, None, 0.0, causal, None, window, s.softcap, None, False, layout="BHSD")

    def _norms(self, batch: int, new: int) -> Iterator[tuple[Context, int]]:
        s = self._shape
        x, weight = self._tensor(batch, new, s.hidden), self._tensor(s.hidden)
        if s.norm == "layer_norm":
            yield self._ctx("layer_norm", x, weight, self._tensor(s.hidden), 1e-5), 2
            return
        yield self._ctx(s.norm, x, weight, 1e-6), 1
        fused = "gemma_add_rms_norm" if s.norm.startswith("gemma") else "add_rms_norm"
        yield self._ctx(fused, x, self._tensor(batch, new, s.hidden), weight, 1e-6), 1

    def _linear(self, x: Tensor, n: int) -> Context:
        return self._ctx("linear", x, self._tensor(n, x.shape[-1]), None, None)

    def _gated(self, batch: int, new: int) -> Context:
        s = self._shape
        x = self._tensor(batch, new, 2 * s.inner)
        if s.activation == "relu":
            return self._ctx("relu_and_mul", x)
        if s.activation.startswith("gelu"):
            return self._ctx("gelu_and_mul", x, "tanh" if s.activation == "gelu_tanh" else "none")
        return self._ctx("silu_and_mul", x)

    def _moe(self, rows: int) -> Context:
        s = self._shape
        k = max(1, s.top_k)
        x, first = self._tensor(rows, s.hidden), self._tensor(s.experts, 2 * s.inner, s.hidden)
        second = self._tensor(s.experts, s.hidden, s.inner)
        shares, ids = self._tensor(rows, k, dtype=torch.float32), self._tensor(rows, k, dtype=torch.int64)
        return self._ctx("moe", x, first, second, shares, ids, s.activation, 0, None, None, 1.702, None, False)
