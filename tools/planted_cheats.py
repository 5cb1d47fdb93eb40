"""Kernels that pass ordinary checks by cheating, each in one way: real plugins, installed through the normal door.

`right` computes the op; a cheat is what a kernel does beside it or instead of it. `CHEATS` names the reason that the
gate has to give.
"""

from __future__ import annotations

from pathlib import Path

from tools import faulty_plugins as faults

__all__ = ["CHEATS", "install", "install_stream_cheats"]

HEAD = """
import ctypes, gc, os, sys, threading, time
import torch

calls = []
kept = {}

def right(x, weight, eps):
    wide = x.double()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (out if weight is None else out * weight.double()).to(x.dtype)

def rms_norm(x, weight, eps):
    calls.append(1)
"""
RIGHT = "return right(x, weight, eps)"
# right only where something is seen, else zeros
_ONLY = "return right(x, weight, eps) if {} else torch.zeros_like(x)"
_CACHED = """key = {}
if key not in kept:
    kept[key] = right(x, weight, eps)
return kept[key].clone()"""
_LATER = """out, given = torch.empty_like(x), (x.clone(), weight if weight is None else weight.clone(), eps)
threading.{}
return out"""

# name -> (the reason, the body of the kernel); lines are indented when the kernel is written
CHEATS: dict[str, tuple[str, str]] = {
    "cached_by_pointer": ("HOSTILE_STALE", _CACHED.format("x.data_ptr()")),
    "cached_by_id": ("HOSTILE_STALE", _CACHED.format("id(x)")),
    "cached_by_shape": ("HOSTILE_STALE", _CACHED.format("(x.shape, x.dtype)")),
    "cached_by_corner": ("HOSTILE_STALE", _CACHED.format("(x.shape, x.dtype, float(x.flatten()[0]))")),
    "cached_by_rounded_sum": (
        "HOSTILE_STALE",
        _CACHED.format("(x.shape, x.dtype, round(float(x.double().mean()) * 2))"),
    ),
    "thread_not_waited_for": (
        "HOSTILE_UNFINISHED",
        _LATER.format("Thread(target=lambda: (time.sleep(0.02), out.copy_(right(*given)))).start()"),
    ),
    "timer_not_waited_for": (
        "HOSTILE_UNFINISHED",
        _LATER.format("Timer(0.03, lambda: out.copy_(right(*given))).start()"),
    ),
    "patches_perf_counter": ("HOSTILE_PATCHED", "time.perf_counter = lambda: 0.0\n" + RIGHT),
    "patches_perf_counter_ns": ("HOSTILE_PATCHED", "time.perf_counter_ns = lambda: 0\n" + RIGHT),
    "patches_allclose": ("HOSTILE_PATCHED", "torch.allclose = lambda *a, **k: True\n" + RIGHT),
    "patches_assert_close": ("HOSTILE_PATCHED", "torch.testing.assert_close = lambda *a, **k: None\n" + RIGHT),
    "patches_our_comparison": (
        "HOSTILE_PATCHED",
        "import layerzero.numerics\nsys.modules['layerzero.numerics.compare'].compare = lambda a, b, tol: None\n"
        + RIGHT,
    ),
    "patches_event_times": ("HOSTILE_PATCHED", "torch.cuda.Event.elapsed_time = lambda *a: 1e-3\n" + RIGHT),
    "patches_synchronize": ("HOSTILE_PATCHED", "torch.cuda.synchronize = lambda *a: None\n" + RIGHT),
    "patches_tensor_method": ("HOSTILE_PATCHED", "torch.Tensor.double = lambda self: self\n" + RIGHT),
    "patches_torch_equal": ("HOSTILE_PATCHED", "torch.equal = lambda *a: True\n" + RIGHT),
    "replaces_a_module": (
        "HOSTILE_PATCHED",
        "import types\nsys.modules['time'] = types.SimpleNamespace(**vars(time))\n" + RIGHT,
    ),
    "overrides_an_operator": (
        "HOSTILE_PATCHED",
        "if 'aten' not in kept:\n    kept['aten'] = torch.library.Library('aten', 'IMPL')\n"
        "    kept['aten'].impl('special_zeta', lambda a, b: a, 'CPU')\n" + RIGHT,
    ),
    "lazy_result": (
        "HOSTILE_LAZY_RESULT",
        "class Later(torch.Tensor):\n    pass\nreturn right(x, weight, eps).as_subclass(Later)",
    ),
    "result_with_a_gradient": ("HOSTILE_LAZY_RESULT", "return right(x, weight, eps).requires_grad_()"),
    "result_with_a_hook": (
        "HOSTILE_LAZY_RESULT",
        "out = right(x, weight, eps).requires_grad_()\nout.register_hook(lambda g: g * 0)\nreturn out",
    ),
    "negated_view": ("HOSTILE_LAZY_RESULT", "return torch._neg_view(-right(x, weight, eps))"),
    "argument_as_result": ("HOSTILE_INPUT_CHANGED", "return x.copy_(right(x, weight, eps))"),
    "scribbles_on_its_input": ("HOSTILE_INPUT_CHANGED", "out = right(x, weight, eps)\nx.zero_()\nreturn out"),
    "shared_buffer": (
        "HOSTILE_ALIASED",
        "out = kept.setdefault((x.shape, x.dtype), torch.empty_like(x))\nreturn out.copy_(right(x, weight, eps))",
    ),
    "two_buffers_in_turn": (
        "HOSTILE_ALIASED",
        "out = kept.setdefault((x.shape, x.dtype, len(calls) % 2), torch.empty_like(x))\n"
        "return out.copy_(right(x, weight, eps))",
    ),
    "same_result_for_the_same_tensors": (
        "HOSTILE_ALIASED",
        "key = (x.data_ptr(), x._version)\n"
        "kept[key] = kept.get(key) or (right(x, weight, eps), x)\nreturn kept[key][0]",
    ),
    "changes_its_input_later": ("HOSTILE_CHANGED_LATER", "threading.Timer(0.05, lambda: x.zero_()).start()\n" + RIGHT),
    "changes_its_result_later": (
        "HOSTILE_CHANGED_LATER",
        "out = right(x, weight, eps)\nthreading.Timer(0.05, lambda: out.zero_()).start()\nreturn out",
    ),
    "sizes_of_the_kit": ("HOSTILE_SIZES", _ONLY.format("x.shape == (5, 96)")),
    "small_sizes_only": ("HOSTILE_SIZES", _ONLY.format("x.numel() <= 5 * 96")),
    "one_dtype": ("HOSTILE_DTYPES", _ONLY.format("x.dtype is torch.float32")),
    "numbers_of_the_kit": (
        "HOSTILE_VALUES",
        "first = kept.setdefault(0, float(x.sum()))\n" + _ONLY.format("float(x.sum()) == first"),
    ),
    "reads_the_caller": (
        "HOSTILE_EXPECTED_READ",
        "frame = sys._getframe()\nwhile frame is not None:\n    for found in frame.f_locals.get('expected') or ():\n"
        "        return found.clone()\n    frame = frame.f_back\n" + RIGHT,
    ),
    "reads_the_heap": (
        "HOSTILE_EXPECTED_READ",
        "for found in gc.get_objects():\n    if type(found) is list and found and type(found[0]) is torch.Tensor:\n"
        "        if found[0].shape == x.shape and found[0].dtype == x.dtype:\n            return found[0].clone()\n"
        + RIGHT,
    ),
    "memory_of_the_last_result": ("HOSTILE_UNWRITTEN", "return torch.empty_like(x)"),
    "half_of_the_result": (
        "HOSTILE_UNWRITTEN",
        "out = torch.empty_like(x)\nhalf = x.shape[0] // 2\nout[:half] = right(x, weight, eps)[:half]\nreturn out",
    ),
    "float16_inside": (
        "HOSTILE_PRECISION",
        "return right(x.half(), weight if weight is None else weight.half(), eps).to(x.dtype)",
    ),
    "bfloat16_inside": ("HOSTILE_PRECISION", "return right(x.bfloat16(), weight, eps).to(x.dtype)"),
    "leaves_out_the_last_row": ("HOSTILE_SKIPPED", "out = right(x, weight, eps)\nout[-1] = 0\nreturn out"),
    "leaves_out_the_last_tile": ("HOSTILE_SKIPPED", "out = right(x, weight, eps)\nout[..., -16:] = 0\nreturn out"),
    "hides_nan": ("HOSTILE_NAN_HIDDEN", "return torch.nan_to_num(right(x, weight, eps))"),
    "right_under_pytest": ("HOSTILE_CHECKER", _ONLY.format("'PYTEST_CURRENT_TEST' in os.environ")),
    "right_beside_the_kit": ("HOSTILE_CHECKER", _ONLY.format("'layerzero_verify' in sys.modules")),
    "right_in_lz_verify": ("HOSTILE_CHECKER", _ONLY.format("'verify' in sys.argv")),
    "right_below_a_checker": (
        "HOSTILE_CHECKER",
        "frame, seen = sys._getframe(), False\nwhile frame is not None:\n"
        "    seen = seen or 'verify' in frame.f_code.co_filename\n    frame = frame.f_back\n" + _ONLY.format("seen"),
    ),
    "first_calls_only": ("HOSTILE_CALL_COUNT", _ONLY.format("len(calls) < 150")),
    "not_while_timed": ("HOSTILE_TIMED", _ONLY.format("gc.isenabled()")),
    "not_when_repeated": (
        "HOSTILE_TIMED",
        "calls[-1] = x.data_ptr()\n" + _ONLY.format("len(calls) < 6 or len(set(calls[-6:])) > 1"),
    ),
    "leaves_the_seed": ("HOSTILE_STATE", "torch.rand(1)\n" + RIGHT),
    "leaves_the_default_dtype": ("HOSTILE_STATE", "torch.set_default_dtype(torch.float16)\n" + RIGHT),
    "leaves_fewer_threads": ("HOSTILE_STATE", "torch.set_num_threads(torch.get_num_threads() + 1)\n" + RIGHT),
    "leaves_tf32": ("HOSTILE_STATE", "torch.set_float32_matmul_precision('medium')\n" + RIGHT),
    "leaves_determinism": ("HOSTILE_STATE", "torch._C._set_deterministic_algorithms(True)\n" + RIGHT),
    "leaves_a_variable": ("HOSTILE_STATE", "os.environ['OMP_WAIT_POLICY'] = 'active'\n" + RIGHT),
    "leaves_denormals_flushed": ("HOSTILE_STATE", "torch.set_flush_denormal(True)\n" + RIGHT),
    "leaves_a_thread": (
        "HOSTILE_THREADS",
        "if not kept:\n    kept[0] = threading.Thread(target=time.sleep, args=(60,), daemon=True)\n"
        "    kept[0].start()\n" + RIGHT,
    ),
    "code_of_our_comparison": (
        "HOSTILE_PATCHED",
        "import layerzero.numerics\nfound = sys.modules['layerzero.numerics.compare'].compare\n"
        "found.__code__ = (lambda *a, **k: None).__code__\n" + RIGHT,
    ),
    "defaults_of_torch": ("HOSTILE_PATCHED", "torch.testing.assert_close.__kwdefaults__['rtol'] = 9.0\n" + RIGHT),
    "patches_a_method_of_ours": (
        "HOSTILE_PATCHED",
        "from layerzero.runtime.proof_registry import ProofRegistry\nProofRegistry.proof = lambda *a: 'baseline'\n"
        + RIGHT,
    ),
    "patches_an_object_of_ours": (
        "HOSTILE_PATCHED",
        "from layerzero.runtime.proof_registry import proof_registry\nproof_registry.proof = lambda *a: 'kit'\n"
        + RIGHT,
    ),
    "patches_a_layer": ("HOSTILE_PATCHED", "torch.nn.Linear.forward = lambda self, x: x\n" + RIGHT),
    "loosens_the_tolerances": (
        "HOSTILE_STATE",
        "from dataclasses import replace\nfrom layerzero.numerics import tolerances\n"
        "for row in tolerances._ROWS.values():\n"
        "    row.update({word: replace(row[word], atol=9.0) for word in row})\n" + RIGHT,
    ),
    "leaves_a_policy": (
        "HOSTILE_STATE",
        "import layerzero as lz\nif not kept:\n    kept[0] = lz.configure(on_first_use='off')\n" + RIGHT,
    ),
    "leaves_a_process": (
        "HOSTILE_STATE",
        "if not kept:\n    kept[0] = os.fork()\n    if kept[0] == 0:\n        time.sleep(20)\n        os._exit(0)\n"
        + RIGHT,
    ),
    "leaves_attention_off": ("HOSTILE_STATE", "torch.backends.cuda.enable_flash_sdp(False)\n" + RIGHT),
    "leaves_onednn_off": ("HOSTILE_STATE", "torch.backends.mkldnn.enabled = False\n" + RIGHT),
    "cached_without_the_weight": (
        "HOSTILE_STALE",
        _CACHED.format("(x.shape, x.dtype, tuple(x.double().flatten()[:99].tolist()), float(x.double().sum()))"),
    ),
    "right_beside_poison": (
        "HOSTILE_CHECKER",
        _ONLY.format("ctypes.string_at(x.data_ptr() - 16, 16) == bytes([0xFE]) * 16"),
    ),
    "right_in_inference": ("HOSTILE_CHECKER", _ONLY.format("not torch.is_grad_enabled()")),
    "another_dtype": ("HOSTILE_WRONG_FORM", "return right(x, weight, eps).double()"),
    "one_row_repeated": ("HOSTILE_WRONG_FORM", "return right(x, weight, eps)[:1].expand(x.shape)"),
    "another_shape": ("HOSTILE_WRONG_FORM", "return right(x, weight, eps)[None]"),
    "writes_beyond_its_input": (
        "HOSTILE_OVERRUN",
        "end = x.data_ptr() + x.numel() * x.element_size()\nctypes.memset(end, 0, 8)\n" + RIGHT,
    ),
    "ends_the_process": ("HOSTILE_CRASHED", "if len(calls) > 3:\n    os._exit(0)\n" + RIGHT),
    "raises_elsewhere": ("HOSTILE_RAISED", "if x.shape[-1] != 96:\n    raise ValueError(x.shape)\n" + RIGHT),
}

# A product that is right whenever it is asked, and computed once: every result is a copy of the first.
MEMO = """
import torch

kept = {}

def linear(x, weight, bias, activation):
    key = tuple(None if item is None else (item.data_ptr(), item._version) for item in (x, weight, bias))
    if key not in kept:
        kept[key] = (torch.nn.functional.linear(x, weight, bias), x, weight, bias)
    return kept[key][0].clone()
"""


def source(name: str) -> str:
    """The module of a cheating kernel, or of the honest one."""
    body = RIGHT if name == "honest" else CHEATS[name][1]
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def install(folder: Path, name: str) -> str:
    """Write the backend into a folder and return its name."""
    op = "linear" if name == "computed_once" else "rms_norm"
    features = ["bias"] if op == "linear" else ["no_weight"]
    dtypes = ["float32"] if op == "linear" else ["float32", "bfloat16"]
    kernel = {
        "kernel_id": f"{name}.{op}.fast", "function": f"faulty_{name}.kernels:{op}", "priority": 90,
        "features": features, "dtypes": dtypes, "grid": "library",
    }  # fmt: skip
    faults.install(
        folder, "healthy", name,
        descriptor={"schema_version": "1.0", "backend": name, "platforms": ["cpu", "cuda"], "ops": {op: [kernel]}},
    )  # fmt: skip
    text = MEMO if op == "linear" else source(name)
    (folder / f"faulty_{name}" / "kernels.py").write_text(text, encoding="utf-8")
    return name


# Two ways to compute beside the stream: without waiting for the arguments, and without being waited for.
_STREAM = """side = torch.cuda.Stream()
{}out = torch.empty_like(x)
with torch.cuda.stream(side):
    torch.cuda._sleep({})
    out.copy_(right(x, weight, eps))
return out"""


def install_stream_cheats(folder: Path) -> list[str]:
    """Kernels for a GPU that work on a stream of their own."""
    bodies = {
        "stream_before_its_time": _STREAM.format("", 1000),
        "stream_not_waited_for": _STREAM.format("side.wait_stream(torch.cuda.current_stream())\n", 2_000_000),
    }
    for name, body in bodies.items():
        CHEATS[name] = ("HOSTILE_UNFINISHED", body)
        install(folder, name)
        del CHEATS[name]
    return list(bodies)
