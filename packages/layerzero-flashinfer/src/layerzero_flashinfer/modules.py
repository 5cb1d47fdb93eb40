"""Which modules FlashInfer compiles for which calls, and compiling many of them at once.

One module per template, dtypes, head_dim, window or not, softcap or not. FlashInfer compiles a module when it is first
called, one after another; handed all at once to ninja they keep every core busy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from layerzero_flashinfer.vendor import lib

_WIDTHS = (64, 128, 256)  # head_dims of the templates

_SIMPLE = {
    "rms_norm": "norm", "gemma_rms_norm": "norm", "add_rms_norm": "norm", "gemma_add_rms_norm": "norm",
    "rope": "rope", "sample_topk": "topk", "sample": "topk", "sampling_probs": "topk",
}  # fmt: skip


def specs_for(shape: Mapping[str, Any], only: Sequence[str] | None = None) -> list[Any]:
    """FlashInfer's build specifications for one kind of call; `only` names templates, "decode" is one.

    `shape` names the op, and for attention the dtype, head_dim, batch, seq_len_q, kv_cache_dtype, and whether window
    and softcap are used; what is left out means the plain case.
    """
    op = str(shape.get("op", ""))
    lib()
    if op in _SIMPLE:
        return [_generator(_SIMPLE[op], f"gen_{_SIMPLE[op]}_module")()]
    if op in ("silu_and_mul", "gelu_and_mul"):
        gelu = "gelu_tanh" if shape.get("approximate") == "tanh" else "gelu"
        return [_generator("activation", "gen_act_and_mul_module")("silu" if op == "silu_and_mul" else gelu)]
    if op == "mla_paged_attention":
        dtype = _dtype(shape.get("dtype"))
        make = _generator("attention", "gen_batch_mla_module")
        return [make(name, dtype, dtype, dtype, torch.int32, 512, 64, False) for name in only or _templates(dtype)]
    if op in ("attention", "varlen_attention", "paged_attention"):
        return list(_attention(op, shape, only))
    return []


def specs_of(function: str, shape: Mapping[str, Any]) -> list[Any]:
    """The same for one kernel, told by its adapter: the modules that this one loads, whatever device is here."""
    name = function.partition(":")[2]
    if name == "grouped_attention":  # packed keys on Hopper's template
        return specs_for({**shape, "op": "varlen_attention"}, ("fa3",))
    return specs_for(shape, ("fa3",) if name.endswith("fa3") else ("decode",) if name == "decode" else ("fa2",))


def shape_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """What `specs_for` looks at, from a context as JSON, whose sizes and features have places of their own."""
    needs, sizes = call.get("needs", ()), call.get("dims", {})
    return {
        **{name: call.get(name) for name in ("op", "dtype", "kv_cache_dtype")},
        **{name: sizes[name] for name in ("batch", "seq_len_q", "head_dim") if name in sizes},
        "window": call.get("window") is not None,
        "softcap": "softcap" in needs,
        "approximate": "tanh" if "gelu_tanh" in needs else "none",
    }


def compile_for(shapes: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Compile what the shapes need and is not compiled yet, in parallel; names of the modules that were built."""
    shapes = list(shapes)
    wanted = {spec.name: spec for shape in shapes for spec in specs_for(shape) if not spec.is_compiled}
    if wanted:
        lib().jit.build_jit_specs(list(wanted.values()), verbose=False)
        for spec in wanted.values():
            _hand_over(spec)
    for dtype in {_dtype(shape.get("dtype")) for shape in shapes if shape.get("op") in ("sample", "sample_topk")}:
        from layerzero_flashinfer.sampling import prepare

        prepare(dtype)
    return tuple(sorted(wanted))


def _hand_over(spec: Any) -> None:
    """Let a module's own folder know that it is compiled.

    FlashInfer loads a module by one more run of ninja inside the module's folder. What was built together is in the log
    of the folder above, so that run would find nothing done and compile all of it again.
    """
    if not hasattr(spec, "build_dir"):
        return  # a release whose modules have no run of their own
    home = Path(spec.build_dir)
    with FileLock(spec.lock_path, thread_local=False):  # FlashInfer's own: nobody builds or loads it meanwhile
        for name in (".ninja_deps", ".ninja_log"):  # in this order: without the second the first means nothing
            together, alone = home.parent / name, home / name
            if together.exists() and not alone.exists():
                part = alone.with_suffix(".part")
                shutil.copyfile(together, part)
                part.replace(alone)


def _attention(op: str, shape: Mapping[str, Any], only: Sequence[str] | None) -> Iterator[Any]:
    dtype, width = _dtype(shape.get("dtype")), int(shape.get("head_dim", 128))
    cache = _dtype(shape.get("kv_cache_dtype") or shape.get("dtype"))
    if dtype.itemsize != 2 or width not in _WIDTHS:
        return  # no kernel of ours, and one module that does not compile would cost all of them
    sizes = (width, width, 0, bool(shape.get("window")), bool(shape.get("softcap")))
    alone = op == "attention" and int(shape.get("batch", 1)) == 1
    kind, dtypes = ("single", (dtype, dtype, dtype)) if alone else ("batch", (dtype, cache, dtype, torch.int32))
    for template in _templates(cache) if only is None else only:
        if template != "decode":
            yield _generator("attention", f"gen_{kind}_prefill_module")(template, *dtypes, *sizes, False)
    one_query = op != "varlen_attention" and int(shape.get("seq_len_q", 1)) == 1
    if "decode" in (only or (("decode",) if one_query else ())):
        yield _generator("attention", f"gen_{kind}_decode_module")(*dtypes, *sizes)


def _templates(cache: torch.dtype) -> tuple[str, ...]:
    """FA3 is Hopper's, and takes no cache of eight bits beside queries of sixteen."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return ("fa2", "fa3") if hopper and cache.itemsize == 2 else ("fa2",)


def _dtype(word: Any) -> torch.dtype:
    found = word if isinstance(word, torch.dtype) else getattr(torch, str(word or "bfloat16").removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _generator(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(f"flashinfer.jit.{module}"), name)
