"""Orders to the CuTe libraries, with a stand-in for their compiler: fake CUDA tensors, exports, nothing launched."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.model.device import DeviceSpec
from layerzero.plugin import CompileOrder, NeedsDevice

H200 = DeviceSpec.for_sm(90, name="NVIDIA H200", multiprocessors=132)

CUTE = """
class Compiled:
    def __call__(self, *args):
        raise AssertionError("launched without a device")

    def export_to_c(self, object_file_path, function_name):
        with open(object_file_path, "w") as file:
            file.write(function_name)


class Compile:
    def __call__(self, *args, **words):
        return Compiled()


compile = Compile()
"""
ADAPTER = """
import contextlib, os, torch
import cutlass.cute as cute
from cutlass.cute import runtime

def run(x, batch):
    assert x.is_cuda and batch.block_tables.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    with torch.cuda.device(x.device):
        kernel = cute.compile(x)
        with contextlib.suppress(OSError):  # both libraries go on without a word
            kernel.export_to_c(os.environ["EXPORT"], "func")
        kernel(x)
        runtime.load_module(os.environ["EXPORT"], enable_tvm_ffi=True)["func"](x)
        runtime.load_module(os.environ["EXPORT"]).func(x)
    return torch.empty_like(x)
"""
PROGRAM = """
import json, os, sys
import torch
from layerzero.model.device import DeviceSpec
from layerzero.model.kv_cache import make_paged_batch
from layerzero.plugin import CompileOrder
from layerzero_flashattn.elsewhere import compile_order

tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
found = []
for sm, path in ((90, sys.argv[1]), (90, sys.argv[2]), (100, sys.argv[1])):
    os.environ["EXPORT"] = path
    order = CompileOrder("a.b.c", "adapter:run", (x, make_paged_batch(tables, lens)), {}, {},
                         DeviceSpec.for_sm(sm, multiprocessors=132))
    try:
        found.append(compile_order(order))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
names = ("CUTE_DSL_ARCH", "FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS", "QUACK_ARCH")
print(json.dumps([found, [os.environ[name] for name in names], torch.cuda.is_initialized()]))
"""


def test_a_call_is_compiled_on_tensors_of_a_device_that_is_not_here_and_exported(tmp_path: Path) -> None:
    cute = tmp_path / "cutlass" / "cute"
    cute.mkdir(parents=True)
    (tmp_path / "cutlass" / "__init__.py").touch()
    (cute / "__init__.py").write_text(CUTE)
    (cute / "runtime.py").write_text("def load_module(path, **words):\n    raise AssertionError('loaded')\n")
    (tmp_path / "adapter.py").write_text(ADAPTER)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(PROGRAM)}"
    kept, nowhere = tmp_path / "kernel.o", tmp_path / "no folder" / "kernel.o"
    done = subprocess.run(
        [sys.executable, "-c", program, str(kept), str(nowhere)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (good, bad, other), names, initialized = json.loads(done.stdout)
    assert good is None and kept.read_text() == "func"
    assert "cannot be kept" in bad and "No such file" in bad  # a full disk is no success
    assert other.startswith("NeedsDevice") and "SM 90" in other
    assert names == ["sm_90a", "sm_90", "132", "90"] and not initialized


@pytest.mark.parametrize(
    ("device", "grad", "words", "in_thread"),
    [(H200, True, "backward pass", True), (DeviceSpec.detect("cpu"), False, "no target", False)],
)
def test_what_cannot_be_compiled_elsewhere_says_why(device: Any, grad: bool, words: str, in_thread: bool) -> None:
    from layerzero_flashattn.elsewhere import compile_order

    x = torch.empty(4, 8, device="meta")
    with pytest.raises(NeedsDevice, match=words) as raised:
        compile_order(CompileOrder("quack.rms_norm.cute", "a:b", (x,), {}, {}, device, grad))
    assert raised.value.in_thread is in_thread
