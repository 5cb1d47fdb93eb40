"""`lz.sample_speculative`, `lz.sample_tree`: which drafted tokens a target model keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.sampling import check_generator
from layerzero._ops.signature import dispatch
from layerzero.errors import invalid
from layerzero.model.checks import (
    expect_index,
    expect_rank,
    expect_shape,
    expect_tensor,
    expect_vocabulary,
    simple_context,
)
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_floating
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, Op
from layerzero_models.drafts.trees import checked_parents


def sample_speculative(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the drafted tokens that the target would have drawn, and draw the token after them.

    draft_ids [B, L] were drawn one after the other from draft_probs [B, L, V]; target_probs [B, L+1, V] is what the
    target draws from after 0 … L of them (both from `lz.sampling_probs`, with the settings that the tokens are drawn
    with). Gives (tokens [B, L+1], kept [B]): the first `kept` tokens of a row are the draft's, one more is the
    target's, -1 fills the rest. The tokens are distributed exactly as if the target alone had drawn them, whatever the
    draft is; its quality decides only how many are kept.

    `draft_probs=None` is for tokens that were picked, not drawn (the draft's likeliest, or text that is looked up).
    -1 ends a row's draft early. `greedy=True` keeps tokens as long as they are the target's likeliest, draws nothing,
    and takes logits as well as probabilities.
    """
    args = (draft_ids, draft_probs, target_probs, greedy, generator)
    return dispatch(SAMPLE_SPECULATIVE, args, backend=backend)  # type: ignore[no-any-return]


def sample_tree(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    parents: Tensor | Sequence[int],
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lz.sample_speculative` for a tree of candidates: several for one place, of which at most one is kept.

    Node i has the token draft_ids[:, i] [B, N] and the parent parents[i] (`[N]` or `[B, N]`; a lower index, or -1 below
    the root); `lz.tree_mask` makes the attention mask of the same tree. target_probs [B, N+1, V] is what the target
    draws from at the root and after each node. draft_probs [B, N, V] is what each node was drawn from, given the
    siblings before it: the same row for each when they were drawn independently, a row without the earlier siblings
    when they were drawn without replacement; None when they were picked.

    Gives (tokens [B, N+1], kept [B], path [B, N]): the tokens as `lz.sample_speculative` gives them, and the nodes they
    came from, -1 after the last. The tokens are distributed as the target's own.
    """
    args = (draft_ids, draft_probs, target_probs, _on_device(parents, draft_ids), greedy, generator)
    return dispatch(SAMPLE_TREE, args, backend=backend)  # type: ignore[no-any-return]


def _on_device(parents: Any, like: Any) -> Any:
    if isinstance(like, Tensor):
        return (parents if isinstance(parents, Tensor) else checked_parents(parents)).to(like.device)
    return parents


def _describe(op: str, call: Call) -> Context:
    draft_ids, draft_probs, target = call.args[0], call.args[1], call.args[2]
    parents = call.args[3] if op == "sample_tree" else None
    ids = expect_tensor(draft_ids, "draft_ids")
    expect_rank(ids, "draft_ids", (2,))
    expect_index(ids, "draft_ids")
    batch, length = ids.shape
    expect_rank(expect_tensor(target, "target_probs"), "target_probs", (3,))
    vocab = target.shape[-1]
    expect_vocabulary(target, "target_probs")
    expect_shape(target, "target_probs", (batch, length + 1, vocab))
    expect_shape(draft_probs, "draft_probs", (batch, length, vocab))
    if draft_probs is not None:
        check_floating(draft_probs, "draft_probs")
    greedy, generator = call.args[-2:]
    if not isinstance(greedy, bool):
        raise invalid("VALUE_INVALID", f"greedy={greedy!r}", "True or False")
    if parents is not None:
        checked_parents(parents, (batch, length))
    needs = {"greedy"} if greedy else set()
    if draft_probs is None:
        needs.add("no_draft_probs")
    check_generator(generator, target)
    if generator is not None:
        needs.add("generator")
    others = {"draft_ids": ids, "draft_probs": draft_probs, "parents": parents}
    call = Call(call.args, call.device, call.layout, call.backend, False)  # a token has no gradient
    dims = {"batch": batch, "draft_len": length, "vocab": vocab}
    return simple_context(call, op, target, others, dims, needs, kind=OpKind.SAMPLING, mixed=True)


def _fake_tokens(draft_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length = draft_ids.shape
    return draft_ids.new_empty((batch, length + 1), dtype=torch.int64), draft_ids.new_empty(batch, dtype=torch.int64)


def _fake_tree(draft_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_tokens(draft_ids), draft_ids.new_empty(draft_ids.shape, dtype=torch.int64)


def _op(function: Callable[..., Any], fake: Callable[..., Any], greedy: int, **more: Any) -> Op:
    """An op that keeps drafted tokens or not; `greedy` is the place of that argument."""
    name = function.__name__
    return Op(
        function=function,
        fake=fake,
        op_kind=OpKind.SAMPLING,
        output_kind="ids",
        describe=functools.partial(_describe, name),
        features=("generator", "greedy", "no_draft_probs"),
        reference=f"layerzero_models.drafts.kernels:{name}",
        cost=Roofline(
            "element_bytes * batch * vocab * (1 + draft_len * (2 - no_draft_probs)) + 24 * batch * (draft_len + 1)",
            "3 * batch * vocab * (draft_len + 1)",
        ),
        workspace="batch * (draft_len + 1) * (16 * vocab + 32)",
        tp_invariant=True,
        shapes={"shape": "batch,draft_len,vocab"},
        example="layerzero_models.drafts.ops:drafted",
        tolerance="exact",
        random=lambda args: not args[greedy],
        **more,
    )


SAMPLE_SPECULATIVE = _op(sample_speculative, _fake_tokens, 3)
SAMPLE_TREE = _op(
    sample_tree,
    _fake_tree,
    4,
    canonical=lambda a: tuple(
        _on_device(item, a["draft_ids"]) if name == "parents" else item for name, item in a.items() if name != "backend"
    ),
)


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
