"""Kernels of a stranger that nothing vouches for, for the tests of the first use."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.health.quarantine import Quarantine
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state
from layerzero_verify.testing.fakes import FakeDist, FakeEntryPoint, capabilities, plugin

_module = sys.modules.setdefault("layerzero_first_use_kernels", ModuleType("layerzero_first_use_kernels"))
_numbers = _module.__dict__.setdefault("numbers", itertools.count())  # one count for both files of tests
ALL = ["backward", "no_weight", "mixed_weight", "inplace", "rotate_half", "position_ids", "generator"]
BASE = "torch.rms_norm.native"


def zeros(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    """The wrong kernel."""
    return torch.zeros_like(x)


def right(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    """The right one."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Planted:
    """Third-party kernels of one backend "acme" that record their runs, found by an entry point, nobody vouching."""

    def __init__(self, quarantine: Path) -> None:
        self.quarantine = quarantine
        self.calls: list[str] = []
        self.kernels: list[dict[str, Any]] = []

    def kernel(self, op: str, function: Callable[..., Any], variant: str = "fast", **fields: Any) -> str:
        name, kernel_id = f"kernel_{next(_numbers)}", f"acme.{op}.{variant}"

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(kernel_id)
            return function(*args, **kwargs)

        setattr(_module, name, run)
        self.kernels.append(
            {"op": op, "variant": variant, "function": f"{_module.__name__}:{name}", "priority": 99, "features": ALL}
            | fields
        )
        return kernel_id

    def start(self, version: str = "1.0", source: Path | None = None, **settings: Any) -> None:
        """A process as it begins: what was checked before is only on disk."""
        described = capabilities("acme", *self.kernels)
        if source is not None:
            source.mkdir(exist_ok=True)
            (source / "capabilities.json").write_text(json.dumps(described), encoding="utf-8")
        given: Any = described if source is None else source / "capabilities.json"
        entry = FakeEntryPoint("acme", plugin(given), FakeDist("acme", version))
        lz.reset()
        if settings:
            lz.configure(**settings)
        state.use(load_plugins(entry_points=[entry]).registry, proven=False)
        self.calls.clear()

    def entries(self) -> dict[str, str]:
        return {entry.kernel_id: entry.code for entry in Quarantine(self.quarantine).entries()}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    file = tmp_path / "kept" / "quarantine.json"
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(file))
    yield Planted(file)
    lz.reset()


def call(rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x, weight = torch.randn(rows, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    return x, weight, F.rms_norm(x, (64,), weight, 1e-6)
