"""Compiling for a GPU that is not here: in tests, and to fill a cache before a machine is rented."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from layerzero_triton.kernels.launch import Launch, early

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.bool: "i1", torch.int16: "i16",
}  # fmt: skip


def target(name: str) -> GPUTarget:
    """ "sm_90", "gfx942" and the like."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def compile_for(launch: Launch, where: GPUTarget) -> Any:
    """What Triton compiles for a launch whose pointers are aligned to 16 bytes."""
    kernel = launch.kernel
    options = {"num_warps": launch.warps, "num_stages": launch.stages, **early(kernel, where)}
    values = (*launch.tensors, *launch.numbers, *launch.constants)
    if len(values) < len(kernel.params):
        values = (*values, options.pop("EARLY", False))
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for place, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=where, options=options)
