"""The backend as if it were one for the CPU, where Triton's interpreter runs its kernels."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from layerzero.plugin import hookimpl


@hookimpl
def layerzero_register(registrar: Any) -> None:
    """The real descriptor on another device, without the CUDA-only block and without bfloat16 (see test_kernels)."""
    document = json.loads(files("layerzero_liger").joinpath("capabilities.json").read_text(encoding="utf-8"))
    document["platforms"] = ["cpu"]
    del document["vendor"], document["ops"]["mlp"]
    for entries in document["ops"].values():
        for entry in entries:
            del entry["min_sm"]
            entry["dtypes"] = ["float16", "float32"]
    registrar.backend(document)
