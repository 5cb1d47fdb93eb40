"""The attention backend of a CPU, in place of CPU_ATTN; imported by vLLM when it builds the first attention layer.

Both sides keep the KV cache in the same tensor and pack it differently. Per KV-cache group one of them is chosen when
vLLM makes the group's metadata builder, before any request; it then writes and reads that cache in every phase.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends import cpu_attn as stock

import layerzero as lz
from layerzero_vllm import attend, experts, linear, norm
from layerzero_vllm.choice import (
    OURS,
    THEIRS,
    Choice,
    LayerKind,
    Phase,
    cannot_run,
    choose_one,
    left_alone,
    lost,
    phases,
    refusals,
)
from layerzero_vllm.plugin import pinned
from layerzero_vllm.worker import agreed, check_scales, kind_of, metadata_of, report, tell

linear.install()  # before the weights of the first model are packed
experts.install()


class CpuBackend(stock.CPUAttentionBackend):
    """CPU_ATTN with our implementation and metadata; what it supports is what vLLM's supports."""

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        """The implementation that holds both sides."""
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuBuilder]:
        """The builder that chooses for its group."""
        return CpuBuilder


class CpuImpl(stock.CPUAttentionBackendImpl):
    """One layer's attention: vLLM's until its group has chosen ours."""

    ours = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        window = None if self.sliding_window < 0 else self.sliding_window
        softcap = self.logits_soft_cap or None
        self.settings = attend.Settings(self.scale, window, softcap, self.alibi_slopes, self.sinks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Every linear and expert is packed by now: those that wait are chosen for."""
        super().process_weights_after_loading(act_dtype)
        linear.settle()
        experts.settle()
        norm.settle()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens as the chosen side packs them."""
        if self.ours:
            attend.write(key, value, kv_cache, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **scales: Tensor | None,
    ) -> Tensor:
        """Attention of this step's tokens into `output` [tokens, heads, head_dim]."""
        if attn_metadata is None or not self.ours:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
            return output
        tokens = attn_metadata.num_actual_tokens
        caches, batch = attend.halves(kv_cache), attn_metadata.batch
        found = attend.attend(query[:tokens], caches, batch, self.settings, attn_metadata.all_causal)
        output[:tokens].view(found.shape).copy_(found)
        return output


class CpuBuilder(stock.CPUAttentionMetadataBuilder):
    """Metadata of a KV-cache group; when it is made it chooses for the layers of the group."""

    ours = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        check_scales(layers)
        kinds = {kind_of(layer.impl, "cpu", kv_cache_spec.block_size, vllm_config): layer for layer in layers.values()}
        choices = agreed(lambda: self._choose(kinds))
        # one cache, one packing: layers that vLLM serves decide for their whole group
        self.ours = bool(choices) and all(choice.winner == OURS for choice in choices)
        for layer in layers.values():
            layer.impl.ours = self.ours
            # where vLLM serves, nothing of ours stays in the way
            layer.impl.__class__ = CpuImpl if self.ours else stock.CPUAttentionBackendImpl
        tell(choices)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's metadata, or the same fields without its schedule and with a planned batch."""
        common = common_attn_metadata
        attend.forget()
        report().step("decode" if common.max_query_len == 1 else "prefill or mixed")
        if not self.ours:
            return super().build(common_prefix_len, common, fast_build)
        return self._planned(common)

    def _planned(self, common: Any) -> Any:
        metadata = stock.CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )
        metadata.all_causal = common.causal is not False
        metadata.batch = attend.batch_of(common.block_table_tensor, common.seq_lens, common.query_start_loc)
        return metadata

    def _choose(self, kinds: dict[LayerKind, Any]) -> list[Choice]:
        scheduler, model = self.vllm_config.scheduler_config, self.vllm_config.model_config
        told = phases(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, model.max_model_len)
        against = [reason for kind in kinds for reason in refusals(kind)]
        if against:
            return [choice for kind in kinds for choice in left_alone(kind, map(str, told), "; ".join(against))]
        found = [choice for kind, layer in kinds.items() for choice in self._measured(kind, layer, told)]
        if any(choice.winner == THEIRS for choice in found):
            names = [str(kind) for kind in kinds]
            said = f"vLLM's is quicker for the KV-cache group of {' and '.join(names)}"
            return [choice if choice.winner == THEIRS else choice.given_up(said) for choice in found]
        return found

    def _measured(self, kind: LayerKind, layer: Any, told: tuple[Phase, ...]) -> list[Choice]:
        """Race both sides on drawn batches, the writing of new tokens included, until one phase is clearly lost."""
        times, kernels, side = {}, {}, pinned(os.environ)
        if side == THEIRS:
            return left_alone(kind, map(str, told), "vllm is pinned")
        why = cannot_run(platform.machine(), kind.dtype, torch.cpu.get_capabilities())
        for place, phase in enumerate(told, start=1):
            drawn = attend.example(kind, phase, self.vllm_config.model_config.dtype)
            ways, kernels[str(phase)] = self._ways(layer, phase, drawn, alone=why is not None)
            if why is not None:
                ways[OURS]()  # what it has to set up is set up before any request
                continue
            one, other = (way().clone() for way in ways.values())
            if not attend.agrees(one, other):
                return left_alone(kind, map(str, told), f"the two sides disagree on a drawn batch of {phase}")
            raced = {name: [way] for name, way in ways.items()}
            times[str(phase)] = attend.race(raced, seconds=0.02)
            if side is None and lost(times[str(phase)]):  # it costs us all phases: once more, at length
                times[str(phase)] = attend.race(raced)
            if side is None and lost(times[str(phase)]):
                rest = left_alone(kind, map(str, told[place:]), f"not measured: vLLM's is quicker in {phase}")
                return choose_one(kind, times, kernels) + rest
        if why is not None:
            return [Choice(kind, phase, OURS, why, kernel) for phase, kernel in kernels.items()]
        return choose_one(kind, times, kernels, side)

    def _ways(
        self, layer: Any, phase: Phase, drawn: attend.Example, alone: bool
    ) -> tuple[dict[str, Callable[[], Tensor]], str]:
        """Both sides' attention of a drawn batch, or ours `alone`, and the name of our kernel."""
        impl, new = layer.impl, drawn.new
        key, value, slots = drawn.keys[new], drawn.values[new], drawn.slots[new]
        common = metadata_of(drawn, phase)

        def way(impl_class: type[Any], metadata: Any) -> Callable[[], Tensor]:
            cache, output = drawn.cache.clone(), torch.empty_like(drawn.query)
            impl.ours = impl_class is CpuImpl
            impl_class.do_kv_cache_update(impl, layer, drawn.keys, drawn.values, cache, drawn.slots)

            def run() -> Tensor:
                impl.ours = impl_class is CpuImpl
                impl_class.do_kv_cache_update(impl, layer, key, value, cache, slots)
                impl_class.forward(impl, layer, drawn.query, key, value, cache, metadata, output)
                return output

            return run

        planned = self._planned(common)
        ways = {OURS: way(CpuImpl, planned)}
        if not alone:
            theirs = stock.CPUAttentionMetadataBuilder.build(self, 0, common)
            ways[THEIRS] = way(stock.CPUAttentionBackendImpl, theirs)
        caches = attend.halves(drawn.cache)
        options = impl.settings.options
        return ways, lz.which("paged_attention", drawn.query, *caches, planned.batch, layout="HND", **options)
