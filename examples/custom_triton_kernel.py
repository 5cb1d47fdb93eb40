"""Your own Triton kernel as a candidate for an op: registered in a few lines, selected, explained and checked.

On a GPU it is compiled; without one Triton interprets it on the CPU.
Run it: python examples/custom_triton_kernel.py
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

import layerzero as lz
from layerzero_triton.custom import Arguments, kernel


@triton.jit
def gate(x, out, width, BLOCK: tl.constexpr):
    """silu(first half of a row) * second half."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = first / (1.0 + tl.exp(-first)) * second
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@kernel(
    op="silu_and_mul",
    name="mine",
    kernel=gate,
    grid=("rows", "ceil(hidden / BLOCK)"),
    constants={"BLOCK": 256},
    dtypes=("float16", "bfloat16", "float32"),
    contiguous=True,
    deterministic=True,
)
def mine(x):
    """What the kernel is launched with for the op's arguments."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return Arguments((x, out, out.shape[-1]), out, rows=out.numel() // out.shape[-1], hidden=out.shape[-1])


def main():
    """Select it by name, compare it with torch, and see why it was chosen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4, 1000, device=device)
    expected = torch.nn.functional.silu(x[:, :500]) * x[:, 500:]
    with lz.scoped(jit="block"):  # let this call wait for the compiler; lz.warmup compiles ahead
        got = lz.silu_and_mul(x, backend="triton")
        report = lz.explain("silu_and_mul", x, backend="triton")
    print(f"{mine.spec.kernel_id} on {device}: largest error {(got - expected).abs().max().item():.1e}")
    print(f"selected: {report.chosen}")
    assert report.chosen == mine.spec.kernel_id
    torch.testing.assert_close(got, expected)


if __name__ == "__main__":
    main()
