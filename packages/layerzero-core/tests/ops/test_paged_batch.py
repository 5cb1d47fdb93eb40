"""Building a PagedBatch: what is accepted, what is refused and with which reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layerzero.errors import InvalidInputError
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.reasons import ReasonCode


def tables(rows=3, width=4, dtype=torch.int32):
    return torch.arange(rows * width, dtype=dtype).reshape(rows, width)


def lens(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.req("R-OP-07")
def test_both_index_dtypes_are_accepted_and_lengths_come_to_the_host(dtype):
    batch = make_paged_batch(tables(dtype=dtype), lens(5, 1, 9, dtype=dtype))
    assert batch.context_lens_host == (5, 1, 9)
    assert batch.query_lens_host == (1, 1, 1)
    assert (batch.batch_size, batch.total_q, batch.max_query_len, batch.max_context_len) == (3, 3, 1, 9)
    assert batch.is_decode


def test_query_lens_describe_a_mixed_batch():
    batch = make_paged_batch(tables(), lens(5, 1, 9), lens(3, 1, 0))
    assert batch.query_lens_host == (3, 1, 0)
    assert batch.total_q == 4
    assert not batch.is_decode


def test_it_is_a_frozen_value():
    batch = make_paged_batch(tables(), lens(1, 2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.context_lens_host = (9, 9, 9)
    assert isinstance(batch, PagedBatch)


class _NoSync(torch.Tensor):
    """A tensor that refuses to be read by the host."""

    def tolist(self):
        raise AssertionError("the device was asked")


@pytest.mark.parametrize("host", [(5, 1, 9), [5, 1, 9]])
def test_known_context_lengths_spare_the_copy(host):
    batch = make_paged_batch(tables(), lens(5, 1, 9).as_subclass(_NoSync), host_lens=host)
    assert batch.context_lens_host == (5, 1, 9)


def test_a_pair_of_host_lengths_spares_both_copies():
    context, query = lens(5, 1, 9).as_subclass(_NoSync), lens(2, 1, 4).as_subclass(_NoSync)
    batch = make_paged_batch(tables(), context, query, host_lens=((5, 1, 9), (2, 1, 4)))
    assert batch.query_lens_host == (2, 1, 4)


def test_an_empty_batch_is_fine():
    batch = make_paged_batch(tables(rows=0), lens())
    assert (batch.total_q, batch.max_query_len, batch.max_context_len) == (0, 0, 0)


def test_a_padding_row_without_context_is_fine():
    assert make_paged_batch(tables(), lens(4, 0, 2)).context_lens_host == (4, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize("which", ["block_tables", "context_lens", "query_lens"])
@pytest.mark.req("R-OP-07")
def test_other_dtypes_are_refused_by_name(dtype, which):
    args = {"block_tables": tables(), "context_lens": lens(5, 1, 9), "query_lens": lens(1, 1, 1)}
    args[which] = args[which].to(dtype)
    with pytest.raises(InvalidInputError, match=which) as caught:
        make_paged_batch(**args)
    assert caught.value.code is ReasonCode.BLOCK_TABLE_DTYPE


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((torch.zeros(3, dtype=torch.int32), lens(1, 1, 1)), "block_tables"),
        ((tables(), lens(1, 1)), "context_lens"),
        ((tables(), lens(1, 1, 1).reshape(3, 1)), "context_lens"),
        ((tables(), lens(1, 1, 1), lens(1, 1)), "query_lens"),
        ((tables(), lens(1, -2, 1)), "-2"),
        ((tables(), lens(4, 4, 4), lens(1, -1, 1)), "-1"),
        ((tables(), lens(4, 2, 4), lens(1, 3, 1)), "row 1"),
        ((tables(), lens(4, 4, 4), None, (4, 4)), "2 context_lens"),
        ((tables(), lens(4, 4, 4), None, ((4, 4, 4), (2, 1, 1))), "without query_lens"),
    ],
)
def test_shapes_and_lengths_that_do_not_fit_are_refused(args, word):
    with pytest.raises(InvalidInputError, match=word) as caught:
        make_paged_batch(*args)
    assert caught.value.code is ReasonCode.BLOCK_TABLE_INVALID


def test_mixed_devices_are_refused():
    with pytest.raises(InvalidInputError, match="context_lens on meta") as caught:
        make_paged_batch(tables(), lens(1, 1, 1).to("meta"))
    assert caught.value.code is ReasonCode.DEVICE_MIXED


@pytest.mark.parametrize("args", [([[0, 1]], lens(1)), (tables(1), [1]), (tables(1), lens(1), None, ["x"])])
def test_things_that_are_no_tensors_are_refused(args):
    with pytest.raises(InvalidInputError) as caught:
        make_paged_batch(*args)
    assert caught.value.code is ReasonCode.TYPE_INVALID


# -- batches for captured graphs, and what kernels keep in a batch -------------------------------------
class _Kept:
    """A plan as a kernel keeps it."""

    def __init__(self):
        self.seen = []

    def replan(self, batch):
        self.seen.append((batch.context_lens_host, batch.max_context_len, batch.block_tables.tolist()))


@pytest.mark.req("R-GRAPH-04")
def test_a_batch_for_a_capture_owns_its_tensors_and_takes_other_numbers_in_place():
    given, lengths = tables(), lens(5, 1, 9)
    batch = make_paged_batch(given, lengths, capture=True)
    addresses = [item.data_ptr() for item in batch.tensors()]
    assert given.data_ptr() not in addresses and lengths.data_ptr() not in addresses
    plan = batch.plans["kernel"] = _Kept()
    batch.update(given.flip(0), lens(2, 16, 3))
    assert [item.data_ptr() for item in batch.tensors()] == addresses
    assert batch.context_lens.tolist() == [2, 16, 3] and batch.context_lens_host == (2, 16, 3)
    assert (batch.max_context_len, batch.total_q, batch.is_decode) == (16, 3, True)
    assert plan.seen == [((2, 16, 3), 16, given.flip(0).tolist())]
    assert given.tolist() == tables().tolist()


def test_an_update_keeps_what_the_graph_was_captured_with():
    batch = make_paged_batch(tables(), lens(5, 1, 9), lens(3, 1, 0), capture=True)
    batch.update(tables(), lens(7, 2, 9), query_lens=lens(1, 1, 2))
    assert batch.query_lens.tolist() == [1, 1, 2] and batch.query_lens_host == (1, 1, 2)
    wrong = {
        "another width": (tables(width=5), lens(5, 1, 9), lens(3, 1, 0)),
        "another number of query tokens": (tables(), lens(5, 1, 9), lens(3, 1, 1)),
        "no query lengths": (tables(), lens(5, 1, 9), None),
    }
    for name, (pages, contexts, queries) in wrong.items():
        with pytest.raises(InvalidInputError) as caught:
            batch.update(pages, contexts, query_lens=queries)
        assert "as captured" in str(caught.value), name
    assert batch.context_lens_host == (7, 2, 9)


def test_any_other_batch_stays_as_it_was_planned():
    batch = make_paged_batch(tables(), lens(5, 1, 9))
    with pytest.raises(InvalidInputError, match="capture=True"):
        batch.update(tables(), lens(5, 1, 9))


@pytest.mark.req("R-KV-04")
@pytest.mark.parametrize("contexts", [(5, 1, 9), (0, 16, 3), (0, 0, 0), (16, 16, 16)])
@pytest.mark.parametrize("page", [1, 4, 5])
def test_page_places_are_those_of_the_tables_without_asking_the_device(contexts, page):
    width = -(-max(*contexts, 1) // page)
    pages = torch.randperm(3 * width).reshape(3, width)
    batch = make_paged_batch(pages, lens(*contexts, dtype=torch.int64), host_lens=contexts)
    starts, places, last = batch.page_places(page)
    flat = pages.flatten()[places].tolist()
    for row, length in enumerate(contexts):
        count = -(-length // page)
        assert flat[starts[row] : starts[row + 1]] == pages[row, :count].tolist()
        assert (count - 1) * page + last[row] == length or (count, last[row]) == (0, 0)
    assert starts.dtype == last.dtype == torch.int32
