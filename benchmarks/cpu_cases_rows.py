"""Norms, RoPE, gated activations, sampling and quantization: work that reads and writes each number about once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from cpu_case import Asked, Call, Case, Goal, asked

from layerzero_cpu import gated, norm, rotary, sampling
from layerzero_cpu.library import native

WORDS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def copied(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Call:
    """The floor of work that reads the first of each pair and writes the second."""

    def run() -> None:
        for source, to in pairs:
            native.copied(source, to)

    return run


def _norms(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    width = 4096

    def draw() -> tuple[torch.Tensor, ...]:
        return (*(torch.randn(rows, width, dtype=dtype) for _ in range(2)), torch.randn(width, dtype=dtype))

    def rms() -> dict[str, Call | Asked]:
        x, out, w = draw()
        return {
            "eager": lambda: F.rms_norm(x, (width,), w, 1e-6),
            "direct": lambda: norm.rms_norm(x, w, 1e-6),
            "lz": asked("rms_norm", x, w, 1e-6),
            "floor": copied((x, out)),
        }

    def added() -> dict[str, Call | Asked]:
        x, r, w = draw()
        first, second = torch.empty_like(x), torch.empty_like(x)

        def eager() -> tuple[torch.Tensor, torch.Tensor]:
            stream = x + r
            return F.rms_norm(stream, (width,), w, 1e-6), stream

        return {
            "eager": eager,
            "direct": lambda: norm.add_rms_norm(x, r, w, 1e-6),
            "lz": asked("add_rms_norm", x, r, w, 1e-6),
            "floor": copied((x, first), (r, second)),
        }

    def layer() -> dict[str, Call | Asked]:
        x, out, w = draw()
        return {
            "eager": lambda: F.layer_norm(x, (width,), w, w, 1e-5),
            "direct": lambda: norm.layer_norm(x, w, w, 1e-5),
            "lz": asked("layer_norm", x, w, w, 1e-5),
            "floor": copied((x, out)),
        }

    word = f"{rows}×{width} {WORDS[dtype]}"
    few = rows <= 16
    goals = (Goal("eager", 8.0),) if few else (Goal("floor", 0.6),)
    yield Case("norm", f"RMSNorm {word}", rms, goals if dtype is torch.bfloat16 else goals[:0])
    yield Case("norm", f"add+RMSNorm {word}", added, goals if dtype is torch.bfloat16 else goals[:0])
    yield Case("norm", f"LayerNorm {word}", layer, (Goal("eager", 2.0),) if rows == 512 else ())


def _halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _rope(tokens: int, interleaved: bool, dtype: torch.dtype) -> Case:
    def make() -> dict[str, Call | Asked]:
        q, k = torch.randn(1, 32, tokens, 128, dtype=dtype), torch.randn(1, 8, tokens, 128, dtype=dtype)
        angles = torch.randn(tokens, 64)
        cos, sin = angles.cos(), angles.sin()
        wide = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
        c, s = (t.to(dtype) for t in wide)
        turned = _pairs if interleaved else _halves
        return {
            "eager": lambda: (q * c + turned(q) * s, k * c + turned(k) * s),
            "direct": lambda: rotary.rope(q, k, cos, sin, interleaved, "BHSD", None, False),
            "lz": asked("rope", q, k, cos, sin, interleaved=interleaved),
            "floor": copied((q, torch.empty_like(q)), (k, torch.empty_like(k))),
        }

    goals = (Goal("eager", 8.0),) if tokens <= 16 else (Goal("floor", 0.6),)
    name = f"RoPE {'interleaved' if interleaved else 'halves'} {tokens} tokens {WORDS[dtype]}"
    return Case("rope", name, make, goals if dtype is torch.bfloat16 else ())


def _gated(rows: int, kind: str, dtype: torch.dtype) -> Case:
    width = 14336

    def make() -> dict[str, Call | Asked]:
        x = torch.randn(rows, 2 * width, dtype=dtype)

        def eager() -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            return (F.silu(gate) if kind == "silu" else F.gelu(gate)) * up

        half = torch.empty(rows, width, dtype=dtype)
        # three parts in, one out: read one and a half, write a half of what a copy of x moves
        return {
            "eager": eager,
            "direct": lambda: gated.silu_and_mul(x) if kind == "silu" else gated.gelu_and_mul(x, "none"),
            "lz": asked("silu_and_mul" if kind == "silu" else "gelu_and_mul", x),
            "floor": lambda: (native.copied(x[:, :width], half), native.read(x[:, width:])),
        }

    goals = (Goal("eager", 2.0),) if kind == "silu" and dtype is torch.bfloat16 else ()
    return Case("gated", f"{'SiLU' if kind == 'silu' else 'GELU'}·mul {rows}×{width} {WORDS[dtype]}", make, goals)


def _sampling(name: str, top_k: int | None, top_p: float | None, goal: float | None, batch: int = 1) -> Case:
    def make() -> dict[str, Call | Asked]:
        logits = torch.randn(batch, 128256) * 4

        def eager() -> torch.Tensor:  # as generation libraries write it: warpers on sorted copies, then multinomial
            scores = logits
            if top_k is not None:
                scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
            if top_p is not None:
                ordered, index = torch.sort(scores, descending=False)
                gone = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
                gone[..., -1:] = False
                scores = scores.masked_fill(gone.scatter(1, index, gone), -torch.inf)
            return torch.multinomial(scores.softmax(-1), 1)

        return {
            "eager": eager,
            "direct": lambda: sampling.sample(logits, top_k, top_p, None, 1.0, None),
            "lz": asked("sample", logits, top_k=top_k, top_p=top_p),
            "floor": lambda: native.read(logits),
        }

    return Case("sampling", f"{name}, 128k vocabulary, B{batch}", make, (Goal("eager", goal),) if goal else ())


def _quant(fmt: str) -> Case:
    def make() -> dict[str, Call | Asked]:
        x = torch.randn(512, 4096, dtype=torch.bfloat16)

        def eager() -> torch.Tensor:
            wide = x.float()
            scale = wide.abs().amax(-1, keepdim=True) / 127.0
            return (wide / scale).round().clamp(-127, 127).to(torch.int8)

        return {
            "eager": eager,
            "lz": asked("quantize", x, fmt, granularity="channel"),
            "floor": lambda: native.read(x),
        }

    return Case("quantize", f"{fmt} by rows 512×4096 bf16", make)


def _small() -> Iterator[Case]:
    """Tiny inputs: what a call costs, so that the goal is the public function's own."""
    x, w = torch.randn(1, 64), torch.randn(64)

    def gate() -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b

    q, k, angles = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16), torch.randn(1, 8)
    cos, sin = angles.cos(), angles.sin()
    c, s = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    one = (Goal("eager", 1.0, through=1.0),)
    yield Case(
        "overhead", "rms_norm 1×64",
        lambda: {"eager": lambda: F.rms_norm(x, (64,), w, 1e-6), "direct": lambda: norm.rms_norm(x, w, 1e-6),
                 "lz": asked("rms_norm", x, w, 1e-6)}, one,
    )  # fmt: skip
    yield Case(
        "overhead", "layer_norm 1×64",
        lambda: {"eager": lambda: F.layer_norm(x, (64,), w, w, 1e-5), "direct": lambda: norm.layer_norm(x, w, w, 1e-5),
                 "lz": asked("layer_norm", x, w, w, 1e-5)}, one,
    )  # fmt: skip
    yield Case(
        "overhead", "silu_and_mul 1×64",
        lambda: {"eager": gate, "direct": lambda: gated.silu_and_mul(x), "lz": asked("silu_and_mul", x)}, one,
    )  # fmt: skip
    yield Case(
        "overhead", "rope 1 token, 4+2 heads of 16",
        lambda: {"eager": lambda: (q * c + _halves(q) * s, k * c + _halves(k) * s),
                 "direct": lambda: rotary.rope(q, k, cos, sin, False, "BHSD", None, False),
                 "lz": asked("rope", q, k, cos, sin)}, one,
    )  # fmt: skip


def cases() -> list[Case]:
    """All of them."""
    found = [case for dtype in WORDS for rows in (1, 16, 512) for case in _norms(rows, dtype)]
    found += [_rope(tokens, kind, torch.bfloat16) for tokens in (1, 16, 512) for kind in (False, True)]
    found += [_rope(512, False, torch.float32)]
    found += [_gated(rows, "silu", dtype) for rows in (1, 512) for dtype in WORDS]
    found += [_gated(512, "gelu", torch.bfloat16)]
    found += [_sampling("top-k 50 + top-p 0.9", 50, 0.9, 100.0), _sampling("top-k 50 + top-p 0.9", 50, 0.9, None, 8)]
    found += [_sampling("top-p 0.9", None, 0.9, None), _sampling("no filter", None, None, None)]
    found += [_quant("int8"), *_small()]
    return found
