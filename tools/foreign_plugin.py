"""pytest plugin of tools/foreign.py: puts our code in the place of a library's, as LAYERZERO_FOREIGN says."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["WAYS", "pytest_configure"]


def sdpa() -> None:
    """`lz.attention` in the place of `torch.nn.functional.scaled_dot_product_attention`."""
    import torch

    import layerzero as lz

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return lz.attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def attention_interface() -> None:
    """What `attn_implementation="layerzero"` names, in the place of "sdpa", which transformers takes by default."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from layerzero_models.transformers import enable_transformers

    enable_transformers()
    AttentionInterface.register("sdpa", ALL_ATTENTION_FUNCTIONS["layerzero"])
    AttentionMaskInterface.register("sdpa", ALL_MASK_ATTENTION_FUNCTIONS["layerzero"])


def patched_models() -> None:
    """`lz.patch` on every model of transformers and diffusers that a test puts into evaluation mode."""
    import torch

    import layerzero as lz

    def evaluating(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def evaluate(self: torch.nn.Module) -> Any:
            own(self)
            if not self.__dict__.get("_in_patch"):
                self.__dict__["_in_patch"] = True
                lz.patch(self)
            return self

        return evaluate

    for name, kind in (("transformers", "PreTrainedModel"), ("diffusers", "ModelMixin")):
        try:
            model = getattr(__import__(name), kind)
        except ImportError:
            continue
        model.eval = evaluating(model.eval)


def definitions() -> None:
    """Every definition that flashinfer-bench makes is read by ours, and what it refuses ours refuses."""
    from flashinfer_bench.data import Definition
    from pydantic import ValidationError

    from layerzero.errors import LayerZeroError
    from layerzero_verify.definitions.schema import load_definition

    own = Definition.__init__

    def ours(data: dict[str, Any]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "definition.json"
            file.write_text(json.dumps(data, default=lambda item: item.model_dump(mode="json")), encoding="utf-8")
            try:
                load_definition(file)
            except LayerZeroError:
                return False
            return True

    @functools.wraps(own)
    def make(self: Any, **data: Any) -> None:
        try:
            own(self, **data)
        except ValidationError:
            assert not ours(data), f"flashinfer-bench refuses what we read: {data}"
            raise
        assert ours(json.loads(self.model_dump_json())), f"flashinfer-bench reads what we refuse: {data}"

    Definition.__init__ = make


WAYS = {way.__name__: way for way in (sdpa, attention_interface, patched_models, definitions)}


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is imported."""
    WAYS[os.environ["LAYERZERO_FOREIGN"]]()
