"""Everything the scope names is here: libraries as backends, found or not available with a reason; ops as functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.plugin.manager import load_plugins
from tools.pretended_vendors import pretend

SCOPE = {
    "FlashAttention": ("flashattn2", "flashattn3", "flashattn4"),
    "FlashInfer": ("flashinfer",),
    "xFormers": ("xformers",),
    "Triton and Liger": ("triton", "liger"),
    "the Kernel Hub": ("hub",),
    "PyTorch": ("sdpa", "torch", "reference"),
    "CPU libraries": ("cpu",),
}


@pytest.mark.req("R-BK-OT-01")
@pytest.mark.parametrize(("library", "backends"), SCOPE.items(), ids=str)
def test_every_library_of_the_scope_is_found_or_says_why_not(library: str, backends: tuple[str, ...]) -> None:
    records = {name: record for record in load_plugins(env={}).records for name in (*record.backends, record.name)}
    for backend in backends:
        record = records[backend]
        assert record.state in ("ok", "unavailable"), record
        if record.state == "unavailable":
            assert record.reasons and record.fix, record


@pytest.mark.req("R-BK-OT-01")
def test_the_cpu_backend_speaks_of_onednn_and_zendnn() -> None:
    """oneDNN is what this torch has of it; ZenDNN is spoken of as zentorch, where that is installed."""
    from layerzero_cpu.plugin import libraries

    assert re.search(r"^oneDNN [\d.]+ in torch$", next(iter(libraries())))
    for version, said in ((None, []), ("2.14.0.1", ["zentorch 2.14.0.1"])):
        with pretend({"zentorch": version}, {"zentorch": None}):
            assert [phrase for phrase in libraries() if phrase.startswith("zentorch")] == said


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


Q, K, V, X = draw(1, 2, 8, 16), draw(1, 2, 8, 16) + 1, draw(1, 2, 8, 16) - 1, draw(3, 16)
ANGLES = torch.arange(8.0)[:, None] * 0.5 ** torch.arange(8)
PAGES = [t[0].transpose(0, 1).unflatten(0, (2, 4)) for t in (K, V)]  # two pages of four tokens
BATCH = lz.paged_batch(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32))
SDPA = functional.scaled_dot_product_attention


def turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * ANGLES.cos() - right * ANGLES.sin(), right * ANGLES.cos() + left * ANGLES.sin()), -1)


# class of the scope, op, arguments, options, what comes out; tokenization has layerzero-tokenizers' own tests
OPS: list[tuple[Any, ...]] = [
    ("positional", "rope", (Q, K, ANGLES.cos(), ANGLES.sin()), {}, (turned(Q), turned(K))),
    ("prefill", "attention", (Q, K, V), {"is_causal": True}, SDPA(Q, K, V, is_causal=True)),
    ("decode", "attention", (Q[:, :, -1:], K, V), {}, SDPA(Q[:, :, -1:], K, V)),
    ("paged", "paged_attention", (Q[:, :, -1], *PAGES, BATCH), {}, SDPA(Q[:, :, -1:], K, V)[:, :, 0]),
    ("GEMM", "linear", (X, draw(5, 16), X[0, :5]), {}, functional.linear(X, draw(5, 16), X[0, :5])),
    ("MLP", "silu_and_mul", (X,), {}, functional.silu(X[:, :8]) * X[:, 8:]),
    ("norms", "rms_norm", (X, X[0]), {}, functional.rms_norm(X, (16,), X[0], 1e-6)),
    ("norms", "layer_norm", (X, X[0], X[1]), {}, functional.layer_norm(X, (16,), X[0], X[1])),
    ("sampling", "sample_topk", (X, 1), {}, X.argmax(-1)),
    ("dtype conversion", "cast", (X, torch.bfloat16), {}, X.to(torch.bfloat16)),
]  # fmt: skip


@pytest.mark.req("R-OP-01")
@pytest.mark.parametrize("row", OPS, ids=lambda row: f"{row[0]} {row[1]}")
def test_every_kind_of_op_of_the_scope_is_dispatched_and_right(row: tuple[Any, ...]) -> None:
    _, op, args, options, want = row
    for _ in range(2):  # where its kernel has no proof, the first answer is checked and may be another's
        out = getattr(lz, op)(*args, **options)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    report = lz.explain(op, *args, **options)
    assert report.chosen and report.ran == report.chosen


@pytest.mark.req("R-BK-OT-01")
def test_with_no_library_at_all_pytorch_serves_every_op() -> None:
    alone = load_plugins(env={"LAYERZERO_PLUGINS": ""}).registry
    assert {spec.backend for spec in alone.kernels.values()} <= {"inductor", *SCOPE["PyTorch"]}
    for _, op, args, options, want in OPS:
        assert alone.by_op(op), op
        with lz.scoped(allow=list(SCOPE["PyTorch"])):
            torch.testing.assert_close(getattr(lz, op)(*args, **options), want, rtol=1e-4, atol=1e-5)
            assert lz.explain(op, *args, **options).ran in alone.kernels


@pytest.mark.req("R-OP-01")
def test_quantization_is_dispatched_and_gives_back_what_it_stored() -> None:
    for _ in range(2):  # where its kernel has no proof, the first answer is checked and may be another's
        codes = lz.quantize(X, "int8", granularity="channel")
        lz.dequantize(codes)
    step = X.abs().amax(-1, keepdim=True) / 127
    assert ((lz.dequantize(codes) - X).abs() <= step * 0.5001).all()
    for op, args, options in (("quantize", (X, "int8"), {"granularity": "channel"}), ("dequantize", (codes,), {})):
        report = lz.explain(op, *args, **options)
        assert report.chosen and report.ran == report.chosen
