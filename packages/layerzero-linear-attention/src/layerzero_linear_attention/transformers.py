"""Models of transformers with linear attention: the functions their layers call become the ops.

transformers binds such a function (`use_kernel_func_from_hub_with_fallback`) in the file of a model when that file is
imported, to the package it finds or to a slow form in torch. Here the `forward` of one layer of one model gets other
values for those names; the file, its class and other models of it stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz


def patch_layers(model: Any, record: Any) -> None:
    """A step of `lz.patch`: every layer whose forward calls one of the functions below by its name."""
    for name, module, bound in _layers(model):
        if not getattr(vars(module).get("forward"), "by_itself", "forward" not in vars(module)):
            record.leave(name, module, "it has a forward of its own on the instance")
            continue
        names = {word: _FUNCTIONS[word][1](own) for word, own in bound.items()}
        record.changes.set(module, "forward", types.MethodType(_renamed(type(module).forward, names), module))
        record.did(name, module, " + ".join(dict.fromkeys(_FUNCTIONS[word][0] for word in bound)))


def by_itself(model: Any) -> None:
    """Let a model compute in transformers' own torch code also where a package is installed that it would call: what
    `lz verify` compares with. `lz.patch` goes on from there."""
    for _, module, bound in _layers(model):
        forward: Any = _renamed(type(module).forward, {word: _alone(own) for word, own in bound.items()})
        forward.by_itself = True
        module.forward = types.MethodType(forward, module)


def _layers(model: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name and module of each such layer, and what transformers has bound to the names that its forward calls."""
    for name, module in model.named_modules():
        plain = _innermost(type(module).forward)
        words = plain.__code__.co_names if plain is not None else ()
        bound = {word: plain.__globals__[word] for word in words if plain is not None and word in _FUNCTIONS}
        if bound:
            yield name, module, bound


def _alone(own: Callable[..., Any]) -> Callable[..., Any]:
    """The torch code that transformers put a package in front of, which drops arguments that it does not know."""
    inner = _innermost(own)
    known = inspect.signature(inner or own).parameters
    return (lambda *args, **more: inner(*args, **{k: more[k] for k in more if k in known})) if inner else own


def _innermost(function: Any) -> types.FunctionType | None:
    """The function that decorators were put around; None for what is no function of Python."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None


def _renamed(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The function, in the same decorators, with other values for some global names of what is inside them."""
    inner = getattr(function, "__wrapped__", None)
    closure, known = function.__closure__, function.__globals__
    if inner is None:
        # without `__name__`: torch.compile would look the names up in the module of that name, where they are not
        known = {word: item for word, item in {**known, **names}.items() if word != "__name__"}
    else:
        made = _renamed(inner, names)
        closure = tuple(types.CellType(made) if cell.cell_contents is inner else cell for cell in closure or ())
    found = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


# -- the functions, with the arguments transformers gives them; each is made with the one it stands for ---------------
def _conv(own: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any
    ) -> Any:
        if activation not in _ACTIVATIONS or more.get("initial_states") is not None:
            return own(x, weight, bias, activation=activation, **more)
        offsets = _offsets(more)
        return lz.ops.causal_conv1d(x, weight, bias, None, offsets, _ACTIVATIONS[activation])[0]

    return causal_conv1d_fn


def _conv_step(own: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_update(
        x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Any:
        if activation not in _ACTIVATIONS:
            return own(x, conv_state, weight, bias, activation)
        out, state = lz.ops.causal_conv1d(x, weight, bias, conv_state, None, _ACTIVATIONS[activation])
        conv_state.copy_(state)
        return out

    return causal_conv1d_update


_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _delta(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def made(own: Callable[..., Any]) -> Callable[..., Any]:
        function = getattr(lz.ops, op)

        def delta_rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **more: Any,
        ) -> tuple[Tensor, Tensor | None]:
            out, state = function(
                query, key, value, g, beta, initial_state, _offsets(more), qk_l2norm=use_qk_l2norm_in_kernel
            )
            return out, state if output_final_state else None

        return delta_rule

    return made


def _scan(own: Callable[..., Any]) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **more: Any,
    ) -> Any:
        low, high = dt_limit
        most = None if high == float("inf") else high
        out, state = lz.ops.mamba2_scan(
            x, dt, A, B, C, D, dt_bias, initial_states, _offsets(more), dt_softplus, low, most
        )
        return (out, state) if return_final_states else out

    return mamba2_chunk_scan


def _scan_step(own: Callable[..., Any]) -> Callable[..., Any]:
    def selective_state_update(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """One token; dt, A, D and the bias were expanded from one value a head."""
        found, last = lz.ops.mamba2_scan(
            x.unsqueeze(1),
            dt[..., 0].unsqueeze(1),
            A[:, 0, 0],
            B.unsqueeze(1),
            C.unsqueeze(1),
            None if D is None else D[:, 0],
            None if dt_bias is None else dt_bias[:, 0],
            state,
            None,
            dt_softplus,
        )
        state.copy_(last)
        out: Tensor = found.squeeze(1)
        return out if z is None else out * F.silu(z)

    return selective_state_update


def _offsets(more: dict[str, Any]) -> Tensor | None:
    """Where packed sequences begin and end: as offsets, or by the number of its sequence for each token."""
    offsets: Tensor | None = more.get("cu_seqlens")
    of_token: Tensor | None = more.get("seq_idx")
    if offsets is not None or of_token is None:
        return offsets
    row = of_token.reshape(-1)
    cuts = (row.diff() != 0).nonzero().reshape(-1) + 1
    return torch.cat((cuts.new_zeros(1), cuts, cuts.new_full((1,), row.shape[0])))


# name in the file of a model -> the op, and what stands in its place
_FUNCTIONS: dict[str, tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "causal_conv1d_fn": ("causal_conv1d", _conv),
    "causal_conv1d_update": ("causal_conv1d", _conv_step),
    "torch_chunk_gated_delta_rule": ("gated_delta_rule", _delta("gated_delta_rule")),
    "torch_recurrent_gated_delta_rule": ("gated_delta_rule", _delta("gated_delta_rule")),
    "chunk_kimi_delta_attention": ("kimi_delta_attention", _delta("kimi_delta_attention")),
    "recurrent_kimi_delta_attention": ("kimi_delta_attention", _delta("kimi_delta_attention")),
    "mamba2_chunk_scan": ("mamba2_scan", _scan),
    "mamba2_selective_state_update": ("mamba2_scan", _scan_step),
}
