"""The attention backend CUSTOM on CUDA, written against vLLM 0.26: for each kind of step the quickest of vLLM's
FLASH_ATTN, its TRITON_ATTN and our kernels.

All of them read the pages that FLASH_ATTN writes, so each step may have another reader. Steps of single tokens run in
captured graphs; they are timed as graphs, and each captured batch size has its own reader. Steps with a prompt in them
run outside of graphs, which the builder's graph support makes sure of.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends import triton_attn

import layerzero as lz
from layerzero.errors import LayerZeroError
from layerzero_vllm import attend
from layerzero_vllm.choice import (
    OURS,
    THEIRS,
    TRITON,
    Choice,
    LayerKind,
    Phase,
    by_count,
    choose_one,
    left_alone,
    phases,
    refusals,
    together,
)
from layerzero_vllm.plugin import pinned
from layerzero_vllm.worker import agreed, check_scales, kind_of, metadata_of, report, tell

# Reads the lengths of a step of single tokens on the device, so that a captured graph stays right while they grow.
IN_GRAPHS = "triton.paged_attention.split"
TAKEN_OVER = "a step that was ours is vLLM's"
BATCHES = (1, 16, 64)  # steps of single tokens that are timed; others are served as the next larger one of these
LONG = 4096  # tokens after which they are timed, too
CALLS = 16  # of a layer in one graph that is timed
ROUNDS = 7


class CudaBackend(stock.FlashAttentionBackend):
    """FLASH_ATTN with our implementation and metadata; what it supports is what vLLM's supports."""

    @staticmethod
    def get_name() -> str:
        """The name it is asked for by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """The implementation that holds all sides."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """The builder that chooses for its group."""
        return CudaBuilder


class CudaImpl(stock.FlashAttentionImpl):
    """One layer's attention: a step's metadata say who serves it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        left = self.sliding_window[0]
        softcap = self.logits_soft_cap or None
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.cuda()
        self.settings = attend.Settings(self.scale, left + 1 if left >= 0 else None, softcap, slopes, self.sinks)
        self.triton = triton_attn.TritonAttentionImpl(*args, **kwargs)

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
        given = (layer, query, key, value, kv_cache, attn_metadata, output)
        if isinstance(attn_metadata, triton_attn.TritonAttentionMetadata):
            self.triton.forward(*given, **scales)
            return output
        batch = getattr(attn_metadata, "batch", None)
        if batch is None or not self._ours(query, kv_cache, attn_metadata, batch, output):
            super().forward(*given, **scales)
        return output

    def _ours(self, query: Tensor, kv_cache: Tensor, metadata: Any, batch: Any, output: Tensor) -> bool:
        """Whether ours did it; where no kernel of ours can, vLLM's takes the step, or the graph that is captured."""
        tokens = metadata.num_actual_tokens
        kernel = IN_GRAPHS if metadata.max_query_len == 1 else None
        try:
            found = attend.attend(query[:tokens], attend.interleaved(kv_cache), batch, self.settings, True, kernel)
        except LayerZeroError as error:
            if not any(one.startswith(TAKEN_OVER) for one in report().warnings):
                report().warnings.append(f"{TAKEN_OVER}: {error}")
                report().changed()
            return False
        output[:tokens].view(found.shape).copy_(found)
        return True


class Way(NamedTuple):
    """How one side attends a drawn batch: its metadata, made once a step, and one layer's attention with them."""

    build: Callable[[], Any]
    run: Callable[[Any], Tensor]


class CudaBuilder(stock.FlashAttentionMetadataBuilder):
    """Metadata of a KV-cache group; when it is made it chooses for the layers of the group."""

    supports_update_block_table = False  # a planned batch holds the pages of its own group

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Graphs hold steps of single tokens alone: other steps may be ours, which plans on the host."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.triton = triton_attn.TritonAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
        self.steps: dict[tuple[Any, ...], Any] = {}
        self.layers = len(layer_names)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        check_scales(layers)
        kinds: dict[LayerKind, Any] = {}
        for layer in layers.values():
            kinds.setdefault(kind_of(layer.impl, "cuda", kv_cache_spec.block_size, vllm_config), layer)
        limits, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        told = phases(limits.max_num_seqs, limits.max_num_batched_tokens, longest, BATCHES, LONG)
        choices = together(
            agreed(lambda: [one for kind, layer in kinds.items() for one in self._all(kind, layer, told)])
        )
        sides = {choice.phase: choice.winner for choice in choices}
        # by the number of sequences of a step of single tokens; one side for all steps with a prompt
        single = {phase.batch: sides.get(str(phase), THEIRS) for phase in told if phase.query == 1}
        graphs = self.compilation_config.cudagraph_capture_sizes if self.use_full_cuda_graph else None
        self.single: list[str] = by_count(single, sorted(graphs or []), limits.max_num_seqs)
        self.several = next((sides[str(phase)] for phase in told if phase.query > 1 and sides), THEIRS)
        if all(side == THEIRS for side in sides.values()):
            # nothing of ours stays in the way, unless vLLM made a subclass of ours for a mask of its own
            for layer in layers.values():
                if type(layer.impl) is CudaImpl:
                    layer.impl.__class__ = stock.FlashAttentionImpl
            if type(self) is CudaBuilder:
                self.__class__ = stock.FlashAttentionMetadataBuilder
        tell(choices)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The metadata of the side that serves such a step."""
        common = common_attn_metadata
        report().step("decode" if common.max_query_len == 1 else "prefill or mixed")
        plain = common.causal is True and common_prefix_len == 0 and self.vllm_config.speculative_config is None
        side = self._side(common) if plain else THEIRS
        if side == TRITON:
            return self.triton.build(0, common)
        if side == OURS and common.max_query_len == 1:
            return self._in_graphs(common)
        metadata = super().build(common_prefix_len, common, fast_build)
        if side == OURS:
            batch = _planned(common, common.seq_lens_cpu_upper_bound)
            metadata.batch = batch if batch.total_q == common.num_actual_tokens else None
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The metadata of the side that a graph of so many sequences will hold."""
        if self._side(common_attn_metadata) == TRITON:
            return self.triton.build_for_cudagraph_capture(common_attn_metadata)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _side(self, common: Any) -> str:
        if common.max_query_len > 1:
            # masks of their own, and lengths that only the device knows exactly
            odd = common.mm_req_doc_ranges is not None or common.seq_lens_cpu_upper_bound is None
            return THEIRS if odd else self.several
        return self.single[int(min(common.num_reqs, len(self.single) - 1))]

    def _in_graphs(self, common: Any) -> Any:
        """Metadata of single tokens over vLLM's own tensors, made once as long as these stay where they are.

        How ours splits the context goes by the longest that vLLM serves, and lengths are read on the device: so it is
        right in a graph, too. So are the metadata where vLLM's has to take the step: without a schedule made before.
        """
        table, count = common.block_table_tensor, common.num_reqs
        held = (table, common.seq_lens, common.slot_mapping, common.query_start_loc)
        key = (count, common.num_actual_tokens, table.shape, table.stride(), *(one.data_ptr() for one in held))
        found = self.steps.get(key)
        if found is None:
            if len(self.steps) > 1000:
                self.steps.clear()
            longest = self.model_config.max_model_len
            found = super().build(0, common.replace(max_seq_len=longest), fast_build=True)
            found.batch = lz.paged_batch(table[:count], common.seq_lens[:count], host_lens=[longest] * count)
            self.steps[key] = found
        return found

    def _all(self, kind: LayerKind, layer: Any, told: tuple[Phase, ...]) -> list[Choice]:
        """A choice for each phase: single tokens by batch size, steps with a prompt together."""
        against = [*refusals(kind), *(["decode context parallel"] if self.dcp_world_size > 1 else [])]
        against += ["a reference window is left to vLLM"] if self.rswa_window is not None else []
        against += ["vllm is pinned"] if pinned(os.environ) == THEIRS else []
        if against:
            return left_alone(kind, map(str, told), "; ".join(against))
        found = []
        for _, alike in itertools.groupby(told, key=lambda phase: phase.batch if phase.query == 1 else 0):
            times, kernels, refused = {}, {}, dict[str, str]()
            for phase in alike:
                drawn = self._drawn(kind, phase)
                ways, kernels[str(phase)] = self._ways(kind, layer, phase, drawn)
                times[str(phase)], dropped = self._timed(ways, phase, drawn)
                refused |= dropped
            found += choose_one(kind, times, kernels, pinned(os.environ), refused)
        return found

    def _drawn(self, kind: LayerKind, phase: Phase) -> attend.Example:
        """A batch of this phase; tables of single tokens are as wide as the longest context, as they are in graphs."""
        drawn = attend.example(kind, phase, self.model_config.dtype)
        if phase.query > 1:
            return drawn
        missing = -(-self.model_config.max_model_len // kind.block_size) - drawn.block_table.shape[1]
        return replace(drawn, block_table=torch.nn.functional.pad(drawn.block_table, (0, max(missing, 0))))

    def _ways(self, kind: LayerKind, layer: Any, phase: Phase, drawn: attend.Example) -> tuple[dict[str, Way], str]:
        impl, output = layer.impl, torch.empty_like(drawn.query)
        # pages of one token after another, as vLLM lays them out; [blocks, kv heads, page, 2 * head_dim] to look at
        cache = drawn.cache.transpose(1, 2).contiguous().transpose(1, 2)
        impl.do_kv_cache_update(layer, drawn.keys, drawn.values, cache, drawn.slots)
        key, value, slots = drawn.keys[drawn.new], drawn.values[drawn.new], drawn.slots[drawn.new]

        common = metadata_of(drawn, phase, seq_lens_cpu_upper_bound=drawn.seq_lens.cpu())
        if phase.query == 1:
            common = common.replace(max_seq_len=self.model_config.max_model_len)
        flash = functools.partial(stock.FlashAttentionMetadataBuilder.build, self, 0, common)

        def by(forward: Callable[..., Any]) -> Callable[[Any], Tensor]:
            def run(metadata: Any) -> Tensor:
                if phase.query == 1:  # the writer stands before in a graph: kernels of one side may begin early
                    impl.do_kv_cache_update(layer, key, value, cache, slots)
                forward(layer, drawn.query, key, value, cache, metadata, output)
                return output

            return run

        def ours(layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, batch: Any, out: Tensor) -> None:
            kernel, batch = (IN_GRAPHS, batch.batch) if phase.query == 1 else (None, batch)
            out.copy_(attend.attend(query, attend.interleaved(cache), batch, impl.settings, True, kernel))

        def batch() -> Any:
            return self._in_graphs(common) if phase.query == 1 else _planned(common, common.seq_lens_cpu_upper_bound)

        theirs = functools.partial(stock.FlashAttentionImpl.forward, impl)
        ways = {THEIRS: Way(flash, by(theirs)), OURS: Way(batch, by(ours))}
        if not kind.alibi:
            ways[TRITON] = Way(lambda: self.triton.build(0, common), by(impl.triton.forward))
        if phase.query == 1:
            return ways, IN_GRAPHS
        caches, options = attend.interleaved(cache), impl.settings.options
        return ways, lz.which("paged_attention", drawn.query, *caches, batch(), layout="HND", **options)

    def _timed(
        self, ways: Mapping[str, Way], phase: Phase, drawn: attend.Example
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds of a layer by each side that gives FLASH_ATTN's result, and why others do not count."""
        compiling = {} if lz.configure().jit == "off" else {"jit": "block"}
        runs, builds, refused = dict[str, Callable[[], Tensor]](), {}, {}
        expected = ways[THEIRS].run(ways[THEIRS].build()).clone()
        for side, way in ways.items():
            try:
                with lz.scoped(**compiling):  # what ours runs is compiled while vLLM starts, not beside requests
                    if not attend.agrees(way.run(way.build()), expected):
                        refused[side] = f"{side} gives another result on a drawn batch"
                        continue
                    runs[side] = functools.partial(way.run, way.build())
                    if phase.query == 1 and self.use_full_cuda_graph:
                        runs[side] = _captured(runs[side])
                builds[side] = way.build
            except (LayerZeroError, RuntimeError) as error:
                if side == THEIRS:
                    raise
                refused[side] = f"{side} cannot: {error}"
        if phase.query > 1:
            return attend.race({side: [run] for side, run in runs.items()}), refused
        if OURS in runs and self.use_full_cuda_graph and not self._follows(runs[OURS], ways, drawn):
            refused[OURS] = f"{OURS} does not follow lengths that grow"
            del runs[OURS]
        calls = CALLS if self.use_full_cuda_graph else 1
        best = dict.fromkeys(runs, float("inf"))
        for _, side in itertools.product(range(ROUNDS), runs):
            once = _microseconds(builds[side]) / self.layers
            best[side] = min(best[side], once + _microseconds(runs[side]) / calls)
        return best, refused

    def _follows(self, replay: Callable[[], Any], ways: Mapping[str, Way], drawn: attend.Example) -> bool:
        """Whether the captured call is right for other lengths than it was captured with."""
        before = drawn.seq_lens.clone()
        drawn.seq_lens.copy_(before // 2 + 1)
        expected = ways[THEIRS].run(ways[THEIRS].build()).clone()
        found: Tensor = replay().clone()
        drawn.seq_lens.copy_(before)
        return attend.agrees(found, expected)


def _captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Some calls as one graph; what it returns is what they write."""
    found = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            found = run()

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay


def _microseconds(call: Callable[[], Any], times: int = 5) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / times


def _planned(common: Any, lengths: Tensor) -> Any:
    """The batch with its lengths from the host: nothing waits for the device."""
    counts = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
    table, device = common.block_table_tensor[: common.num_reqs], common.seq_lens.device
    query_lens = torch.tensor(counts, dtype=table.dtype).to(device, non_blocking=True)
    contexts = common.seq_lens[: common.num_reqs].to(table.dtype)
    return lz.paged_batch(
        table, contexts, query_lens=query_lens, host_lens=(lengths[: common.num_reqs].tolist(), counts)
    )
