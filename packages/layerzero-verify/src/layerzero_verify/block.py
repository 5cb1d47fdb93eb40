"""A transformer layer made of LayerZero's ops, stage by stage: prefill, and decode over a contiguous or paged cache.

The small models of the ladder, each there to show one kind of mistake, are `CONFIGS`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from layerzero._ops.paged import paged_batch


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
        w1=matrix(4 * hidden, hidden),
        w2=matrix(hidden, 2 * hidden),
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


Tables = tuple[Tensor, Tensor] | None
Stages = dict[str, Tensor]


class Calls(Protocol):
    """Computes ops, by kernels (`Caller`) or by formulas (`Truth`), and notes op and kernel of each stage."""

    stages: dict[str, tuple[str, str]]

    def __call__(self, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the op on public arguments."""


def forward(call: Calls, w: LayerWeights, x: Tensor, tables: Tables, prefix: str = "") -> Stages:
    """Every stage of a causal layer on x [B, S, H]; `prefix` goes before the stage names in the caller's notes."""
    found, (q, k, v) = _before(call, w, x, tables, prefix)
    # scaled, of every query with the keys up to its own, zero elsewhere; what a kernel keeps to itself
    keys = k.repeat_interleave(w.heads // w.kv_heads, dim=1)
    found["scores"] = torch.tril(q @ keys.transpose(-1, -2) / math.sqrt(w.head_dim))
    out = call(f"{prefix}attn_out", "attention", q, k, v, is_causal=True)
    call.stages[f"{prefix}scores"] = call.stages[f"{prefix}attn_out"]
    found["attn_out"] = out.transpose(1, 2).reshape(*x.shape[:2], -1)
    return {**found, **_after(call, w, x, found["attn_out"], prefix)}


def decode(call: Calls, w: LayerWeights, x: Tensor, tables: Tables, prompt: int, *, paged: str | None = None) -> Tensor:
    """The layer's output on x [B, S, H], made as a server makes it: `prompt` tokens at once, then one by one.

    `paged` is None for a contiguous cache that grows, or the layout (NHD, HND) of a paged one.
    """
    length = x.shape[1]
    cache = _Contiguous(call) if paged is None else _Paged(call, w, x, paged)
    steps = [(0, prompt), *((start, start + 1) for start in range(prompt, length))]
    outs = []
    for start, stop in steps:
        part = None if tables is None else (tables[0][start:stop], tables[1][start:stop])
        name = "prefill" if start == 0 else f"decode token {start}"
        _, (q, k, v) = _before(call, w, x[:, start:stop], part, f"{name} ")
        attended = cache.attend(f"{name} attn_out", q, k, v)
        outs.append(_after(call, w, x[:, start:stop], attended, f"{name} ")["output"])
    return torch.cat(outs, dim=1)


def _before(
    call: Calls, w: LayerWeights, x: Tensor, tables: Tables, prefix: str
) -> tuple[Stages, tuple[Tensor, Tensor, Tensor]]:
    batch, length, _ = x.shape
    found: Stages = {}
    found["ln1_out"] = normed = call(f"{prefix}ln1_out", "rms_norm", x, w.ln1, w.eps)
    for name, weight, bias in (("q_proj", w.wq, w.bq), ("k_proj", w.wk, w.bk), ("v_proj", w.wv, w.bv)):
        found[name] = call(f"{prefix}{name}", "linear", normed, weight, bias)
    q = found["q_proj"].view(batch, length, w.heads, w.head_dim).transpose(1, 2)
    k, v = (found[name].view(batch, length, w.kv_heads, w.head_dim).transpose(1, 2) for name in ("k_proj", "v_proj"))
    if tables is not None:
        q, k = call(f"{prefix}q_rope", "rope", q, k, *tables)
        call.stages[f"{prefix}k_rope"] = call.stages[f"{prefix}q_rope"]
        found["q_rope"], found["k_rope"] = q, k
    return found, (q, k, v)


def _after(call: Calls, w: LayerWeights, x: Tensor, attended: Tensor, prefix: str) -> Stages:
    found: Stages = {}
    found["proj_out"] = projected = call(f"{prefix}proj_out", "linear", attended, w.wo)
    normed, stream = call(f"{prefix}ln2_out", "add_rms_norm", projected, x, w.ln2, w.eps)
    call.stages[f"{prefix}residual"] = call.stages[f"{prefix}ln2_out"]
    # a fused kernel keeps the norm's share of the sum's gradient to itself: what is compared is what comes from outside
    stream = stream.view_as(stream)
    found["residual"], found["ln2_out"] = stream, normed
    found["fc1_out"] = wide = call(f"{prefix}fc1_out", "linear", normed, w.w1)
    found["swiglu_out"] = gated = call(f"{prefix}swiglu_out", "silu_and_mul", wide)
    found["mlp_out"] = down = call(f"{prefix}mlp_out", "linear", gated, w.w2)
    found["output"] = stream + down
    return found


class _Contiguous:
    """Keys and values of all tokens so far, one tensor each."""

    def __init__(self, call: Calls) -> None:
        self.call = call
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(self, stage: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append, then attend from the last positions: the triangle is aligned to the bottom right."""
        self.keys = k if self.keys is None else torch.cat((self.keys, k), dim=2)
        self.values = v if self.values is None else torch.cat((self.values, v), dim=2)
        out = self.call(stage, "attention", q, self.keys, self.values, is_causal="bottom_right")
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)  # type: ignore[no-any-return]


class _Paged:
    """A paged cache with shuffled pages; a page holds as many tokens as there are KV heads, so that a layout read
    the wrong way round gives numbers and no error."""

    def __init__(self, call: Calls, w: LayerWeights, x: Tensor, layout: str) -> None:
        self.call = call
        self.layout = layout
        batch, length = x.shape[:2]
        self.page = max(w.kv_heads, 2)
        per_row = -(-length // self.page)
        blocks = batch * per_row
        rows = (self.page, w.kv_heads) if layout == "NHD" else (w.kv_heads, self.page)
        self.keys, self.values = (x.new_zeros(blocks, *rows, w.head_dim) for _ in range(2))
        order = torch.arange(blocks, dtype=torch.int32).flip(0).reshape(batch, per_row)
        self.tables = order.to(x.device)
        self.seen = 0

    def attend(self, stage: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new tokens into their pages, then attend over the pages."""
        batch, heads, new, dim = q.shape
        places = torch.arange(self.seen, self.seen + new, device=q.device)
        pages, slots = self.tables[:, places // self.page].long(), places % self.page
        for cache, fresh in ((self.keys, k), (self.values, v)):
            tokens_first = cache if self.layout == "NHD" else cache.transpose(1, 2)
            tokens_first[pages, slots] = fresh.transpose(1, 2)
        self.seen += new
        lens = torch.full((batch,), self.seen, dtype=torch.int32, device=q.device)
        news = torch.full((batch,), new, dtype=torch.int32, device=q.device)
        plan = paged_batch(self.tables, lens, query_lens=news)
        query = q.transpose(1, 2).reshape(batch * new, heads, dim)
        out: Tensor = self.call(stage, "paged_attention", query, self.keys, self.values, plan, layout=self.layout)
        return out.reshape(batch, new, heads * dim)
