"""The attention backend CUSTOM on CUDA, written against vLLM 0.26: vLLM's FlashAttention backend, with our kernels
for the steps they win.

Both sides read the pages that vLLM's writer fills. Steps of single tokens run in captured graphs and are vLLM's; steps
with a prompt in them run outside of graphs, which the builder's graph support makes sure of, and are ours where ours
won when vLLM made the builder of the KV-cache group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn as stock

import layerzero as lz
from layerzero_vllm import attend
from layerzero_vllm.choice import OURS, THEIRS, Choice, LayerKind, Phase, choose_one, left_alone, phases, refusals
from layerzero_vllm.plugin import pinned
from layerzero_vllm.worker import agreed, check_scales, kind_of, metadata_of, report, tell


class CudaBackend(stock.FlashAttentionBackend):
    """FLASH_ATTN with our implementation and metadata; what it supports is what vLLM's supports."""

    @staticmethod
    def get_name() -> str:
        """The name it is asked for by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """The implementation that holds both sides."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """The builder that chooses for its group."""
        return CudaBuilder


class CudaImpl(stock.FlashAttentionImpl):
    """One layer's attention: ours in steps whose metadata hold a planned batch."""

    ours = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        left = self.sliding_window[0]
        softcap = self.logits_soft_cap or None
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.cuda()
        self.settings = attend.Settings(self.scale, left + 1 if left >= 0 else None, softcap, slopes, self.sinks)

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
        batch = getattr(attn_metadata, "batch", None)
        if batch is None or not self.ours:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
            return output
        tokens = attn_metadata.num_actual_tokens
        found = attend.attend(query[:tokens], attend.interleaved(kv_cache), batch, self.settings)
        output[:tokens].view(found.shape).copy_(found)
        return output


class CudaBuilder(stock.FlashAttentionMetadataBuilder):
    """Metadata of a KV-cache group; when it is made it chooses for the layers of the group."""

    supports_update_block_table = False  # a planned batch holds the pages of its own group

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Graphs hold steps of single tokens alone: other steps may be ours, which plans on the host."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        check_scales(layers)
        kinds: dict[LayerKind, Any] = {}
        for layer in layers.values():
            kinds.setdefault(kind_of(layer.impl, "cuda", kv_cache_spec.block_size, vllm_config), []).append(layer)
        choices = agreed(lambda: [choice for kind, group in kinds.items() for choice in self._choose(kind, group[0])])
        won = {choice.kind for choice in choices if choice.winner == OURS}
        # where vLLM serves, nothing of ours stays in the way, unless vLLM made a subclass of ours for a mask of its own
        for kind, group in kinds.items():
            for layer in group:
                layer.impl.ours = kind in won
                if type(layer.impl) in (CudaImpl, stock.FlashAttentionImpl):
                    layer.impl.__class__ = CudaImpl if kind in won else stock.FlashAttentionImpl
        self.plans = bool(won)
        if type(self) is CudaBuilder and not won:
            self.__class__ = stock.FlashAttentionMetadataBuilder
        tell(choices)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's metadata; for a step with a prompt in it a planned batch as well."""
        common = common_attn_metadata
        report().step("decode" if common.max_query_len == 1 else "prefill or mixed")
        metadata = super().build(common_prefix_len, common, fast_build)
        lengths = common.seq_lens_cpu_upper_bound  # exact unless drafts are verified asynchronously
        plain = common.causal is True and not metadata.use_cascade and self.vllm_config.speculative_config is None
        plain = plain and common.mm_req_doc_ranges is None and common.rswa_prefix_lens is None  # masks of their own
        if self.plans and plain and common.max_query_len > 1 and lengths is not None:
            batch = _planned(common, lengths)
            metadata.batch = batch if batch.total_q == common.num_actual_tokens else None
        return metadata

    def _choose(self, kind: LayerKind, layer: Any) -> list[Choice]:
        scheduler, model = self.vllm_config.scheduler_config, self.vllm_config.model_config
        told = phases(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, model.max_model_len)
        steps = [phase for phase in told if phase.query > 1]
        captured = [str(phase) for phase in told if phase.query == 1]
        found = left_alone(kind, captured, "steps of single tokens run in vLLM's captured graphs")
        against = [*refusals(kind), *(["decode context parallel"] if self.dcp_world_size > 1 else [])]
        if against:
            return found + left_alone(kind, map(str, steps), "; ".join(against))
        times, kernels = {}, {}
        compiling = {} if lz.configure().jit == "off" else {"jit": "block"}
        for phase in steps:
            drawn = attend.example(kind, phase, model.dtype)
            with lz.scoped(**compiling):  # what ours runs is compiled while vLLM starts, not beside requests
                ways, kernels[str(phase)] = self._ways(layer, phase, drawn)
                one, other = (way().clone() for way in ways.values())
            if not attend.agrees(one, other):
                return found + left_alone(kind, map(str, steps), f"the two sides disagree on a drawn batch of {phase}")
            times[str(phase)] = attend.race({name: [way] for name, way in ways.items()})
        return found + choose_one(kind, times, kernels, pinned(os.environ))

    def _ways(self, layer: Any, phase: Phase, drawn: attend.Example) -> tuple[dict[str, Callable[[], Tensor]], str]:
        impl, output = layer.impl, torch.empty_like(drawn.query)
        # pages of one token after another, as vLLM lays them out; [blocks, kv heads, page, 2 * head_dim] to look at
        cache = drawn.cache.transpose(1, 2).contiguous().transpose(1, 2)
        impl.do_kv_cache_update(layer, drawn.keys, drawn.values, cache, drawn.slots)
        lengths = drawn.seq_lens.cpu()
        common = metadata_of(drawn, phase, seq_lens_cpu_upper_bound=lengths)
        metadata = stock.FlashAttentionMetadataBuilder.build(self, 0, common)
        batch, caches = _planned(common, lengths), attend.interleaved(cache)
        key, value = drawn.keys[drawn.new], drawn.values[drawn.new]
        given = (layer, drawn.query, key, value, cache, metadata, output)

        def theirs() -> Tensor:
            stock.FlashAttentionImpl.forward(impl, *given)
            return output

        def ours() -> Tensor:
            return output.copy_(attend.attend(drawn.query, caches, batch, impl.settings))

        kernel = lz.which("paged_attention", drawn.query, *caches, batch, layout="HND", **impl.settings.options)
        return {OURS: ours, THEIRS: theirs}, kernel


def _planned(common: Any, lengths: Tensor) -> Any:
    """The batch with its lengths from the host: nothing waits for the device."""
    counts = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
    table, device = common.block_table_tensor[: common.num_reqs], common.seq_lens.device
    query_lens = torch.tensor(counts, dtype=table.dtype).to(device, non_blocking=True)
    contexts = common.seq_lens[: common.num_reqs].to(table.dtype)
    return lz.paged_batch(
        table, contexts, query_lens=query_lens, host_lens=(lengths[: common.num_reqs].tolist(), counts)
    )
