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
