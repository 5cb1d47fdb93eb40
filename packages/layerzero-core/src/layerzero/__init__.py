"""LayerZero: for every call the fastest kernel that is correct here, and the reason why.

import layerzero as lz
out = lz.attention(q, k, v, is_causal=True)
print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerzero import ops
from layerzero._ops.paged import paged_batch as paged_batch
from layerzero._ops.positional import alibi_slopes as alibi_slopes
from layerzero._ops.signature import PUBLIC as _PUBLIC
from layerzero.op_tables import LATE_OPS as _LATE_OPS
from layerzero.ops import (
    add_rms_norm,
    attention,
    dequantize as dequantize,
    embedding as embedding,
    gelu_and_mul as gelu_and_mul,
    layer_norm,
    linear,
    paged_attention,
    quantize,
    relu_and_mul as relu_and_mul,
    rms_norm,
    rope,
    sample,
    sample_topk as sample_topk,
    sample_topp as sample_topp,
    silu_and_mul,
)
from layerzero.runtime.current import collector_paused as _collector_paused
from layerzero.torch_ops import install as _install
from layerzero.torch_ops.functions import functions as _functions
from layerzero.version import __version__

if TYPE_CHECKING:
    from layerzero import distributed, graphs
    from layerzero._ops.conversion import cast as cast
    from layerzero._ops.moe import mlp as mlp
    from layerzero._ops.gemma import gemma_add_rms_norm as gemma_add_rms_norm, gemma_rms_norm as gemma_rms_norm
    from layerzero._ops.grouped import grouped_attention as grouped_attention, grouped_batch as grouped_batch
    from layerzero._ops.loss import cross_entropy as cross_entropy
    from layerzero._ops.mla import mla_paged_attention as mla_paged_attention
    from layerzero._ops.moe import grouped_gemm as grouped_gemm, moe as moe, topk_gate as topk_gate
    from layerzero._ops.rotary import xpos as xpos
    from layerzero._ops.sampling_probs import sampling_probs as sampling_probs
    from layerzero._ops.varlen import varlen_attention
    from layerzero.distributed.agreement import agree as agree
    from layerzero.graphs.checks import (
        capture_graph as capture_graph,
        is_graph_safe as is_graph_safe,
        validate_graph_capture as validate_graph_capture,
    )
    from layerzero.model.context import Context as Context
    from layerzero.model.device import DeviceSpec as DeviceSpec
    from layerzero.model.masks import block_mask as block_mask, chunk_mask as chunk_mask
    from layerzero.public.checks import doctor, readiness_check as readiness_check
    from layerzero.public.control import (
        configure,
        disabled as disabled,
        get_config as get_config,
        get_locks as get_locks,
        load_config as load_config,
        lock,
        prefer as prefer,
        reload_config as reload_config,
        reset as reset,
        scoped,
        unlock as unlock,
        use_table as use_table,
    )
    from layerzero.public.inspection import (
        dry_run as dry_run,
        explain,
        list_kernels,
        list_ops as list_ops,
        select as select,
        validate as validate,
        which,
    )
    from layerzero.public.planning import plan
    from layerzero.public.traffic import record as record, warmup as warmup
    from layerzero.runtime.observation import metrics as metrics, observe as observe, structured_logs as structured_logs
    from layerzero_models.drafts.ops import sample_speculative as sample_speculative, sample_tree as sample_tree
    from layerzero_models.drafts.trees import tree_mask as tree_mask, tree_positions as tree_positions
    from layerzero_models.kv_cache import kv_cache as kv_cache
    from layerzero_models.packing import pack_weight as pack_weight
    from layerzero_models.patching import patch, patched as patched, unpatch as unpatch
    from layerzero_models.relative_bias import relative_bias as relative_bias
    from layerzero_models.rope_tables import rope_tables as rope_tables
    from layerzero_models.tensor_parallel import (
        column_linear as column_linear,
        row_linear as row_linear,
        shard_weight as shard_weight,
    )
    from layerzero_models.transformers import enable_transformers as enable_transformers
    from layerzero_tokenizers.ops import detokenize as detokenize, tokenize as tokenize
    from layerzero_tune.blocks.plan import plan_block as plan_block
    from layerzero_tune.freezing import compile as compile
    from layerzero_tune.tuning import solve as solve, tune
    from layerzero_verify.ladder import verify as verify

# The cold path's modules and the libraries of discovery are imported here; plugins are discovered at the first cold
# call. Both have a budget, and this split keeps both.
with _collector_paused():
    for _name in ("layerzero.dispatch.run", "layerzero.env", "importlib_metadata", "pluggy"):
        importlib.import_module(_name)
    _accelerator = importlib.import_module("layerzero.dispatch.accel").accelerator
    if _accelerator.native is not None:  # layerzero-accel: the same functions, their hot path in C
        globals().update(_functions.accelerate(_accelerator.functions.accelerated(_accelerator.native)))
        _accelerator.functions.put_in_place(_functions.accelerated)
_install(_PUBLIC, paged_batch, alibi_slopes)  # torch.compile, torch.export and tensor subclasses; loads nothing yet

# What a newcomer meets; every other name of `_LAZY`, of `lz.ops` and of installed packages is an attribute, too.
__all__ = [
    "__version__",
    "add_rms_norm",
    "attention",
    "configure",
    "distributed",
    "doctor",
    "explain",
    "graphs",
    "layer_norm",
    "linear",
    "list_kernels",
    "lock",
    "ops",
    "paged_attention",
    "patch",
    "plan",
    "quantize",
    "rms_norm",
    "rope",
    "sample",
    "scoped",
    "silu_and_mul",
    "tune",
    "varlen_attention",
    "which",
]

# Loaded at first use: a process that only calls ops never reads a policy file's machinery or a report's.
_LAZY_NAMES = {
    "_ops.grouped": "grouped_batch",
    "distributed.agreement": "agree",
    "graphs.checks": "capture_graph is_graph_safe validate_graph_capture",
    "model.context": "Context",
    "model.device": "DeviceSpec",
    "model.masks": "block_mask chunk_mask",
    "public.checks": "doctor readiness_check",
    "public.control": "configure disabled get_config get_locks load_config lock prefer reload_config reset scoped"
    " unlock use_table",
    "public.inspection": "dry_run explain list_kernels list_ops select validate which",
    "public.planning": "plan",
    "public.traffic": "record warmup",
    "runtime.observation": "metrics observe structured_logs",
}
_LAZY = _LATE_OPS | {name: f"layerzero.{module}" for module, names in _LAZY_NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if name in ("distributed", "graphs"):
        found = importlib.import_module(f"layerzero.{name}")
    elif module is None:
        if name.startswith("_"):  # Python and tools look for dunder names; no package brings one
            raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
        from layerzero.companions import Missing, public

        found = public(name)
        if isinstance(found, Missing):  # asked again: the package may be installed meanwhile
            return found
    else:
        found = getattr(importlib.import_module(module), name)
        found = _functions.accelerated.get(name, found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from layerzero.companions import known_names

    return sorted({*globals(), *__all__, *_LAZY, *known_names()})
