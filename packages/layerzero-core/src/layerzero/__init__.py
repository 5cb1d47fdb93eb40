"""LayerZero: for every call the fastest kernel that is correct here, and the reason why.

import layerzero as lz
out = lz.attention(q, k, v, is_causal=True)
print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerzero.ops import (
    add_rms_norm,
    alibi_slopes,
    attention,
    dequantize,
    embedding,
    gelu_and_mul,
    layer_norm,
    linear,
    paged_attention,
    paged_batch,
    quantize,
    relu_and_mul,
    rms_norm,
    rope,
    sample,
    sample_topk,
    sample_topp,
    silu_and_mul,
)
from layerzero.ops.signature import PUBLIC as _PUBLIC
from layerzero.runtime.current import collector_paused as _collector_paused
from layerzero.runtime.late_ops import LATE_OPS as _LATE_OPS
from layerzero.torch_ops import install as _install
from layerzero.version import __version__

if TYPE_CHECKING:
    from layerzero.model.context import Context
    from layerzero.model.device import DeviceSpec
    from layerzero.public.checks import doctor, readiness_check
    from layerzero.public.control import (
        configure,
        disabled,
        get_config,
        get_locks,
        load_config,
        lock,
        prefer,
        reload_config,
        reset,
        scoped,
        unlock,
    )
    from layerzero.public.inspection import dry_run, explain, list_kernels, list_ops, select, validate, which
    from layerzero.public.planning import plan

# The cold path's modules and the libraries of discovery are imported here; plugins are discovered at the first cold
# call. Both have a budget, and this split keeps both.
with _collector_paused():
    for _name in ("layerzero.dispatch.run", "layerzero.env", "importlib_metadata", "pluggy"):
        importlib.import_module(_name)
_install(_PUBLIC, paged_batch, alibi_slopes)  # torch.compile, torch.export and tensor subclasses; loads nothing yet

__all__ = [
    "Context",
    "DeviceSpec",
    "__version__",
    "add_rms_norm",
    "alibi_slopes",
    "attention",
    "configure",
    "dequantize",
    "disabled",
    "doctor",
    "dry_run",
    "embedding",
    "explain",
    "gelu_and_mul",
    "get_config",
    "get_locks",
    "layer_norm",
    "linear",
    "list_kernels",
    "list_ops",
    "load_config",
    "lock",
    "paged_attention",
    "paged_batch",
    "plan",
    "prefer",
    "quantize",
    "readiness_check",
    "reload_config",
    "relu_and_mul",
    "reset",
    "rms_norm",
    "rope",
    "sample",
    "sample_topk",
    "sample_topp",
    "scoped",
    "select",
    "silu_and_mul",
    "unlock",
    "validate",
    "which",
]

# Loaded at first use: a process that only calls ops never reads a policy file's machinery or a report's.
_LAZY = {
    **_LATE_OPS,
    "Context": "layerzero.model.context",
    "DeviceSpec": "layerzero.model.device",
    "doctor": "layerzero.public.checks",
    "plan": "layerzero.public.planning",
    "readiness_check": "layerzero.public.checks",
    **dict.fromkeys(
        (
            "configure",
            "disabled",
            "get_config",
            "get_locks",
            "load_config",
            "lock",
            "prefer",
            "reload_config",
            "reset",
            "scoped",
            "unlock",
        ),
        "layerzero.public.control",
    ),
    **dict.fromkeys(
        ("dry_run", "explain", "list_kernels", "list_ops", "select", "validate", "which"),
        "layerzero.public.inspection",
    ),
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
