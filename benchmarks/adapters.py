"""What our adapters add to the libraries they call: vendor call and adapter side by side, on a GPU. Keeps JSON.

    python benchmarks/adapters.py --machine NAME [--json FILE] [--seconds 0.3] [--only flashinfer,quack]
    python benchmarks/adapters.py --machine NAME --ops [--device cpu]

Each pair computes the same thing from the same tensors, and is checked to agree before it is timed. "device" is the
median between two CUDA events with the cache overwritten before, "host" the time a launch keeps the interpreter; both
are taken in turns. The limit is 5 % or 3 µs over the vendor's own call, whichever is larger, for each of the two.
A vendor's call that needs more than it is given (a table in float32, lengths on the host) has that made beforehand
where our op makes it per batch, and inside the pair where our op must make it per call.

`--ops` holds every public op on tiny tensors against the lines of torch that somebody without LayerZero writes: the
host time of both, on any device. The medians and the least are kept; a busy machine moves the medians.
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
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

from layerzero_tune.timing.baselines import BASELINES
from layerzero_tune.timing.clock import cpu_clock, cuda_clock, launch_clock

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


# -- every public op and torch's own lines -----------------------------------------------------------------
def public_ops(device: str) -> Iterator[Pair]:
    import layerzero as lz

    torch.manual_seed(0)
    make = partial(torch.randn, device=device)

    def default(op: str, ours: Callable[[], Any], **given: Any) -> Pair:
        return op, BASELINES[op](given), ours

    x, r, w, b, packed = make(2, 64), make(2, 64), make(64), make(64), make(2, 128)
    yield default("rms_norm", lambda: lz.rms_norm(x, w), x=x, weight=w)
    norm = BASELINES["rms_norm"]({"x": x, "weight": w})
    yield "rms_norm, grad mode", norm, torch.enable_grad()(lambda: lz.rms_norm(x, w))
    yield "add_rms_norm", lambda: (F.rms_norm(s := x + r, (64,), w, 1e-6), s), lambda: lz.add_rms_norm(x, r, w)
    yield "gemma_rms_norm", lambda: F.rms_norm(x, (64,), 1 + w, 1e-6), lambda: lz.gemma_rms_norm(x, w)

    def gemma_added() -> Any:
        total = x + r
        return F.rms_norm(total, (64,), 1 + w, 1e-6), total

    yield "gemma_add_rms_norm", gemma_added, lambda: lz.gemma_add_rms_norm(x, r, w)
    yield default("layer_norm", lambda: lz.layer_norm(x, w, b), x=x, weight=w, bias=b, eps=1e-5)
    yield default("silu_and_mul", lambda: lz.silu_and_mul(packed), x=packed)
    yield default("gelu_and_mul", lambda: lz.gelu_and_mul(packed), x=packed, approximate="none")
    yield "relu_and_mul", lambda: F.relu(packed[:, :64]) * packed[:, 64:], lambda: lz.relu_and_mul(packed)

    ids, table = torch.tensor([3, 5], device=device), make(16, 64)
    yield "embedding", lambda: F.embedding(ids, table), lambda: lz.embedding(ids, table)
    weight, up, down = make(64, 64), make(256, 64), make(64, 128)
    yield default("linear", lambda: lz.linear(x, weight, b), x=x, weight=weight, bias=b)

    def feed_forward() -> torch.Tensor:
        gate, value = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down)

    yield "mlp", feed_forward, lambda: lz.mlp(x, up, down)
    yield "cross_entropy", lambda: F.cross_entropy(table[:2], ids), lambda: lz.cross_entropy(table[:2], ids)
    yield "cast", lambda: x.to(torch.bfloat16), lambda: lz.cast(x, torch.bfloat16)
    scaled = lz.quantize(x, "int8")

    def to_int8() -> Any:
        scale = x.abs().amax() / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    yield "~quantize", to_int8, lambda: lz.quantize(x, "int8")
    yield "~dequantize", lambda: scaled.data.float() * scaled.scale, lambda: lz.dequantize(scaled)

    q, k = make(1, 4, 8, 32), make(1, 2, 8, 32)
    yield default("attention", lambda: lz.attention(q, k, k), query=q, key=k, value=k)
    packed_q, packed_k = (item[0].transpose(0, 1).contiguous() for item in (q, k))
    ends = torch.tensor([0, 8], device=device, dtype=torch.int32)
    packed_call = partial(lz.varlen_attention, packed_q, packed_k, packed_k, ends, ends, max_seqlen_q=8, max_seqlen_k=8)
    yield default(
        "varlen_attention", packed_call, query=packed_q, key=packed_k, value=packed_k, cu_seqlens_q=ends,
        cu_seqlens_k=ends,
    )  # fmt: skip
    pages, tables = make(2, 8, 2, 32), torch.tensor([[0], [1]], device=device, dtype=torch.int32)
    batch = lz.paged_batch(tables, torch.tensor([8, 8], device=device, dtype=torch.int32))
    one = make(2, 4, 32)
    yield default(
        "paged_attention", lambda: lz.paged_attention(one, pages, pages, batch), query=one, key_cache=pages,
        value_cache=pages, batch=batch,
    )  # fmt: skip
    latent, turned, latent_q, turned_q = make(2, 8, 32), make(2, 8, 16), make(2, 4, 32), make(2, 4, 16)
    wide = tables.long()

    def latent_attention() -> torch.Tensor:
        held = latent[wide].flatten(1, 2)
        keys = torch.cat((held, turned[wide].flatten(1, 2)), -1)[:, None]
        query = torch.cat((latent_q, turned_q), -1)[:, :, None]
        return F.scaled_dot_product_attention(query, keys, held[:, None], scale=0.1, enable_gqa=True)[:, :, 0]

    mla = partial(lz.mla_paged_attention, latent_q, turned_q, latent, turned, batch, scale=0.1)
    yield "mla_paged_attention", latent_attention, mla
    groups = lz.grouped_batch(ends, ends, torch.tensor([[8]], device=device, dtype=torch.int32))

    def one_group() -> torch.Tensor:
        rows = [item.transpose(0, 1)[None] for item in (packed_q, packed_k, packed_k)]
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    yield "grouped_attention", one_group, lambda: lz.grouped_attention(packed_q, packed_k, packed_k, groups)
    cos, sin = make(8, 16), make(8, 16)
    yield default("rope", lambda: lz.rope(q, k, cos, sin), q=q, k=k, cos=cos, sin=sin)

    power = (torch.arange(0, 32, 2, device=device) + 0.4 * 32) / (1.4 * 32)
    places = (torch.arange(8, device=device)[:, None] / 512).float()

    def decayed() -> Any:
        decay = torch.cat((power, power)) ** places
        turn = BASELINES["rope"]({"q": q, "k": k, "cos": cos, "sin": sin})()
        return turn[0] * decay, turn[1] / decay

    yield "~xpos", decayed, lambda: lz.xpos(q, k, cos, sin)

    logits = make(2, 64)
    yield default("sample", lambda: lz.sample(logits, top_k=8, top_p=0.9), logits=logits, top_k=8, top_p=0.9)

    def drawn_topk() -> torch.Tensor:
        best, places = torch.topk(logits, 8, -1)
        return places.gather(-1, torch.multinomial(torch.softmax(best, -1), 1))[:, 0]

    yield "~sample_topk", drawn_topk, lambda: lz.sample_topk(logits, 8)

    def filtered() -> tuple[torch.Tensor, torch.Tensor]:
        ordered, places = torch.sort(torch.softmax(logits, -1), -1, descending=True)
        kept = torch.cumsum(ordered, -1) - ordered <= 0.9
        return ordered.masked_fill(~kept, 0.0), places

    def drawn_topp() -> torch.Tensor:
        kept, places = filtered()
        return places.gather(-1, torch.multinomial(kept, 1))[:, 0]

    yield "~sample_topp", drawn_topp, lambda: lz.sample_topp(logits, 0.9)

    def probabilities() -> torch.Tensor:
        kept, places = filtered()
        return torch.zeros_like(kept).scatter_(-1, places, kept / kept.sum(-1, keepdim=True))

    yield "sampling_probs", probabilities, lambda: lz.sampling_probs(logits, top_p=0.9)
    drafted, target = torch.tensor([[1, 2]], device=device), torch.softmax(make(1, 3, 64), -1)

    def greedily() -> Any:
        best = target.argmax(-1)
        kept = (best[:, :-1] == drafted).long().cumprod(-1).sum(-1)
        return torch.where(torch.arange(3, device=device) <= kept[:, None], best, -1), kept

    spec = partial(lz.sample_speculative, drafted, None, target, greedy=True)
    yield "sample_speculative, greedy", greedily, spec

    def routed() -> Any:
        best, chosen = torch.softmax(logits, -1).topk(2, -1)
        return best / best.sum(-1, keepdim=True), chosen

    yield "topk_gate", routed, lambda: lz.topk_gate(logits, 2)
    experts, back, sizes = make(4, 64, 64), make(4, 64, 32), torch.tensor([1, 1, 0, 0], device=device)

    def by_group() -> torch.Tensor:
        parts = x.split(sizes.tolist())
        return torch.cat([part @ matrix.T for part, matrix in zip(parts, experts, strict=True)])

    yield "grouped_gemm", by_group, lambda: lz.grouped_gemm(x, experts, sizes)
    shares, chosen = lz.topk_gate(logits[:, :4].contiguous(), 2)

    def experts_in_turn() -> torch.Tensor:  # the loop of a Hugging Face mixture of experts
        out = torch.zeros_like(x)
        for expert in range(4):
            row, slot = torch.where(chosen == expert)
            gate, value = F.linear(x[row], experts[expert]).chunk(2, -1)
            out.index_add_(0, row, F.linear(F.silu(gate) * value, back[expert]) * shares[row, slot, None])
        return out

    yield "moe", experts_in_turn, lambda: lz.moe(x, experts, back, shares, chosen)


def host_of_ops(device: str, seconds: float) -> dict[str, Any]:
    """The host time of each public op and of the torch code in its place, taken in turns, µs."""
    clock, rows = launch_clock if device == "cuda" else cpu_clock, {}
    for name, plain, ours in public_ops(device):
        if not name.startswith("~") and name != "sample" and not agree(plain(), ours()):
            rows[name] = {"failed": "torch and the op disagree"}
            continue
        found: dict[str, list[float]] = {"torch": [], "op": []}
        for call in (plain, ours) * 5:
            call()
        end, pairs = time.monotonic() + seconds, (("torch", plain), ("op", ours))
        while len(found["op"]) < 7 or time.monotonic() < end:
            for word, call in pairs if len(found["op"]) % 2 else pairs[::-1]:
                found[word].append(clock(call, 10))
        told = {f"{word}_us": statistics.median(values) for word, values in found.items()}
        least = {f"{word}_least_us": min(values) for word, values in found.items()}
        rows[name.lstrip("~")] = {key: round(value, 2) for key, value in (told | least).items()}
        more = min(told["op_us"] - told["torch_us"], least["op_least_us"] - least["torch_least_us"])
        rows[name.lstrip("~")] |= {"more_us": round(more, 2), "host_within": more <= EXTRA_US}
    return rows


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
    parser.add_argument("--ops", action="store_true", help="every public op against torch's own lines, host time alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of --ops")
    given = parser.parse_args(argv)
    if given.ops:
        with torch.no_grad():
            rows = host_of_ops(given.device, given.seconds)
        kept = sum(row.get("host_within", False) for row in rows.values())
        write_json(given.json or RESULTS / given.machine / f"ops_host_{given.device}.json", {
            "commit": commit(), "machine": machine(), "device": given.device, "limit": {"us": EXTRA_US}, "ops": rows,
            "command": f"python benchmarks/adapters.py --machine {given.machine} --ops --device {given.device}",
            "host_within": kept,
        })  # fmt: skip
        for name, row in rows.items():
            print(f"{name}: " + " ".join(f"{key}={value}" for key, value in row.items()))
        print(f"{kept} of {len(rows)} ops within {EXTRA_US:g} µs of torch")
        return 0
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
