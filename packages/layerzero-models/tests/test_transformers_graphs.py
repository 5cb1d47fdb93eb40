"""`lz.patch(model, graphs=True)`: the same tokens as the unpatched model, by captured steps or with a reason.

Without a CUDA device the steps run uncaptured (`eager`): the same code over the same buffers, masks and positions.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_models.record import GraphReport

pytestmark = [pytest.mark.integration, pytest.mark.needs_package("transformers")]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


def stepping(model: Any, **options: Any) -> Any:
    """The model with graphs, its steps taken on this CPU."""
    lz.patch(model, graphs=True, **options)
    vars(model)["_layerzero"].eager = True
    return model


def graphs(model: Any) -> GraphReport:
    found = lz.patched(model)
    assert found is not None and found.graphs is not None
    return found.graphs


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "gpt2"])
def test_steps_give_the_tokens_of_the_unpatched_model(name: str, side: str | None) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, side)
    want = zoo.generated(model, given)
    stepping(model)
    for call in (1, 2):  # the second one finds the buffers of the first
        assert torch.equal(zoo.generated(model, given), want)
        found = graphs(model)
        assert found.steps == 9 * call and found.captured == ((2, 256),) and not found.plain
