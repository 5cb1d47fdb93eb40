"""What our adapters add to the libraries they call: vendor call and adapter side by side, on a GPU. Keeps JSON.

    python benchmarks/adapters.py --machine NAME [--json FILE] [--seconds 0.3] [--only flashinfer,quack]

Each pair computes the same thing from the same tensors, and is checked to agree before it is timed. "device" is the
median between two CUDA events with the cache overwritten before, "host" the time a launch keeps the interpreter; both
are taken in turns. The limit is 5 % or 3 µs over the vendor's own call, whichever is larger, for each of the two.
A vendor's call that needs more than it is given (a table in float32, lengths on the host) has that made beforehand
where our op makes it per batch, and inside the pair where our op must make it per call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

from layerzero_tune.timing.clock import cuda_clock, launch_clock

BF = torch.bfloat16
SHARE, EXTRA_US = 0.05, 3.0
Pair = tuple[str, Callable[[], Any], Callable[[], Any]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF)


# -- pairs, one generator a library; its import is part of it --------------------------------------------
def flashinfer() -> Iterator[Pair]:
    import flashinfer as fi

    import layerzero as lz
    from layerzero_flashinfer import elementwise, paged, rope, sampling, single

    for rows, width in ((16, 4096), (16384, 8192)):
        x, w = rand(rows, width), rand(width)
        yield f"rms_norm {rows}x{width}", partial(fi.rmsnorm, x, w, 1e-6), partial(elementwise.rms_norm, x, w, 1e-6)
    x = rand(16384, 2 * 14336)
    yield "silu_and_mul 16384x14336", lambda: fi.silu_and_mul(x), lambda: elementwise.silu_and_mul(x)
    a, b, w = rand(16384, 4096), rand(16384, 4096), rand(4096)

    def added() -> Any:  # the vendor adds in place; our op leaves its inputs alone
        out, stream = a.clone(), b.clone()
        fi.fused_add_rmsnorm(out, stream, w, 1e-6)
        return out, stream

    yield "add_rms_norm 16384x4096", added, lambda: elementwise.add_rms_norm(a, b, w, 1e-6)
    q, k, cos, sin = rand(1, 16384, 32, 128), rand(1, 16384, 8, 128), rand(16384, 64), rand(16384, 64)
    positions = torch.arange(16384, device="cuda", dtype=torch.int32)
    flat = q.view(16384, -1), k.view(16384, -1)

    def turned() -> Any:
        table = torch.cat((cos, sin), -1).float()
        done = fi.apply_rope_with_cos_sin_cache(positions, *flat, 128, table)
        return done[0].view(q.shape), done[1].view(k.shape)

    yield "rope 16384", turned, lambda: rope.rope(q, k, cos, sin, False, "BSHD", None, False)
    for length in (512, 2048):
        q1, k1, v1 = rand(1, length, 32, 128), rand(1, length, 8, 128), rand(1, length, 8, 128)
        plain = (None, 0.0, "bottom_right", None, None, None, None, False)
        yield (
            f"prefill fa3 S{length}",
            partial(fi.single_prefill_with_kv_cache, q1[0], k1[0], v1[0], causal=True, backend="fa3"),
            partial(single.prefill_fa3, q1, k1, v1, *plain),
        )
    q2, k2, v2 = rand(1, 1, 32, 128), rand(1, 4096, 8, 128), rand(1, 4096, 8, 128)
    free = (None, 0.0, False, None, None, None, None, False)
    yield (
        "decode B1 Sk4096",
        lambda: fi.single_decode_with_kv_cache(q2[0, 0], k2[0], v2[0], use_tensor_cores=True),
        lambda: single.decode_tc(q2, k2, v2, *free),
    )
    count, length, page = 16, 4096, 16
    pages = count * length // page
    keys, values, query = rand(pages, page, 8, 128), rand(pages, page, 8, 128), rand(count, 32, 128)
    tables = torch.randperm(pages, device="cuda", dtype=torch.int32).view(count, -1)
    batch = lz.paged_batch(tables, torch.full((count,), length, dtype=torch.int32, device="cuda"))
    space = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True, backend="fa2")
    begins = torch.arange(count + 1, dtype=torch.int32) * (length // page)
    last = torch.full((count,), page, dtype=torch.int32)
    wrapper.plan(begins, tables.view(-1), last, 32, 8, 128, page, q_data_type=BF, kv_data_type=BF)
    yield (
        "paged decode B16 Sk4096",
        lambda: wrapper.run(query, (keys, values)),
        lambda: paged.decode_tc(query, keys, values, batch, None, None, None, None, False, "NHD"),
    )
    # The vendor's order of the filters is the op's (top-k, then top-p of what is left), but it keeps every token that
    # equals the last one kept, looks for no NaN, and draws by rejection from float32 with random numbers of its own. It
    # has no call that does the op's whole job, so ours is held to the one that does nearly all of it.
    logits = torch.randn(1, 128256, device="cuda") * 3
    yield (
        "~top-k 50, top-p 0.9, B1",  # another draw from the same distribution: not compared
        lambda: fi.sampling.top_k_top_p_sampling_from_probs(torch.softmax(logits, -1), 50, 0.9),
        lambda: sampling.sample(logits, 50, 0.9, None, 1.0, None),
    )


def flashattn4() -> Iterator[Pair]:
    from flash_attn.cute import interface

    from layerzero_flashattn.fa4 import kernels

    for length in (512, 2048, 8192):
        q, k, v = rand(1, length, 32, 128), rand(1, length, 8, 128), rand(1, length, 8, 128)
        plain = (None, 0.0, "bottom_right", None, None, None, None, False)
        yield (
            f"prefill S{length}",
            partial(interface.flash_attn_func, q, k, v, causal=True),
            partial(kernels.attention, q, k, v, *plain),
        )


def quack() -> Iterator[Pair]:
    from quack.rmsnorm import rmsnorm

    from layerzero_flashattn.quack import norm

    for rows, width in ((16, 4096), (16384, 8192)):
        x, w = rand(rows, width), rand(width)
        yield f"rms_norm {rows}x{width}", partial(rmsnorm, x, w, eps=1e-6), partial(norm.rms_norm, x, w, 1e-6)


def liger() -> Iterator[Pair]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    from layerzero_liger import gated, norm

    for rows, width in ((16, 4096), (16384, 8192)):
        x, w = rand(rows, width), rand(width)
        yield (
            f"rms_norm {rows}x{width}",
            partial(LigerRMSNormFunction.apply, x, w, 1e-6, 0.0, "gemma", False),
            partial(norm.rms_norm, x, w, 1e-6),
        )
    x = rand(16384, 2 * 14336)
    yield (
        "silu_and_mul 16384x14336",
        lambda: LigerFusedGateUpSiLUMulFunction.apply(x, False),
        lambda: gated.silu_and_mul(x),
    )


LIBRARIES: dict[str, Callable[[], Iterator[Pair]]] = {
    "flashinfer": flashinfer, "flashattn4": flashattn4, "quack": quack, "liger": liger,
}  # fmt: skip


# -- timing ------------------------------------------------------------------------------------------------
def within(vendor_us: float, ours_us: float) -> bool:
    """The budget of an adapter."""
    return ours_us <= vendor_us + max(SHARE * vendor_us, EXTRA_US)


def measure(vendor: Callable[[], Any], ours: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Device and host time of both, in turns."""
    found: dict[str, list[float]] = {"vendor_us": [], "ours_us": [], "vendor_host_us": [], "ours_host_us": []}
    for call in (vendor, ours, vendor, ours):
        call()
    end, rounds = time.monotonic() + seconds, 0
    while rounds < 7 or (time.monotonic() < end and rounds < 60):
        pairs = (("vendor", vendor), ("ours", ours))
        for name, call in pairs if rounds % 2 else pairs[::-1]:
            found[f"{name}_us"].append(cuda_clock(call, 5))
            found[f"{name}_host_us"].append(launch_clock(call, 10))
        rounds += 1
    told: dict[str, Any] = {name: round(statistics.median(values), 2) for name, values in found.items()}
    told["device_within"] = within(told["vendor_us"], told["ours_us"])
    told["host_within"] = within(told["vendor_host_us"], told["ours_host_us"])
    return told


def agree(one: Any, other: Any) -> bool:
    """Whether the two give the same: the same kernel on the same numbers, up to rounding of a table."""
    if not isinstance(other, (tuple, list)):  # a vendor may give its log-sum-exp too
        one, other = (one[0] if isinstance(one, (tuple, list)) else one,), (other,)
    pairs = [(a.float().flatten(), b.float().flatten()) for a, b in zip(one, other, strict=True)]
    return all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in pairs)


def library(name: str, seconds: float) -> dict[str, Any]:
    """All pairs of one library; one that cannot run says why."""
    rows: dict[str, Any] = {}
    try:
        with torch.no_grad():
            for case, vendor, ours in LIBRARIES[name]():
                try:
                    if not case.startswith("~") and not agree(vendor(), ours()):
                        raise AssertionError("vendor and adapter disagree")
                    rows[case.lstrip("~")] = measure(vendor, ours, seconds)
                except Exception as error:  # one pair; the others are still worth their time
                    rows[case.lstrip("~")] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    except Exception as error:
        rows["import"] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", default=",".join(LIBRARIES))
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("adapters of GPU libraries are measured on a GPU; there is none here")
        return 2
    found = {name: library(name, given.seconds) for name in given.only.split(",")}
    measured = [row for rows in found.values() for row in rows.values() if "failed" not in row]
    data = {
        "commit": commit(), "machine": machine(), "limit": {"share": SHARE, "us": EXTRA_US}, "libraries": found,
        "command": f"python benchmarks/adapters.py --machine {given.machine}", "pairs": len(measured),
        "device_within": sum(row["device_within"] for row in measured),
        "host_within": sum(row["host_within"] for row in measured),
    }  # fmt: skip
    write_json(given.json or RESULTS / given.machine / "adapters.json", data)
    for name, rows in found.items():
        for case, row in rows.items():
            print(f"{name} {case}: " + " ".join(f"{key}={value}" for key, value in row.items()))
    print(f"{data['device_within']} and {data['host_within']} of {len(measured)} pairs within the limit (device, host)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
