"""Calls drawn to fill the space that people use: any op with a torch baseline, sizes spread evenly over their octaves.

head_dim 64 to 256, GQA ratios 1 to 16, batch 1 to 256, lengths 1 to 131 072, hidden 1 024 to 16 384, vocabularies to
256k. A call too large for the device (`LIMITS`: bytes of inputs, operations) is drawn again. Nothing here is a grid.

    python benchmarks/drawing.py SEED DEVICE FIRST LAST OPS BACKENDS FOLDER

runs the calls FIRST to LAST once by every kernel that may run them, which compiles; OPS parted by commas, or all.
Several at once share them: who takes a call leaves a file in FOLDER.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["OPS", "Drawn", "compile_for", "drawn", "part_of", "prepare"]

# device -> (bytes, operations) of the largest call
LIMITS = {"cpu": (48e6, 2e9), "cuda": (2e9, 4e12)}
DTYPES = {"cpu": ("float32", "float32", "bfloat16"), "cuda": ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")}


class Drawn(NamedTuple):
    """A call in the words of `lz explain`, and about what it costs."""

    name: str
    op: str
    options: dict[str, Any]
    bytes: float
    operations: float


Options = tuple[dict[str, Any], float, float]


def _octaves(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A size, every octave as likely as another."""
    size = math.exp(rng.uniform(math.log(low), math.log(high)))
    return max(multiple, round(size / multiple) * multiple)


def _heads(rng: random.Random) -> tuple[int, int, int]:
    kv, ratio = rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 2, 4, 6, 8, 16))
    return kv * ratio, kv, rng.choice((64, 80, 96, 128, 128, 192, 256))


def _attention(rng: random.Random, size: int) -> Options:
    heads, kv, dim = _heads(rng)
    batch, keys = _octaves(rng, 1, 256), _octaves(rng, 1, 131_072)
    rows = rng.choice((1, keys, keys, min(keys, _octaves(rng, 2, 4096))))
    given: dict[str, Any] = {"q": (batch, rows, heads, dim), "k": (batch, keys, kv, dim), "layout": "BSHD"}
    if rows == keys and rows > 1 and rng.random() < 0.7:
        given["causal"] = "top_left"
    moved = size * batch * dim * (2 * rows * heads + 2 * keys * kv)
    return given, moved, 4.0 * batch * heads * rows * keys * dim


def _paged(rng: random.Random, size: int) -> Options:
    heads, kv, dim = _heads(rng)
    dim = rng.choice((64, 128, 128, 256))
    batch, length, page = _octaves(rng, 1, 256), _octaves(rng, 16, 131_072), 16
    blocks = batch * -(-length // page)
    given = {"q": (batch, heads, dim), "k": (blocks, page, kv, dim), "context": length}
    return given, 2.0 * size * blocks * page * kv * dim, 4.0 * batch * heads * length * dim


def _rows(width: str) -> Callable[[random.Random, int], Options]:
    def make(rng: random.Random, size: int) -> Options:
        hidden = _octaves(rng, 1024, 16_384, 64)
        shape = (_octaves(rng, 1, 131_072), 2 * hidden if width == "gated" else hidden)
        return {"shape": shape}, 2.0 * size * shape[0] * shape[1], 8.0 * shape[0] * shape[1]

    return make


def _rope(rng: random.Random, size: int) -> Options:
    heads, kv, dim = _heads(rng)
    batch, length = _octaves(rng, 1, 32), _octaves(rng, 1, 131_072)
    given = {"q": (batch, length, heads, dim), "k": (batch, length, kv, dim), "layout": "BSHD"}
    count = batch * length * (heads + kv) * dim
    return given, 2.0 * size * count, 6.0 * count


def _sample(rng: random.Random, size: int) -> Options:
    shape = (_octaves(rng, 1, 256), _octaves(rng, 16_384, 262_144, 64))
    given = {"shape": shape, "top_k": rng.choice((20, 50, 100)), "top_p": rng.choice((0.8, 0.9, 0.95))}
    return given, 12.0 * shape[0] * shape[1], 40.0 * shape[0] * shape[1]


def _linear(rng: random.Random, size: int) -> Options:
    rows, k, n = _octaves(rng, 1, 16_384), _octaves(rng, 1024, 16_384, 64), _octaves(rng, 1024, 16_384, 64)
    return {"shape": (rows, k), "weight": (n, k)}, size * (rows * k + n * k + rows * n), 2.0 * rows * k * n


OPS: dict[str, Callable[[random.Random, int], Options]] = {
    "attention": _attention, "paged_attention": _paged, "rope": _rope, "sample": _sample, "linear": _linear,
    **{op: _rows("") for op in ("rms_norm", "add_rms_norm", "layer_norm")},
    **{op: _rows("gated") for op in ("silu_and_mul", "gelu_and_mul")},
}  # fmt: skip
_WEIGHTS = {"attention": 4, "paged_attention": 2, "rope": 2, "sample": 2}


def drawn(seed: int, device: str) -> Iterator[Drawn]:
    """Calls without end, the same for the same seed; every op comes round in turn, attention more often."""
    rng = random.Random(seed)
    turn = [op for op in OPS for _ in range(_WEIGHTS.get(op, 1))]
    most_bytes, most_operations = LIMITS[device]
    seen: set[str] = set()
    while True:
        rng.shuffle(turn)
        for op in list(turn):
            for _ in range(1000):
                dtype = rng.choice(DTYPES[device])
                options, moved, operations = OPS[op](rng, 4 if dtype == "float32" else 2)
                words = " ".join(f"{name}={value}" for name, value in options.items())
                name = f"{op} {dtype} {words}"
                if moved <= most_bytes and operations <= most_operations and name not in seen:
                    seen.add(name)
                    yield Drawn(name, op, {**options, "dtype": dtype, "device": device}, moved, operations)
                    break


def part_of(seed: int, device: str, first: int, last: int, ops: str, dtypes: str = "all") -> Iterator[Drawn]:
    """The calls from `first` to before `last`, of these ops and dtypes (parted by commas, or all)."""
    wanted = OPS if ops == "all" else ops.split(",")
    found = (call for call in itertools.islice(drawn(seed, device), first, last) if call.op in wanted)
    return found if dtypes == "all" else (call for call in found if call.options["dtype"] in dtypes.split(","))


def prepare(
    seed: int, device: str, cases: int, compiled: str, parts: int, seconds: float, *, first: int = 0, ops: str = "all"
) -> float:
    """Compile what the calls need in so many processes at once, for so long at most; what each vendor keeps on disk is
    there afterwards. Returns the seconds it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prepare-") as taken:
        arguments = [str(item) for item in (seed, device, first, cases, ops, compiled, taken)]
        running = [
            subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.DEVNULL) for _ in range(parts)
        ]
        for child in running:
            try:
                child.wait(timeout=max(0.1, seconds - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    return round(time.monotonic() - begin, 1)


def compile_for(ctx: Any, only: Collection[str] | None) -> None:
    """Run a call once by each of these kernels, or all, that compile: what they need is there afterwards."""
    import torch

    from layerzero._ops.signature import public_op
    from layerzero.dispatch.bind import bind
    from layerzero.dispatch.run import current_world, describe
    from layerzero.selection.engine import select
    from layerzero.selection.world import measurement_settings
    from layerzero.tuning.inputs import build, conditions

    spec = public_op(ctx.op)
    call = build(ctx)
    with conditions(ctx):
        world = current_world()
        measuring = measurement_settings(world)
        decision = select(describe(spec, call.args, call.layout, ctx.backend, world), measuring)
        for name in decision.ranking:
            if (only is None or name in only) and measuring.registry.kernels[name].jit:
                try:
                    bind(spec, decision, measuring, name).run(*call.args)
                    if ctx.device.device_type == "cuda":  # a fault of a kernel is raised where it was called
                        torch.cuda.synchronize()
                except Exception as error:  # the race will say it of its kernel
                    print(f"{name}: {error}".splitlines()[0][:200], file=sys.stderr)


def _compile(calls: Iterator[Drawn], compiled: str, taken: Path) -> None:
    """One process's share: each call that no other has taken is run once by every kernel that may be compiled."""
    from tuned import ready

    from layerzero_cli.calls import context

    for number, call in enumerate(calls):
        try:
            (taken / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            ctx = context(call.op, call.options)
            compile_for(ctx, ready(ctx, compiled))
        except Exception as error:  # one call that does not fit must not end the others
            print(f"{call.name}: {error}".splitlines()[0][:200], file=sys.stderr)


if __name__ == "__main__":
    os.environ["LAYERZERO_JIT"] = "off"
    which = sys.argv
    wanted = part_of(int(which[1]), which[2], int(which[3]), int(which[4]), which[5])
    _compile(wanted, which[6], Path(which[7]))
