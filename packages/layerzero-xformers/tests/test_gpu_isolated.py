"""xFormers in a process of its own beside what it cannot share one with; needs its folder in XFORMERS_HOME.

    XFORMERS_HOME=FOLDER pytest -m gpu packages/layerzero-xformers/tests/test_gpu_isolated.py

FOLDER holds xformers and, for its CUDA 12 runtime, nvidia/cuda_runtime/lib.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import layerzero as lz
from layerzero.backends.reference.attention import attention as reference
from layerzero.isolation.process import Settings
from layerzero.isolation.wire import ChildError, IsolationFault
from layerzero.isolation.worker import Worker, close_all, settings_for, worker_for, workers
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state

pytestmark = pytest.mark.gpu

HOME = os.environ.get("XFORMERS_HOME", "")
ENTRY = {
    "mode": "subprocess",
    "path": [HOME],
    "env": {"LD_LIBRARY_PATH": os.path.join(HOME, "nvidia", "cuda_runtime", "lib")},
    "hide": ["flash_attn"],
    "deadline_s": 60.0,
}
HALF, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def apart() -> Iterator[None]:
    if not HOME:
        pytest.skip("XFORMERS_HOME is not set")
    lz.reset()
    lz.configure(isolation={"xformers": ENTRY}, jit="block")
    yield
    close_all()
    lz.reset()


@pytest.fixture(scope="module")
def plain() -> Iterator[Worker]:
    """A child without a vendor: the channel alone."""
    worker = Worker(Settings("plain", deadline_s=20.0))
    yield worker
    worker.close()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def qkv(batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Any:
    return (
        randn(batch, heads, q_len, dim, dtype=dtype),
        randn(batch, kv_heads, k_len, dim, seed=1, dtype=dtype),
        randn(batch, kv_heads, k_len, dim, seed=2, dtype=dtype),
    )


def truth(q: Any, k: Any, v: Any, causal: Any, window: Any = None) -> Any:
    return reference(q.double(), k.double(), v.double(), None, 0.0, causal, None, window, None, None, True)


# -- memory of the GPU in two processes -------------------------------------------------------------
LAID_OUT = {
    "transposed": lambda x: x.transpose(0, 2),
    "rows_apart": lambda x: x[..., :4],
    "every_other": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "out_of_the_middle": lambda x: x[1:2, 2:4, 3:6],
    "one_number": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:, :0],
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, in order: a strided tensor itself cannot be seen as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.req("R-ISO-04")
@pytest.mark.parametrize("lay", LAID_OUT)
@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_gpu_tensors_arrive_bit_for_bit_with_their_strides(plain: Worker, dtype: torch.dtype, lay: str) -> None:
    whole = randn(3, 5, 7, dtype=torch.float32) * 9
    if dtype.is_floating_point:
        whole[1, 2, 3] = torch.nan
    x = LAID_OUT[lay](whole.to(dtype))
    kept, here = x.clone(), x.clone(memory_format=torch.preserve_format)
    back = plain.call("torch:clone", (x,), {})
    assert (back.shape, back.stride(), back.dtype, back.device) == (x.shape, here.stride(), x.dtype, x.device)
    assert torch.equal(bits(back), bits(here))
    assert torch.equal(bits(x), bits(kept)), "an argument was changed"
    assert plain.call("torch:Tensor.stride", (x,), {}) == x.stride()  # seen there as it lies here


def test_the_arena_grows_with_the_call_and_results_stay_what_they_were(plain: Worker) -> None:
    small = plain.call("torch:neg", (randn(16),), {})
    kept = small.clone()
    for size in (1 << 20, 1 << 24, 1 << 26):
        x = randn(size)
        assert torch.equal(plain.call("torch:neg", (x,), {}), -x)
    assert torch.equal(small, kept)
    out = plain.call("torch:outer", (randn(4096, dtype=torch.float32), randn(8192, dtype=torch.float32)), {})
    assert out.shape == (4096, 8192)  # the result is far larger than what went in


def test_inputs_written_on_another_stream_are_seen_complete(plain: Worker) -> None:
    stream = torch.cuda.Stream()
    for round_ in range(20):
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 22, device="cuda")
            for _ in range(50):
                x = x + 1
            assert plain.call("torch:sum", (x,), {}).item() == 50.0 * (1 << 22), round_


def held(worker: Worker) -> tuple[Any, ...]:
    """What this process holds of the GPU. What is free on the device says nothing: others use it at the same time."""
    memory = worker._memory
    assert memory is not None
    arenas = {name: arena.size for name, arena in memory._devices.items()}
    return arenas, len(memory._retired), torch.cuda.memory_allocated()


def test_a_child_that_dies_on_the_gpu_leaves_this_process_able_to_go_on(plain: Worker) -> None:
    """Nothing piles up: not here, and a child that is gone has given its context back, as the driver sees to it."""
    x = randn(1 << 20)
    expected, pids = -x, []
    assert torch.equal(plain.call("torch:neg", (x,), {}), expected)
    before = held(plain)
    for _ in range(3):
        pids.append(plain.pid)
        with pytest.raises(IsolationFault):
            plain.call("os:abort", (), {})
        plain._not_before = 0.0
        assert torch.equal(plain.call("torch:neg", (x,), {}), expected)
    assert held(plain) == before
    assert len({*pids, plain.pid}) == 4
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # ended and collected, not left as zombies


def test_running_out_of_gpu_memory_there_is_said_so(plain: Worker) -> None:
    with pytest.raises(ChildError) as caught:
        plain.call("torch:zeros", (1 << 41,), {"device": "cuda"})
    assert caught.value.reason.code == "OUT_OF_MEMORY" and isinstance(caught.value, MemoryError)
    assert plain.call("torch:neg", (randn(4),), {}).shape == (4,)


# -- xFormers itself --------------------------------------------------------------------------------
CASES = {
    "prefill": ((1, 512, 512, 8, 2, 128, BF16), "bottom_right", None),
    "prefill_square": ((2, 300, 300, 4, 4, 64, HALF), True, None),
    "full": ((1, 130, 200, 6, 2, 64, HALF), False, None),
    "decode": ((4, 1, 1000, 8, 2, 128, BF16), "bottom_right", None),
    "window": ((1, 300, 300, 4, 2, 128, BF16), "bottom_right", (64, 0)),
}


@pytest.mark.req("R-ISO-01")
@pytest.mark.req("R-BK-XF-05")
@pytest.mark.parametrize("kernel", ["flash", "cutlass", "splitk"])
@pytest.mark.parametrize("case", CASES)
def test_isolated_kernels_are_right_through_the_ordinary_call(apart: None, kernel: str, case: str) -> None:
    sizes, causal, window = CASES[case]
    if kernel == "splitk" and case != "decode":
        pytest.skip("split-K is for short queries")
    q, k, v = qkv(*sizes)
    is_causal = causal is True
    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal == "bottom_right" else None
    name = f"xformers.attention.{kernel}"
    with torch.no_grad():
        out, lse = lz.attention(q, k, v, mask, is_causal=is_causal, window=window, return_lse=True, backend=name)
    expected, expected_lse = truth(q, k, v, causal, window)
    assert_close(out, expected.to(out.dtype), tolerance("attention", out.dtype))
    assert_close(lse, expected_lse.float(), tolerance("attention", out.dtype))
    assert state.health.snapshot().blocked_by(name, "xformers") is None


@pytest.mark.req("R-ISO-04")
def test_what_cannot_share_a_process_works_in_one_program(apart: None) -> None:
    """FlashAttention 4 (else torch's own) here, xFormers there, in turn and on the same tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own deprecations
        try:
            import flash_attn.cute  # noqa: F401  # the very module that xFormers cannot live beside

            here = "flashattn4"
        except ImportError:
            here = "sdpa"
    q, k, v = qkv(1, 512, 512, 8, 8, 128, BF16)
    expected = truth(q, k, v, True)[0].to(BF16)
    with torch.no_grad():
        for _ in range(3):
            for backend in (here, "xformers"):
                out = lz.attention(q, k, v, is_causal=True, backend=backend)
                assert_close(out, expected, tolerance("attention", BF16))
                report = lz.explain("attention", q, k, v, is_causal=True, backend=backend)
                assert report.chosen.startswith(backend)
                assert ("isolated" in str(report)) == (backend == "xformers")
    assert [worker.settings.backend for worker in workers()] == ["xformers"]


def test_an_isolated_kernel_is_not_offered_for_gradients_or_graphs(apart: None) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 64, 64, 2, 2, 64, HALF))
    codes = {why.code.value for why in lz.validate("xformers.attention.flash", q, k, v)}
    assert "BACKWARD_UNSUPPORTED" in codes


@pytest.mark.req("R-BK-XF-01")
def test_doctor_sees_xformers_where_it_runs(apart: None) -> None:
    check = lz.doctor("xformers", timeout=120.0).check("xformers", "backends")
    assert check.status == "ok", check
    assert "isolated" in check.message and "0.0.35" in check.message


def test_a_killed_child_costs_one_call_a_detour(apart: None) -> None:
    q, k, v = qkv(1, 64, 64, 2, 2, 64, HALF)
    with torch.no_grad():
        lz.attention(q, k, v, backend="xformers")
    worker = worker_for(settings_for("xformers", state.world))
    assert worker.pid is not None
    os.kill(worker.pid, 9)
    with torch.no_grad(), lz.prefer("xformers.attention.flash"):
        out = lz.attention(q, k, v)
    assert_close(out, truth(q, k, v, False)[0].to(HALF), tolerance("attention", HALF))
