"""The Triton kernels, run by Triton's interpreter on the CPU, against the oracle in numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="missing tool: triton")
pytest.importorskip("layerzero_triton", reason="missing tool: layerzero-triton, which mends the interpreter")

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
from layerzero_triton.interpret import mend
mend()
from linear_attention_calls import BY_NAME, NAMES, NEEDS, ORACLES, example
from layerzero_linear_attention import gpu
def moved(item):
    if not isinstance(item, torch.Tensor) or not item.is_floating_point():
        return item
    return item.new_empty(item.numel() + 1)[1:].as_strided(item.shape, item.stride()).copy_(item)
for name in NAMES:
    for needs in (NEEDS["plain"], NEEDS["everything"]):
        for sizes in ({"batch": 3, "seq_len": 70}, {"batch": 2, "seq_len": 1}, {"batch": 4, "seq_len": 5}):
            short = sizes["seq_len"] <= 16
            if "delta" in name and not short:
                continue
            args = list(example(name, *needs, dtype="float32", **sizes))
            if name == "causal_conv1d" and sizes["seq_len"] != 5:
                args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
            wanted, shapes = ORACLES[name](*args), BY_NAME[name].fake(*args)
            function = "delta_step" if "delta" in name else f"{name}_step" if short else name
            found = getattr(gpu, function)(*args)
            for one, other, like in zip(found, wanted, shapes, strict=True):
                np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-5)
                assert one.dtype == like.dtype and one.stride() == like.stride()
            for one, other in zip(getattr(gpu, function)(*map(moved, args)), found, strict=True):
                assert torch.equal(one, other)
for shape in ((2, 9, 3, 128), (1, 5, 2, 7)):
    x = torch.randn(*shape)
    lengths = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(gpu.l2norm(x.transpose(1, 2)), (x / lengths).transpose(1, 2))
print("ALL RIGHT")
"""


def test_the_interpreted_kernels_are_the_oracle():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert "ALL RIGHT" in done.stdout, done.stderr[-3000:]
