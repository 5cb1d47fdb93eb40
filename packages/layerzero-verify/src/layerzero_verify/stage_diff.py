"""Level 3: the stages of a layer with real weights, one difference each, and the component they point to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero_verify import block
from layerzero_verify.caller import IDLE, Caller, StageError
from layerzero_verify.configs import CONFIGS
from layerzero_verify.layers import diff_stages, references
from layerzero_verify.lineup import LineUp
from layerzero_verify.models import Model
from layerzero_verify.report import Check, failed, skipped
from layerzero_verify.truth import Truth, rope_tables
from layerzero_verify.weights import LayerWeights, from_transformers, generator, made

__all__ = ["check_made", "check_stages"]


def check_stages(name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str) -> Iterator[Check]:
    """First and last layer of a Llama-like model, on the hidden states that the model itself feeds them."""
    module, config = model.module, model.module.config
    subject = f"{name} [{line_up.name}]"
    layers = getattr(getattr(module, "model", None), "layers", None)
    if layers is None or not _llama_like(layers[0]):
        yield skipped(3, "stage diff", "not of the Llama family", subject=subject)
        return
    hidden: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(_keeper(hidden, number), with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    try:
        model.logits(model.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    length = next(iter(hidden.values())).shape[1]
    positions = torch.arange(length, device=next(module.parameters()).device)[None]
    cos, sin = module.model.rotary_emb(hidden[0], positions)
    half = cos.shape[-1] // 2
    tables = (cos[0, :, :half].float().to(device), sin[0, :, :half].float().to(device))
    for number in sorted({0, len(layers) - 1}):
        weights = from_transformers(layers[number], config)
        yield _one(f"layer {number}", weights, hidden[number], tables, line_up, device, dtype, subject)


def _llama_like(layer: Any) -> bool:
    """RMSNorm, separate projections, SwiGLU: what the ladder's own layer computes."""
    return (
        all(hasattr(layer, name) for name in ("self_attn", "input_layernorm", "post_attention_layernorm"))
        and hasattr(layer.mlp, "gate_proj")
        and "SiLU" in type(layer.mlp.act_fn).__name__
        and not hasattr(layer.self_attn, "q_norm")
        and not hasattr(layer, "pre_feedforward_layernorm")
    )


def _keeper(hidden: dict[int, Tensor], number: int) -> Any:
    def keep(module: Any, args: Any, kwargs: Any) -> None:
        hidden[number] = (args[0] if args else kwargs["hidden_states"]).detach()

    return keep


def check_made(line_up: LineUp, device: torch.device, dtype: str, seed: int) -> Iterator[Check]:
    """The same with weights made here, for a machine without transformers."""
    config = CONFIGS["gqa"]
    x = torch.randn(2, 12, config.hidden, generator=generator("stages", seed))
    cos, sin = rope_tables(12, config.head_dim)
    tables = (cos.float().to(device), sin.float().to(device))
    yield _one("layer 0", made(config, 0, seed), x, tables, line_up, device, dtype, f"made weights [{line_up.name}]")


def _one(
    label: str,
    weights: LayerWeights,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    line_up: LineUp,
    device: torch.device,
    dtype: str,
    subject: str,
) -> Check:
    kind: torch.dtype = getattr(torch, dtype)
    weights, x = weights.to(kind, device), x.to(device, kind)
    truth = Truth(references(line_up))
    want = truth.layer(weights.to(torch.float64), x.double(), (tables[0].double(), tables[1].double()))
    own = {}
    if kind not in (torch.float32, torch.float64):
        own = truth.layer(weights, x, (tables[0].to(kind), tables[1].to(kind)))
    call = Caller(line_up)
    try:
        with torch.no_grad(), line_up.entered():
            got = block.forward(call, weights, x, tables)
    except StageError as error:
        return failed(3, "stage diff", error, subject=subject, dtype=dtype)
    if call.idle:
        return skipped(3, f"stage diff, {label}", IDLE, subject=subject, dtype=dtype)
    return diff_stages(3, f"stage diff, {label}", got, want, call, own, subject=subject, dtype=dtype)
