"""`lz.compare`: a model or a function before and after, timed in one interleaved run, its results side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

import layerzero as lz
from layerzero.errors import invalid
from layerzero_tune.timing import host_load
from layerzero_tune.timing.race import Times, race

if TYPE_CHECKING:
    from layerzero.public.inspection import ModelReport


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` returns.

    speedup      times faster after than before
    difference   the largest difference of a number in the results, None where they cannot be held side by side
    report       the calls of `after` with their kernels and reasons
    busy         share of the cores that other programs used meanwhile
    """

    before: Times
    after: Times
    difference: float | None
    report: ModelReport
    device: str
    busy: float = 0.0

    @property
    def speedup(self) -> float:
        return self.before.median_us / self.after.median_us

    def to_json(self) -> dict[str, Any]:
        times = {
            name: {"median_us": item.median_us, "p95_us": item.p95_us, "samples": item.samples}
            for name, item in (("before", self.before), ("after", self.after))
        }
        more = {"speedup": self.speedup, "difference": self.difference, "device": self.device, "busy": self.busy}
        return {**times, **more, **self.report.to_json()}

    def __str__(self) -> str:
        times = [
            f"{name:6} {item.median_us / 1e3:10.3f} ms, 95 % within {item.p95_us / 1e3:.3f} ms, {item.samples} samples"
            for name, item in (("before", self.before), ("after", self.after))
        ]
        apart = "" if self.difference is None else f", results differ by at most {self.difference:.1e}"
        return "\n".join([f"{self.speedup:.2f}× on {self.device}{apart}", *times, str(self.report)])


def compare(
    before: Callable[..., Any], inputs: Any, after: Callable[..., Any] | None = None, *, seconds: float = 5.0
) -> Comparison:
    """Time a model before and after `lz.patch`, or one function against another, in turns.

    before    a model that `lz.patch` knows; with `after`, anything that can be called
    inputs    a tuple of positional arguments, a mapping of named ones, or the only argument
    after     what to hold against it; default: a patched copy of the model that shares its weights

    Both run without gradients. The model itself is left as it is.
    """
    if after is None:
        if not isinstance(before, torch.nn.Module):
            told, hint = "lz.compare needs to know what comes after", "lz.compare(before, inputs, after)"
            raise invalid("VALUE_INVALID", type(before).__name__, "a model, or two functions", told, hint)
        after = _patched_copy(before)
    with torch.no_grad():
        first, second = _call(before, inputs), _call(after, inputs)
        difference = _difference(first(), second())
        tensors = [item for item in tree_leaves(inputs) if isinstance(item, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        looked = host_load.load()
        found = race(
            {"before": first, "after": second}, device=device, seconds=seconds, settle=True, noise=0.0, most=400
        )
        busy = host_load.others(looked, host_load.load())
    report: ModelReport = lz.explain(after, inputs)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Comparison(found.times["before"], found.times["after"], difference, report, place, busy)


def _patched_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, patched, whose weights and buffers are other tensors over the same memory: patching may move its own."""
    shared: dict[int, Any] = {id(item): item.detach() for item in model.buffers()}
    shared |= {id(item): torch.nn.Parameter(item.detach(), item.requires_grad) for item in model.parameters()}
    made: torch.nn.Module = copy.deepcopy(model, shared)
    lz.patch(made)
    return made


def _call(target: Callable[..., Any], inputs: Any) -> Callable[[], Any]:
    if isinstance(inputs, Mapping):
        return lambda: target(**inputs)
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return lambda: target(*given)


def _difference(one: Any, other: Any) -> float | None:
    """The largest difference of a number in two results of the same form; None where the forms differ."""
    pairs = [[item for item in tree_leaves(result) if isinstance(item, torch.Tensor)] for result in (one, other)]
    if not pairs[0] or [item.shape for item in pairs[0]] != [item.shape for item in pairs[1]]:
        return None
    apart = [(a.double() - b.double()).abs().max().item() for a, b in zip(*pairs, strict=True) if a.numel()]
    return max(apart, default=0.0)
