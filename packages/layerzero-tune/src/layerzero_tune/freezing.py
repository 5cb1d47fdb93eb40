"""`lz.compile`: a model or function whose choices are made once, beforehand."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
from torch import nn

from layerzero.device.probe import probe_device
from layerzero.errors import InvalidInputError
from layerzero.public.traffic import record
from layerzero.runtime.policies import under_table
from layerzero.torch_ops.imports import after_import
from layerzero_tune.tuning import solve, tune

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable
    from layerzero.recording.traffic import Traffic

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class FrozenFunction(Protocol[Result_co]):
    """A function whose choices are made, as `lz.compile` gives it."""

    table: DispatchTable
    traffic: Traffic
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Result_co:
        """Run it under its table."""


@overload
def freeze(
    model: nn.Module, *example_inputs: Any, budget: float | None = ..., model_id: str = ...,
    path: str | os.PathLike[str] | None = ..., device: str | None = ..., **example_options: Any,
) -> FrozenModule: ...  # fmt: skip


@overload
def freeze(
    model: Callable[..., Result], *example_inputs: Any, budget: float | None = ..., model_id: str = ...,
    path: str | os.PathLike[str] | None = ..., device: str | None = ..., **example_options: Any,
) -> FrozenFunction[Result]: ...  # fmt: skip


def freeze(
    model: Callable[..., Any],
    *example_inputs: Any,
    budget: float | None = None,
    model_id: str = "",
    path: str | os.PathLike[str] | None = None,
    device: str | None = None,
    **example_options: Any,
) -> Any:
    """Fix the kernels of a model for the calls that `model(*example_inputs)` makes.

    The example is run once and its calls are recorded; with `budget` they are tuned first, for so many seconds. What
    comes back is called like the model: inside it a dispatch table is obeyed and nothing is selected. A call that the
    example did not make is selected as ever. Attributes: `table`, `traffic`, `original`; a module stays a module.
    """
    if not callable(model):
        raise InvalidInputError(code="TYPE_INVALID", value=type(model).__name__, limit="a module or a function")
    inference = isinstance(model, nn.Module) and not model.training
    with record() as recording, torch.no_grad() if inference else torch.enable_grad():
        model(*example_inputs, **example_options)
    traffic = recording.traffic
    if budget is not None:
        tune(traffic, budget=budget)
    kinds = [item.context.device.device_type for item in traffic.calls]
    where = probe_device(device or max(set(kinds), key=kinds.count, default="cpu"))
    table = solve(traffic, path, device=where, model_id=model_id or getattr(model, "__name__", type(model).__name__))
    if isinstance(model, nn.Module):
        return FrozenModule(model, table, traffic)

    @functools.wraps(model)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        with under_table(table):
            return model(*args, **kwargs)

    frozen.table, frozen.traffic, frozen.original = table, traffic, model  # type: ignore[attr-defined]
    return frozen


compile = freeze  # the public name; inside this module the builtin keeps its own


class FrozenModule(nn.Module):
    """The model, run under its table. Parameters are the model's own."""

    def __init__(self, original: nn.Module, table: DispatchTable, traffic: Traffic) -> None:
        super().__init__()
        self.original = original
        self.table = table
        self.traffic = traffic
        self.training = original.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with under_table(self.table):
            return self.original(*args, **kwargs)


def _leave_alone() -> None:
    from layerzero.torch_ops.dynamo import leave_alone

    leave_alone("layerzero_tune.freezing")


after_import("torch._dynamo", _leave_alone)
