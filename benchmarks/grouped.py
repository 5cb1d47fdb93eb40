"""Grouped attention against one call for each group: time, ratio, and the bytes of K and V each way has to read.

    python benchmarks/grouped.py --machine NAME [--json FILE] [--backward] [--quick]

Every ratio is one of medians from one interleaved run. A case is one rank of eight in zigzag context parallelism: an
eighth of the tokens ask, in groups whose prefixes grow in equal steps up to the whole sequence. The separate calls are
made with every kernel of `varlen_attention` that runs here, and the fastest of them is what grouping has to beat. Every
contestant's result is compared with the separate calls' before it is timed. Without a GPU the tokens are divided by 32.
The bytes are a model (each way's unique reads), the times are measured. On a GPU the run fails where grouping is not
faster at 65 536 tokens. Writes JSON, and CSV beside it.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

import layerzero as lz
from layerzero.dispatch.compiling import forget_failures
from layerzero.errors import LayerZeroError
from layerzero.model.device import DeviceSpec
from layerzero.model.grouped import GroupedBatch
from layerzero.numerics import assert_close, tolerance


@dataclass(frozen=True)
class Case:
    """A model's attention, the length of its sequence, and how many groups ask."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    groups: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.tokens // 1024}K, {self.groups} groups"

    @property
    def theory(self) -> float:
        """The share of K/V reads that n equal steps spare."""
        return (self.groups - 1) / (self.groups + 1)


LLAMA_8B, LLAMA_70B = ("Llama3-8B", 32, 8, 128), ("Llama3-70B", 64, 8, 128)
CASES = (
    *(Case(*LLAMA_8B, tokens, 2) for tokens in (8_192, 16_384, 32_768)),
    *(Case(*LLAMA_70B, tokens, 2) for tokens in (8_192, 16_384)),
    Case(*LLAMA_8B, 16_384, 4),
    Case(*LLAMA_8B, 65_536, 2),
)


def lengths(case: Case, divisor: int) -> tuple[list[int], list[int]]:
    """Queries and keys of every group."""
    tokens = case.tokens // divisor
    return [tokens // (8 * case.groups)] * case.groups, [tokens * (g + 1) // case.groups for g in range(case.groups)]


def scene(case: Case, divisor: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], GroupedBatch]:
    queries, keys = lengths(case, divisor)
    offsets = [0]
    for count in queries:
        offsets.append(offsets[-1] + count)
    shapes = ((offsets[-1], case.heads, case.head_dim), *[(keys[-1], case.kv_heads, case.head_dim)] * 2)
    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=gen).to(dtype).to(device) for shape in shapes]
    host = (offsets, [0, keys[-1]], [[n] for n in keys])
    parts = (torch.tensor(item, dtype=torch.int32, device=device) for item in host)
    return tensors, lz.grouped_batch(*parts, host_lens=host)


def separate(batch: GroupedBatch, device: str, backend: str | None = None) -> Callable[..., Tensor]:
    """One call for each group, on its own prefix: what grouping replaces. Offsets are made beforehand."""
    made = [
        (s, *(torch.tensor([0, n], dtype=torch.int32, device=device) for n in (s.q_len, s.kv_len)))
        for s in batch.segments()
    ]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([
            lz.varlen_attention(
                query[s.q_start : s.q_start + s.q_len], key[: s.kv_len], value[: s.kv_len], cu_q, cu_k,
                max_seqlen_q=s.q_len, max_seqlen_k=s.kv_len, is_causal="bottom_right", backend=backend,
            )
            for s, cu_q, cu_k in made
        ])  # fmt: skip

    return call


def usable(op: str, device: str, without: Sequence[str]) -> list[str]:
    """Kernels of an op for this device that hold no score matrix."""
    spec = DeviceSpec.detect(device)
    kernels = lz.list_kernels(op, available=True)
    return [k.kernel_id for k in kernels if k.backend not in ("reference", *without) and not k.check_device(spec)]


def contestants(batch: GroupedBatch, device: str, without: Sequence[str] = ()) -> dict[str, Callable[..., Tensor]]:
    """The separate calls, by dispatch and by each kernel; what dispatch chooses for all; every kernel for all."""
    found: dict[str, Callable[..., Tensor]] = {"separate": separate(batch, device)}
    for name in usable("varlen_attention", device, without):
        found[f"separate {name}"] = separate(batch, device, name)
    found["grouped"] = lambda q, k, v: lz.grouped_attention(q, k, v, batch)
    for name in usable("grouped_attention", device, without):
        found[name] = lambda q, k, v, name=name: lz.grouped_attention(q, k, v, batch, backend=name)
    return found


def agreeing(calls: dict[str, Callable[..., Tensor]], tensors: Sequence[Tensor], backward: bool) -> Any:
    """The contestants that take this case, each compared with the separate calls; and why others do not."""
    want = calls["separate"](*tensors)
    kept, refused = {}, {}
    for name, function in calls.items():
        try:
            with torch.set_grad_enabled(backward):
                found = function(*(t.detach().requires_grad_(backward) for t in tensors))
        except LayerZeroError as error:
            refused[name] = " ".join(line.strip() for line in str(error).splitlines())[:300]
            continue
        assert_close(found.detach(), want.detach(), tolerance("grouped_attention", want.dtype))
        kept[name] = function
    return kept, refused


def timed(function: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> Callable[[], None]:
    """A call that is over when it returns, with the gradients of all inputs where asked."""
    leaves = [t.detach().requires_grad_(backward) for t in tensors]

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = function(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
        if out.is_cuda:
            torch.cuda.synchronize()

    return call


def measure(case: Case, options: argparse.Namespace, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One case: results compared, bytes held against the formula, then everything timed in one run."""
    tensors, batch = scene(case, options.divisor, device, dtype)
    traffic = batch.kv_traffic(case.kv_heads, case.head_dim, dtype.itemsize)
    if abs(traffic.share - case.theory) > 1e-12:
        raise SystemExit(
            f"{case.name}: {traffic.share:.4f} of the reads are spared, the formula says {case.theory:.4f}"
        )
    calls, refused = agreeing(contestants(batch, device, options.without), tensors, options.backward)
    rounds = 3 if options.quick else options.rounds
    medians = interleaved(
        {name: timed(function, tensors, options.backward) for name, function in calls.items()}, rounds=rounds, batch=1
    )
    best = min((name for name in medians if name.startswith("separate")), key=medians.__getitem__)
    return {
        "case": case.name,
        **asdict(case),
        "measured_tokens": case.tokens // options.divisor,
        "dtype": str(dtype).removeprefix("torch."),
        "backward": options.backward,
        "chosen": lz.which("grouped_attention", *tensors, batch),
        "separate_kernel": best.removeprefix("separate").strip() or "by dispatch",
        "separate_ms": round(medians[best] / 1e6, 4),
        "grouped_ms": round(medians["grouped"] / 1e6, 4),
        "ratio": round(medians[best] / medians["grouped"], 3),
        "separate_mb": round(traffic.separate / 1e6, 1),
        "grouped_mb": round(traffic.grouped / 1e6, 1),
        "saved_share": round(traffic.share, 4),
        "kernels_ms": {name: round(ns / 1e6, 4) for name, ns in medians.items() if "." in name},
        "refused": refused,
    }


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Whole or not at all; the times of single kernels stay in the JSON."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    names = [name for name in rows[0] if name not in ("kernels_ms", "refused")]
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'case':28} {'tokens':>7} {'separate':>11} {'grouped':>11} {'ratio':>6} {'K/V read, MB':>17} {'saved':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row['case']:28} {row['measured_tokens']:>7} {row['separate_ms']:>8.3f} ms {row['grouped_ms']:>8.3f} ms "
            f"{row['ratio']:>5.2f}x {row['separate_mb']:>7.1f} -> {row['grouped_mb']:>6.1f} {row['saved_share']:>6.1%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="folder under benchmarks/results for the JSON and CSV")
    parser.add_argument("--json", type=Path, help="write the JSON to this file instead, the CSV beside it")
    parser.add_argument("--backward", action="store_true", help="time the forward and the gradients together")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of the interleaved run")
    parser.add_argument("--divisor", type=int, help="divide the tokens by this; 1 on a GPU and 32 without")
    parser.add_argument(
        "--without", nargs="*", default=[], help="backends to leave out, such as one that compiles long"
    )
    parser.add_argument("--quick", action="store_true", help="three rounds: a smoke test, not a figure")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bfloat16 where it is fast; few CPUs multiply it.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if options.divisor is None:
        options.divisor = 1 if device == "cuda" else 32
    # A compile that failed in another program of this machine, in its tests for instance, is tried again here.
    forget_failures()
    with lz.scoped(jit="block"):
        rows = [measure(case, options, device, dtype) for case in CASES]
    path = options.json or RESULTS / options.machine / ("grouped_backward.json" if options.backward else "grouped.json")
    data = {
        "benchmark": "grouped",
        "commit": commit(),
        "command": "python benchmarks/grouped.py" + (" --backward" if options.backward else ""),
        "machine": machine(),
        "divisor": options.divisor,
        "rounds": 3 if options.quick else options.rounds,
        "without": options.without,
        "rows": rows,
    }
    write_json(path, data)
    write_csv(path.with_suffix(".csv"), rows)
    print(table(rows))
    slow = [row["case"] for row in rows if device == "cuda" and row["tokens"] == 65_536 and row["ratio"] <= 1.0]
    if slow:
        print(f"not faster than separate calls: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
