"""What every adapter is made of: the value itself, and how inputs are looked at, pages and offsets among them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
def lengths_of(indptr: Tensor) -> Tensor:
    """Lengths of the sequences between offsets."""
    return indptr[1:] - indptr[:-1]


def last_page_len(inputs: Inputs, page_size: int) -> Tensor:
    """Tokens in the last page of each sequence: as given, or full pages. Some definitions have a slot to spare."""
    sequences: Tensor = inputs["kv_indptr"][1:]
    given = inputs.get("kv_last_page_len")
    return torch.full_like(sequences, page_size) if given is None else given[: len(sequences)]


def block_tables(inputs: Inputs, page_size: int) -> tuple[Tensor, Tensor]:
    """Page numbers as a padded table [B, most], and the keys of each sequence, from offsets and a list of pages."""
    counts = lengths_of(inputs["kv_indptr"])
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
