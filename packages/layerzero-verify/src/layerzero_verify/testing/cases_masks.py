"""Cases of attention: masks that are values, and the sliding windows that models use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerzero.model.kernel import KernelSpec
from layerzero.model.masks import block_mask, chunk_mask
from layerzero_verify.testing.cases import Draw, Maker, fit, group
from layerzero_verify.testing.cases_attention import attention_call, paged_call

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]
_MASK, _SLOPES = 3, 7  # places among the arguments of attention, and of paged attention


def _masked(maker: Maker, build: Any) -> Maker:
    """The same call with the mask that `build` makes of a Draw and the tensors."""

    def make(draw: Draw) -> tuple[Any, ...]:
        args = list(maker(draw))
        args[_MASK] = build(draw, args[0], args[1])
        return tuple(args)

    return make


def _blocks(rows: int, cols: int, *, per_head: bool = False) -> Any:
    def build(draw: Draw, query: Any, key: Any) -> Any:
        grid = (-(-query.shape[2] // rows), -(-key.shape[2] // cols))
        lead = query.shape[:2] if per_head else (1, 1)
        return block_mask(draw.bools(*lead, *grid), (rows, cols))

    return build


@group("block_mask", "attention", "block_mask")
def _block_mask(spec: KernelSpec) -> Pairs:
    rows, cols = fit(spec, "mask_block_q", 8), fit(spec, "mask_block_k", 8)
    yield "shared", _masked(attention_call(spec, seq_q=3 * rows, seq_k=5 * cols), _blocks(rows, cols))
    # The last blocks reach beyond the end.
    yield "per_head", _masked(attention_call(spec, seq_q=3 * rows - 5), _blocks(rows, cols, per_head=True))


@group("chunk_mask", "attention", "chunk_mask")
def _chunk_mask(spec: KernelSpec) -> Pairs:
    size = fit(spec, "mask_chunk", 8)

    def mask(draw: Draw, query: Any, key: Any) -> Any:
        return chunk_mask(size)

    yield "square", _masked(attention_call(spec, seq_q=3 * size + 3), mask)
    if not spec.square:
        yield "more_keys", _masked(attention_call(spec, seq_q=size + 2, seq_k=3 * size + 3), mask)
        yield "more_queries", _masked(attention_call(spec, seq_q=2 * size + 3, seq_k=size + 1), mask)
        yield "one_query", _masked(attention_call(spec, seq_q=1, seq_k=3 * size + 3), mask)


@group("window", "attention", "window")
def _model_windows(spec: KernelSpec) -> Pairs:
    for size, length in ((256, 300), (1024, 1100)):
        if fit(spec, "seq_len_k", length) == length and not spec.square:
            yield f"left_{size}", attention_call(spec, batch=1, heads=2, seq_q=20, seq_k=length, window=(size, 0))


def _layout(spec: KernelSpec) -> str:
    return min((item.value for item in spec.kv_cache_layouts), default="NHD")


@group("window", "paged_attention", "window")
def _paged_window(spec: KernelSpec) -> Pairs:
    yield "left_5", paged_call(spec, contexts=(40, 3, 17), layout=_layout(spec), window=(5, 0))
    if "paged_prefill" in spec.features:
        yield (
            "left_20",
            paged_call(spec, contexts=(40, 3, 17), queries=(9, 3, 1), layout=_layout(spec), window=(20, 0)),
        )


@group("softcap", "paged_attention", "softcap")
def _paged_softcap(spec: KernelSpec) -> Pairs:
    yield "tight", paged_call(spec, layout=_layout(spec), softcap=1.5, scale=0.5)


@group("alibi", "paged_attention", "alibi")
def _paged_alibi(spec: KernelSpec) -> Pairs:
    def biased(maker: Maker, per_sequence: bool) -> Maker:
        def make(draw: Draw) -> tuple[Any, ...]:
            args = list(maker(draw))
            heads = args[0].shape[1]
            shape = (args[3].batch_size, heads) if per_sequence else (heads,)
            args[_SLOPES] = draw.normal(*shape).abs().float()
            return tuple(args)

        return make

    yield "per_head", biased(paged_call(spec, layout=_layout(spec)), False)
    yield "per_sequence", biased(paged_call(spec, layout=_layout(spec)), True)


@group("sizes", "paged_attention")
def _pages(spec: KernelSpec) -> Pairs:
    """Page sizes that servers use; those a kernel lists as its limits are tried beside them."""
    for page in (1, 16, 128):
        if fit(spec, "page_size", page) == page:
            yield f"pages_of_{page}", paged_call(spec, page=page, contexts=(page + 1, 2), layout=_layout(spec))
