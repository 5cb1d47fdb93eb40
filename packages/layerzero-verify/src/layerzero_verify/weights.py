"""Weights of a transformer layer as values: made from a seed, or taken from a transformers model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from layerzero_verify.configs import Config

__all__ = ["LayerWeights", "from_transformers", "generator", "made"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norms [H], projections [out, in] with optional biases, w1 the gate above the up projection."""

    ln1: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    ln2: Tensor
    w1: Tensor
    w2: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    bq: Tensor | None = None
    bk: Tensor | None = None
    bv: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}

    def with_tensors(self, changed: Mapping[str, Tensor]) -> LayerWeights:
        """The same layer with other tensors."""
        given: dict[str, Any] = dict(changed)
        return replace(self, **given)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> LayerWeights:
        """The same layer in another dtype (and on another device)."""
        return self.with_tensors({name: value.detach().to(device, dtype) for name, value in self.named().items()})

    def leaves(self) -> LayerWeights:
        """Fresh leaves that collect gradients."""
        return self.with_tensors(
            {name: value.detach().clone().requires_grad_() for name, value in self.named().items()}
        )


def generator(*words: object) -> torch.Generator:
    """A generator seeded by words, the same on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, words)).encode()))


def made(config: Config, layer: int, seed: int) -> LayerWeights:
    """Seeded weights of one layer, of the size a trained model has: outputs stay near one."""
    draw = generator("layer", config.name, layer, seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw).div(columns**0.5)

    hidden, heads, kv_heads, dim = config.hidden, config.heads, config.kv_heads, config.head_dim
    return LayerWeights(
        ln1=1 + 0.1 * torch.randn(hidden, generator=draw),
        wq=matrix(heads * dim, hidden),
        wk=matrix(kv_heads * dim, hidden),
        wv=matrix(kv_heads * dim, hidden),
        wo=matrix(hidden, heads * dim),
        ln2=1 + 0.1 * torch.randn(hidden, generator=draw),
        w1=matrix(2 * config.ffn, hidden),
        w2=matrix(hidden, config.ffn),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
    )


def from_transformers(layer: Any, config: Any) -> LayerWeights:
    """The weights of a decoder layer of the Llama family (Llama, Mistral, Qwen2)."""
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        ln1=layer.input_layernorm.weight.detach(),
        wq=attention.q_proj.weight.detach(),
        wk=attention.k_proj.weight.detach(),
        wv=attention.v_proj.weight.detach(),
        wo=attention.o_proj.weight.detach(),
        ln2=layer.post_attention_layernorm.weight.detach(),
        w1=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach(),
        w2=mlp.down_proj.weight.detach(),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        eps=config.rms_norm_eps,
        **{
            name: bias.detach()
            for name, part in (("bq", attention.q_proj), ("bk", attention.k_proj), ("bv", attention.v_proj))
            if (bias := part.bias) is not None
        },
    )
