"""Small calls that exercise one declared capability each, with sizes moved to what a kernel's own limits allow.

    norm = Calls("rms_norm", rows=4, hidden=64)
    norm("result", "plain")                                     # a group, and what the case is called in it
    norm("no_weight", "plain", "no_weight")                     # only where the kernel declares these features

A case says how the call differs from the usual one of its op: sizes (whole numbers), fields of a `Context`, and what a
context leaves open (`Draw.choice`). The op's own example makes the tensors. The suite asks `cases_of` for all cases of
a group on one kernel.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from layerzero._ops.signature import public_op
from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.model.op import Op
from layerzero.tuning.inputs import Draw

# dtypes the kit can draw and compare; the most exact first.
_TESTABLE = ("float32", "float64", "float16", "bfloat16")
# Groups whose cases are tried in every declared dtype.
_EVERY_DTYPE = {"result", "mixed_weight", "accumulation", "loss_options", "speculation"}
_EVERY_DTYPE |= {"quantized", "dequantized", "quantized_weight"}

LARGEST = 4096  # of a size that is tried at its declared limit; beyond it a test takes minutes and shows no more

Given = Mapping[str, Any]
Labelled = Iterable[tuple[str, Given]]
Generator = Callable[[KernelSpec], Labelled]


@dataclass(frozen=True)
class Case:
    """One call of one kernel: `given` says how it differs from the usual one (attention in BHSD)."""

    spec: KernelSpec
    op: Op | str
    label: str
    dtype: str
    given: Given

    @property
    def id(self) -> str:
        return f"{self.spec.kernel_id}-{self.dtype}-{self.label}"

    def arguments(self, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Fresh canonical arguments on a device; the same each time for a seed."""
        words = self.id if seed == 0 else f"{self.id} {seed}"
        return drawn(self.op, self.spec, self.dtype, device, words, **self.given)


def tried_by(item: Any) -> tuple[Case | None, KernelSpec | None]:
    """The case that a test of the kit runs, if it runs one, and the kernel, if it is about one."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    case: Case | None = params.get("lz_case")
    return case, params.get("lz_kernel") if case is None else case.spec


_FIELDS = {item.name for item in fields(Context) if item.init}


def drawn(op: Op | str, spec: KernelSpec, dtype: str, device: torch.device, seed: str, **given: Any) -> tuple[Any, ...]:
    """Canonical arguments from the op's own example; sizes move to what the kernel's limits allow."""
    found = public_op(op) if isinstance(op, str) else op
    assert callable(found.example)
    sizes = {name: fit(spec, name, n) for name, n in given.items() if type(n) is int and name not in _FIELDS}
    told: dict[str, Any] = {"dtype": dtype, "rank": len(sizes)} | {
        name: value for name, value in given.items() if name in _FIELDS
    }
    if "seq_len_q" in sizes:
        rows = sizes["seq_len_q"]
        cols = sizes["seq_len_k"] = rows if spec.square else sizes.get("seq_len_k", rows)
        told["seq_relation"] = "equal" if rows == cols else "shorter" if rows < cols else "longer"
    ctx = Context(found.op_id, dims=tuple(sizes.items()), **{**told, "needs": frozenset(given.get("needs", ()))})
    return found.example(Draw(ctx, device, zlib.crc32(seed.encode()), {**given, **sizes}))


@dataclass(frozen=True)
class Group:
    """Cases of one op that need some features; `every_dtype` repeats them for each declared dtype."""

    name: str
    op: str
    requires: frozenset[str]
    every_dtype: bool
    cases: list[Callable[[KernelSpec, str], Iterator[Case]]] = field(default_factory=list, compare=False)


GROUPS: dict[str, list[Group]] = {}


class Calls:
    """Cases of one op. What they have in common is given here, or by `usual` where it follows from the kernel."""

    def __init__(self, op: Op | str, usual: Callable[[KernelSpec], Given] | None = None, **common: Any) -> None:
        self._op, self._usual, self._common = op, usual, common

    def __call__(
        self,
        name: str,
        label: str,
        *requires: str,
        every_dtype: bool | None = None,
        unless_square: bool = False,
        **given: Any,
    ) -> None:
        """One case of a group, for kernels that declare some features."""

        @self.each(name, *requires, every_dtype=every_dtype)
        def one(spec: KernelSpec) -> Labelled:
            return () if unless_square and spec.square else [(label, given)]

    def each(self, name: str, *requires: str, every_dtype: bool | None = None) -> Callable[[Generator], Generator]:
        """Cases that follow from what the kernel declares: the function gives their labels and what is in each."""
        op = self._op if isinstance(self._op, str) else self._op.op_id
        found = Group(name, op, frozenset(requires), name in _EVERY_DTYPE if every_dtype is None else every_dtype)
        known = GROUPS.setdefault(name, [])
        if found not in known:
            known.append(found)

        def register(generate: Generator) -> Generator:
            known[known.index(found)].cases.append(
                lambda spec, dtype: (
                    self.case(spec, label, dtype, *requires, **given) for label, given in generate(spec)
                )
            )
            return generate

        return register

    def edges(self, *names: str, **few: Any) -> None:
        """Cases at the declared extremes of some sizes, each with what else the call has."""

        @self.each("sizes")
        def sizes(spec: KernelSpec) -> Labelled:
            yield from ((f"{name}_{size}", {**few, name: size}) for name in names for size in edges(spec, name))

    def case(self, spec: KernelSpec, label: str, dtype: str, *requires: str, **given: Any) -> Case:
        """A case that belongs to no group."""
        call = {**self._common, **(self._usual(spec) if self._usual else {}), **given}
        return Case(spec, self._op, label, dtype, {**call, "needs": {*requires, *call.get("needs", ())}})


def declare(op: Op) -> None:
    """Cases of an op that says itself how a call is made: its sizes at their least and at their most, each feature."""
    if op.example is None or not op.sizes or any(found.op == op.op_id for found in GROUPS.get("result", ())):
        return

    def sizes(place: int) -> dict[str, Any]:
        return {name: found[place] for name, found in op.sizes.items()}

    calls = Calls(op, **sizes(0))
    calls("result", "least")
    calls("result", "most", **sizes(-1))
    for feature in op.features:
        calls("result", feature, feature, every_dtype=False)


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


def cases_of(found: Group, spec: KernelSpec, dtypes: Iterable[str] | None = None) -> Iterator[Case]:
    """Every case of a group on one kernel, in the dtypes that are asked for, or that the group is tried in."""
    if dtypes is None:
        dtypes = dtypes_of(spec) if found.every_dtype else dtypes_of(spec)[:1]
    return (case for dtype in dtypes for cases in found.cases for case in cases(spec, dtype))


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
        first = -(-max(limit.min or 1, 1) // step) * step
        top = limit.max if limit.max is not None else max(preferred, first) + step
        steps, near = range(first, top + 1, step), max((preferred - first) // step, 0)
        around = steps[near : near + 2] or steps[-1:]
        allowed = list(around) if top - first < 10**6 else [first, -(-preferred // step) * step]
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
