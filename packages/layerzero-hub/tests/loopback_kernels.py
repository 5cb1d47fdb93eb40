"""Kernels for tests: a universal one in Python, and one compiled with gcc against torch's stable ABI."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["compile_c", "compiled_kernel", "metadata_for", "stable_abi_variant", "universal_kernel"]

_UNIVERSAL = '''
"""RMSNorm in plain torch, in one pass over float32."""
import torch
from . import detail

def rms_norm(x, weight, eps):
    return detail.normalized(x, eps) * weight

def scaled(out, x, factor):
    out.copy_(x * factor)
'''
_DETAIL = """
import torch

def normalized(x, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
"""
_COMPILED = r"""
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The C functions that torch promises to keep; declared here so that no header of torch is needed. */
typedef void *Tensor;
typedef void *Library;
int32_t aoti_torch_get_data_ptr(Tensor, void **);
int32_t aoti_torch_get_size(Tensor, int64_t, int64_t *);
int32_t aoti_torch_delete_tensor_object(Tensor);
int32_t aoti_torch_library_init_def(const char *, const char *, uint32_t, Library *);
int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, Library *);
int32_t aoti_torch_library_def(Library, const char *);
int32_t aoti_torch_library_impl(Library, const char *, void (*)(uint64_t *, uint64_t, uint64_t));

/* Writes the RMS norm of each row of a contiguous float32 matrix into the first argument. */
static void rms_norm(uint64_t *stack, uint64_t num_args, uint64_t num_outputs) {
  Tensor out = (Tensor)stack[0], x = (Tensor)stack[1], weight = (Tensor)stack[2];
  union { uint64_t bits; double value; } eps = { stack[3] };
  int64_t rows = 0, width = 0;
  void *to, *from, *scale_by;
  aoti_torch_get_size(x, 0, &rows);
  aoti_torch_get_size(x, 1, &width);
  aoti_torch_get_data_ptr(out, &to);
  aoti_torch_get_data_ptr(x, &from);
  aoti_torch_get_data_ptr(weight, &scale_by);
  for (int64_t row = 0; row < rows; ++row) {
    const float *in = (const float *)from + row * width;
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += (double)in[i] * in[i];
    const double scale = 1.0 / sqrt(sum / width + eps.value);
    for (int64_t i = 0; i < width; ++i)
      ((float *)to)[row * width + i] = (float)(in[i] * scale) * ((const float *)scale_by)[i];
  }
  /* The caller hands over its references. */
  for (int i = 0; i < 3; ++i) aoti_torch_delete_tensor_object((Tensor)stack[i]);
}

__attribute__((constructor)) static void register_ops(void) {
  Library defined, implemented;
  aoti_torch_library_init_def("NAMESPACE", __FILE__, __LINE__, &defined);
  aoti_torch_library_def(defined, "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  aoti_torch_library_init_impl("NAMESPACE", "CPU", __FILE__, __LINE__, &implemented);
  aoti_torch_library_impl(implemented, "rms_norm", &rms_norm);
  OVERRIDE
}
"""
_OVERRIDE = """
  Library stolen;
  aoti_torch_library_init_impl("aten", "CPU", __FILE__, __LINE__, &stolen);
  aoti_torch_library_impl(stolen, "relu6", &rms_norm);
"""
_WRAPPER = '''
"""RMSNorm compiled against torch's stable ABI."""
from pathlib import Path
import torch

torch.ops.load_library(str(next(Path(__file__).parent.glob("*.so"))))

def rms_norm(x, weight, eps):
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(flat)
    torch.ops.NAMESPACE.rms_norm(out, flat, weight, eps)
    return out.reshape(x.shape)
'''


def metadata_for(files: Mapping[str, bytes], **changes: Any) -> bytes:
    """A metadata.json whose digest covers `files` (paths inside the build)."""
    digest = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in files.items()}
    fields: dict[str, Any] = {
        "id": "_lz_universal_1",
        "name": "lz-universal",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": digest},
    }
    fields.update(changes)
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


def build(files: Mapping[str, bytes], variant: str, **changes: Any) -> dict[str, bytes]:
    """Files of one build as they stand in a repository, metadata included."""
    whole = {**files, "metadata.json": metadata_for(files, **changes)}
    return {f"build/{variant}/{path}": data for path, data in whole.items()}


def universal_kernel(*, extra: str = "", variant: str = "torch-universal", **changes: Any) -> dict[str, bytes]:
    """A kernel in Python; `extra` is appended to its code, `changes` go into the metadata."""
    files = {"__init__.py": (_UNIVERSAL + extra).encode(), "detail.py": _DETAIL.encode()}
    return build(files, variant, **changes)


def stable_abi_variant() -> str:
    """The name of a stable-ABI CPU build for this machine."""
    import platform

    import torch

    major, minor = torch.__version__.split(".")[:2]
    return f"torch-stable-abi{major}{minor}-cpu-{platform.machine()}-linux"


def compiled_kernel(
    folder: Path, *, identity: str = "_lz_compiled_1", namespace: str = "", override: bool = False
) -> dict[str, bytes]:
    """A kernel compiled with gcc. `override` makes it replace an op of torch as well."""
    import torch

    space = namespace or identity
    source, target = folder / "kernel.c", folder / "kernel.abi3.so"
    code = _COMPILED.replace("NAMESPACE", space).replace("OVERRIDE", _OVERRIDE if override else "")
    source.write_text(code, encoding="utf-8")
    libraries = Path(torch.__file__).parent / "lib"
    command = ["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(target), f"-L{libraries}", "-ltorch_cpu", "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    files = {"__init__.py": _WRAPPER.replace("NAMESPACE", space).encode(), "kernel.abi3.so": target.read_bytes()}
    return build(files, stable_abi_variant(), id=identity, name="lz-compiled")


def compile_c(folder: Path, code: str, *flags: str, name: str = "part.so", strip: bool = False) -> bytes:
    """A small shared object from C, for the checks of binaries."""
    source, target = folder / "part.c", folder / name
    source.write_text(code, encoding="utf-8")
    include = sysconfig.get_paths()["include"]
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(target), *flags]
    subprocess.run(command, check=True, capture_output=True, text=True)
    if strip:
        subprocess.run(["strip", str(target)], check=True)
    return target.read_bytes()
