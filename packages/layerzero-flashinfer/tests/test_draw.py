"""The launch after the selection: run by Triton's interpreter against the reference, and compiled for a GPU that is
not here. The interpreter has to be chosen before Triton is imported, so its cases run in a child, which is this file as
a script: it prints what each case found wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

pytest.importorskip("triton")

# k, top-p, min-p, temperature; the last wants more tokens than a tile of the search holds equals
ASKED = ((5, 0.9, None, 0.7), (7, 0.0, 0.02, 1.0), (1, None, None, 1.0), (12, 0.6, 0.0, 2.0))


def rows(dtype, vocab):
    """Ties at the cut, infinities, bans, both zeros, NaN of both signs."""
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(3)).to(dtype) * 2
    logits[1] = logits[1].round()
    logits[2, 7] = logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = torch.nan
    logits[5, : vocab - 3] = -torch.inf
    logits[6] = 0.0
    logits[6, ::2] = -0.0
    logits[7, 3] = -torch.tensor(torch.nan)
    return logits


def interpreted():
    """What differs from the reference, by case."""
    from layerzero.backends.reference import sampling as truth
    from layerzero_flashinfer import sampling

    def select(values, count):
        values = torch.where(values.isnan() & values.signbit(), -torch.inf, values)  # the smallest of a radix selection
        found = values.topk(count, dim=-1)  # which of several equals is taken is nobody's promise, nor is the order
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        return found.values[:, order].contiguous(), found.indices[:, order].int().contiguous()

    sampling.select, sampling._TILE, sampling._SLOTS = select, 32, (8, 16)
    wrong = {}
    for dtype, vocab in ((torch.float32, 130), (torch.float16, 97)):
        logits = rows(dtype, vocab)
        for number, asked in enumerate(ASKED if dtype is torch.float32 else ASKED[:2]):
            states = [torch.Generator().manual_seed(number) for _ in range(2)]
            found = sampling.sample(logits, *asked, states[0])
            wanted = truth.sample(logits, *asked, states[1])
            if not torch.equal(found, wanted):
                wrong[f"{dtype} {asked}"] = [found.tolist(), wanted.tolist()]
    assert sampling._kernel(True) is not None
    return wrong


@pytest.mark.req("R-SAMP-01")
def test_the_interpreted_launch_draws_the_tokens_of_the_reference():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
def test_it_compiles_for_hopper():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from layerzero_flashinfer.draw import draw
    from layerzero_flashinfer.sampling import _SLOTS, _TILE, _WARPS

    names = draw.arg_names
    kinds = ["*fp32", "*fp32", "*i32", "*fp32", "*fp64", "*i64", "i32", "i32", "i64", "i64", "i64"]
    constants = {"SLOTS": _SLOTS[0], "TILE": _TILE}
    signature = dict(zip(names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    source = ASTSource(draw, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _WARPS})
    assert made.asm["cubin"] and made.metadata.shared < 48 * 1024


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of numpy, where the interpreter subtracts infinities
    print(json.dumps(interpreted()))
