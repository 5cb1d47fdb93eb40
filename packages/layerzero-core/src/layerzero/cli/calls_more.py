"""Calls from shapes alone, for the ops with groups, pages of latents and experts (see `calls`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import make_paged_batch

if TYPE_CHECKING:
    from layerzero.cli.calls import Args, Made

__all__ = ["gate", "grouped_attention", "grouped_gemm", "latent", "mlp", "moe"]


def grouped_attention(made: Made) -> Args:
    """Two groups over one sequence, as on a rank of zigzag context parallelism: half of the keys, and all of them."""
    query_shape = made.shape("q", (3,), "TOKENS,H,D", made.take("shape"))
    key_shape = made.shape("k", (3,), "TOKENS,HKV,D", query_shape)
    grad = bool(made.take("grad"))
    query, key, value = (made.tensor(*shape, grad=grad) for shape in (query_shape, key_shape, key_shape))
    half, tokens, keys = query_shape[0] // 2, query_shape[0], key_shape[0]
    index = torch.int32
    batch = make_grouped_batch(
        made.tensor(3, dtype=index), made.tensor(2, dtype=index), made.tensor(2, 1, dtype=index),
        ((0, half, tokens), (0, keys), ((keys - keys // 2,), (keys,))),
    )  # fmt: skip
    causal = made.take("causal") is not None
    return (query, key, value, batch), {"causal": causal, "return_lse": bool(made.take("lse"))}


def latent(made: Made) -> Args:
    """Decode over a latent cache: query TOKENS,H,CKV and pages BLOCKS,PAGE,CKV; the rotated part is 64 wide."""
    tokens, heads, width = made.shape("q", (3,), "TOKENS,H,CKV", made.take("shape"))
    blocks, page, cached = made.shape("k", (3,), "BLOCKS,PAGE,CKV")
    columns = max(1, blocks // max(1, tokens))
    length = made.take("context", columns * page)
    index = torch.int32
    batch = make_paged_batch(
        made.tensor(tokens, max(columns, -(-length // page)), dtype=index), made.tensor(tokens, dtype=index), None,
        [length] * tokens,
    )  # fmt: skip
    queries = made.tensor(tokens, heads, width), made.tensor(tokens, heads, 64)
    caches = made.tensor(blocks, page, cached), made.tensor(blocks, page, 64)
    return (*queries, *caches, batch), {"scale": (width + 64) ** -0.5, "return_lse": bool(made.take("lse"))}


def mlp(made: Made) -> Args:
    """A gated block: x ROWS,HIDDEN and the packed gate and up weight 2*INNER,HIDDEN."""
    shape, weight = made.shape("shape", (), "ROWS,HIDDEN"), made.shape("weight", (2,), "2*INNER,HIDDEN")
    grad = bool(made.take("grad"))
    x, up = made.tensor(*shape, grad=grad), made.tensor(*weight, grad=grad)
    down = made.tensor(shape[-1], weight[0] // 2, grad=grad)
    return (x, up, down), {"activation": made.take("activation", "silu")}


def gate(made: Made) -> Args:
    """Router logits TOKENS,EXPERTS and how many experts a token gets."""
    logits = made.tensor(*made.shape("shape", (2,), "TOKENS,EXPERTS"), grad=bool(made.take("grad")))
    return (logits, made.take("top_k", 2)), {}


def grouped_gemm(made: Made) -> Args:
    """Rows TOKENS,K and one weight for each group, GROUPS,N,K."""
    shape, weights = made.shape("shape", (2,), "TOKENS,K"), made.shape("weight", (3,), "GROUPS,N,K")
    grad = bool(made.take("grad"))
    x, stacked = made.tensor(*shape, grad=grad), made.tensor(*weights, grad=grad)
    return (x, stacked, made.tensor(weights[0], dtype=torch.int64)), {}


def moe(made: Made) -> Args:
    """Tokens TOKENS,HIDDEN and the experts' packed gate and up weights, EXPERTS,2*INNER,HIDDEN."""
    tokens, hidden = made.shape("shape", (2,), "TOKENS,HIDDEN")
    experts, doubled, _ = weights = made.shape("weight", (3,), "EXPERTS,2*INNER,HIDDEN")
    grad, k = bool(made.take("grad")), made.take("top_k", 2)
    x, first = made.tensor(tokens, hidden, grad=grad), made.tensor(*weights, grad=grad)
    second = made.tensor(experts, hidden, doubled // 2, grad=grad)
    routed: tuple[Any, ...] = made.tensor(tokens, k, dtype=torch.float32), made.tensor(tokens, k, dtype=torch.int64)
    return (x, first, second, *routed), {"activation": made.take("activation", "silu")}
