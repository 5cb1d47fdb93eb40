"""Either order of axes, either layout of a cache and shared KV heads, through the public calls, on the double."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.model.enums import Platform
from layerzero.numerics import assert_close, tolerance
from layerzero.registry.capabilities import load_capabilities
from layerzero_flashinfer import plugin

KERNELS = {spec.kernel_id.removeprefix("flashinfer."): spec for spec in load_capabilities(plugin.CAPABILITIES).kernels}
DENSE = [name for name in KERNELS if name.startswith("attention.")]
PAGED = [name for name in KERNELS if name.startswith("paged_attention.")]
PACKED = [name for name in KERNELS if name.startswith("varlen_attention.")]
TABLES = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4).int()
LENGTHS = (13, 5, 16)
BOUND = tolerance("attention", "float16")


@pytest.fixture
def on_cpu(vendor, lab):
    """A kernel as it is declared, but for the device: the double computes on the CPU."""

    def put(name):
        here = {"platforms": frozenset({Platform.CPU}), "min_sm": None, "max_sm": None, "jit": False}
        lab.use(replace(KERNELS[name], **here))
        return f"flashinfer.{name}"

    return put


def drawn(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).half() for size in sizes]


def dense(name, heads=8):
    """Query, key and value [B, H, S, D] that this kernel takes, of two KV heads."""
    batch, rows = (1 if "single" in name else 3), (1 if "decode" in name else 5)
    return drawn((batch, heads, rows, 64), (batch, 2, 21, 64), (batch, 2, 21, 64))


def pages(layout, heads=8, rows=1):
    """A query and the two caches of pages of four tokens, in a layout, and the batch that names their pages."""
    query, keys, values = drawn((3 * rows, heads, 64), (12, 4, 2, 64), (12, 4, 2, 64))
    new = None if rows == 1 else torch.full((3,), rows, dtype=torch.int32)
    batch = lz.paged_batch(TABLES, torch.tensor(LENGTHS, dtype=torch.int32), query_lens=new)
    if layout == "HND":
        keys, values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    return query, keys, values, batch


def attended(query, keys, values):
    """[T, H, D] of each sequence's last tokens over its [S, Hkv, D], by torch in float64."""
    turned = [item.double().transpose(0, 1) for item in (query, keys, values)]
    rows, cols = query.shape[0], keys.shape[0]
    seen = torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)
    out = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.mark.req("R-BK-FI-03")
@pytest.mark.parametrize("name", DENSE)
def test_queries_come_in_either_order_of_axes_and_so_does_the_result(on_cpu, name):
    kernel, given = on_cpu(name), dense(name)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(item.double() for item in given), enable_gqa=True)
    for layout, steps in (("BHSD", ["layout:BHSD->BSHD"]), ("BSHD", [])):
        args = given if layout == "BHSD" else [item.transpose(1, 2).contiguous() for item in given]
        found = lz.attention(*args, layout=layout, backend=kernel)
        report = lz.explain("attention", *args, layout=layout, backend=kernel)
        assert report.ran == kernel and [step.name for step in report.decision.transforms(kernel)] == steps
        assert_close(found.double(), wanted if layout == "BHSD" else wanted.transpose(1, 2), BOUND)


@pytest.mark.req("R-BK-FI-03", "R-BK-FI-02")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", PAGED)
def test_pages_are_read_in_either_layout_through_their_block_tables(on_cpu, name, layout):
    kernel, rows = on_cpu(name), 1 if "decode" in name else 3
    query, keys, values, batch = pages(layout, rows=rows)
    found = lz.paged_attention(query, keys, values, batch, layout=layout, backend=kernel)
    assert lz.explain("paged_attention", query, keys, values, batch, layout=layout, backend=kernel).ran == kernel
    tokens = [(item if layout == "NHD" else item.transpose(1, 2))[TABLES].flatten(1, 2) for item in (keys, values)]
    for number, length in enumerate(LENGTHS):
        mine = slice(number * rows, (number + 1) * rows)
        wanted = attended(query[mine], *(item[number, :length] for item in tokens))
        assert_close(found[mine].double(), wanted, BOUND)


@pytest.mark.req("R-BK-FI-04")
@pytest.mark.parametrize("name", [*DENSE, *PAGED, *PACKED])
def test_groups_of_two_four_and_eight_query_heads_share_keys(on_cpu, name):
    kernel = on_cpu(name)
    for heads in (4, 8, 16):  # over two of keys
        if name in DENSE:
            given = dense(name, heads)
            found = lz.attention(*given, backend=kernel)
            wide = (item.double() for item in given)
            wanted = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True)
        elif name in PAGED:
            query, keys, values, batch = pages("NHD", heads)
            found = lz.paged_attention(query, keys, values, batch, backend=kernel)
            tokens = [item[TABLES].flatten(1, 2) for item in (keys, values)]
            each = [[item[number, :length] for item in tokens] for number, length in enumerate(LENGTHS)]
            wanted = torch.cat([attended(query[number : number + 1], *item) for number, item in enumerate(each)])
        else:
            given, offsets = drawn((12, heads, 64), (12, 2, 64), (12, 2, 64)), torch.tensor([0, 7, 12]).int()
            found = lz.varlen_attention(*given, offsets, offsets, is_causal=True, backend=kernel)
            wanted = torch.cat([attended(*(item[start:stop] for item in given)) for start, stop in ((0, 7), (7, 12))])
        assert_close(found.double(), wanted, BOUND)
