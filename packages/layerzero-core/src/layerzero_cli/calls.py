"""A call of an op from shapes alone: `--shape 1,32,4096,128 --causal` becomes the arguments of `lz.attention`.

`Op.shapes` says which sizes an option names; the options become a context, and the op's own example the call. Its
tensors are made on torch's meta device, where they have shapes and strides but no memory, so any size and any device
can be asked about. On an accelerator that is here, real ones are made: torch's own checks look at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch

from layerzero._ops.signature import public_op
from layerzero.dispatch.run import current_world, describe
from layerzero.model.context import Context
from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.model.formula import Formula
from layerzero.model.op import Op
from layerzero.model.quant import format_traits
from layerzero.tuning.inputs import Draw
from layerzero_cli.words import device as device_of
from layerzero_cli.words import dtype as dtype_of
from layerzero_cli.words import is_here

_SHAPES = ("shape", "q", "k", "v", "weight")
_SIZES = {"context": "seq_len_k", "rotary_dim": "rotary_dim", "top_k": "top_k"}
# What an option says beside sizes: a word among the needs, fields of the context.
_WORDS = {
    **{name: name for name in ("alibi", "bias", "interleaved", "lse", "no_weight", "sinks", "softcap")},
    "activation": "activation_{}",
    "approximate": "gelu_{}",
    "top_k": "sample_top_k",
    "top_p": "sample_top_p",
}
_FIELDS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "causal": lambda given: {"causal": Causal.TOP_LEFT if given is True else Causal(given)},
    "dropout": lambda given: {"dropout": True, "dropout_p": given},
    "granularity": lambda given: {"granularity": given},
    "layout": lambda given: {"kv_cache_layout" if given in ("NHD", "HND") else "layout": Layout(given)},
    "mask": lambda given: {"mask": MaskKind(given)},
    "window": lambda given: {"window": _window(given)},
}


def _window(given: tuple[int, ...]) -> tuple[int, int]:
    if len(given) not in (1, 2):
        raise click.UsageError("--window takes LEFT or LEFT,RIGHT")
    return (given[0], given[1] if len(given) == 2 else 0)


def context(op: str, options: Mapping[str, Any]) -> Context:
    """The Context of the call that the options describe. Raises UsageError for an option the op does not have."""
    public = public_op(op)
    shapes = public.shapes or ({"shape": ",".join(public.sizes)} if public.sizes else {})
    if public.example is None or not shapes:
        raise click.UsageError(f"lz does not know the shapes of {op}; use lz.explain({op!r}, ...) from Python")
    given = {name: value for name, value in options.items() if value not in (None, False)}
    word = dtype_of(given.pop("dtype", "bfloat16"))
    spec = device_of(given.pop("device", None))
    backend = given.pop("backend", None)
    known = {*shapes, "grad", *public.options, *(("shape", "k", "v") if "q" in shapes else ())}
    extra = sorted(set(given) - known, key=list(given).index)
    if extra:
        raise click.UsageError(f"{op} has no {', '.join('--' + name.replace('_', '-') for name in extra)}")
    if op == "cast":
        given["format"] = dtype_of(given.get("format", "float8_e4m3fn"))
    sizes, rank = _sizes(op, shapes, given)
    fields: dict[str, Any] = {"needs_grad": bool(given.pop("grad", False)), "rank": rank, "quant_format": None}
    for name in set(given) & set(_FIELDS):
        fields |= _FIELDS[name](given[name])
    if "format" in public.options and op != "cast" and ("format" in given or op.endswith("quantize")):
        fmt, traits = format_traits(given.get("format", "int8"))
        usual = "tensor" if op.endswith("quantize") else "channel"
        fields |= {
            "quant_format": fmt.value,
            "granularity": "block" if traits.block_only else given.get("granularity", usual),
        }
    if "seq_len_q" in sizes and "seq_len_k" in sizes:
        pair = (sizes["tokens"], sizes["tokens_k"]) if "tokens_k" in sizes else (sizes["seq_len_q"], sizes["seq_len_k"])
        fields["seq_relation"] = "equal" if pair[0] == pair[1] else "shorter" if pair[0] < pair[1] else "longer"
    needs = {_WORDS[name].format(given[name]) for name in set(given) & set(_WORDS)}
    draft = Context(op, spec, word, tuple(sizes.items()), frozenset(needs), **fields)
    where = f"{spec.device_type}:{spec.index}" if is_here(spec) else "meta"
    try:
        args = _made(public, draft, where, given)
    except torch.OutOfMemoryError:  # too large to be real here; then without torch's own checks
        args = _made(public, draft, "meta", given)
    named = dict(public.keywords(args) if public.keywords else zip(public.arguments, args, strict=False))
    if "layout" in public.signature.parameters:
        named.setdefault("layout", given.get("layout", "BHSD"))
    canonical, layout, asked = public.normalize((), {**named, "backend": backend})
    return describe(public, canonical, layout, asked, current_world(), spec)


def _made(op: Op, draft: Context, where: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    assert callable(op.example)
    try:
        return op.example(Draw(draft, torch.device(where), 0, {"tables": torch.float32, **given}))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise click.UsageError(f"{op.op_id}: no tensor can be that large ({error})") from None


def _sizes(op: str, shapes: Mapping[str, str], given: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The sizes that the shapes name, then those that follow from them; and the rank of the first shape."""
    sizes: dict[str, int] = {}
    whole, before, rank = given.get("shape"), None, 0
    for option, form in shapes.items():
        if option not in _SHAPES:
            told = next((given[name] for name, size in _SIZES.items() if size == option and name in given), None)
            sizes.setdefault(option, Formula(form)(sizes.__getitem__) if told is None else told)
            continue
        shape = given.get(option) or (before if option != "weight" else None) or (whole if option == "q" else None)
        if shape is None:
            told = " (or --shape for query, key and value alike)" if option == "q" else ""
            raise click.UsageError(f"lz needs --{option} {form.upper()}{told} for {op}")
        names = _names(form, len(shape), given.get("layout"))
        if not names:
            shown = ",".join(str(size) for size in shape)
            raise click.UsageError(f"--{option} {shown} has {len(shape)} sizes; {op} takes {form.upper()}")
        free = len(shape) - len(names) + 1 if names[0].startswith("*") else 1
        for name, size in zip(names, (math.prod(shape[:free]), *shape[free:]), strict=True):
            count, _, plain = name.lstrip("*").rpartition("*")
            if sizes.setdefault(plain, size // int(count or 1)) != size // int(count or 1):
                raise click.UsageError(f"--{option}: {plain} is {size}, and {sizes[plain]} before it")
        before, rank = (shape if option == "q" or "q" in shapes else None), rank or len(shape)
    return sizes, rank


def _names(form: str, rank: int, layout: str | None) -> list[str]:
    """The names of a form's sizes in the order of the layout; of three axes of attention the heads are left out."""
    names = form.split(",")
    if layout in ("BSHD", "HND") and len(names) == 4:
        names[1], names[2] = names[2], names[1]
    if form.startswith("*"):
        return names if rank >= len(names) - 1 else []
    if rank == 3 and names[0] == "batch" and len(names) == 4:
        return [name for name in names if "heads" not in name]
    return names if rank == len(names) else []
