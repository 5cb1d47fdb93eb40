"""A program that serves calls of kernels, and watches what they do to everything else in their process.

It is copied and started under a name of its own, as any server would be: nothing in its arguments, environment, modules
and stack tells a kernel that it is looked at, and no right answer is ever in its memory. The judge, in another
process, sends arguments, takes the time and compares. Only torch and layerzero are imported here.

One process loads the plugins and computes nothing; it forks for every kernel, so that kernels never meet.
"""

from __future__ import annotations

import contextvars
import ctypes
import dataclasses
import gc
import hashlib
import inspect
import io
import json
import logging
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import layerzero as lz
import layerzero.numerics
from layerzero._ops.signature import dispatch
from layerzero.dispatch.run import current_world

GUARD = 256  # elements before and behind every tensor that a kernel is given
POISON = 0xFE  # what memory that nobody has written holds; no number that a result would hold
HELD = 6  # calls whose tensors are kept, to see whether they change later
BLOCKS = 24  # freed blocks of poison that a result may come to lie in; an eighth of them where results are not
SMALL = 1 << 15  # bytes
_SLEEP = 2_000_000  # cycles of a GPU's clock: about a millisecond before the inputs are there
_TENSOR, _NO_GRAD = torch.Tensor, torch.no_grad
_NUMBERS = ("float16", "bfloat16", "float32")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_OURS = {"__main__", "layerzero", "layerzero_cli", "layerzero_hostile", "layerzero_tune", "layerzero_verify"}
_MODULES = (
    "builtins", "copy", "ctypes", "functools", "gc", "hashlib", "inspect", "itertools", "json", "math", "operator",
    "os", "pickle", "random", "socket", "struct", "sys", "threading", "time", "torch", "torch.autograd", "torch.cuda",
    "torch.linalg", "torch.nn", "torch.nn.functional", "torch.testing", "torch.utils.data",
)  # fmt: skip


# -- messages ---------------------------------------------------------------------------------------------------------
def send(channel: socket.socket, said: dict[str, Any], *parts: bytes) -> None:
    """A JSON object and some bytes: whoever reads it never unpickles what a kernel may have written."""
    head = json.dumps({**said, "parts": [len(part) for part in parts]}).encode()
    channel.sendall(struct.pack("<Q", len(head)) + head)
    for part in parts:
        channel.sendall(part)


def _exactly(channel: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = channel.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        found += part
    return bytes(found)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """What `send` sent."""
    said = json.loads(_exactly(channel, struct.unpack("<Q", _exactly(channel, 8))[0]))
    return said, [_exactly(channel, count) for count in said.pop("parts")]


class _Packer(pickle.Pickler):
    """Tensors of every dtype by their bytes, with the strides they have."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not _TENSOR:
            return None
        flat = value.detach().as_strided((elements(value),), (1,)) if value.numel() else value.detach().flatten()
        word = str(value.dtype).removeprefix("torch.")
        return raw(flat), word, tuple(value.shape), value.stride(), str(value.device)


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, told: Any) -> Any:
        data, word, shape, strides, device = told
        dtype = getattr(torch, word)
        if not data:
            return torch.empty(shape, dtype=dtype, device=device)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device).view(dtype)
        return flat.as_strided(shape, strides)


def packed(args: tuple[Any, ...]) -> bytes:
    """Arguments on their way to a kernel; only the judge makes them."""
    made = io.BytesIO()
    _Packer(made).dump(args)
    return made.getvalue()


def unpacked(data: bytes) -> tuple[Any, ...]:
    """What `packed` packed."""
    found: tuple[Any, ...] = _Unpacker(io.BytesIO(data)).load()
    return found


# -- memory -----------------------------------------------------------------------------------------------------------
def raw(tensor: torch.Tensor) -> bytes:
    """The numbers of a plain tensor in order, by their bytes, as the current stream would see them now."""
    plain = tensor.detach().contiguous()
    plain = plain.clone() if plain.is_cuda and plain.data_ptr() == tensor.data_ptr() else plain
    plain = plain.cpu()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())


def elements(tensor: torch.Tensor) -> int:
    """From the first element to the last that a tensor touches."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * stride for n, stride in strides) if tensor.numel() else 0


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte behind the last."""
    start = tensor.data_ptr()
    return start, start + elements(tensor) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share a byte."""
    (a, b), (c, d) = span_of(one), span_of(other)
    return a < d and c < b


def tensors_of(value: Any) -> list[Any]:
    """The tensors in an argument or a result, in order."""
    if isinstance(value, _TENSOR):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [item for part in value for item in tensors_of(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [item for part in dataclasses.fields(value) for item in tensors_of(getattr(value, part.name))]
    if type(value).__module__.startswith("layerzero."):  # a packed weight, say
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
        return [item for name in names for item in tensors_of(getattr(value, name, None))]
    return []


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in the middle of a larger buffer of poison, and that buffer."""
    size = (elements(tensor) + 2 * GUARD) * tensor.element_size()
    buffer = torch.full((size,), POISON, dtype=torch.uint8, device=tensor.device)
    inside = buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), GUARD)
    return inside, buffer


class Given:
    """Arguments of one call, where the kernel finds them, and what they have to look like afterwards."""

    def __init__(self, args: tuple[Any, ...], *, mutates: bool = False, apart: bool = False) -> None:
        self.mutates = mutates
        self.buffers: dict[int, torch.Tensor] = {}
        placed = list(args)
        for place, item in enumerate(args):
            if type(item) is _TENSOR and item.numel() and item.layout is torch.strided and not item.requires_grad:
                if apart:
                    placed[place] = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
                else:
                    placed[place], self.buffers[place] = guarded(item)
        self.args = tuple(placed)
        self.write(args)

    def write(self, args: tuple[Any, ...]) -> None:
        """Fill the tensors; on a GPU after a pause in the stream, so that one who does not wait for it is too early."""
        pairs = [pair for pair in zip(tensors_of(self.args), tensors_of(args), strict=True) if pair[0] is not pair[1]]
        self.wanted = [raw(item) for item in tensors_of(args)]
        if pairs and pairs[0][0].is_cuda:
            torch.cuda._sleep(_SLEEP)  # type: ignore[no-untyped-call]
        # A weight with its packed form beside it is written whole: to its owner it is no weight that has changed since.
        inside = tuple(own for own, _ in pairs if not any(own is item for item in self.args))
        with _NO_GRAD(), _unsafe_preserve_version_counter(inside):
            for own, new in pairs:
                own.copy_(new)

    def _outside(self, place: int) -> bytes:
        size = GUARD * self.args[place].element_size()
        buffer = self.buffers[place]
        return raw(buffer[:size]) + raw(buffer[-size:])

    def changed(self) -> str:
        """Which tensor is not as it was given, where the op does not write into it."""
        if self.mutates:
            return ""
        for place, item in enumerate(tensors_of(self.args)):
            if raw(item) != self.wanted[place]:
                return f"tensor {place} of the arguments"
        return ""

    def overrun(self) -> str:
        """The argument beside which something was written."""
        found = (place for place in self.buffers if set(self._outside(place)) != {POISON})
        return next((f"argument {place}" for place in found), "")


# -- what a call must leave alone ---------------------------------------------------------------------------------
def _functions() -> dict[str, Any]:
    """Every function and class of the watched modules, by name; holding them keeps their addresses theirs."""
    found: dict[str, Any] = {}
    ours = [name for name in sys.modules if name.split(".")[0] in _OURS]
    for name in (*_MODULES, *ours):
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            found[f"module {name}"] = module
            here = {f"{name}.{key}": item for key, item in list(vars(module).items()) if callable(item)}
            for label, item in here.items():
                if type(item) is FunctionType:
                    found |= {f"{label}.__code__": item.__code__, f"{label}.__defaults__": item.__defaults__}
                    found |= {f"{label}({key}=)": value for key, value in (item.__kwdefaults__ or {}).items()}
                elif isinstance(item, type) and ((name in ours and item.__module__ == name) or name == "torch.nn"):
                    found |= {f"{label}.{key}": value for key, value in list(vars(item).items()) if callable(value)}
            found |= here
            for key, item in list(vars(module).items()) if name in ours else ():
                if type(item).__module__ in ours and hasattr(item, "__dict__"):
                    methods = sorted(word for word, value in vars(item).items() if callable(value))
                    found[f"{name}.{key}"] = " ".join(methods)
    del found["ctypes._dlopen"]  # the hub's loader stands there while it loads a build
    for kind in (_TENSOR, torch.cuda.Event, torch.cuda.Stream, torch.Generator, torch.nn.Module, threading.Thread):
        found |= {f"{kind.__module__}.{kind.__name__}.{key}": item for key, item in list(vars(kind).items())}
        found[f"attributes of {kind.__name__}"] = " ".join(sorted(vars(kind)))  # a new one hides that of a base
    del found["torch.Storage"]  # follows the default dtype
    return found


def _overrides() -> set[str]:
    """Kernels that Python code has put behind torch's own operators."""
    return {name for name in getattr(torch.library, "_impls", ()) if name.startswith("aten")}


def _flag(read: Any) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError):  # an older torch, or flags of two generations mixed
        return None


def _children() -> str:
    """The processes that this one has started and that are still there; asked of Linux."""
    with suppress(OSError):
        return "".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    return ""


def _state(cuda: bool) -> dict[str, Any]:
    """Settings of the process that belong to its owner."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    bounds = [lz.numerics.tolerance(op, dtype) for op in ("attention", "rms_norm", "linear") for dtype in _NUMBERS]
    world = contextvars.Context().run(current_world)  # outside of the scope that locks the kernel
    found = {
        "the tolerance table": str(bounds),
        "LayerZero's settings": (world.policy.policy_hash, len(world.registry.kernels)),
        "the state of torch's random numbers": hashlib.sha1(raw(torch.get_rng_state())).hexdigest(),
        "the state of Python's random numbers": hash(random.getstate()),
        "the default dtype": str(torch.get_default_dtype()),
        "the default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "the number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "TF32": (_flag(lambda: matmul.allow_tf32), _flag(lambda: cudnn.allow_tf32)),
        "reduced-precision sums": (
            _flag(lambda: matmul.allow_fp16_reduced_precision_reduction),
            _flag(lambda: matmul.allow_bf16_reduced_precision_reduction),
        ),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cuDNN": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "oneDNN": _flag(lambda: torch.backends.mkldnn.enabled),
        "the kinds of attention": [_flag(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")) for kind in _ATTENTION],
        "logging": logging.root.manager.disable,
        "processes it started": _children(),
        "denormal numbers": float(torch.full((1,), 1e-41) * 1.0) != 0.0,
        "torch function modes": _flag(torch._C._len_torch_function_stack),
        "torch dispatch modes": _flag(torch._C._len_torch_dispatch_stack),
        "os.environ": dict(os.environ),
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "tracing": (sys.gettrace(), sys.getprofile()),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "the affinity of the process": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }  # fmt: skip
    if cuda:
        found["the state of CUDA's random numbers"] = hashlib.sha1(raw(torch.cuda.get_rng_state())).hexdigest()
        found["the current stream"] = torch.cuda.current_stream().cuda_stream
        found["the current device"] = torch.cuda.current_device()
    return found


def _of_torch(item: Any) -> bool:
    """Whether a function's code is in torch's own files."""
    code = getattr(inspect.unwrap(item) if callable(item) else item, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is str and type(other) is str and one == other)


def _of_compiler(variable: str) -> bool:
    """Whether a variable says where a library keeps what it compiles; LayerZero sets them before the first one does."""
    known = ("CUTE_DSL_", "FLASHINFER_", "FLASH_ATTENTION_", "QUACK_", "TORCHINDUCTOR_", "TRITON_")
    return variable.lstrip("_").startswith(known)


class Watch:
    """Functions, settings and threads as they were before the kernel came."""

    def __init__(self, random: bool, cuda: bool, compiles: bool = False) -> None:
        self.random, self.cuda, self.compiles = random, cuda, compiles
        self.functions, self.overrides = _functions(), _overrides()
        self.threads = set(sys._current_frames())
        self.settings = _state(cuda)

    def found(self) -> dict[str, str]:
        """What is different now, by the kind of difference."""
        now = _functions()
        patched = [name for name, item in self.functions.items() if not _same(now.get(name), item)]
        after = _state(self.cuda)
        if self.compiles:
            # Compilers wrap functions of torch, name their caches, keep a pool of threads, and CuTe's shows its own
            # messages for errors that nobody catches.
            patched = [name for name in patched if name != "sys.excepthook" and not _of_torch(now.get(name))]
            new = [name for name in after["os.environ"] if name not in self.settings["os.environ"]]
            for name in filter(_of_compiler, new):
                del after["os.environ"][name]
        patched += sorted(_overrides() - self.overrides)
        left = [name for name, item in self.settings.items() if after[name] != item]
        if "os.environ" in left:
            names = dict(self.settings["os.environ"].items() ^ after["os.environ"].items())
            left[left.index("os.environ")] = f"os.environ ({', '.join(sorted(names)[:4])})"
        if self.random:
            left = [name for name in left if "random numbers" not in name]
        threads = [item.name for item in threading.enumerate() if item.ident not in self.threads]
        count = len(set(sys._current_frames()) - self.threads)
        if self.compiles:
            threads, count = [], 0
            left = [name for name in left if name != "processes it started"]
        return {
            "patched": ", ".join(patched[:4]),
            "state": ", ".join(left[:4]),
            "threads": ", ".join(threads[:4]) or (f"{count} threads" if count else ""),
        }


# -- results ----------------------------------------------------------------------------------------------------------
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size, torch.device)


def odd(value: Any) -> str:
    """Why a result is not made of plain tensors; empty where it is."""
    if type(value) is _TENSOR:
        if value.requires_grad or value.grad_fn is not None or value._backward_hooks:
            return "a tensor with requires_grad or hooks, where no gradient is asked for"
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or value.is_meta:
            return f"a tensor that is not there as it reads: layout {value.layout}, conjugate, negated or meta"
        if set(vars(value)) if hasattr(value, "__dict__") else False:
            return f"a tensor with attributes of its own: {', '.join(sorted(vars(value)))}"
        return ""
    if isinstance(value, _TENSOR):
        return f"a {type(value).__module__}.{type(value).__qualname__} and not a plain tensor"
    if type(value) in (tuple, list):
        return next((found for item in value if (found := odd(item))), "")
    if type(value) is dict:
        return next((found for item in value.values() if (found := odd(item))), "")
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("layerzero"):
        return next((why for part in dataclasses.fields(value) if (why := odd(getattr(value, part.name)))), "")
    if isinstance(value, tuple) and type(value).__module__.startswith(("layerzero", "torch")):
        return next((found for item in value if (found := odd(item))), "")
    allowed = type(value) in _PLAIN or type(value).__module__.startswith("layerzero")
    return "" if allowed else f"a {type(value).__module__}.{type(value).__qualname__}"


def form(tensor: torch.Tensor) -> dict[str, Any]:
    """What the judge has to know to read the bytes."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    folded = any(n > 1 and stride == 0 for n, stride in strides)
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    short = span_of(tensor)[1] - span_of(tensor)[0] > room
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
        "device": str(tensor.device), "folded": folded or short,
    }  # fmt: skip


class Kernel:
    """One kernel, called through dispatch as any program calls it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.spec = current_world().ops[told["op"]]
        self.kernel = told["kernel"]
        self.device = torch.device(told["device"])
        self.told = told
        self.given: Given | None = None
        self.last: list[torch.Tensor] = []
        self.held: list[tuple[Given, list[torch.Tensor], list[bytes]]] = []
        self.watch = Watch(told["random"], self.device.type == "cuda", told["compiles"])

    def run(self, args: tuple[Any, ...], layout: str | None, grad: bool = False) -> Any:
        """The result of one call; none of its arguments asks for a gradient."""
        with torch.set_grad_enabled(grad):
            return dispatch(self.spec, args, layout)

    # -- requests ------------------------------------------------------------------------------------
    def call(self, said: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """One call, on tensors at new places or (`again`) in the same ones with other numbers in them."""
        args = unpacked(parts[0])
        # Looks like what a careless checker leaves lying about; it is not the answer.
        expected = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts[1:]]
        expected = [item.view(getattr(torch, kind)) for item, kind in zip(expected, said["decoys"], strict=True)]
        expected = [item.reshape(shape) for item, shape in zip(expected, said["shapes"], strict=True)]
        if said["again"] and self.given is not None:
            given = self.given
            given.write(args)
        else:
            given = Given(args, mutates=said["mutates"])
        self.given = given
        fences = self._fences(said["sizes"], 2 * BLOCKS)[::2] + self._fences(said["sizes"], BLOCKS // 2)
        result = self.run(given.args, said["layout"])
        strange = odd(result)
        if strange:
            return {"odd": strange, **self.watch.found()}, []
        outs = tensors_of(result)
        early = [raw(item) for item in outs]
        answer = {"leaves": [form(item) for item in outs], "odd": "", **self.watch.found()}
        answer["overrun"] = given.overrun() or (
            "" if all(raw(item) == bytes([POISON]) * item.numel() for item in fences) else "the result"
        )
        answer["changed"] = given.changed()
        answer["aliased"] = "" if said["mutates"] or said["may_alias"] else self._aliased(given, outs)
        self.held.append((given, outs, early))
        answer["later"] = self._later()
        while len(self.held) > HELD:
            self._forget()
        del expected
        return answer, early

    def _fences(self, sizes: list[int], count: int) -> list[torch.Tensor]:
        """Blocks of poison like results. Some are let go of, for a result to come to lie in; then some more are taken,
        since mimalloc, torch's on Arm, gives out what it has never given before what came back to it."""
        count = count if sum(sizes) < SMALL else max(1, count // 8)
        return [torch.full((n,), POISON, dtype=torch.uint8, device=self.device) for n in sizes * count]

    def _aliased(self, given: Given, outs: list[torch.Tensor]) -> str:
        for place, out in enumerate(outs):
            if any(overlap(out, item) for item in tensors_of(given.args)):
                return "an argument"
            if any(overlap(out, item) for _, before, _ in self.held for item in before):
                return "an earlier result"
            if any(overlap(out, item) for item in outs[:place]):
                return "another result of the same call"
        return ""

    def _later(self) -> str:
        """What changed in tensors of former calls."""
        for given, outs, early in self.held[:-1]:
            if any(raw(out) != before for out, before in zip(outs, early, strict=True)):
                return "a result"
            if given is not self.given and given.changed():
                return given.changed()
        return ""

    def _forget(self) -> None:
        """Let go of the oldest call; no right answer is left in memory that is free."""
        _, outs, _ = self.held.pop(0)
        for out in outs:
            if out.numel() and not any(overlap(out, item) for _, others, _ in self.held for item in others):
                out.copy_(torch.full_like(out, float("nan") if out.is_floating_point() else 1))

    def settle(self, said: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Wait a moment, and see whether results and arguments are what they were."""
        time.sleep(said["seconds"])
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        answer: dict[str, Any] = {"later": self._later(), **self.watch.found()}
        if not self.held:
            return answer, []
        given, outs, early = self.held[-1]
        now = [raw(item) for item in outs]
        answer["later"] = answer["later"] or ("a result" if now != early else "")
        answer["later"] = answer["later"] or given.changed()
        answer["leaves"] = [form(item) for item in outs]
        return answer, now

    def many(self, said: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Calls one after the other, as a server or a race makes them: every different result of each is told.

        `timed` is the manner of a race: the same tensors, no collection of garbage, nothing read in between.
        """
        # Every other one as programs give them: no poison beside the arguments, and grad mode as it is by default.
        given = [Given(unpacked(part), mutates=said["mutates"], apart=i % 2 == 1) for i, part in enumerate(parts)]
        self.held.clear()
        kinds: list[dict[bytes, int]] = [{} for _ in given]
        forms: list[dict[str, Any]] = []
        done, end, aliased = 0, time.monotonic() + said["seconds"], ""
        if said["timed"]:
            gc.disable()
        try:
            for place in said["order"]:
                kept = []
                for _ in range(said["timed"] or 1):
                    kept.append(tensors_of(self.run(given[place].args, said["layout"], grad=place % 2 == 1)))
                if len(kept) > 1 and any(overlap(a, b) for a, b in zip(kept[-2], kept[-1], strict=True)):
                    aliased = "an earlier result"
                for outs in kept:
                    found = b"".join(raw(item) for item in outs)
                    kinds[place][found] = kinds[place].get(found, 0) + 1
                    forms = [form(item) for item in outs]
                done += 1
                if time.monotonic() > end:
                    break
        finally:
            gc.enable()
        different = [
            [place, count] for place, found in enumerate(kinds) for count in list(found.values())[: said["most"]]
        ]
        results = [result for found in kinds for result in list(found)[: said["most"]]]
        changed = next((item.changed() for item in given if item.changed()), "")
        return {
            "kinds": different,
            "leaves": forms,
            "done": done,
            "changed": changed,
            "aliased": aliased,
            **self.watch.found(),
        }, results

    def race(self, said: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Calls on the same tensors, those of the last race unless others are given; whoever asks takes the time."""
        if parts:
            self.given = Given(unpacked(parts[0]))
        assert self.given is not None
        for _ in range(said["rounds"]):
            self.last = tensors_of(self.run(self.given.args, said["layout"]))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {}, []

    def raced(self, said: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """The last result of a race."""
        return {}, [raw(item) for item in self.last]


def serve(channel: socket.socket, told: dict[str, Any]) -> None:
    """Answer requests about one kernel until there are no more."""
    with lz.scoped(locks={told["op"]: told["kernel"]}, on_fault="raise", jit="block", on_first_use="off"):
        kernel = Kernel(told)
        send(channel, {"ready": os.getpid()})
        while True:
            said, parts = receive(channel)
            try:
                answer, results = getattr(kernel, said["do"])(said, parts)
            except Exception as error:
                answer, results = {"raised": f"{type(error).__name__}: {error}"[:500]}, []
                with suppress(Exception):  # after a fault of a GPU nothing can be asked of it
                    answer |= kernel.watch.found()
            send(channel, answer, *results)


def _as_under_a_checker() -> Any:
    """`serve` where a kernel that behaves for checkers finds what it looks for: their words in the environment, among
    the arguments and modules, and in the names of the files it is called from."""
    os.environ |= {"PYTEST_CURRENT_TEST": "test_kernels.py::test_result (call)", "CI": "true"}
    sys.argv = ["lz", "verify"]
    for name in ("pytest", "_pytest", "unittest", "layerzero_verify"):
        sys.modules.setdefault(name, ModuleType(name))
    made: dict[str, Any] = {"serve": serve}
    exec(compile("def check(*given):\n    serve(*given)\n", "layerzero_verify/testing/test_kernels.py", "exec"), made)
    return made["check"]


def main() -> None:
    """Load the plugins, then fork for every kernel that the judge names."""
    judge = socket.socket(fileno=0)
    os.environ.pop("MALLOC_PERTURB_", None)
    before = Watch(random=False, cuda=False)
    lz.list_kernels()
    found = before.found()
    # torch and layerzero import much on first use: what is new is not changed
    send(judge, found)
    while True:
        data, handles, *_ = socket.recv_fds(judge, 65536, 1)
        if not data:
            return
        if os.fork() == 0:
            os.setsid()
            judge.close()
            status = 0
            try:
                with open(os.devnull, "r+b") as nothing:
                    for number in (0, 1, 2):
                        os.dup2(nothing.fileno(), number)
                told = json.loads(data)
                (_as_under_a_checker() if told["watched"] else serve)(socket.socket(fileno=handles[0]), told)
            except EOFError:
                pass
            except BaseException:
                status = 1
            finally:
                os._exit(status)
        for handle in handles:
            os.close(handle)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
