"""What `batch_invariant` promises, drawn and compared: the bits of a row are those of the row computed alone.

A composition is one call that holds rows in some company: a batch of some size and order, a prompt in pieces, padding
behind a sequence, pages at other places, a number of threads. `unkept` draws compositions until a row of one has other
bits than alone, and says which. What follows from the row itself (its dtype, its width, the length of its own prompt)
stays; everything else changes.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero.model.kv_cache import make_paged_batch
from layerzero.tuning.truth import flat
from layerzero_verify.testing.cases import GROUPS, Case, cases_of, dtypes_of, fit
from layerzero_verify.testing.cases_attention import layouts_of

COMPOSITIONS = 24
"""How many are drawn for a kernel by default; the long lane draws `THOROUGH`."""
THOROUGH = 1000

VARYING = frozenset({"batch", "batch_heads", "rows", "tokens", "seq_len_q", "seq_len_k"})
"""Sizes that a batch decides: a kernel that is limited in one of them leaves a row to another kernel, and its bits."""

_ROWS = 251  # of a base: no other size of any case
_BATCHES = ("rows", "tokens", "batch")
_COUNTS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 28, 31, 33, 64, 65, 100, 128, 129, 200, _ROWS)
_WIDTHS = (0, 0, 333, 1059, 2307)  # of the inner size of a row; 0: as the case has it
_LENGTHS = (1, 2, 17, 63, 64, 65, 129, 300, 600)
_THREADS = (1, 2, 3, 4, 7)
_PER_BASE = 25

Run = Callable[[tuple[Any, ...]], Any]


# One call in words, and its rows beside those of the rows alone.
Composition: TypeAlias = tuple[str, list[tuple[Tensor, Tensor]]]


class _Rows:
    """Ops whose batch is one axis: norms, activations, products, experts, sampling. A base is a call of 251 rows."""

    def __init__(self, run: Run, spec: KernelSpec, dtype: str, device: torch.device, luck: random.Random) -> None:
        case = luck.choice(list(_cases(spec, dtype)))
        given = dict(case.given)
        given |= {name: _ROWS for name in _BATCHES if name in given}
        if given.get("temperature") == 0.0 and "generator" in spec.features and luck.random() < 0.5:
            given |= {"temperature": 0.7, "needs": {*given["needs"], "generator"}}
        given |= {"rank": 2} if "rank" in given and "rows" in given else {}
        given |= {"shape": (_ROWS, 5)} if "shape" in given else {}
        width = luck.choice(_WIDTHS)
        inner = next((name for name in ("k", "hidden", "vocab") if name in given), None)
        if width and inner is not None:
            given[inner] = fit(spec, inner, width)
        self.run, self.luck, self.case = run, luck, case
        self.args = Case(spec, case.op, case.label, dtype, given).arguments(device, luck.randrange(1 << 30))
        self.axes = [_axis(item) for item in self.args]
        if not any(axis is not None for axis in self.axes):
            raise LookupError(f"the kit cannot compose calls of {spec.op}: no argument has rows")
        self.seeded = any(isinstance(item, torch.Generator) for item in self.args)
        self.device = device
        self.out = [_axis(item) for item in flat(self._call(range(_ROWS)))]
        self.alone: dict[tuple[int, int], list[Tensor]] = {}

    def _call(self, rows: Iterable[int]) -> Any:
        index = torch.tensor(list(rows), device=self.device)
        taken = (
            item if axis is None else item.index_select(axis, index)
            for item, axis in zip(self.args, self.axes, strict=True)
        )
        seeded = torch.Generator(self.device).manual_seed(1) if self.seeded else None
        return self.run(tuple(seeded if isinstance(item, torch.Generator) else item for item in taken))

    def _row(self, result: Any, place: int) -> list[Tensor]:
        return [item.select(axis, place) for item, axis in zip(flat(result), self.out, strict=True) if axis is not None]

    def draw(self) -> Composition:
        """Some rows in some order; a few of them are compared. A drawn number belongs to a place: there it stays."""
        count = self.luck.choice(_COUNTS)
        rows = self.luck.sample(range(_ROWS), count)
        result = self._call(rows)
        pairs = []
        for place in self.luck.sample(range(count), min(count, 4)):
            key = rows[place], place if self.seeded else 0
            if key not in self.alone:
                self.alone[key] = self._row(self._call([key[0]] * (key[1] + 1)), key[1])
            pairs += list(zip(self._row(result, place), self.alone[key], strict=True))
        return f"{self.case.label}: {count} rows", pairs


class _Sequences(ABC):
    """What the three forms of attention share: six sequences, each computed alone and whole, causal from the end."""

    def __init__(self, run: Run, spec: KernelSpec, dtype: str, device: torch.device, luck: random.Random) -> None:
        self.run, self.spec, self.device, self.luck = run, spec, device, luck
        self.choose()
        self.heads, dim = 4, fit(spec, "head_dim", luck.choice((64, 64, 128)))
        kv_heads = 2 if "gqa" in spec.features else self.heads
        self.lengths = self._lengths()
        maker = torch.Generator().manual_seed(luck.randrange(1 << 30))
        self.q, self.k, self.v = (
            [
                torch.randn(n, heads, dim, generator=maker).to(device=device, dtype=getattr(torch, dtype))
                for n in self.lengths
            ]
            for heads in (self.heads, kv_heads, kv_heads)
        )
        window = (luck.choice((5, 37, 128)), 0) if "window" in spec.features and luck.random() < 0.3 else None
        self.options = window, 5.0 if "softcap" in spec.features and luck.random() < 0.2 else None
        self.alone = [self.attend([(number, 0, n)])[0] for number, n in enumerate(self.lengths)]

    def choose(self) -> None:
        """What a form draws once for all of a base."""
        self.pieces = "causal_bottom_right" in self.spec.features

    def _lengths(self) -> list[int]:
        return [self.luck.choice(_LENGTHS) for _ in range(6)]

    @abstractmethod
    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """The result [tokens, heads, dim] of each part: the queries `begin` … `end` - 1 of a sequence."""

    def _part(self) -> tuple[int, int, int]:
        number = self.luck.randrange(len(self.lengths))
        end = self.luck.randint(1, self.lengths[number]) if self.pieces else self.lengths[number]
        kind = self.luck.random() if self.pieces else 1.0
        begin = end - 1 if kind < 0.4 else self.luck.randrange(end) if kind < 0.8 else 0
        return number, begin, end

    def parts(self) -> list[tuple[int, int, int]]:
        return [self._part() for _ in range(self.luck.choice((1, 2, 3, 5, 9, 33)))]

    def draw(self) -> Composition:
        parts = self.parts()
        found = self.attend(parts)
        pairs = [(item, self.alone[number][begin:end]) for item, (number, begin, end) in zip(found, parts, strict=True)]
        words = ", ".join(f"{begin}:{end} of {self.lengths[number]}" for number, begin, end in parts[:3])
        return f"{len(parts)} sequences, tokens {words}", pairs


class _Dense(_Sequences):
    """Attention over a batch: all of one length, or padded behind where the kernel takes a mask."""

    def choose(self) -> None:
        features = self.spec.features
        aligned, masks = "causal_bottom_right" in features, "mask_bool" in features
        self.pieces = (aligned or masks) and not self.spec.square
        self.masked = masks and (not aligned or self.luck.random() < 0.5)
        self.causal: bool | str = "bottom_right" if aligned else bool(features & {"causal_top_left", "causal_square"})

    def _lengths(self) -> list[int]:
        return super()._lengths() if self.masked else [self.luck.choice(_LENGTHS)] * 6

    def parts(self) -> list[tuple[int, int, int]]:
        parts = super().parts()
        if self.masked:
            rows = min(end - begin for _, begin, end in parts)
            return [(number, end - rows, end) for number, _, end in parts]
        _, begin, end = parts[0]
        return [(number, begin, end) for number, _, _ in parts]

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        window, softcap = self.options
        rows = [end - begin for _, begin, end in parts]
        most = max(end for *_, end in parts) + (self.luck.choice((0, 1, 40)) if self.masked else 0)
        query = torch.stack([self.q[number][begin:end] for number, begin, end in parts]).transpose(1, 2)
        key, value = (
            torch.stack([_behind(kv[number][:end], most) for number, _, end in parts]).transpose(1, 2)
            for kv in (self.k, self.v)
        )
        mask, causal = None, self.causal
        if self.masked:  # the triangle and the end of each sequence in one
            causal, window = False, None
            at = torch.tensor([begin for _, begin, _ in parts])[:, None, None] + torch.arange(rows[0])[:, None]
            mask = (torch.arange(most) <= at)[:, None].to(self.device)
        result = self.run((query, key, value, mask, 0.0, causal, None, window, softcap, None, False))
        return list(flat(result)[0].transpose(1, 2))


class _Packed(_Sequences):
    """Attention over packed sequences."""

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        queries, keys = [end - begin for _, begin, end in parts], [end for *_, end in parts]
        query = torch.cat([self.q[number][begin:end] for number, begin, end in parts])
        key, value = (torch.cat([kv[number][:end] for number, _, end in parts]) for kv in (self.k, self.v))
        ends = [_whole([0, *accumulate(lengths)], self.device) for lengths in (queries, keys)]
        causal = "bottom_right" if self.pieces else "causal_top_left" in self.spec.features
        window, softcap = self.options
        tail = (max(queries), max(keys), causal, None, window, softcap, None, False)
        return list(torch.split(flat(self.run((query, key, value, *ends, *tail)))[0], queries))


class _Paged(_Sequences):
    """Attention over pages: each call has a cache of its own, its pages anywhere in it, others between them."""

    def choose(self) -> None:
        self.pieces, self.prefill = True, "paged_prefill" in self.spec.features
        self.page = fit(self.spec, "page_size", self.luck.choice((1, 16, 16, 128)))
        self.layout = self.luck.choice(layouts_of(self.spec)).value

    def _part(self) -> tuple[int, int, int]:
        number, begin, end = super()._part()
        return number, begin if self.prefill else end - 1, end

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        if not self.prefill and any(end - begin > 1 for _, begin, end in parts):
            ((number, begin, end),) = parts  # the base: token by token
            return [torch.cat([self.attend([(number, at, at + 1)])[0] for at in range(begin, end)])]
        needed = [-(-end // self.page) for *_, end in parts]
        blocks = sum(needed) + self.luck.choice((1, 5))
        order = self.luck.sample(range(blocks), sum(needed))
        table = torch.full((len(parts), max(needed)), order[0])
        caches = [torch.full((blocks, self.page, *kv[0].shape[1:]), 3.0).to(kv[0]) for kv in (self.k, self.v)]
        for row, (number, _, end) in enumerate(parts):
            own = [order.pop() for _ in range(needed[row])]
            table[row, : len(own)] = torch.tensor(own)
            for cache, kv in zip(caches, (self.k, self.v), strict=True):
                filled = _behind(kv[number][:end], len(own) * self.page)
                cache[own] = filled.view(len(own), self.page, *filled.shape[1:])
        if self.layout == "HND":
            caches = [cache.transpose(1, 2).contiguous() for cache in caches]
        queries, contexts = [end - begin for _, begin, end in parts], [end for *_, end in parts]
        several = _whole(queries, self.device) if max(queries) > 1 else None
        batch = make_paged_batch(table.int().to(self.device), _whole(contexts, self.device), several)
        query = torch.cat([self.q[number][begin:end] for number, begin, end in parts])
        window, softcap = self.options
        result = self.run((query, *caches, batch, None, window, softcap, None, False, self.layout))
        return list(torch.split(flat(result)[0], queries))


_FORMS: dict[str, type[_Rows | _Sequences]] = {
    "attention": _Dense, "varlen_attention": _Packed, "paged_attention": _Paged,
}  # fmt: skip
_NOT_ROWS = frozenset({"grouped_attention", "mla_paged_attention", "grouped_gemm", "cross_entropy"})


def unkept(run: Run, spec: KernelSpec, device: torch.device, count: int = COMPOSITIONS, seed: int = 0) -> str | None:
    """The first of `count` compositions in which a row has other bits than alone; None where all keep theirs.

    `run` calls the kernel with canonical arguments. Raises LookupError for an op that the kit cannot compose.
    """
    if spec.op in _NOT_ROWS:
        raise LookupError(f"the kit cannot compose calls of {spec.op}")
    dtypes, luck = dtypes_of(spec), random.Random(seed)
    threads, before = 0, torch.get_num_threads()
    try:
        with torch.no_grad():
            for number in range(count):
                if device.type == "cpu":
                    threads = luck.choice(_THREADS)
                    torch.set_num_threads(threads)
                if number % min(_PER_BASE, max(1, count // (2 * len(dtypes)))) == 0:
                    dtype = dtypes[number % len(dtypes)] if number < len(dtypes) else luck.choice(dtypes)
                    base = _FORMS.get(spec.op, _Rows)(run, spec, dtype, device, luck)
                words, pairs = base.draw()
                differing = sum(not _same(left, right) for left, right in pairs)
                if differing:
                    company = f"{words}, {threads} threads" if threads else words
                    return f"{dtype}, {company}: {differing} compared rows have other bits than alone"
    finally:
        torch.set_num_threads(before)
    return None


def _cases(spec: KernelSpec, dtype: str) -> Iterable[Case]:
    """Cases of the op whose result is compared in numbers."""
    found = [
        case
        for group in GROUPS["result"]
        if group.op == spec.op and group.requires <= spec.features
        for case in cases_of(group, spec, (dtype,))
        if case.given.keys() & {*_BATCHES, "shape"} and "tensor_params" not in case.given.get("needs", ())
    ]
    if not found:
        raise LookupError(f"the kit has no cases of {spec.op} in {dtype}")
    return found


def _axis(item: Any) -> int | None:
    sizes = list(item.shape) if isinstance(item, Tensor) else []
    return sizes.index(_ROWS) if _ROWS in sizes else None


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())


def _behind(rows: Tensor, length: int) -> Tensor:
    """The rows and others behind them, which nobody may look at."""
    return torch.cat([rows, rows.new_full((length - len(rows), *rows.shape[1:]), 7.0)])


def _whole(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device)
