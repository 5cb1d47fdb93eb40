"""One thread against all, and both schedulers, for every CPU kernel: what is gained, and that results stay the same.

    python benchmarks/threads.py --machine NAME [--json FILE] [--budget SECONDS] [--only GLOB …]

torch's kernels run on its OpenMP pool, those of layerzero-cpu on a pool of their own. Each kernel is called from the
main thread with one thread and with all, and from four Python threads at once, in interleaved rounds. Results are
compared with those of the main thread at the same thread count, bit by bit where the kernel says that it is
deterministic, and across thread counts within the op's tolerance. Where both schedulers have a kernel for an op, their
results are compared too. Ends with 1 where a result differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

import layerzero as lz
from layerzero._ops.signature import dispatch, public_op
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import compare
from layerzero.numerics.tolerances import tolerance
from layerzero.runtime.current import builtin_ops
from layerzero.tuning.inputs import build
from layerzero_cli.calls import context
from layerzero_verify.kernels import flat
from layerzero_verify.lineup import resolve
from layerzero_verify.testing.cases import drawn
from layerzero_verify.testing.cases_rows import weight_given

__all__ = ["BACKENDS", "covered", "main", "run"]

CALLERS = 4
BACKENDS = {"torch": "OpenMP", "sdpa": "OpenMP", "cpu": "own pool"}
# The call of each op, in the words of `lz bench`: large enough to be split, small enough for two slow cores. Sampling
# is asked for the likeliest token alone, which no random number changes.
_HIDDEN = {"shape": (256, 1024)}
_ROPE = {"shape": (1, 8, 256, 64), "k": (1, 2, 256, 64)}
CALLS: dict[str, Sequence[dict[str, Any]]] = {
    "attention": (
        {"q": (1, 8, 192, 64), "k": (1, 2, 192, 64), "causal": "top_left"}, {"q": (2, 8, 1, 64), "k": (2, 2, 1024, 64)},
    ),
    "paged_attention": ({"q": (4, 8, 64), "k": (128, 16, 2, 64), "context": 400},),
    "mla_paged_attention": ({"q": (4, 8, 128), "k": (32, 16, 128), "context": 100},),
    "varlen_attention": ({"q": (512, 8, 64), "k": (512, 2, 64), "context": 128},),
    "grouped_attention": ({"q": (128, 8, 64), "k": (256, 2, 64)},),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm"), (_HIDDEN,)),
    **dict.fromkeys(("silu_and_mul", "gelu_and_mul", "relu_and_mul", "quantize", "dequantize"), (_HIDDEN,)),
    "rope": (_ROPE, {**_ROPE, "interleaved": True}),
    "xpos": (_ROPE, {**_ROPE, "interleaved": True}),
    "cast": ({"shape": (256, 1024), "format": "float16"},),
    "linear": ({"shape": (8, 512), "weight": (512, 512)}, {"shape": (64, 512), "weight": (512, 512)}),
    "mlp": ({"shape": (16, 256), "weight": (1024, 256)},),
    "grouped_gemm": ({"shape": (64, 256), "weight": (4, 256, 256)},),
    "moe": (
        {"shape": (32, 256), "weight": (4, 512, 256)},
        {"shape": (32, 256), "weight": (4, 512, 256), "format": "int8"},
    ),
    "topk_gate": ({"shape": (512, 64)},),
    "embedding": ({"shape": (4, 256), "weight": (4096, 512)},),
    "cross_entropy": ({"shape": (128, 8192)},),
    "sample": ({"shape": (4, 32768), "top_k": 1},),
    "sample_topk": ({"shape": (4, 32768), "top_k": 1},),
    "sample_topp": ({"shape": (4, 32768), "top_p": 1e-6},),
    "sampling_probs": ({"shape": (4, 32768), "top_k": 40},),
}  # fmt: skip
_LIKELIEST: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sample": ((), {"top_k": 1}),
    "sample_topk": ((1,), {}),
    "sample_topp": ((1e-6,), {}),
}
_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Work:
    """One kernel and a call that it takes."""

    spec: KernelSpec
    case: str
    dtype: str
    args: tuple[Any, ...]
    layout: str | None

    def __call__(self) -> Any:
        """The kernel's result."""
        return dispatch(public_op(self.spec.op), self.args, self.layout, self.spec.kernel_id)


def covered() -> list[KernelSpec]:
    """The CPU kernels of this machine that are measured: all of these backends, for ops that the core declares."""
    found = resolve(device="cpu", compiles=False).kernels
    return [item for item in found if item.backend in BACKENDS and item.op in builtin_ops]


def work_for(spec: KernelSpec) -> Work | None:
    """The first call of the table that the kernel takes."""
    for options in CALLS.get(spec.op, ()):
        for word in _DTYPES:
            ctx = context(spec.op, {**options, "dtype": word, "device": "cpu"})
            call = build(ctx, device="cpu", seed=1)
            args = call.args
            if spec.op in _LIKELIEST:  # a context does not keep such numbers
                more, named = _LIKELIEST[spec.op]
                args, _, _ = public_op(spec.op).normalize((call.args[0], *more), named)
            if spec.op == "linear":  # the weight in the form the kernel takes: plain, quantized or packed
                args = _linear(spec, options, call.args[0])
            op = public_op(spec.op)
            found = decide(op, describe(op, args, call.layout, None, current_world()), current_world())
            if any(item.kernel_id == spec.kernel_id and item.accepted for item in found.candidates):
                words = " ".join(f"{name}={_plain(value)}" for name, value in options.items())
                return Work(spec, words, ctx.dtype, args, call.layout)
    return None


def _linear(spec: KernelSpec, options: dict[str, Any], x: torch.Tensor) -> tuple[Any, ...]:
    word, (n, k) = str(x.dtype).removeprefix("torch."), options["weight"]
    sizes = {"rank": 2, "rows": options["shape"][0], "n": n, "k": k}
    return drawn("linear", spec, word, torch.device("cpu"), spec.kernel_id, **sizes, **weight_given(spec))


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


# -- callers -----------------------------------------------------------------------------------------------
class Callers:
    """Four Python threads that do the same work at the same time, each the given number of times."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.times, self.count, self.results = call, 0, 1, [None] * CALLERS
        self.failed: list[BaseException] = []
        self.gate = threading.Barrier(CALLERS + 1)
        self.threads = [threading.Thread(target=self._serve, args=(n,), daemon=True) for n in range(CALLERS)]
        for thread in self.threads:
            thread.start()

    def _serve(self, number: int) -> None:
        with torch.no_grad():
            while True:
                self.gate.wait()
                if not self.times:
                    return
                try:
                    if torch.get_num_threads() != self.count:  # OpenMP keeps the count for each thread apart
                        torch.set_num_threads(self.count)
                    for _ in range(self.times):
                        self.results[number] = self.call()
                except BaseException as error:  # told by `run`, in the main thread
                    self.failed.append(error)
                self.gate.wait()

    def run(self, times: int) -> list[Any]:
        """Let all of them work, with as many threads each as the caller has; their last results."""
        self.times, self.count = times, torch.get_num_threads()
        self.gate.wait()
        self.gate.wait()
        if self.failed:
            raise self.failed[0]
        return list(self.results)

    def close(self) -> None:
        """End the threads."""
        self.times = 0
        self.gate.wait()
        for thread in self.threads:
            thread.join()


# -- one kernel --------------------------------------------------------------------------------------------
def parity(work: Work, threads: int, callers: Callers) -> dict[str, Any]:
    """Same bits again, same bits from four threads, and within tolerance (or the same bits) across thread counts."""
    found: dict[str, Any] = {}
    by_count = {}
    for count in (1, threads):
        torch.set_num_threads(count)
        first = by_count[count] = flat(work())
        again = flat(work())
        others = [flat(item) for _ in range(3) for item in callers.run(1)]
        found[f"again, {count}"] = _same(work, [again], first)
        found[f"callers, {count}"] = _same(work, others, first)
    across = _same(work, [by_count[threads]], by_count[1], exact=False)
    return {**found, "threads": across, "ok": "differs" not in (*found.values(), across)}


def _same(work: Work, results: Sequence[Sequence[Any]], want: Sequence[Any], *, exact: bool | None = None) -> str:
    """bits: the same; within: inside the op's tolerance, where no more is promised; differs: neither."""
    promised = work.spec.deterministic if exact is None else exact
    pairs = [(a, b) for result in results for a, b in zip(result, want, strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return "bits"
    if promised:
        return "differs"
    return "within" if all(_close(work, a, b) for a, b in pairs) else "differs"


def _close(work: Work, got: torch.Tensor, want: torch.Tensor) -> bool:
    loss = max(dict(work.spec.error_bounds).values(), default=None)
    k = work.args[0].shape[-1] if isinstance(work.args[0], torch.Tensor) else None
    return compare(got, want, tolerance(work.spec.op, work.dtype, k=k, declared=loss)).ok


def timed(work: Work, threads: int, callers: Callers, budget: float) -> dict[str, Any]:
    """Median µs per call: one thread, all threads, and all threads with four callers; a batch of each per round."""

    def main(times: int) -> None:
        for _ in range(times):
            work()

    shape: dict[str, tuple[int, Callable[[int], Any], int]] = {
        "1 thread": (1, main, 1), "all threads": (threads, main, 1), "4 callers": (threads, callers.run, CALLERS),
    }  # fmt: skip
    begin = time.perf_counter()
    main(2)
    once = max(1e-6, (time.perf_counter() - begin) / 2)
    batch = max(1, min(50, int(0.004 / once)))
    samples: dict[str, list[float]] = {name: [] for name in shape}
    rounds, end = 0, time.perf_counter() + budget
    while rounds < 5 or (time.perf_counter() < end and rounds < 51):
        for name, (count, run, calls) in shape.items() if rounds % 2 else reversed(shape.items()):
            torch.set_num_threads(count)
            run(1)
            begin = time.perf_counter()
            run(batch)
            samples[name].append((time.perf_counter() - begin) * 1e6 / (batch * calls))
        rounds += 1
    us = {name: round(statistics.median(values), 2) for name, values in samples.items()}
    return {
        "us": us, "rounds": rounds, "batch": batch,
        "parallel": round(us["1 thread"] / us["all threads"], 3),
        "callers": round(us["all threads"] / us["4 callers"], 3),
    }  # fmt: skip


def run(budget: float, only: Sequence[str] = ()) -> dict[str, Any]:
    """Every kernel; rows, kernels without a call in the table, and the parity of the two schedulers by op."""
    before = torch.get_num_threads()
    threads = max(2, torch.get_num_threads(), len(_cores()))
    kernels = [item for item in covered() if not only or any(fnmatch.fnmatchcase(item.kernel_id, g) for g in only)]
    rows, missing, results = [], [], {}
    try:
        with torch.no_grad():
            for spec in kernels:
                torch.set_num_threads(threads)
                work = work_for(spec)
                if work is None:
                    missing.append(spec.kernel_id)
                    continue
                callers = Callers(work)
                try:
                    same = parity(work, threads, callers)
                    took = timed(work, threads, callers, budget / len(kernels) / 2)
                finally:
                    callers.close()
                results.setdefault((spec.op, work.case, work.dtype), {})[spec.kernel_id] = (work, flat(work()))
                rows.append(
                    {"kernel": spec.kernel_id, "op": spec.op, "scheduler": BACKENDS[spec.backend], "case": work.case,
                     "dtype": work.dtype, "deterministic": spec.deterministic, "parity": same, **took}
                )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    return {"threads": threads, "callers": CALLERS, "rows": rows, "missing": missing, "schedulers": _across(results)}


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _across(results: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ops of plain tensors that a kernel of each scheduler served: their results within the op's tolerance."""
    found = []
    for (op, case, dtype), by_kernel in results.items():
        pools = {BACKENDS[work.spec.backend]: (work, out) for work, out in by_kernel.values()}
        if len(pools) < 2 or op == "linear":  # each kernel of `linear` has a weight in its own form
            continue
        (mine, got), (_, want) = pools["own pool"], pools["OpenMP"]
        ok = len(got) == len(want) and all(_close(mine, a, b) for a, b in zip(got, want, strict=True))
        found.append({"op": op, "case": case, "dtype": dtype, "ok": ok})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--only", nargs="*", default=())
    given = parser.parse_args(argv)
    lz.reset()
    data = {
        "benchmark": "threads",
        "command": f"python benchmarks/threads.py --machine {given.machine} --budget {given.budget:g}",
        "commit": commit(),
        "machine": machine(),
        **run(given.budget, given.only),
    }
    write_json(given.json or RESULTS / given.machine / "threads.json", data)
    for row in data["rows"]:
        same = row["parity"]
        print(
            f"{row['kernel']:38}{row['us']['1 thread']:10.1f} µs  all threads {row['parallel']:5.2f}×  4 callers "
            f"{row['callers']:5.2f}×  {'same' if same['ok'] else 'DIFFERS'} (across thread counts: {same['threads']})"
        )
    bad = [row["kernel"] for row in data["rows"] if not row["parity"]["ok"]]
    bad += [item["op"] for item in data["schedulers"] if not item["ok"]]
    print(f"{len(data['rows'])} kernels, {len(data['schedulers'])} ops on both schedulers; differ: {bad or 'none'}")
    if data["missing"]:
        print(f"no call in the table fits: {', '.join(data['missing'])}")
    return 1 if bad or data["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
