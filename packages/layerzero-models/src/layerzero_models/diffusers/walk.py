"""One pass over a model of diffusers: each part replaced or left, with the reason.

Norms and gated feed-forward blocks get a `forward` over LayerZero's ops, bound to the module instance: a bound method
follows its module through a deep copy, which a closure would not. Where a call is not what the op computes (mixed
dtypes, a hook on an inner layer), the module's own `forward` runs.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import attention, layer_norm, mlp, rms_norm
from layerzero_models.diffusers.processors import backend, known
from layerzero_models.patching import Changes, Record, over

Forward = Callable[..., Tensor]


def _rms_forward(self: Any, hidden_states: Tensor) -> Tensor:
    weight = self.weight
    if weight is not None and weight.dtype is not hidden_states.dtype:
        found: Tensor = type(self).forward(self, hidden_states)
        return found
    eps = self.eps
    return rms_norm(hidden_states, weight, torch.finfo(hidden_states.dtype).eps if eps is None else eps)


def _layer_forward(self: Any, input: Tensor) -> Tensor:
    weight = self.weight
    if weight is not None and weight.dtype is not input.dtype:
        found: Tensor = type(self).forward(self, input)
        return found
    return layer_norm(input, weight, self.bias, self.eps)


def norm_of(module: nn.Module) -> tuple[Forward, str] | str | None:
    """The forward and op for a norm, a word on why it is left alone, or None for a module that is no norm of ours."""
    kind = type(module)
    theirs = kind.__name__ == "RMSNorm" and kind.__module__ == "diffusers.models.normalization"
    if kind.__name__ == "FP32LayerNorm":
        return "computes in float32 whatever it is given"
    if kind is nn.GroupNorm:
        return "LayerZero has no group norm"
    if not theirs and kind not in (nn.RMSNorm, nn.LayerNorm):
        return None
    if kind is not nn.LayerNorm and getattr(module, "bias", None) is not None:
        return "lz.rms_norm has no bias"
    shape: Any = module.dim if theirs else module.normalized_shape
    if len(shape) != 1:
        return "it goes over several axes"
    forward, op = (_layer_forward, "layer_norm") if kind is nn.LayerNorm else (_rms_forward, "rms_norm")
    return types.MethodType(forward, module), op


_ACTIVATIONS = {"GEGLU": "gelu", "SwiGLU": "silu"}


def _gated_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    first, down = self.net[0], self.net[2]
    up = first.proj
    if args or kwargs or not _plain(up, down) or (self.training and self.net[1].p > 0.0) or len(self.net) > 3:
        found: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return found
    weight, bias = up.weight, up.bias
    inner = weight.shape[0] // 2
    # The library's gate is the second half of the product.
    return mlp(
        hidden_states, weight[:inner], down.weight, weight[inner:], _ACTIVATIONS[type(first).__name__],
        up_bias=None if bias is None else bias[:inner], gate_bias=None if bias is None else bias[inner:],
        down_bias=down.bias,
    )  # fmt: skip


def _plain(*layers: Any) -> bool:
    """Whether layers are linear and nothing else: no hook, no adapter, no forward that somebody else put there."""
    return all(
        type(layer) is nn.Linear
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and "forward" not in vars(layer)
        for layer in layers
    )


def feed_forward_of(module: nn.Module) -> Forward | None:
    """The forward for a gated block of the library; None for any other module."""
    net = getattr(module, "net", None)
    if type(module).__name__ != "FeedForward" or not isinstance(net, nn.ModuleList) or len(net) < 3:
        return None
    if type(net[0]).__name__ not in _ACTIVATIONS or not _plain(net[0].proj, net[2]):
        return None
    return types.MethodType(_gated_forward, module)


_GATE_LAST = "its gate is the second half, so that lz.mlp needs two products; feed_forward=True patches it"


def apply(model: nn.Module, record: Record, *, attention: bool, norms: bool, feed_forward: bool) -> None:
    """Replace what can be replaced, and write down what was done, and what was left and why."""
    changes, ours = record.changes, known()
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if attention and callable(processor):
            word, done = _attention(module, processor, changes, ours)
            (record.did if done else record.leave)(name, processor, word)
        found = norm_of(module) if norms else None
        if isinstance(found, str):
            record.leave(name, module, found)
        elif found is not None:
            changes.set(module, "forward", found[0])
            record.did(name, module, found[1])
        forward = feed_forward_of(module)
        if forward is not None and feed_forward:
            changes.set(module, "forward", forward)
            record.did(name, module, "mlp")
        elif forward is not None:
            record.leave(name, module, _GATE_LAST)


def _attention(module: Any, processor: Any, changes: Changes, ours: dict[type, Any]) -> tuple[str, bool]:
    """The op and True, or why not and False."""
    if getattr(processor, "_parallel_config", None) is not None:
        return "runs over several devices by the library's own scheme", False
    replacement = ours.get(type(processor))
    if replacement is not None:
        changes.set(module, "processor", replacement)
        return replacement.op, True
    if hasattr(processor, "_attention_backend"):
        changes.set(processor, "_attention_backend", backend())
        return "attention", True
    borrowed = borrow(processor)
    if borrowed is not None:
        changes.set(module, "processor", borrowed)
        return "attention", True
    if isinstance(processor, nn.Module):
        return "the processor has weights of its own", False
    return "the processor computes its scores itself", False


# Many models have processors of their own that differ in everything around one call of torch's attention function. Such
# a processor's code is kept as it is and gets other globals: the same ones, but for `F`. Neither the library's class
# nor its module is touched.
class _Functional:
    """torch.nn.functional with another attention."""

    scaled_dot_product_attention = staticmethod(attention)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.nn.functional, name)
        setattr(self, name, found)
        return found


_functional = _Functional()


def borrow(processor: Any) -> Any | None:
    """A copy of a processor that attends with LayerZero; None where its code does not call torch's function itself."""
    kind = _over_layerzero(type(processor))  # type: ignore[arg-type] # a class is hashable
    if kind is None:
        return None
    ours = copy.copy(processor)
    ours.__class__ = kind
    return ours


@functools.lru_cache(maxsize=256)
def _over_layerzero(kind: type) -> type | None:
    if issubclass(kind, torch.nn.Module):  # another object in its place would take its weights out of the model
        return None
    call = vars(kind).get("__call__")
    if not isinstance(call, types.FunctionType) or "scaled_dot_product_attention" not in call.__code__.co_names:
        return None
    names = call.__globals__
    if names.get("F") is not torch.nn.functional or vars(sys.modules[kind.__module__]) is not names:
        return None
    again = over(call, {"F": _functional})
    body = {"__call__": again, "__module__": __name__, "__doc__": kind.__doc__, "op": "attention"}
    return type(f"LayerZero{kind.__name__}", (kind,), body)
