"""What the compiler makes of the Hopper kernel; no GPU is needed, but each size takes up to 20 s.

The kernel is fast because two products are in flight while a softmax is computed. The assembler may undo that: it
serializes products when registers run short, and moves waits up. So the machine code is looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="set LAYERZERO_PROVE=1")
triton = pytest.importorskip("triton")

# Exponentials of one softmax in a thread: a warpgroup's 64 rows by the block's keys, over 128 threads.
SIZES = {64: 128, 128: 128, 256: 64}


def tools():
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(dim, tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from layerzero_triton.grouped.hopper import attend
    from layerzero_triton.grouped.hopper_launch import HEAD_DIMS

    cfg = HEAD_DIMS[dim]

    def descriptor(rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {dim}],{layout!r}>"

    constants = dict(RATIO=4, BLOCK_N=cfg.block_n, DIM=dim, STAGES=cfg.stages, TURNS=cfg.turns)
    types = dict.fromkeys(attend.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= dict(q_desc=descriptor(64), k_desc=descriptor(cfg.block_n), v_desc=descriptor(cfg.block_n), scale="fp32")
    types |= dict(out="*bf16", lse="*fp32", parts="*fp32", parts_lse="*fp32", items="*i32")
    place = {name: (index,) for index, name in enumerate(attend.arg_names)}
    aligned = {place[n]: [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*" or "stride" in n}
    source = GluonASTSource(attend, types, {place[n]: value for n, value in constants.items()}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    ptx.write_text(kernel.asm["ptx"])
    cubin.write_bytes(kernel.asm["cubin"])
    command = [tools() / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", tmp_path / "again.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = subprocess.run([tools() / "nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
    return said, re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)([^;]*)", code)


@pytest.mark.parametrize("dim", SIZES)
def test_the_softmax_stays_between_the_two_waits(dim, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    said, code = compiled(dim, tmp_path)
    assert "serialized" not in said, said
    assert re.search(r"\b0 bytes spill stores", said), said
    words = []
    for name, rest in code:
        if name.startswith("WARPGROUP.DEPBAR"):
            words.append("wait" + rest.strip()[-1])
        elif name.startswith("HGMMA"):
            words.append("product")
        elif name.startswith("MUFU.EX2"):
            words.append("exp")
    text = " ".join(words)
    softmax = f"(?:exp ){{{64 * SIZES[dim] // 128},}}"
    # Both warpgroups, with and without a mask: two products, the first one's end, a softmax, the second one's end.
    assert len(re.findall(rf"(?:product ){{8,}}wait1 {softmax}wait0", text)) == 4, text
