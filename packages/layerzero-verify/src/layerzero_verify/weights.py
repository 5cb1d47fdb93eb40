"""The small models of the ladder, each there to show one kind of mistake; and the weights of a layer as values."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a small decoder."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    rope: bool = True
    vocab: int = 97

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def ffn(self) -> int:
        return 2 * self.hidden


CONFIGS: dict[str, Config] = {
    config.name: config
    for config in (
        Config("tiny", 64, 2, 2, 2),  # the baseline
        Config("gqa", 128, 8, 2, 2),  # grouped query heads
        Config("deep", 64, 2, 2, 6),  # errors that add up over layers
        Config("wide", 128, 8, 8, 2),  # many heads
        Config("no_rope", 64, 2, 2, 2, rope=False),  # learned positions only
        Config("medium", 256, 4, 4, 4),  # a larger scale
    )
}


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
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}

    def _changed(self, change: Callable[[Tensor], Tensor]) -> LayerWeights:
        given: dict[str, Any] = {name: change(value.detach()) for name, value in self.named().items()}
        return replace(self, **given)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> LayerWeights:
        return self._changed(lambda value: value.to(device, dtype))

    def leaves(self) -> LayerWeights:
        return self._changed(lambda value: value.clone().requires_grad_())


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
    norms = {"ln1": layer.input_layernorm, "ln2": layer.post_attention_layernorm}
    projections = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
    tensors = {
        "w1": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        "w2": mlp.down_proj.weight,
        **{name: part.weight for name, part in norms.items()},
        **{f"w{name}": part.weight for name, part in projections.items()},
        **{f"b{name}": part.bias for name, part in projections.items() if name != "o" and part.bias is not None},
    }
    return LayerWeights(
        **{name: value.detach() for name, value in tensors.items()},
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        eps=config.rms_norm_eps,
    )
