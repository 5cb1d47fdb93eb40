"""What the backends of both devices share in a worker: the kind of a layer, choices of all ranks, the report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from layerzero_vllm.attend import Example
from layerzero_vllm.choice import Choice, LayerKind, Phase
from layerzero_vllm.plugin import mode
from layerzero_vllm.report import Report

T = TypeVar("T")
_log = logging.getLogger("layerzero.vllm")
_report: Report | None = None
_keyed: dict[str, bool] = {}


def kind_of(impl: Any, device: str, block_size: int, config: Any) -> LayerKind:
    """The kind of the layer with this implementation."""
    window = impl.sliding_window
    left = window[0] + 1 if isinstance(window, tuple) else window  # CUDA's are (left, right), without the query itself
    return LayerKind(
        device=device,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        block_size=block_size,
        kv_cache_dtype=impl.kv_cache_dtype,
        attn_type=str(getattr(impl.attn_type, "value", impl.attn_type)),
        window=left if left is not None and left > 0 else None,
        softcap=impl.logits_soft_cap or None,
        alibi=impl.alibi_slopes is not None,
        sinks=impl.sinks is not None,
        non_causal=bool(getattr(config.attention_config, "use_non_causal", False)),
        kv_transfer=config.kv_transfer_config is not None,
    )


def metadata_of(drawn: Example, phase: Phase, **more: Any) -> Any:
    """What vLLM would tell a builder of a drawn batch."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    return CommonAttentionMetadata(
        query_start_loc=drawn.query_start_loc,
        query_start_loc_cpu=drawn.query_start_loc.cpu(),
        seq_lens=drawn.seq_lens,
        num_reqs=phase.batch,
        num_actual_tokens=len(drawn.new),
        max_query_len=phase.query,
        max_seq_len=phase.context,
        block_table_tensor=drawn.block_table,
        slot_mapping=drawn.slots[drawn.new],
        **more,
    )


def agreed(choose: Callable[[], T]) -> T:
    """The first rank's answer on every rank of the tensor-parallel group, which all ask in the same order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return choose()
    found: T = group.broadcast_object(choose() if group.rank_in_group == 0 else None, src=0)
    return found


def check_scales(layers: dict[str, Any]) -> None:
    """An FP8 KV cache whose scales nobody set is a warning; an error in strict mode."""
    unset = [
        name
        for name, layer in layers.items()
        if layer.impl.kv_cache_dtype.startswith("fp8") and layer._k_scale_float == layer._v_scale_float == 1.0
    ]
    if not unset:
        return
    said = f"the FP8 KV cache of {len(unset)} layers ({unset[0]}, …) has scales of exactly 1.0, which nobody set"
    if mode(os.environ) == "strict":
        raise ValueError(f"{said}; give the checkpoint k_scale and v_scale, or another --kv-cache-dtype")
    _log.warning("%s", said)
    report().warnings.append(said)


def report() -> Report:
    """This worker's report, begun at the first call."""
    global _report
    if _report is None:
        import torch
        from vllm.config import get_current_vllm_config_or_none
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.version import __version__

        import layerzero as lz

        config = get_current_vllm_config_or_none()
        group = get_tp_group()
        model = getattr(getattr(config, "model_config", None), "model", "")
        versions = {"layerzero": lz.__version__, "vllm": __version__, "torch": torch.__version__}
        _report = Report(group.rank_in_group, group.world_size, model, versions)
    return _report


def key(name: str, *, won: bool) -> None:
    """Make it part of the key of compiled graphs whether they hold our op for what has this name."""
    from vllm.config import get_current_vllm_config_or_none

    _keyed[name] = won
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        config.additional_config["layerzero_vllm"] = sorted(f"{name}: {own}" for name, own in _keyed.items())


def tell(choices: list[Choice]) -> None:
    """Add choices to the report and say them once in the log."""
    mine = report()
    for choice in choices:
        mine.choices.append(choice.to_json())
        if mine.rank == 0:
            _log.info("%s, %s: %s (%s)", choice.kind, choice.phase, choice.kernel, choice.reason)
    mine.changed()
