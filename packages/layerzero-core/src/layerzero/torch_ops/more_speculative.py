"""Sampling probabilities and speculative verification inside torch's machinery.

As with `lz.sample`, a generator breaks a graph: inside of one, tokens are judged with torch's default generator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place

__all__ = ["BRIDGES", "OPS", "TWINS"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_sampling = importlib.import_module("layerzero.backends.reference.sampling")
_speculative = importlib.import_module("layerzero.backends.reference.speculative")

_PROBS = (
    "(Tensor logits, SymInt? top_k, Tensor? top_k_rows, Scalar? top_p, Tensor? top_p_rows, Scalar? min_p, "
    "Tensor? min_p_rows, Scalar temperature, Tensor? temperature_rows, str? backend=None) -> Tensor"
)
_CHAIN = (
    "(Tensor draft_ids, Tensor? draft_probs, Tensor target_probs, bool greedy, str? backend=None) -> (Tensor, Tensor)"
)
_TREE = (
    "(Tensor draft_ids, Tensor? draft_probs, Tensor target_probs, Tensor parents, bool greedy, str? backend=None) "
    "-> (Tensor, Tensor, Tensor)"
)


def _split(value: Any, absent: float | None = None) -> tuple[Any, Tensor | None]:
    """A parameter as the schema has it: a number, and beside it the tensor of one value a row."""
    return (absent, value) if isinstance(value, Tensor) else (value, None)


def _either(number: float | None, rows: Tensor | None) -> Any:
    return number if rows is None else rows


# -- probabilities ---------------------------------------------------------------------------------
def _params(rest: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    return _either(*rest[0:2]), _either(*rest[2:4]), _either(*rest[4:6]), _either(*rest[6:8])


def _run_probs(logits: Tensor, *rest: Any) -> Tensor:
    top_k, top_p, min_p, temperature = _params(rest)
    out: Tensor = functions["sampling_probs"](
        logits, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, backend=rest[8]
    )
    return out.contiguous()


def _fake_probs(logits: Tensor, *rest: Any) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape, dtype=dtype)


def _plain_probs(logits: Tensor, *rest: Any) -> Any:
    return _sampling.sampling_probs(logits, *_params(rest))


def _bridge_probs(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    logits, top_k, top_p, min_p, temperature = args
    flat = (*_split(top_k), *_split(top_p), *_split(min_p), *_split(temperature, 1.0))
    return ops.sampling_probs.default(logits, *flat, backend)


def sampling_probs(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sampling_probs`."""
    lead = logits.shape[:-1]
    rows = logits.flatten(0, -2)

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.reshape(value.shape + (1,) * (len(lead) - value.dim())).expand(lead).reshape(-1)

    flat = (*_split(spread(top_k)), *_split(spread(top_p)), *_split(spread(min_p)), *_split(spread(temperature), 1.0))
    if differentiable(backend, logits):
        return _plain_probs(rows, *flat, backend).reshape(logits.shape)
    return place(torch.ops.layerzero.sampling_probs, rows, *flat, backend).reshape(logits.shape)


# -- verification ----------------------------------------------------------------------------------
def _run_chain(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, greedy: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    tokens, kept = functions["sample_speculative"](draft_ids, draft_probs, target_probs, greedy=greedy, backend=backend)
    return tokens.contiguous(), kept.contiguous()


def _fake_chain(draft_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length = draft_ids.shape
    return draft_ids.new_empty((batch, length + 1), dtype=torch.int64), draft_ids.new_empty(batch, dtype=torch.int64)


def _bridge_chain(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    if args[-1] is not None:  # a generator; plain torch is what every subclass that knows torch's ops can follow
        return _speculative.sample_speculative(*args)
    return ops.sample_speculative.default(*args[:-1], backend)


def sample_speculative(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sample_speculative`."""
    _no_generator(generator)
    return place(torch.ops.layerzero.sample_speculative, draft_ids, draft_probs, target_probs, greedy, backend)


def _run_tree(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    parents: Tensor,
    greedy: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kept, path = functions["sample_tree"](
        draft_ids, draft_probs, target_probs, parents, greedy=greedy, backend=backend
    )
    return tokens.contiguous(), kept.contiguous(), path.contiguous()


def _fake_tree(draft_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kept = _fake_chain(draft_ids)
    return tokens, kept, draft_ids.new_empty(draft_ids.shape, dtype=torch.int64)


def _bridge_tree(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    if args[-1] is not None:
        return _speculative.sample_tree(*args)
    return ops.sample_tree.default(*args[:-1], backend)


def sample_tree(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    parents: Tensor | Sequence[int],
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sample_tree`."""
    _no_generator(generator)
    tree = parents if isinstance(parents, Tensor) else torch.tensor(parents, dtype=torch.int64)
    args = (draft_ids, draft_probs, target_probs, tree.to(draft_ids.device), greedy, backend)
    return place(torch.ops.layerzero.sample_tree, *args)


def _no_generator(generator: torch.Generator | None) -> None:
    if generator is not None:
        torch._dynamo.graph_break(msg="LayerZero samples with a generator outside of the graph")


OPS: tuple[OpaqueOp, ...] = (
    OpaqueOp("sampling_probs", _PROBS, _run_probs, _fake_probs, _plain_probs),
    OpaqueOp("sample_speculative", _CHAIN, _run_chain, _fake_chain, random=True),
    OpaqueOp("sample_tree", _TREE, _run_tree, _fake_tree, random=True),
)
TWINS: dict[str, Callable[..., Any]] = {
    twin.__name__: twin for twin in (sampling_probs, sample_speculative, sample_tree)
}
BRIDGES: dict[str, Callable[..., Any]] = {
    "sampling_probs": _bridge_probs,
    "sample_speculative": _bridge_chain,
    "sample_tree": _bridge_tree,
}
