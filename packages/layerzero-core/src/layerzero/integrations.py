"""The import path of 0.1 to layerzero-models: `layerzero.integrations.zigzag` is `layerzero_models.zigzag` itself."""

from __future__ import annotations

import importlib
import sys

from layerzero.errors import PackageMissingError

for _name in ("speculative", "tensor_parallel", "zigzag"):
    try:
        _module = importlib.import_module(f"layerzero_models.{_name}")
    except ModuleNotFoundError as _error:
        if _error.name != "layerzero_models":
            raise
        raise PackageMissingError(
            "layerzero.integrations needs layerzero-models", value=_error.name, hint="pip install layerzero-models"
        ) from None
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _module
