"""Wrong calls of grouped attention's kernels raise before anything is launched; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest
import torch

from layerzero.errors import InvalidInputError
from layerzero.model.grouped import make_grouped_batch

pytest.importorskip("triton")
WAYS = ("work_list", "shared_tiles")


def batch():
    host = [0, *itertools.accumulate((3, 4))], [0, 9], [[5], [9]]
    return make_grouped_batch(*(torch.tensor(item, dtype=torch.int32) for item in host), host_lens=host)


def tensors(*, queries=7, keys=9, heads=4, kv_heads=2, dim=64, key_dim=None, dtype=torch.float16):
    query = torch.zeros(queries, heads, dim, dtype=dtype)
    return query, *(torch.zeros(keys, kv_heads, key_dim or dim, dtype=dtype) for _ in range(2))


WRONG = {
    "more queries than planned": (dict(queries=8), "SHAPE_INVALID"),
    "fewer keys than planned": (dict(keys=8), "SHAPE_INVALID"),
    "keys of another head_dim": (dict(key_dim=128), "SHAPE_INVALID"),
    "a head_dim without a kernel": (dict(dim=96), "HEAD_DIM_INVALID"),
    "heads that do not divide": (dict(heads=3), "GQA_RATIO_INVALID"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_raises_and_says_what_is_wrong(way, case):
    from layerzero_triton.grouped import launch

    change, code = WRONG[case]
    with pytest.raises(InvalidInputError) as raised:
        getattr(launch, way)(*tensors(**change), batch(), True, None, False)
    assert raised.value.reasons[0].code == code


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_two_dtypes_or_ranks_raise(way):
    from layerzero_triton.grouped import launch

    query, key, value = tensors()
    for given in ((query, key, value.float()), (query[0], key, value), (query, key[None], value[None])):
        with pytest.raises(InvalidInputError):
            getattr(launch, way)(*given, batch(), True, None, False)
