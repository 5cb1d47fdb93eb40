"""What torch needs of an op, derived from its declaration: opaque ops, and what torch.compile traces in its place.

The schemas follow from the function's signature (`lowering`), shapes from `Op.fake`, the gradient from `Op.plain`.
All of it is written as source, once for each op: an opaque op costs no loop over its arguments when it runs, and
Dynamo has straight lines to follow. What cannot be derived so is in a module that the op names (`Op.lowering`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from layerzero.model.op import Op, annotation_text
from layerzero.model.shapes import ordered
from layerzero.torch_ops import traced
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.lowering import HELPERS, Variant, left_out, variants
from layerzero.torch_ops.opaque import OpaqueOp

# Where the generated functions live: a module that Dynamo may trace, so that guards on it can be told from others.
_SPACE = traced.__dict__


def opaque_of(op: Op) -> tuple[OpaqueOp, ...]:
    """The opaque ops: each runs the public function."""
    _generate(op)
    made = []
    for variant in variants(op):
        run, fake, plain = (_SPACE[f"{word}_{variant.name}"] for word in ("run", "fake", "plain"))
        widths = [len(part.places) for part in variant.parts.values() for _ in part.places]
        made.append(
            OpaqueOp(
                variant.name,
                schema(op, variant),
                run,
                fake,
                plain if _derivable(op) else None,
                autocast=op.autocast,
                kept=frozenset(i for i, width in enumerate(widths) if width > 1),
                replay=variant.replay,
                random=op.random is not None and not left_out(op),
                call=importlib.import_module(op.lowering).CALL if op.lowering and variant.name == op.op_id else None,
            )
        )
    return *made, *(replace(made[-1], name=name) for name in op.torch_names)


def traced_form(op: Op) -> Callable[..., Any]:
    """What Dynamo traces in place of the public function."""
    if op.lowering:
        own: Callable[..., Any] = importlib.import_module(f"{op.lowering}_traced").traced
        return own
    _generate(op)
    found: Callable[..., Any] = _SPACE[f"call_{op.op_id}"]
    return found


def bridge(op: Op, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """One call, by its canonical arguments, through its opaque op."""
    _generate(op)
    named = op.keywords(args) if op.keywords else dict(zip(op.arguments, args, strict=False))
    if op.lowering:
        named["layout"] = layout
    if any(named.get(name, default) != default for name, default in left_out(op).items()):
        return _SPACE["PLAIN"][op.op_id](*args, layout)
    if named.get("generator") is not None:
        # An op cannot carry it; plain torch is what every subclass that knows torch's ops can follow.
        assert op.fallback_impl is not None
        return op.fallback_impl(*args)
    return _SPACE[f"bridged_{op.op_id}"](**named, backend=backend)


def schema(op: Op, variant: Variant) -> str:
    """The signature of an opaque op: what stands for the parameters, then the backend."""
    given = op.signature.parameters
    places: list[str] = []
    for name, part in reversed(variant.parts.items()):
        absent = given[name].default is None and len(part.places) == 1 and "?" in part.places[0]
        if absent and all("=None" in place for place in places):
            places.insert(0, f"{part.places[0]}=None")
        else:
            places[:0] = part.places
    text = annotation_text(op.signature.return_annotation)
    result = "Tensor"
    if op.output_kind == "quantized":
        result = "Tensor[]"
    elif "return_lse" in given:
        result = "Tensor" if variant.replay else "(Tensor, Tensor)"
    elif text.startswith("tuple") and not variant.first_only:
        result = f"({', '.join(['Tensor'] * text.count('Tensor'))})"
    return f"({', '.join(places)}, str? backend=None) -> {result}"


# -- the source ------------------------------------------------------------------------------------------
_FUNCTIONS = """
def run_{name}({places}, backend):
    return {run}


def fake_{name}({places}, backend):
    return {fake}


def plain_{name}({places}, backend):
    return {plain}

"""
_CALLS = """
def call_{op}({declared}):
{checks}{traced}    return {result}


def bridged_{op}({bridged_parameters}):
{bridged}    return {result}
"""
_SIMPLE = """\
    {when}:
        _args = ({canonical},)
        _own = chosen("{op}", _args, {layout}, backend, differentiable(backend, {tensors}))
        _found = write(_own, PLAIN["{op}"], _args, {casts}) if _own else {placed}
"""
_STRUCTURED = """\
    {when}:
        _places = ({flat},)
        if differentiable(backend, {tensors}):
            {planned}
            _found = plain_{name}(*_places, backend)
        else:
            _found = place(torch.ops.layerzero.{name}, *_places, backend)
"""
_PLACED = """\
    {when}:
        _found = {placed}
"""

_made: dict[str, Op] = {}


def _derivable(op: Op) -> bool:
    return (op.random is None or bool(left_out(op))) and op.output_kind != "quantized"


def _generate(op: Op) -> None:
    """Write the functions of an op into the module of generated functions, once."""
    if _made.get(op.op_id) is op:
        return
    name = op.op_id
    plain = op.plain or op.reference
    _SPACE["PLAIN"][name] = resolve_name(plain) if isinstance(plain, str) else plain
    _SPACE["CANONICAL"][name], _SPACE["FAKE"][name] = op.canonical, op.fake
    declared, _SPACE["DEFAULTS"] = op.parameters_written()
    source = _CALLED.sub(r"_\g<0>", _source(op, declared))
    exec(compile(source, f"<layerzero.torch_ops {name}>", "exec"), _SPACE)
    _SPACE[f"call_{name}"].__name__ = _SPACE[f"call_{name}"].__qualname__ = name  # what errors call it
    _made[name] = op


def _source(op: Op, declared: str) -> str:
    given = [name for name in op.signature.parameters if name != "backend"]
    found = variants(op)
    last = len(found) - 1
    heads = ["if True" if not i and not last else "if " + v.when if not i else "else" for i, v in enumerate(found)]
    checks = "".join(
        f"    {call}\n"
        for name, call in (
            ("generator", "no_generator(generator)"),
            ("inplace", f"lie_apart({', '.join(given[:2])}) if inplace else None"),
        )
        if name in given
    )
    written = ", ".join(
        name if p.default is p.empty else f"{name}=DEFAULTS[{name!r}]" for name, p in op.signature.parameters.items()
    )
    return "".join(_functions(op, item) for item in found) + _CALLS.format(
        op=op.op_id,
        declared=declared,
        checks=checks,
        traced="".join(_traced(op, item, head) for item, head in zip(found, heads, strict=True)),
        bridged_parameters=f"*, {written}",
        bridged="".join(
            _PLACED.format(when=head, placed=_placed(op, item, "default"))
            for item, head in zip(found, heads, strict=True)
        ),
        result=f"copied(({', '.join(given[:2])}), _found) if inplace else _found" if "inplace" in given else "_found",
    )


def _functions(op: Op, variant: Variant) -> str:
    parameters = op.signature.parameters
    raised = {name: variant.fixed.get(name, "None") for name in parameters} | {
        name: part.back for name, part in variant.parts.items()
    }
    shown = raised | {name: part.shown for name, part in variant.parts.items() if part.shown}
    call = [
        raised[name] if p.kind is p.POSITIONAL_OR_KEYWORD else f"{name}={raised[name]}"
        for name, p in parameters.items()
        if name != "backend" and not (p.kind is p.KEYWORD_ONLY and variant.fixed.get(name) == repr(p.default))
    ]
    run = f'fastest("{op.op_id}")({", ".join(call)}, backend=backend)'
    first = "[0]" if variant.first_only else ""
    kept = list(parameters)[: 1 if variant.first_only else 2]
    if op.output_kind == "quantized":
        run = f"promised({run}, x, scheme_of(fmt, granularity, block_size, asymmetric))"
    else:
        run = f"in_order({run}{first}, {', '.join(kept)})" if op.keeps_order else f"dense({run}{first})"
    return _FUNCTIONS.format(
        name=variant.name,
        places=", ".join(name for part in variant.parts.values() for name in part.names),
        run=run,
        fake=f'FAKE["{op.op_id}"]({", ".join(shown[name] for name in parameters if name != "backend")}){first}',
        plain=f'PLAIN["{op.op_id}"]({_canonical(op, variant, raised)}){first}' if _derivable(op) else "None",
    )


def _canonical(op: Op, variant: Variant, values: dict[str, str]) -> str:
    """The canonical arguments, from expressions of the public ones."""
    if op.canonical is not None and variant.simple:
        given = ", ".join(f"{name}={text}" for name, text in values.items())
        return f'*CANONICAL["{op.op_id}"](dict({given}))'
    return ", ".join(values[name] for name in (*op.arguments, *(("layout",) if op.lowering else ())))


def _flat(variant: Variant) -> str:
    return ", ".join(part.flat for part in variant.parts.values())


def _placed(op: Op, variant: Variant, overload: str = "") -> str:
    target = f"torch.ops.layerzero.{variant.name}"
    call = (
        f"{target}.{overload}({_flat(variant)}, backend)" if overload else f"place({target}, {_flat(variant)}, backend)"
    )
    if op.output_kind == "quantized":
        return f"assembled({call}, scheme_of(fmt, granularity, block_size, not symmetric), x)"
    return f"({call}, None)" if variant.first_only else call


def _traced(op: Op, variant: Variant, when: str) -> str:
    parameters = op.signature.parameters
    if not _derivable(op):
        return _PLACED.format(when=when, placed=_placed(op, variant))
    if not variant.simple:
        planned = next((part for part in variant.parts.values() if part.planned), None)
        names = [name for part in variant.parts.values() for name in part.names]
        return _STRUCTURED.format(
            when=when,
            name=variant.name,
            flat=_flat(variant),
            tensors=", ".join(f"_places[{i}]" for i in variant.tensors),
            planned=f"planned(_places[{names.index(planned.planned)}])" if planned else "pass",
        )
    public = {name: "False" if name == "inplace" else name for name in parameters}
    tensors = [name for name, part in variant.parts.items() if part.places[0].startswith("Tensor")]
    return _SIMPLE.format(
        when=when,
        op=op.op_id,
        canonical=_canonical(op, variant, public),
        layout="layout" if "layout" in parameters else None,
        tensors=", ".join(tensors),
        casts=op.autocast,
        placed=_placed(op, variant),
    )


# -- what the generated functions call ---------------------------------------------------------------------
def dense(result: Any) -> Any:
    """Contiguous results."""
    return result.contiguous() if isinstance(result, Tensor) else tuple(item.contiguous() for item in result)


def in_order(result: Any, *like: Tensor) -> Any:
    """Results in the memory order of these arguments."""
    if isinstance(result, Tensor):
        return ordered(result, like[0])
    return tuple(ordered(item, own) for item, own in zip(result, like, strict=True))


def promised(made: Any, x: Tensor, scheme: Any) -> list[Tensor]:
    """The parts of a quantized tensor: codes, scales, the zero points of an asymmetric scheme, and for NVFP4 the tensor
    scale. A traced graph was promised these very parts: where a kernel gives others, the reference makes them."""
    if (made.zero_point is None) != scheme.symmetric or made.block_size != scheme.block_size:
        words = {"granularity": scheme.granularity, "block_size": scheme.block_size, "symmetric": scheme.symmetric}
        made = functions.fastest("quantize")(x, scheme.fmt.value, backend="reference", **words)
    return [part.contiguous() for part in made.tensors()]


# In the generated source each begins with an underscore, as no argument of an op does.
_HELPERS = {**HELPERS, "dense": dense, "in_order": in_order, "promised": promised, "fastest": functions.fastest}
_NAMES = (*_HELPERS, "chosen", "write", "place", "differentiable", "torch", "PLAIN", "FAKE", "CANONICAL", "CAUSAL")
_CALLED = re.compile(rf"""(?<![\w."'])(?:{"|".join(_NAMES)})(?=[(\[.])""")
_SPACE.update({f"_{name}": item for name, item in {**_SPACE, **_HELPERS}.items() if name in _NAMES}, **_HELPERS)
