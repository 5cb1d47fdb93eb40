"""What torch needs of an op, derived from its declaration: the opaque op, and what torch.compile traces in its place.

The schema follows from the signature, the shapes from `Op.fake`, the gradient from `Op.reference`. Ops whose
arguments are no tensors, numbers and words have modules of their own (`library.OPS`, `more`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.op import Op, annotation_text
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place
from layerzero.torch_ops.written import chosen, write

__all__ = ["opaque_of", "schema", "traced_form"]

_TYPES = {"Tensor": "Tensor", "float": "Scalar", "int": "SymInt", "bool": "bool", "str": "str", "dtype": "ScalarType"}


def schema(op: Op) -> str:
    """The signature of the opaque op: canonical arguments, then the backend."""
    written = op.signature.parameters
    parts = []
    for name in op.arguments:
        text = annotation_text(written[name].annotation)
        word = re.split(r"[^\w.]", text, maxsplit=1)[0].rpartition(".")[2]
        optional = "?" if re.search(r"\bNone\b", text) else ""
        parts.append(f"{_TYPES[word]}{optional} {name}")
    result = "Tensor"
    if op.output_kind == "tensors":
        count = annotation_text(op.signature.return_annotation).count("Tensor")
        result = f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(parts)}, str? backend=None) -> {result}"


def opaque_of(op: Op) -> OpaqueOp:
    """The opaque op: it runs the public function, on contiguous results."""
    name = op.op_id
    by_name = [p.name for p in op.signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    places = [(place, argument) for place, argument in enumerate(op.arguments) if argument in by_name]
    first = places[0][0] if places else len(op.arguments)

    def run(*args: Any) -> Any:
        named = {argument: args[place] for place, argument in places}
        return _dense(functions.fastest(name)(*args[:first], **named, backend=args[-1]))

    def fake(*args: Any) -> Any:
        made = functions.declared[name].fake
        assert made is not None
        return made(*args[:-1])

    def plain(*args: Any) -> Any:
        return _reference(name)(*args[:-1])

    random = op.random is not None
    return OpaqueOp(name, schema(op), run, fake, None if random else plain, autocast=op.autocast, random=random)


def _dense(result: Any) -> Any:
    return result.contiguous() if isinstance(result, Tensor) else tuple(item.contiguous() for item in result)


def _reference(name: str) -> Callable[..., Any]:
    found = functions.declared[name].fallback_impl
    assert found is not None
    return found


_TRACED = """\
def {name}({declared}):
    args = ({args},)
    own = chosen("{name}", args, None, backend, differentiable(backend, {tensors}))
    return write(own, PLAIN, args, {casts}) if own else place(torch.ops.layerzero.{name}, *args, backend)
"""


def traced_form(op: Op) -> Callable[..., Any]:
    """What Dynamo traces in place of the public function."""
    tensors = (name for name, kind in zip(op.arguments, op.input_kinds, strict=True) if kind.startswith("tensor"))
    declared, defaults = op.parameters_written()
    text = _TRACED.format(
        name=op.op_id,
        declared=declared,
        args=", ".join(op.arguments),
        tensors=", ".join(tensors),
        casts=op.autocast,
    )
    space: dict[str, Any] = {
        "__name__": __name__, "chosen": chosen, "differentiable": differentiable, "write": write, "place": place,
        "torch": torch, "PLAIN": _reference(op.op_id), "DEFAULTS": defaults,
    }  # fmt: skip
    exec(compile(text, f"<layerzero {op.op_id}>", "exec"), space)
    found: Callable[..., Any] = space[op.op_id]
    return found
