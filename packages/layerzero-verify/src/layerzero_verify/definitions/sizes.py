"""Workloads for a definition that brings none: how many sequences, how long, how many pages."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from layerzero.errors import invalid
from layerzero_verify.definitions.constraints import derive
from layerzero_verify.definitions.schema import Definition
from layerzero_verify.definitions.trace import InputSource, Workload


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to try: every combination of those that the definition has an axis for."""

    batch: tuple[int, ...]
    seq: tuple[int, ...]
    pages: tuple[int, ...]


SIZES: Mapping[str, Sizes] = {
    "small": Sizes((1, 2), (1, 16), (1, 4)),
    "medium": Sizes((4, 8, 16), (64, 128, 256), (16, 32, 64)),
    "large": Sizes((32, 64), (1024, 4096), (256, 512)),
}
DEFAULT = ("small", "medium")
# (batch, longest sequence): the pairs of a whole run.
RUNNER = ((1, 16), (4, 32), (8, 64), (16, 128))

_BATCH = ("batch_size", "batch", "num_seqs", "len_indptr")
_SEQ = ("seq_len", "total_q", "total_kv", "num_tokens", "M", "max_seq_len", "tokens")
_PAGES = ("num_pages", "num_kv_indices")
# Heads may vary in definitions that do not depend on them, such as rope.
_HEADS = {"num_qo_heads": 8, "num_q_heads": 8, "num_heads": 8, "num_kv_heads": 2, "num_k_heads": 2}


def workloads_for(definition: Definition, sizes: Iterable[str] = DEFAULT, *, seed: int = 0) -> list[Workload]:
    """Workloads of these sizes, each once. Their uuids follow from definition, axes and seed."""
    found: dict[str, Workload] = {}
    for name in sizes:
        if name not in SIZES and name != "runner":
            raise invalid("VALUE_INVALID", name, f"{', '.join(SIZES)} or runner", f"unknown size {name!r}")
        for axes in _all_axes(definition, name):
            made = workload_of(definition, axes, seed=seed)
            found.setdefault(made.uuid, made)
    return list(found.values())


def workload_of(definition: Definition, axes: Mapping[str, int], *, seed: int = 0) -> Workload:
    """A workload of random inputs with these axes."""
    words = " ".join(f"{name}={axes[name]}" for name in sorted(axes))
    made = uuid.uuid5(uuid.NAMESPACE_OID, f"layerzero {definition.name} {words} seed={seed}")
    return Workload(str(made), dict(axes), {name: InputSource() for name in definition.inputs})


def _all_axes(definition: Definition, name: str) -> Iterator[dict[str, int]]:
    paged = "kv_indices" in definition.inputs
    if name == "runner":
        for batch, seq in RUNNER:
            page = definition.const_axes.get("page_size", 1)
            yield axes_for(definition, batch, seq, -(-seq // page))
        return
    chosen, have = SIZES[name], set(definition.var_axes)
    for batch, seq, pages in product(
        chosen.batch if have & set(_BATCH) else chosen.batch[:1],
        chosen.seq if have & set(_SEQ) else chosen.seq[:1],
        chosen.pages if paged or have & set(_PAGES) else chosen.pages[:1],
    ):
        yield axes_for(definition, batch, seq, pages)


def axes_for(definition: Definition, batch: int, seq: int, pages: int) -> dict[str, int]:
    """The variable axes for so many sequences, new tokens and pages of each.

    A cache has some pages that nobody uses. In a paged prefill the new tokens have to fit the pages; in a ragged one
    every sequence has earlier keys besides. An axis nobody here knows is derived from the constraints, else it
    becomes `seq`.
    """
    paged = "kv_indices" in definition.inputs
    room = pages * definition.const_axes.get("page_size", 1)
    queries = batch * (min(seq, room) if paged else seq)
    sizes = {
        "batch_size": batch,
        "batch": batch,
        "num_seqs": batch,
        "len_indptr": batch + 1,
        "total_q": queries,
        "total_kv": queries + batch * min(seq, 16),
        "num_pages": batch * pages + 3,
        "num_kv_indices": batch * pages,
        "max_seq_len": 2 * seq + 16,
        **_HEADS,
        **dict.fromkeys(("seq_len", "num_tokens", "M", "tokens"), seq),
    }
    found = {axis: sizes[axis] for axis in definition.var_axes if axis in sizes}
    found |= derive(definition.constraints, {**definition.const_axes, **found}, definition.var_axes)
    return {axis: found.get(axis, seq) for axis in definition.var_axes}
