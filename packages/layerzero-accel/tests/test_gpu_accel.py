"""The same on a GPU: CUDA tensors are keyed by device, captures go through the guard, mixed devices are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.errors import InvalidInputError
from layerzero.runtime.state import state
from layerzero_accel.functions import attention_key

pytestmark = pytest.mark.gpu


def on(device: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    return tuple(t.to(device, torch.bfloat16) for t in (q, k, k))


def test_cuda_tensors_are_found(pair: Any) -> None:
    both = pair("attention")
    args = on("cuda")
    both.c(*args)
    assert both.hits(*args) >= 3
    assert torch.equal(both.c(*args), both.python(*args))
    x, w = torch.randn(4, 64, device="cuda"), torch.ones(64, device="cuda")
    norm = pair("rms_norm")
    norm.c(x, w)
    assert norm.hits(x, w) >= 3
    torch.testing.assert_close(norm.c(x, w), norm.python(x, w))


def test_the_device_is_in_the_key(native: Any) -> None:
    rest = (None, 0.0, False, None, "BHSD", None, False, None, None, None, False, None)  # as lz.attention names them
    here, there = (native.key("attention", (*on(device), *rest), None) for device in ("cpu", "cuda"))
    assert here[0] != there[0]
    assert attention_key((*on("cpu"), None, 0.0, False, None, None, None, None, False), "BHSD", None) != attention_key(
        (*on("cuda"), None, 0.0, False, None, None, None, None, False), "BHSD", None
    )


def test_pinned_memory_is_the_cpu(native: Any) -> None:
    plain, pinned = torch.randn(4, 8), torch.randn(4, 8).pin_memory()
    assert native.key("silu_and_mul", (plain, None), None) is not None
    found = native.key("silu_and_mul", (pinned, None), None)
    assert found is None or found == native.key("silu_and_mul", (plain, None), None)


def test_mixed_devices_are_refused_as_in_python(pair: Any) -> None:
    both = pair("rms_norm")
    x, w = torch.randn(4, 64, device="cuda"), torch.ones(64)
    for function in (both.python, both.c, both.c):
        with pytest.raises(InvalidInputError) as raised:
            function(x, w)
        assert raised.value.code == "DEVICE_MIXED"


def test_a_captured_graph_replays_what_eager_computes(pair: Any) -> None:
    both = pair("rms_norm")
    x, w = torch.randn(4, 64, device="cuda"), torch.ones(64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            both.c(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = both.c(x, w)
    x.copy_(torch.randn(4, 64, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, both.python(x, w))


def test_a_decode_loop_stays_in_c(pair: Any, native: Any) -> None:
    both = pair("attention")
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    both.c(q, cache[:, :, :1], cache[:, :, :1])
    state.counters.reset()
    before = native.counts()
    for n in range(2, 400):
        k = cache[:, :, :n]
        both.c(q, k, k)
    after = native.counts()
    assert after["bucketed"] + after["exact"] - before["bucketed"] - before["exact"] > 370
    assert state.counters.selections < 20
    k = cache[:, :, :399]
    torch.testing.assert_close(both.c(q, k, k), both.python(q, k, k))
