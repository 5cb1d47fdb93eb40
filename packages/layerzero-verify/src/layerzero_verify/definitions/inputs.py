"""The inputs of a workload: numbers as given, tensors from files of the dataset, the rest made up, but valid.

Offsets add up, page numbers exist, tables are cosines. What an input has to be follows from its name; the names are
those the definitions use. Random numbers are drawn on the CPU, seeded by workload and input: the same workload means
the same numbers on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from layerzero.errors import BackendNotAvailableError, ConfigurationError, InvalidInputError, invalid
from layerzero_verify.definitions.schema import Definition, TensorSpec, torch_dtype
from layerzero_verify.definitions.sizes import violated
from layerzero_verify.definitions.trace import InputSource, Workload

_LOW_BIT = ("float8_e4m3fn", "float8_e5m2")
_WEIGHTS = ("B", "w1", "w2", "w13", "gate_up_proj", "down_proj", "gemm1_weights", "gemm2_weights")
# Made first: others follow from them.
_FIRST = ("kv_indptr", "kv_last_page_len", "gating_output", "routing_logits", "topk_ids")


class Maker:
    """Makes the inputs of one workload; those that it gives are respected."""

    def __init__(self, definition: Definition, workload: Workload, root: Path | None) -> None:
        self.definition, self.workload, self.root = definition, workload, root
        self.seed = f"{definition.name} {workload.uuid}"
        missing = [axis for axis in definition.var_axes if axis not in workload.axes]
        if missing:
            raise self.refused(f"does not give the axis {missing[0]}", missing[0], definition.var_axes)
        fixed = definition.const_axes
        for axis, size in workload.axes.items():
            if axis in fixed and fixed[axis] != size:
                raise self.refused(f"changes the constant axis {axis}", size, fixed[axis])
        self.sizes = {**workload.axes, **fixed}
        unknown = sorted(set(workload.inputs) - set(definition.inputs))
        if unknown:
            raise self.refused(f"gives {unknown[0]}, which is no input", unknown[0], definition.inputs)
        given = {name: source for name, source in workload.inputs.items() if source.kind != "random"}
        self.known = {name: self._given(name, source) for name, source in given.items()}

    def fill(self) -> dict[str, Any]:
        names = list(self.definition.inputs)
        for name in sorted(names, key=lambda item: _FIRST.index(item) if item in _FIRST else len(_FIRST)):
            if name not in self.known:
                self.known[name] = self._make(name, self.definition.inputs[name])
        return {name: self.known[name] for name in names}

    def keep(self, values: Mapping[str, Any]) -> None:
        """Refuse values that break a constraint; those that need a value not there yet wait."""
        broken, _ = violated(self.definition.constraints, values)
        if broken:
            raise self.refused(f"does not keep {broken[0]}", dict(self.workload.axes), broken[0])

    def refused(self, problem: str, value: object, limit: object) -> InvalidInputError:
        words = ", ".join(limit) if isinstance(limit, (tuple, list, dict)) else str(limit)
        where = f"the workload {self.workload.uuid} of {self.definition.name}"
        return invalid("SHAPE_INVALID", str(value), words, f"{where} {problem}")

    def _given(self, name: str, source: InputSource) -> Any:
        spec = self.definition.inputs[name]
        if source.kind == "scalar":
            if spec.shape is not None:
                raise self.refused(f"gives a number for the tensor {name}", source.value, spec.shape)
            return source.value
        tensor = _read(source, self.root)
        shape = self.definition.shape(spec, self.sizes)
        if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(spec.dtype):
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise self.refused(f"{name} in {source.path} does not fit", found, f"{spec.dtype} {shape}")
        return tensor

    def _make(self, name: str, spec: TensorSpec) -> Any:
        shape = self.definition.shape(spec, self.sizes)
        role = _ROLES.get(name, _scale if name.endswith("_scale") else None)
        made = role(self, name, shape) if role is not None else self._plain(name, spec, shape)
        if shape is None:
            return made if not isinstance(made, Tensor) else made.item()
        return torch.as_tensor(made).reshape(shape).to(torch_dtype(spec.dtype))

    def _plain(self, name: str, spec: TensorSpec, shape: tuple[int, ...] | None) -> Any:
        if spec.dtype == "bool":
            return True if shape is None else torch.rand(shape, generator=self.generator(name)) < 0.5
        if not spec.floating or spec.dtype == "float4_e2m1":
            told = f"{self.definition.name}: no rule makes a valid {name}: {spec.dtype}"
            hint = "give it in the workload, as a number or from a safetensors file"
            raise invalid("VALUE_INVALID", f"{name}: {spec.dtype}", "an input that can be made up", told, hint)
        if shape is None:
            return 1.0
        drawn = self.normal(name, shape)
        if spec.dtype in _LOW_BIT:
            return drawn.clamp(-2.0, 2.0)
        # Weights of a product are scaled so that the result has the size of the input: bounds then mean something.
        return drawn / math.sqrt(shape[-1]) if name in _WEIGHTS and len(shape) > 1 and shape[-1] else drawn

    # -- tools -----------------------------------------------------------------------------------
    def generator(self, name: str) -> torch.Generator:
        """A generator of this input's own: another input more or less does not shift its numbers."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator(name))

    def uniform(self, name: str, shape: Sequence[int] | None, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tuple(shape or ()), generator=self.generator(name))

    def whole(self, name: str, shape: Sequence[int] | None, low: int, high: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), tuple(shape or ()), generator=self.generator(name))

    def length(self, *names: str) -> int | None:
        """The first size of the first of these inputs that the definition has."""
        return self._size(names, 0)

    def width(self, *names: str) -> int | None:
        """The last size of the first of these inputs that the definition has."""
        return self._size(names, -1)

    def _size(self, names: tuple[str, ...], place: int) -> int | None:
        known = (self.definition.inputs.get(name) for name in names)
        found = next((spec for spec in known if spec is not None and spec.shape), None)
        return None if found is None else (self.definition.shape(found, self.sizes) or (0,))[place]

    @property
    def page_size(self) -> int:
        """Tokens of a page; 1 where keys are not paged."""
        return self.sizes.get("page_size", 1) if "kv_indices" in self.definition.inputs else 1

    def kv_lengths(self) -> list[int]:
        """Keys of each sequence, from the offsets made or given."""
        parts = self.known["kv_indptr"].diff().tolist()
        last = self.known.get("kv_last_page_len")
        if last is None:
            return [count * self.page_size for count in parts]
        return [
            (count - 1) * self.page_size + int(tail) if count else 0
            for count, tail in zip(parts, last[: len(parts)].tolist(), strict=True)
        ]


def split(total: int, lows: Sequence[int], highs: Sequence[int], generator: torch.Generator) -> list[int]:
    """Random whole parts of `total`, each within its bounds."""
    room = [high - low for low, high in zip(lows, highs, strict=True)]
    rest = total - sum(lows)
    if any(item < 0 for item in room) or not 0 <= rest <= sum(room):
        raise invalid(
            "SHAPE_INVALID",
            f"{total} in {len(lows)} parts",
            f"{sum(lows)} to {sum(highs)}",
            "the axes contradict each other",
        )
    parts, ahead = list(lows), sum(room)
    order = torch.randperm(len(parts), generator=generator).tolist()
    for place, index in enumerate(order):
        ahead -= room[index]
        least, most = max(0, rest - ahead), min(room[index], rest)
        fair = max(least, min(most, 2 * rest // (len(order) - place)))
        taken = int(torch.randint(least, fair + 1, (), generator=generator))
        parts[index] += taken
        rest -= taken
    return parts


def _offsets(parts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *parts]).cumsum(0)


# -- attention -----------------------------------------------------------------------------------
def _kv_indptr(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    count = (shape or (1,))[0] - 1
    total = make.length("kv_indices", "k") or 0
    queries = make.known.get("qo_indptr")
    needed = [1] * count if queries is None else [-(-part // make.page_size) for part in queries.diff().tolist()]
    if total < sum(needed) and queries is None:  # fewer pages than sequences: the last ones stay empty
        needed = [1] * total + [0] * (count - total)
    return _offsets(split(total, needed, [total] * count, make.generator(name)))


def _qo_indptr(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    keys = make.kv_lengths()
    total = make.length("q", "q_nope") or 0
    least = [min(1, length) for length in keys]
    if sum(least) > total:
        least = [0] * len(keys)
    return _offsets(split(total, least, keys, make.generator(name)))


def _last_page_len(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    counts, page = make.known["kv_indptr"].diff().tolist(), make.page_size
    drawn = make.whole(name, shape, 1, page + 1).tolist()[: len(counts)]
    queries = make.known.get("qo_indptr")
    needed = [0] * len(counts) if queries is None else queries.diff().tolist()
    tails = [
        min(page, max(tail, need - (count - 1) * page)) if count else 0
        for count, tail, need in zip(counts, drawn, needed, strict=True)
    ]
    short = (make.length("q", "q_nope") or 0) if "qo_indptr" in make.definition.inputs else 0
    short -= sum((count - 1) * page + tail for count, tail in zip(counts, tails, strict=True) if count)
    for index, (count, tail) in enumerate(zip(counts, tails, strict=True)):  # there must be a key for every query
        if short > 0 and count:
            tails[index] = min(page, tail + short)
            short -= tails[index] - tail
    slots = (shape or (0,))[0]  # published prefills declare one slot more than there are sequences
    return torch.tensor(tails + [0] * (slots - len(tails)))


def _kv_indices(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    pages, count = make.length("k_cache", "ckv_cache") or 1, (shape or (0,))[0]
    if count <= pages:
        return torch.randperm(pages, generator=make.generator(name))[:count]
    return make.whole(name, (count,), 0, pages)  # sequences share pages


def _sm_scale(make: Maker, name: str, shape: tuple[int, ...] | None) -> float:
    rotary = make.width("q_pe")
    # The latent form is scaled by the width of the heads before absorption, which is 128 in every published model.
    return 1.0 / math.sqrt(128 + rotary if rotary is not None else make.width("q", "query") or 1)


# -- positions -----------------------------------------------------------------------------------
def _angles(rows: int, pairs: int) -> Tensor:
    return torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(pairs) / max(pairs, 1))


def _cos_sin_cache(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    rows, width = shape or (1, 2)
    angles = _angles(rows, width // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _table(make: Maker, shape: tuple[int, ...] | None, function: Callable[[Tensor], Tensor]) -> Tensor:
    *leading, rows, width = shape or (1, 2)
    full = width == make.width("q", "query")  # one angle per element, both halves alike
    table = function(_angles(rows, width // 2 if full else width))
    return (torch.cat((table, table), dim=-1) if full else table).expand(*leading, rows, width).contiguous()


# -- experts -------------------------------------------------------------------------------------
def _topk_ids(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    tokens, count = shape or (0, 0)
    experts = make.sizes.get("num_experts") or make.length("w1", "w13", "gemm1_weights") or count
    gates = make.known.get("gating_output", make.known.get("routing_logits"))
    scores = gates.float() if gates is not None else make.uniform(name, (tokens, experts), 0.0, 1.0)
    return scores.topk(count, dim=-1).indices


def _expert_offset(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    everywhere, here = (make.sizes.get(axis, 0) for axis in ("num_experts", "num_local_experts"))
    return make.whole(name, shape, 0, everywhere - here + 1)


def _scale(make: Maker, name: str, shape: tuple[int, ...] | None) -> Tensor:
    scaled = name.removesuffix("_scale")
    width = make.width(scaled) if scaled in _WEIGHTS else 1
    return make.uniform(name, shape, 0.5, 1.5) / math.sqrt(width or 1)


# How an input of a name is made, from its name and shape.
Role: TypeAlias = Callable[[Maker, str, tuple[int, ...] | None], Any]
_ROLES: Mapping[str, Role] = {
    "kv_indptr": _kv_indptr,
    "qo_indptr": _qo_indptr,
    "kv_last_page_len": _last_page_len,
    "kv_indices": _kv_indices,
    "sm_scale": _sm_scale,
    "cos_sin_cache": _cos_sin_cache,
    "cos": lambda make, name, shape: _table(make, shape, torch.cos),
    "sin": lambda make, name, shape: _table(make, shape, torch.sin),
    **dict.fromkeys(
        ("positions", "position_ids"),
        lambda make, name, shape: make.whole(name, shape, 0, make.length("cos_sin_cache", "cos") or 4096),
    ),
    "probs": lambda make, name, shape: torch.softmax(2.0 * make.normal(name, shape or (1,)), dim=-1),
    "top_k": lambda make, name, shape: make.whole(name, shape, 1, min(make.width("probs", "logits") or 2, 64) + 1),
    "top_p": lambda make, name, shape: make.uniform(name, shape, 0.1, 0.95),
    "min_p": lambda make, name, shape: make.uniform(name, shape, 0.01, 0.2),
    "temperature": lambda make, name, shape: make.uniform(name, shape, 0.5, 1.5),
    "topk_ids": _topk_ids,
    "topk_weights": lambda make, name, shape: torch.softmax(make.normal(name, shape or (1,)), dim=-1),
    "routing_bias": lambda make, name, shape: 0.1 * make.normal(name, shape or ()),
    "local_expert_offset": _expert_offset,
    "routed_scaling_factor": lambda make, name, shape: 2.5,
    "eps": lambda make, name, shape: 1e-6,
}


def make_inputs(
    definition: Definition, workload: Workload, device: torch.device | str, *, root: Path | None = None
) -> dict[str, Any]:
    """Every input in the definition's order, on the device; the same workload always gives the same numbers.

    `root` is the dataset's folder, where safetensors files are looked for. A workload that contradicts its definition
    is refused with the axis, input or constraint.
    """
    maker = Maker(definition, workload, root)
    maker.keep(maker.sizes)
    try:
        made = maker.fill()
    except InvalidInputError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise maker.refused("cannot be made up", f"{type(error).__name__}: {error}", "") from error
    maker.keep({**maker.sizes, **made})
    place = torch.device(device)
    return {name: item.to(place) if isinstance(item, Tensor) else item for name, item in made.items()}


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Fresh tensors: a kernel may write into what it is given."""
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in inputs.items()}


def _read(source: InputSource, root: Path | None) -> Tensor:
    if root is None:
        raise ConfigurationError(
            f"{source.path} is relative to a dataset, and none is given", code="CONFIG_FILE_MISSING", value=source.path
        )
    path = (root / source.path).resolve()
    if root.resolve() not in path.parents:
        raise ConfigurationError(
            f"{source.path} is outside the dataset", code="PATH_NOT_TRUSTED", value=source.path, limit=str(root)
        )
    if not path.is_file():
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path))
    try:
        from safetensors import safe_open
    except ImportError:
        raise BackendNotAvailableError(
            "safetensors is not installed", value="safetensors", limit="'layerzero-verify[definitions]'"
        ) from None
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.get_tensor(source.key)  # type: ignore[no-any-return]
    except Exception as error:  # the library raises types of its own for a bad file and for a missing key
        raise ConfigurationError(
            f"{source.path}: {source.key} cannot be read: {error}", code="SCHEMA_INVALID", value=source.path
        ) from None
