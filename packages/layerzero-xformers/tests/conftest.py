"""A stand-in for xFormers, which computes on GPUs only: every call has to fit the recorded signature and the library's
own rules (nothing is broadcast, rows of a bias begin on 16 bytes, five dimensions have no backward), is then computed
in plain torch, and comes back in the library's own shapes."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SIGNATURES = json.loads((Path(__file__).parent / "signatures" / "xformers.json").read_text(encoding="utf-8"))["calls"]


def signature(dotted: str) -> inspect.Signature:
    """A recorded signature; a default only says that there is one."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                item["name"], inspect._ParameterKind[item["kind"]], default=empty if item["default"] is None else None
            )
            for item in SIGNATURES[dotted]
        ]
    )


def positions(rows: int, cols: int, bottom_right: bool) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None] + (cols - rows if bottom_right else 0), torch.arange(cols)[None, :]


@dataclass(frozen=True)
class LowerTriangularMask:
    def keep(self, rows: int, cols: int) -> Tensor:
        i, j = positions(rows, cols, False)
        return j <= i


@dataclass(frozen=True)
class LowerTriangularFromBottomRightMask:
    def keep(self, rows: int, cols: int) -> Tensor:
        i, j = positions(rows, cols, True)
        return j <= i


@dataclass(frozen=True)
class LowerTriangularFromBottomRightLocalAttentionMask:
    _window_size: int

    def keep(self, rows: int, cols: int) -> Tensor:
        i, j = positions(rows, cols, True)
        return (j <= i) & (j > i - self._window_size)


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int

    def keep(self, rows: int, cols: int) -> Tensor:
        assert self.window_left >= 0 and self.window_right >= 0
        i, j = positions(rows, cols, True)
        return (j >= i - self.window_left) & (j <= i + self.window_right)


BIASES = (
    LowerTriangularMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LocalAttentionFromBottomRightMask,
)


class Vendor:
    """The modules, the operators by name, and what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.ops = {
            name: type(name.replace(".", "_"), (), {}) for name in ("flash.FwOp", "flash.BwOp", "cutlass.FwOp",
            "cutlass.BwOp", "triton_splitk.FwOp")
        }  # fmt: skip
        self.modules = {name: ModuleType(name) for name in ("xformers", "xformers.ops", "xformers.ops.fmha")}
        fmha = self.modules["xformers.ops.fmha"]
        for part in ("attn_bias", "flash", "cutlass", "triton_splitk"):
            self.modules[f"xformers.ops.fmha.{part}"] = ModuleType(f"xformers.ops.fmha.{part}")
            setattr(fmha, part, self.modules[f"xformers.ops.fmha.{part}"])
        for name, op in self.ops.items():
            part, _, kind = name.partition(".")
            setattr(getattr(fmha, part), kind, op)
        for bias in BIASES:
            setattr(fmha.attn_bias, bias.__name__, self._checked(f"attn_bias.{bias.__name__}", bias))
        for name in ("", "_forward", "_forward_requires_grad"):
            full = f"memory_efficient_attention{name}"
            setattr(fmha, full, self._checked(full, lambda name=full, **given: self._attend(name, **given)))
        self.modules["xformers.ops"].fmha = fmha  # type: ignore[attr-defined]
        self.kernels: Any = None

    def _checked(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        bind = signature(f"xformers.ops.fmha.{name}")

        def called(*args: Any, **kwargs: Any) -> Any:
            given = dict(bind.bind(*args, **kwargs).arguments)
            self.calls.append((name, given))
            return compute(**given)

        return called

    def _attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
                scale: float | None = None, *, op: Any) -> Any:  # fmt: skip
        forward = op[0] if name == "memory_efficient_attention" else op
        self._rules(forward, op, name, query, key, value, attn_bias, p, scale)
        rows, cols = query.shape[1], key.shape[1]
        q, k, v = (t.movedim(1, -2).double() for t in (query, key, value))
        scores = q @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if isinstance(attn_bias, Tensor):
            scores = scores + attn_bias.double()
        elif attn_bias is not None:
            scores = scores.masked_fill(~attn_bias.keep(rows, cols), -math.inf)
        sums = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0)[..., None])
        out = (weights @ v).movedim(-2, 1).to(query.dtype)
        if name != "memory_efficient_attention_forward_requires_grad":
            return out
        if forward is self.ops["cutlass.FwOp"]:  # rows of its log-sum-exp are padded to 32
            return out, torch.nn.functional.pad(sums, (0, -rows % 32), value=math.nan).float()
        if forward is self.ops["flash.FwOp"]:
            sums = sums.masked_fill(sums == -math.inf, math.inf)
        return out, sums.float()

    def _rules(self, forward: Any, op: Any, name: str, q: Tensor, k: Tensor, v: Tensor, bias: Any, p: float,
               scale: Any) -> None:  # fmt: skip
        assert q.ndim == k.ndim == v.ndim in (4, 5)
        assert k.shape[2:-1] == q.shape[2:-1] == v.shape[2:-1], "nothing is broadcast"
        assert scale is None or scale > 0.0
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if q.ndim == 5:
            assert name != "memory_efficient_attention", "five dimensions have no backward"
            assert v.stride(3) == 0, "value heads are copied"
        if isinstance(bias, Tensor):
            assert forward is self.ops["cutlass.FwOp"]
            assert bias.shape == (q.shape[0], *q.shape[2:-1], q.shape[1], k.shape[1]) and bias.dtype is q.dtype
            step = 16 // bias.element_size()
            assert bias.stride(-1) in (0, 1) and all(size % step == 0 for size in bias.stride()[:-1])
        elif bias is not None:
            assert forward is not self.ops["triton_splitk.FwOp"]
            if forward is self.ops["flash.FwOp"]:
                assert not isinstance(bias, LowerTriangularMask) or q.shape[1] == k.shape[1]
            else:
                assert not isinstance(bias, LocalAttentionFromBottomRightMask)
                assert isinstance(bias, LowerTriangularMask) or q.shape[1] <= k.shape[1], "computed wrongly there"
        if forward is self.ops["cutlass.FwOp"] and q.shape[1] % 32 == 1 and k.stride(-2) == v.stride(-2) == 0:
            fine = bias is None or not isinstance(bias, (Tensor, LowerTriangularMask))
            assert fine or (isinstance(bias, Tensor) and q.shape[1] == 1), "the last row is computed over heads"
        assert p == 0.0 or name != "memory_efficient_attention_forward_requires_grad"


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendor]:
    """xFormers as the adapters see it, with the adapters themselves as `.kernels`."""
    made = Vendor()
    for name in [name for name in sys.modules if name == "xformers" or name.startswith("xformers.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "layerzero_xformers.kernels", raising=False)
    made.kernels = import_module("layerzero_xformers.kernels")
    yield made
    sys.modules.pop("layerzero_xformers.kernels", None)
