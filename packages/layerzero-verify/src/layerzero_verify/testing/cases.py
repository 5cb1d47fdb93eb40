"""Small calls that exercise one declared capability each, with sizes drawn from the kernel's own limits.

A group of cases belongs to one op and to the features it needs. `@group` registers a generator; the suite asks
`cases_of` for all cases of a group on one kernel.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import PUBLIC
from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.model.op import Op
from layerzero.tuning import inputs

__all__ = [
    "GROUPS",
    "Case",
    "Draw",
    "Group",
    "Maker",
    "cases_of",
    "declare",
    "dtypes_of",
    "example",
    "fit",
    "group",
    "load_cases",
]

# dtypes the kit can draw and compare; the most exact first.
_TESTABLE = ("float32", "float64", "float16", "bfloat16")

LARGEST = 4096  # of a size that is tried at its declared limit; beyond it a test takes minutes and shows no more


class Draw:
    """Seeded random tensors of one dtype on one device. The CPU draws, so devices see the same numbers."""

    def __init__(self, dtype: str, device: torch.device, seed: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self._generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Gaussian numbers."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.dtype).to(self.device)

    def bools(self, *shape: int, share: float = 0.6) -> Tensor:
        """True with probability `share`; the first of the last axis is always True."""
        found = torch.rand(shape, generator=self._generator) < share
        found[..., 0] = True
        return found.to(self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers below `high`."""
        return torch.randint(high, shape, generator=self._generator, dtype=dtype).to(self.device)

    def permutation(self, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A shuffled range."""
        return torch.randperm(size, generator=self._generator).to(dtype).to(self.device)


Maker = Callable[[Draw], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One call of one kernel: `make` gives its canonical arguments (attention in BHSD)."""

    spec: KernelSpec
    label: str
    dtype: str
    make: Maker
    layout: str | None = None

    @property
    def id(self) -> str:
        """Name in test reports."""
        return f"{self.spec.kernel_id}-{self.dtype}-{self.label}"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """Fresh canonical arguments on a device; the same each time."""
        return self.make(Draw(self.dtype, device, self.id))


Generator = Callable[[KernelSpec], Iterator[tuple[str, Maker]]]


@dataclass(frozen=True)
class Group:
    """Cases of one op that need some features; `every_dtype` repeats them for each declared dtype."""

    name: str
    op: str
    requires: frozenset[str]
    generate: Generator
    every_dtype: bool = False


GROUPS: dict[str, list[Group]] = {}


def group(name: str, op: str, *requires: str, every_dtype: bool = False) -> Callable[[Generator], Generator]:
    """Register a generator of (label, maker) pairs under a group name; several ops may share one name."""

    def register(generate: Generator) -> Generator:
        GROUPS.setdefault(name, []).append(Group(name, op, frozenset(requires), generate, every_dtype))
        return generate

    return register


def example(
    op: Op | str,
    spec: KernelSpec,
    sizes: Mapping[str, int],
    needs: Iterable[str] = (),
    choices: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Maker:
    """The op's own example at these sizes, moved to what the kernel's limits allow."""
    dims = tuple((name, fit(spec, name, size)) for name, size in sizes.items())

    def make(draw: Draw) -> tuple[Any, ...]:
        found = PUBLIC[op] if isinstance(op, str) else op
        assert callable(found.example)
        word = str(draw.dtype).removeprefix("torch.")
        ctx = Context(found.op_id, dtype=word, dims=dims, needs=frozenset(needs), **{"rank": len(dims), **fields})
        return found.example(inputs.Draw(ctx, draw.device, int(draw.integers(1 << 30, 1)), choices))

    return make


def declare(op: Op) -> None:
    """Cases of an op that says itself how a call is made: its sizes at their least and at their most, each feature."""
    if op.example is None or not op.sizes or any(found.op == op.op_id for found in GROUPS.get("result", ())):
        return

    def maker(spec: KernelSpec, place: int, *needs: str) -> Maker:
        return example(op, spec, {name: sizes[place] for name, sizes in op.sizes.items()}, needs)

    @group("result", op.op_id, every_dtype=True)
    def plain(spec: KernelSpec) -> Iterator[tuple[str, Maker]]:
        yield "least", maker(spec, 0)
        yield "most", maker(spec, -1)

    for feature in op.features:

        @group("result", op.op_id, feature)
        def special(spec: KernelSpec, feature: str = feature) -> Iterator[tuple[str, Maker]]:
            yield feature, maker(spec, 0, feature)


def load_cases() -> dict[str, list[Group]]:
    """Import every `cases_*` module of the kit, whose groups register themselves, and return them by name."""
    package = importlib.import_module("layerzero_verify.testing")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("cases_"):
            importlib.import_module(f"layerzero_verify.testing.{module.name}")
    return GROUPS


def dtypes_of(spec: KernelSpec) -> tuple[str, ...]:
    """The declared dtypes that the kit can draw, most exact first."""
    return tuple(name for name in _TESTABLE if name in spec.dtypes)


def cases_of(found: Group, spec: KernelSpec) -> Iterator[Case]:
    """Every case of a group on one kernel."""
    dtypes = dtypes_of(spec)
    # Only rope and the paged cache take a layout as an argument; there it comes from the maker.
    for dtype in dtypes if found.every_dtype else dtypes[:1]:
        for label, make in found.generate(spec):
            yield Case(spec, label, dtype, make)


def limit_of(spec: KernelSpec, name: str) -> Limit:
    """The declared limit on a size, or one that allows everything."""
    return dict(spec.limits).get(name, Limit())


def fit(spec: KernelSpec, name: str, preferred: int) -> int:
    """A value near `preferred` that the kernel's limit on `name` allows."""
    limit = limit_of(spec, name)
    if limit.one_of:
        allowed = sorted(limit.one_of)
    else:
        step = limit.multiple_of or 1
        low = max(limit.min or 1, 1)
        first = -(-low // step) * step
        top = limit.max if limit.max is not None else max(preferred, first) + step
        allowed = list(range(first, top + 1, step)) if top - first < 10**6 else [first, -(-preferred // step) * step]
    allowed = [value for value in allowed if not limit.problems(name, value)] or [preferred]
    return min(allowed, key=lambda value: (abs(value - preferred), value))


def edges(spec: KernelSpec, name: str) -> list[int]:
    """The declared extremes of a size, as far as they can be tried quickly."""
    limit = limit_of(spec, name)
    if limit.one_of:
        values = sorted(limit.one_of)
    else:
        values = [fit(spec, name, value) for value in (limit.min, limit.max) if value is not None]
        if limit.multiple_of:
            values.append(fit(spec, name, 3 * limit.multiple_of))
    return sorted({value for value in values if 0 < value <= LARGEST})
