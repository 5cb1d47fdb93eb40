"""Attention processors over LayerZero's ops, for the layers whose own processors call torch directly.

Each is joined with the processor it takes the place of, since diffusers asks for their classes in several places; that
is done at the first patch, so that this module can be imported without the library. They keep no state: one object
serves every layer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor

from layerzero import attention, rope

NAME = "layerzero"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """What the dispatcher calls: tensors are [B, S, H, D], a mask of rank 2 says which keys of each row count."""
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    found = attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale,
        layout="BSHD", enable_gqa=enable_gqa, return_lse=return_lse,
    )  # fmt: skip
    return (found[0], found[1].transpose(1, 2)) if return_lse else found


def backend() -> Any:
    """The member of AttentionBackendName that stands for LayerZero; registered at the first call.

    Newer processors hand q, k and v to `dispatch_attention_fn` with such a name noted on them. The Enum takes no new
    members by ordinary means, so one is made by hand; `model.set_attention_backend("layerzero")` works then, too.
    """
    library: Any = importlib.import_module("diffusers.models.attention_dispatch")
    names = library.AttentionBackendName
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        library._AttentionBackendRegistry.register(member)(attend)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member  # last: what is found here is complete
    return member


def _projected(attn: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query of one stream, key and value of another, [B, S, H, D] each."""
    projected = attn.to_q(x), attn.to_k(source), attn.to_v(source)
    return _in_heads(projected, projected[0].shape[-1] // attn.heads, attn.norm_q, attn.norm_k)


def _in_heads(projected: Sequence[Any], head_dim: int, norm_q: Any, norm_k: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, S, H·D] as [B, S, H, D], query and key normed where there is a norm."""
    query, key, value = [item.unflatten(-1, (-1, head_dim)) for item in projected]
    return query if norm_q is None else norm_q(query), key if norm_k is None else norm_k(key), value


def _one_behind_another(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Query, key and value of two streams as those of one sequence."""
    return [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]


class PlainProcessor:
    """Self and cross attention of UNets, VAEs and DiTs: one stream of queries over itself or over another stream."""

    op: ClassVar[str] = "attention"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Project, attend, project back; images [B, C, H, W] are sequences of their pixels meanwhile."""
        if args or kwargs:  # deprecated arguments: the library knows what to say about them
            return super().__call__(  # type: ignore[misc,no-any-return] # the library's class comes next
                attn, hidden_states, encoder_hidden_states, attention_mask, temb, *args, **kwargs
            )
        x = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
        image = x.shape if x.ndim == 4 else None
        if image is not None:
            x = x.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        source = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        query, key, value = _projected(attn, x, source)
        if attention_mask is not None:
            # The library's masks come as [B, 1, S] or wider and leave this call once for each head.
            mask = attn.prepare_attention_mask(attention_mask, source.shape[1], source.shape[0])
            attention_mask = mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])
        out = attention(query, key, value, attention_mask, layout="BSHD").flatten(2)
        out = attn.to_out[1](attn.to_out[0](out))
        if image is not None:
            out = out.transpose(1, 2).reshape(image)
        if attn.residual_connection:
            out = out + hidden_states
        if attn.rescale_output_factor != 1.0:
            out = out / attn.rescale_output_factor
        return out  # type: ignore[no-any-return]


class JointProcessor:
    """Joint attention as in Stable Diffusion 3: image and text, each with projections of its own, attend all."""

    op: ClassVar[str] = "attention"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image tokens first, then text; the mask is ignored, as it is by the library."""
        query, key, value = _projected(attn, hidden_states, hidden_states)
        text = encoder_hidden_states
        if text is not None:
            projected = attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)
            added = _in_heads(projected, query.shape[-1], attn.norm_added_q, attn.norm_added_k)
            query, key, value = _one_behind_another((query, key, value), added)
        out = attention(query, key, value, layout="BSHD").flatten(2)
        if text is None:
            return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]
        image_out, text_out = torch.split_with_sizes(out, (hidden_states.shape[1], text.shape[1]), 1)
        if not attn.context_pre_only:
            text_out = attn.to_add_out(text_out)
        return attn.to_out[1](attn.to_out[0](image_out)), text_out


class FluxProcessor:
    """Flux: text and image tokens in one sequence, RMSNorm over each head, rotary embedding in pairs, attention."""

    op: ClassVar[str] = "attention + rope"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Text tokens first, then image; a block with a single stream gets both as `hidden_states`."""
        if attn.fused_projections:
            projected = attn.to_qkv(hidden_states).chunk(3, -1)
        else:
            projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key, value = _in_heads(projected, attn.head_dim, attn.norm_q, attn.norm_k)
        text = encoder_hidden_states
        if attn.added_kv_proj_dim is not None and text is not None:
            if attn.fused_projections:
                projected = attn.to_added_qkv(text).chunk(3, -1)
            else:
                projected = attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)
            added = _in_heads(projected, attn.head_dim, attn.norm_added_q, attn.norm_added_k)
            query, key, value = _one_behind_another(added, (query, key, value))
        if image_rotary_emb is not None:
            cos, sin = _half_tables(*image_rotary_emb, query.device)
            query, key = rope(query, key, cos, sin, interleaved=True, layout="BSHD")
        out = attend(query, key, value, attention_mask).flatten(2)
        if text is None:
            return out  # type: ignore[no-any-return]
        text_out, image_out = out.split((text.shape[1], out.shape[1] - text.shape[1]), 1)
        image_out = attn.to_out[1](attn.to_out[0](image_out))
        return image_out, attn.to_add_out(text_out)


# (cos the library made, its version, one angle a pair of cos, of sin): every layer of a step passes the same tables.
_last: tuple[Any, int, Tensor, Tensor] | None = None


def _half_tables(cos: Tensor, sin: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables [S, D] in which each angle stands twice, as [S, D/2]."""
    global _last
    # A tensor made before a capture would be missing from the graph, which then never sees new tables.
    fresh = torch.compiler.is_compiling() or (cos.is_cuda and torch.cuda.is_current_stream_capturing())
    known = _last
    if not fresh and known is not None and known[0]() is cos and known[1] == cos._version:
        return known[2], known[3]
    half_cos, half_sin = (table[:, ::2].to(device).contiguous() for table in (cos, sin))
    if not fresh and not torch.is_inference(cos):  # an inference tensor counts no versions
        _last = (ref(cos), cos._version, half_cos, half_sin)
    return half_cos, half_sin


@functools.cache
def known() -> dict[type, Any]:
    """Processor of the library -> ours that takes its place, derived from it."""
    common: Any = importlib.import_module("diffusers.models.attention_processor")
    flux: Any = importlib.import_module("diffusers.models.transformers.transformer_flux")
    pairs: tuple[tuple[type, Any], ...] = (
        (PlainProcessor, common.AttnProcessor2_0),
        (JointProcessor, common.JointAttnProcessor2_0),
        (FluxProcessor, flux.FluxAttnProcessor),
    )
    return {theirs: type(ours.__name__, (ours, theirs), {"__module__": __name__})() for ours, theirs in pairs}
