"""The opaque ops `torch.ops.layerzero.*`: one or two for each public op, registered once, when first needed.

Below autograd an op calls the public function, so the kernel is selected when the op runs. For tracing it knows the
shape of its result, for gradients its plain form, for autocast whether its inputs are cast (`declared`).
`torch.library.custom_op` is not used: it costs 13 µs a call where this costs 3.

Each has an overload `call` as well, which stands in compiled graphs where no gradient is recorded: it has no layer for
autograd, so a call crosses from C++ into Python once instead of three times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from layerzero.dispatch import modes
from layerzero.dispatch.hot import aside, watched
from layerzero.forking import fresh_lock
from layerzero.model.op import Op
from layerzero.torch_ops import declared
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, bare, narrowed, present, uncounted

_lock = fresh_lock(threading.RLock)
_library: Any = None
_complete = False
_namespace = torch._ops._OpNamespace("layerzero")


def opaque_ops() -> list[OpaqueOp]:
    """All opaque ops there are."""
    return [made for op in functions.ops() for made in declared.opaque_of(op)]


def register() -> None:
    """Define every op. Safe to call from many threads and any number of times."""
    global _complete, _library
    if _complete:
        return
    with _lock:
        if _library is not None:
            return  # this thread is at it: torch looks ops up by name while they are being defined
        make: Any = torch.library.Library
        _library = make("layerzero", "FRAGMENT")  # kept: an op lives as long as its Library
        for op in opaque_ops():
            _define(_library, op)
        vars(torch.ops)["layerzero"] = _namespace
        _complete = True


def add(op: Op) -> None:
    """Define the op of a plugin, where the others are defined already; else it is defined with them."""
    with _lock:
        for made in declared.opaque_of(op) if _complete else ():
            if not hasattr(_namespace, made.name):  # one that comes again has its own shapes and gradient now
                _define(_library, made)


def namespace() -> Any:
    """`torch.ops.layerzero` with every op in it."""
    register()
    return _namespace


def _define(library: Any, op: OpaqueOp) -> None:
    tags = [torch.Tag.pt2_compliant_tag]
    if op.random:
        tags.append(torch.Tag.nondeterministic_seeded)
    library.define(op.name + op.signature, tags=tuple(tags))
    _define_call(library, op, tags)
    full = f"layerzero::{op.name}"
    overload = getattr(_namespace, op.name).default
    count = len(overload._schema.arguments)
    library.impl(op.name, _below_autograd(op.run, count), "CompositeExplicitAutograd")
    torch.library.register_fake(full, _filled(op.fake, count), lib=library)
    if op.plain is None:
        library.impl(op.name, _without_gradient(overload), "Autograd")
    else:
        if op.replay:
            _define_backward(library, op, count)
        library.impl(op.name, _derived(op, overload), "Autograd", with_keyset=True)
        torch.library.register_vmap(full, _vmap(overload), lib=library)
    for kind in ("CPU", "CUDA", "XPU"):
        library.impl(op.name, _autocast(overload, kind, op), f"Autocast{kind}")


def _define_call(library: Any, op: OpaqueOp, tags: list[Any]) -> None:
    """The overload for compiled graphs. Its inputs come as they were traced: what was chosen for them must fit."""
    name = f"{op.name}.call"
    signature, run, fake = op.call or (op.signature, None, op.fake)
    library.define(name + signature, tags=(*tags, torch.Tag.needs_exact_strides))
    overload = getattr(_namespace, op.name).call
    count = len(overload._schema.arguments)
    library.impl(name, run or _direct(op.run, count), "CompositeExplicitAutograd")
    torch.library.register_fake(f"layerzero::{name}", _filled(fake, count), lib=library)
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for kind in ("CPU", "CUDA", "XPU"):
        library.impl(name, _autocast(overload, kind, op), f"Autocast{kind}")


def _define_backward(library: Any, op: OpaqueOp, count: int) -> None:
    """The gradient as an op of its own, for compiled graphs: the op runs again, on a kernel that has a backward."""
    name = f"{op.name}_backward"
    inputs = op.signature[1 : op.signature.index(") -> ")]
    library.define(f"{name}(Tensor?[] grads, int[] wanted, {inputs}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))

    def run(grads: list[Tensor | None], wanted: list[int], *inputs: Any) -> list[Tensor]:
        args = [bare(item) for item in _fill(inputs, count)]
        if args[-1] is not None:
            args[-1] = present(args[-1])
        for place in wanted:
            args[place] = args[place].detach().requires_grad_()
        found = _gradients(op.run, args, wanted, grads)
        taken = [item.untyped_storage()._cdata for item in (*args, *grads) if isinstance(item, Tensor)]
        made = []
        for place, grad in zip(wanted, found, strict=True):
            own = torch.zeros_like(args[place]) if grad is None else grad
            own = own.contiguous()
            if own.untyped_storage()._cdata in taken:  # what an op gives is nobody else's
                own = own.clone()
            taken.append(own.untyped_storage()._cdata)
            made.append(own.detach())
        return made

    def fake(grads: list[Tensor | None], wanted: list[int], *inputs: Any) -> list[Tensor]:
        return [inputs[place].new_empty(inputs[place].shape) for place in wanted]

    library.impl(name, run, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"layerzero::{name}", fake, lib=library)


# -- running ---------------------------------------------------------------------------------------
def _fill(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The dispatcher leaves out arguments at the end that equal their default, which is None in all our schemas."""
    return args + (None,) * (count - len(args))


def _filled(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    return lambda *args: function(*_fill(args, count))


def _below_autograd(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The kernel of an op: no gradient is recorded here, so none is asked of the kernel that is selected."""

    direct = _direct(run, count)

    def kernel(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return direct(*args)
        with torch.no_grad():
            return direct(*args)

    return kernel


def _once(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run what torch has just seen as an op: a profiler or forward-mode AD is not told again, nor a tracer of sizes."""
    tracer: Any = torch._C
    tracing = tracer._get_tracing_state()
    if tracing is None and not watched():
        return run(*args)
    with aside.quietly():
        if tracing is None:
            return run(*args)
        tracer._set_tracing_state(None)
        try:
            return run(*args)
        finally:
            tracer._set_tracing_state(tracing)


# What needs no second look on its way to a kernel.
_SIMPLE = frozenset({Tensor, Parameter, type(None), str, bool, int, float, list, tuple})


def _direct(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The kernel of an overload `call`: no gradient is recorded around it."""

    def kernel(*args: Any) -> Any:
        for item in args:
            if type(item) not in _SIMPLE:
                args = tuple(bare(item) for item in args)
                break
        if len(args) < count:
            args = (*args, *(None,) * (count - len(args)))
        elif args[-1] is not None:
            args = (*args[:-1], present(args[-1]))
        return _once(run, args)

    return kernel


def _without_gradient(overload: Any) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return kernel


def _autocast(overload: Any, kind: str, op: OpaqueOp) -> Callable[..., Any]:
    """Cast once, here, then switch autocast off: a traced graph holds the casts and means the same when it runs."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kind}"))
    device = kind.lower()

    def kernel(*args: Any) -> Any:
        if op.autocast:
            dtype = torch.get_autocast_dtype(device)
            args = tuple(item if i in op.kept else narrowed(item, dtype) for i, item in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args)

    return kernel


# -- transforms ------------------------------------------------------------------------------------
def _derived(op: OpaqueOp, overload: Any) -> Callable[..., Any]:
    """The op where gradients are recorded: what `torch.library.register_autograd` makes, and forward-mode AD.

    A dual tensor takes the plain form, whose steps torch derives: the op itself knows of no tangent and would lose it.
    """
    derivable = op.plain
    assert derivable is not None
    info = torch._library.autograd.Info(_backward(op), _remember)
    recorded = torch._library.autograd.make_autograd_impl(overload, info)
    count = len(overload._schema.arguments)

    def kernel(keys: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and modes.carries_tangent(modes.tensors_of(args)):
            return derivable(*_fill(args, count))
        return recorded(keys, *args)

    return kernel


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.places = tuple(i for i, item in enumerate(inputs) if isinstance(item, Tensor))
    ctx.values = tuple(None if isinstance(item, Tensor) else item for item in inputs)
    ctx.save_for_backward(*(inputs[i] for i in ctx.places))


def _backward(op: OpaqueOp) -> Callable[..., Any]:
    """The gradient by running the op again: with a kernel of its own choice in eager mode, else in plain torch.

    In a compiled graph that is one node (`_define_backward`), whose kernel is chosen when the graph runs.
    """
    assert op.plain is not None
    derivable = op.plain

    def recomputed(*args: Any) -> Any:
        with uncounted():  # the forward pass was counted when it ran
            return derivable(*args)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        args = list(ctx.values)
        saved = ctx.saved_tensors
        wanted = [i for i in ctx.places if ctx.needs_input_grad[i]]
        again = torch.is_grad_enabled()  # a gradient of the gradient is wanted
        if op.replay and not again and _compiling():
            for place, tensor in zip(ctx.places, saved, strict=True):
                args[place] = tensor
            found = getattr(_namespace, f"{op.name}_backward")(list(grads), wanted, *args)
        else:
            for place, tensor in zip(ctx.places, saved, strict=True):
                args[place] = tensor if again else tensor.detach().requires_grad_(place in wanted)
            eager = op.replay and not again and modes.plain(saved)
            found = _gradients(op.run if eager else recomputed, args, wanted, grads, again)
        back = dict(zip(wanted, found, strict=True))
        return tuple(back.get(i) for i in range(len(args)))

    return backward


def _compiling() -> bool:
    """Whether torch.compile derives a graph; a program of torch.export has to be plain torch."""
    return torch._guards.TracingContext.try_get() is not None and not torch.compiler._is_exporting_flag


def _gradients(
    function: Callable[..., Any], args: list[Any], wanted: list[int], grads: Any, again: bool = False
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        out = function(*args)
    outs = out if isinstance(out, tuple) else (out,)
    pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and g is not None]
    return torch.autograd.grad(
        [o for o, _ in pairs],
        [args[i] for i in wanted],
        [g for _, g in pairs],
        create_graph=again,
        allow_unused=True,
    )


def _vmap(overload: Any) -> Callable[..., Any]:
    """One call for each sample: no kernel knows of a batch axis that is not its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        found = [
            overload(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if not isinstance(found[0], tuple):
            return torch.stack(found), 0
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(found[0])

    return rule
