"""Calls of the ops of drafted tokens from their contexts."""

from __future__ import annotations

from typing import Any

import torch


def drafted(draw: Any) -> tuple[Any, ...]:
    """Drafted tokens and the probabilities they are judged by.

    Where rows are alike, the target of a node looks at its depth alone and tokens are drawn from the draft: at each
    depth the tokens that are kept have one known distribution.
    """
    ctx, needs, alike = draw.ctx, draw.ctx.needs, draw.choice("alike")
    batch, length, vocab = draw.size("batch"), draw.size("draft_len"), draw.size("vocab")
    rows = 1 if alike else batch
    parents = draw.choice("parents", tuple(range(-1, length - 1)))
    depth = [0]
    for parent in parents:
        depth.append(depth[parent + 1] + 1)
    ids = draw.integers(vocab, rows, length).expand(batch, -1).contiguous()
    target = draw.normal(rows, max(depth) + 1, vocab, dtype=torch.float32).softmax(-1).to(draw.dtype())[:, depth]
    drafted = None
    if "no_draft_probs" not in needs:
        dtype = draw.dtype()
        if "mixed_weight" in needs:
            dtype = torch.float32 if dtype is not torch.float32 else torch.float16
        drafted = draw.normal(rows, length, vocab, dtype=torch.float32).softmax(-1).to(dtype)
        if alike:
            cdf = drafted[0].double().cumsum(-1)
            ids = torch.searchsorted(cdf, draw.uniform(length, batch).double() * cdf[:, -1:], right=True)
            ids = ids.clamp(max=vocab - 1).T.contiguous()
        drafted = drafted.expand(batch, -1, -1).contiguous()
    target = draw.laid(target.expand(batch, -1, -1).contiguous())
    tail = ("greedy" in needs, draw.generator())
    if ctx.op == "sample_tree":
        return (ids, drafted, target, torch.tensor(parents, dtype=torch.int64, device=draw.device), *tail)
    return (ids, drafted, target, *tail)
