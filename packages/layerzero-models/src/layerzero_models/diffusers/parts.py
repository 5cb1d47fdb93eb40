"""Norms and gated feed-forward blocks of diffusers over LayerZero's ops.

Each function is bound to a module instance as its `forward`. A bound method follows its module through a deep copy,
which a closure would not. Where a call is not what the op computes (mixed dtypes, a hook on an inner layer), the
module's own `forward` runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import layer_norm, mlp, rms_norm

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
    shape: Any
    if kind.__name__ == "RMSNorm":
        if kind is not nn.RMSNorm and kind.__module__ != "diffusers.models.normalization":
            return None
        shape = module.normalized_shape if kind is nn.RMSNorm else module.dim
        if getattr(module, "bias", None) is not None:
            return "lz.rms_norm has no bias"
        if len(shape) != 1:
            return "it goes over several axes"
        return types.MethodType(_rms_forward, module), "rms_norm"
    if kind is nn.LayerNorm:
        shape = module.normalized_shape
        if len(shape) != 1:
            return "it goes over several axes"
        return types.MethodType(_layer_forward, module), "layer_norm"
    if kind.__name__ == "FP32LayerNorm":
        return "computes in float32 whatever it is given"
    if kind is nn.GroupNorm:
        return "LayerZero has no group norm"
    return None


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
