"""How the parameters of a public function stand in torch schemas, by their annotations, and what turns them there.

A schema knows tensors, numbers, words and lists of them. A number that may be a tensor of one value a row has two
places there, a batch or a quantized tensor one for each of its parts. `return_lse`, a second tensor that may be left
out and a weight that may be quantized make an op of their own each: another number or kind of results or inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError, invalid
from layerzero.model.describe import check_window_fits
from layerzero.model.grouped import GroupedBatch, make_grouped_batch
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.masks import MASK_VALUES
from layerzero.model.op import Op, annotation_text
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits

_TYPES = {"Tensor": "Tensor", "float": "Scalar", "int": "SymInt", "bool": "bool", "str": "str", "dtype": "ScalarType"}


class Part(NamedTuple):
    """One parameter: its places in the schema, and as source how it is spread there and put together again.

    `shown` is what `Op.fake` is given for it; `planned` the place that is None as long as a batch is not planned.
    """

    places: tuple[str, ...]
    flat: str
    back: str
    simple: bool = False
    shown: str | None = None
    planned: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.split(" ")[1].split("=")[0] for place in self.places)


class Variant(NamedTuple):
    """One op of torch for an op of ours: its name, the parameters in it, and those that have one value there."""

    name: str
    when: str
    parts: dict[str, Part]
    fixed: dict[str, str]
    replay: bool = True
    first_only: bool = False

    @property
    def simple(self) -> bool:
        """Whether every parameter is a tensor, a number, a word or a flag."""
        return all(part.simple for part in self.parts.values())

    @property
    def tensors(self) -> list[int]:
        places = [place for part in self.parts.values() for place in part.places]
        return [i for i, place in enumerate(places) if place.startswith("Tensor")]


# Of a batch the places are its first fields: three tensors, then what the host knows of them.
_PAGED = (
    "Tensor block_tables", "Tensor context_lens", "Tensor? query_lens", "SymInt[]? context_lens_host",
    "SymInt[]? query_lens_host",
)  # fmt: skip
_GROUPED = (
    "Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "Tensor kv_lens", "SymInt[]? cu_seqlens_q_host",
    "SymInt[]? cu_seqlens_k_host", "SymInt[]? kv_lens_host",
)  # fmt: skip
_QUANTIZED = (
    "Tensor data", "Tensor scale", "Tensor? zero_point", "Tensor? tensor_scale", "str fmt", "str granularity",
    "SymInt? block_size", "SymInt[] shape", "ScalarType weight_dtype",
)  # fmt: skip


_BATCHES = {"PagedBatch": ("make_paged_batch", _PAGED), "GroupedBatch": ("make_grouped_batch", _GROUPED)}


def _names(places: tuple[str, ...]) -> str:
    return ", ".join(place.split(" ")[1] for place in places)


def _part(op: Op, name: str) -> Part:
    given = op.signature.parameters
    text = annotation_text(given[name].annotation)
    words = set(re.findall(r"[A-Za-z]\w*", text))
    for kind in words & _BATCHES.keys():
        make, places = _BATCHES[kind]
        names = _names(places).split(", ")
        loose = "".join(f", {place}" for place in names if place in given)
        back = f"batch_of({make}, {kind}, {', '.join(names)})"
        return Part(places, f"*batch_parts({name}, {names}{loose})", back, False, "None", names[-1])
    if "QuantizedTensor" in words and "Tensor" not in words:
        return Part(_QUANTIZED, f"*quantized_parts({name})", f"quantized_of({_names(_QUANTIZED)})")
    if "BlockMask" in words:
        return Part((f"Tensor? {name}",), f"written_out({name}, query, key, layout, window)", name)
    if "Sequence" in words and "Tensor" in words:
        return Part((f"Tensor {name}",), f"as_tensor({name}, {next(iter(given))})", name)
    if "Sequence" in words:
        return Part((f"SymInt[]? {name}",), f"sides({name})", f"pair({name})")
    if {"bool", "str"} <= words:
        return Part(("str causal",), f"causal_word({name})", "CAUSAL[causal]")
    optional = "?" if "None" in words else ""
    number = "int" if "int" in words else "float" if words & {"float", "Number"} else ""
    if number and words & {"Tensor", "Number"}:
        absent = "None" if optional else f"{number}(1)"
        places = f"{_TYPES[number]}{optional} {name}", f"Tensor? {name}_rows"
        return Part(places, f"*split({name}, {absent})", f"either({name}, {name}_rows)")
    if op.lowered.get(name) == "absent for 0":
        return Part((f"Scalar? {name}",), name, f"({name} or 0.0)", True)
    if op.lowered.get(name) == "negated":
        return Part((f"bool? a{name}=None",), f"not {name}", f"not a{name}", True)
    first = re.split(r"[^\w.]", text, maxsplit=1)[0].rpartition(".")[2]
    if first not in _TYPES:
        raise invalid("TYPE_INVALID", f"{name}: {text}", f"one of {', '.join(_TYPES)}, Sequence[int]")
    return Part((f"{_TYPES[first]}{optional} {name}",), name, name, True)


def _weight(name: str, prefix: str) -> Part:
    """A weight that is quantized; the prefix tells the places of several apart."""
    places = tuple(place.replace(" ", f" {prefix}") for place in (*_QUANTIZED, "str? act"))
    return Part(places, f"*weight_parts({name})", f"weight_of({_names(places)})")


def left_out(op: Op) -> dict[str, Any]:
    """The parameters that no schema carries, with their defaults."""
    return {name: op.signature.parameters[name].default for name, word in op.lowered.items() if word == "left out"}


def variants(op: Op) -> list[Variant]:
    """The ops of torch that an op of ours needs, special ones first, the one of its own name last."""
    given = op.signature.parameters
    fixed = {name: word for name, word in (("generator", "None"), ("inplace", "False")) if name in given}
    fixed |= {name: repr(default) for name, default in left_out(op).items()}
    beside = ("context_lens", "cu_seqlens_k", "kv_lens")
    loose = {name: "None" for name in beside if name in given and name not in op.arguments}
    left = {"backend", "return_lse", *fixed, *loose}
    mixed = [name for name in given if "QuantizedTensor" in (text := annotation_text(given[name].annotation)) and
             "Tensor |" in text]  # fmt: skip
    parts = {name: _part(op, name) for name in given if name not in left and name not in mixed}
    if mixed:
        ahead = {name: Part((f"Tensor {name}",), name, name, True) for name in mixed}
        wide = {name: _weight(name, f"{name}_" if mixed[1:] else "") for name in mixed}
        ordered, split = (
            {p: {**parts, **chosen}[p] for p in given if p in {**parts, **chosen}} for chosen in (ahead, wide)
        )
        return [
            Variant(f"{op.op_id}_quantized", f"not isinstance({mixed[0]}, Tensor)", split, fixed),
            Variant(op.op_id, "True", ordered, fixed),
        ]
    for name in [name for name, word in op.lowered.items() if word == "may be absent"]:
        part = parts[name]
        present = {**parts, name: part._replace(places=(part.places[0].replace("?", ""),))}
        absent = {key: value for key, value in parts.items() if key != name}
        return [
            Variant(f"{op.op_id}_query", f"{name} is None", absent, {**fixed, name: "None"}, first_only=True),
            Variant(op.op_id, "True", present, fixed),
        ]
    fixed |= loose
    if "return_lse" not in given:
        return [Variant(op.op_id, "True", parts, fixed)]
    # The fused kernels give no gradient through the log-sum-exp: there the backward takes the plain form.
    return [
        Variant(f"{op.op_id}_lse", "return_lse", parts, {**fixed, "return_lse": "True"}, replay=False),
        Variant(op.op_id, "True", parts, {**fixed, "return_lse": "False"}),
    ]


# -- what the expressions above call, traced by Dynamo ----------------------------------------------------
# The causal words of a schema, as the public functions spell them.
CAUSAL: dict[str, bool | str] = {"none": False, "top_left": True, "bottom_right": "bottom_right"}


def causal_word(is_causal: bool | str) -> str:
    """The word of a schema for a causal flag."""
    if is_causal is False or is_causal is None:
        return "none"
    if is_causal is True:
        return "top_left"
    if is_causal == "bottom_right":
        return "bottom_right"
    raise InvalidInputError(code="VALUE_INVALID", value=str(is_causal), limit="False, True or 'bottom_right'")


def sides(window: int | Sequence[int] | None) -> list[int] | None:
    """A window as the list that a schema takes."""
    if window is None:
        return None
    if isinstance(window, int):
        if window < 0:
            raise InvalidInputError(code="WINDOW_INVALID", value=str(window))
        window = (window, 0)
    check_window_fits(window)
    return list(window)


def pair(window: Sequence[int] | None) -> tuple[int, ...] | None:
    """The list of a schema as a window."""
    return None if window is None else tuple(window)


def written_out(mask: Any, query: Tensor, key: Tensor, layout: str, window: Any) -> Tensor | None:
    """A mask; a mask value as a boolean one, once it is known to fit: an opaque op takes tensors only."""
    if not isinstance(mask, MASK_VALUES):
        found: Tensor | None = mask
        return found
    axis = 1 if layout == "BSHD" or query.dim() == 3 else 2
    rows, cols = query.shape[axis], key.shape[axis]
    heads = 1 if query.dim() == 3 else query.shape[3 - axis]
    dims = {"batch": query.shape[0], "num_heads": heads, "seq_len_q": rows, "seq_len_k": cols}
    mask.check(dims, query.dim(), window)
    return mask.dense(rows, cols, query.device)


def split(value: Any, absent: float | None = None) -> tuple[Any, Tensor | None]:
    """A parameter as a schema has it: a number, and beside it the tensor of one value a row."""
    return (absent, value) if isinstance(value, Tensor) else (value, None)


def either(number: float | None, rows: Tensor | None) -> Any:
    """The tensor of one value a row where there is one, else the number."""
    return number if rows is None else rows


def as_tensor(values: Tensor | Sequence[int], like: Tensor) -> Tensor:
    """Numbers as a tensor on the device of `like`."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return made.to(like.device)


def batch_parts(batch: Any, names: Sequence[str], *loose: Tensor | None) -> list[Any]:
    """A batch of pages or of groups, planned or as its tensors."""
    if isinstance(batch, (PagedBatch, GroupedBatch)):
        fields = [getattr(batch, name) for name in names]
        return [list(item) if isinstance(item, tuple) else item for item in fields]
    return [batch, *loose, *[None] * (len(names) - 1 - len(loose))]


def batch_of(make: Callable[..., Any], kind: Callable[..., Any], *parts: Any) -> Any:
    """The batch those parts describe; without host numbers it is planned here, which waits for the device."""
    tensors, hosts = parts[:3], parts[3:]
    if any(host is None for host in hosts):
        return make(*tensors)
    return kind(*tensors, *(tuple(host) for host in hosts))


def planned(host: Any) -> None:
    """Leave the graph where a gradient needs lengths that only the device knows."""
    if host is None:
        torch._dynamo.graph_break(msg="a gradient needs the lengths; make the batch outside of the graph")


def quantized_parts(source: QuantizedTensor) -> tuple[Any, ...]:
    """A quantized tensor."""
    words = source.fmt.value, source.granularity, source.block_size, list(source.shape), source.dtype
    return source.data, source.scale, source.zero_point, source.tensor_scale, *words


def quantized_of(*parts: Any) -> QuantizedTensor:
    """The quantized tensor of these parts."""
    data, scale, zero_point, tensor_scale, fmt, granularity, block_size, shape, dtype = parts
    known, _ = format_traits(fmt)
    return QuantizedTensor(data, scale, known, granularity, tuple(shape), dtype, block_size, zero_point, tensor_scale)


def weight_parts(weight: QuantizedTensor | PackedWeight) -> tuple[Any, ...]:
    """A quantized weight, and how its activations are quantized. Of a packed one the source: whether the packed parts
    are still its own can only be asked outside of a graph."""
    source, act = (weight, None) if isinstance(weight, QuantizedTensor) else (weight.source, weight.act)
    return (*quantized_parts(source), act)


def weight_of(*parts: Any) -> QuantizedTensor | PackedWeight:
    """The weight of these parts."""
    made = quantized_of(*parts[:-1])
    return made if parts[-1] is None else PackedWeight(made, act=parts[-1])


def scheme_of(fmt: str, granularity: str, block_size: int | None, asymmetric: bool | None) -> QuantScheme:
    """The scheme that the arguments of a schema name."""
    known, _ = format_traits(fmt)
    return QuantScheme(known, granularity, block_size, not asymmetric)


def assembled(parts: Sequence[Tensor], scheme: QuantScheme, like: Tensor) -> QuantizedTensor:
    """The quantized tensor of the parts that `quantize` gives, in their order, made from `like`."""
    zero_point = None if scheme.symmetric else parts[2]
    tensor_scale = parts[-1] if scheme.traits.tensor_scale else None
    shape, block = tuple(like.shape), scheme.block_size
    return QuantizedTensor(
        parts[0], parts[1], scheme.fmt, scheme.granularity, shape, like.dtype, block, zero_point, tensor_scale
    )


def no_generator(generator: torch.Generator | None) -> None:
    """Leave the graph to draw with a generator."""
    if generator is not None:
        torch._dynamo.graph_break(msg="LayerZero samples with a generator outside of the graph")


def lie_apart(q: Tensor, k: Tensor | None) -> None:
    """Refuse to write two results into one tensor."""
    if k is q:
        raise invalid("INPLACE_UNSUPPORTED", "q and k share memory", "tensors that lie apart")


def copied(targets: tuple[Tensor | None, ...], found: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Results written into these tensors: a copy at the end, which the compiler turns back into a write."""
    return tuple(None if target is None else target.copy_(item) for target, item in zip(targets, found, strict=True))


HELPERS = {
    item.__name__: item
    for item in (
        causal_word, sides, pair, written_out, split, either, as_tensor, batch_parts, batch_of, PagedBatch,
        make_paged_batch, GroupedBatch, make_grouped_batch, planned, quantized_parts, quantized_of, weight_parts,
        weight_of, scheme_of, assembled, no_generator, lie_apart, copied,
    )
}  # fmt: skip
