"""What a kernel could stand in for: torch's ops, functions, modes and tables, before and after it was imported.

`Dispatcher` reads the ops from the memory of another process: what code in that process says does not matter then.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, Self

_WATCHED: Final = ("torch", "kernels", "builtins", "importlib", "layerzero_hub")
# Tables of Python functions that stand for ops, where their module is loaded.
_TABLES: Final = (
    ("torch._decomp", "global_decomposition_table"),
    ("torch._inductor.decomposition", "decompositions"),
    ("torch._inductor.lowering", "lowerings"),
    ("torch._subclasses.fake_impls", "op_implementations_dict"),
)
_HOOKS: Final = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was: the reason code, what, and a mark of what it became where there is one."""

    code: str
    what: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How torch looked at one moment. Objects are held, so that none can take the place of another unseen."""

    ops: Mapping[str, bytes]
    functions: Mapping[str, tuple[object, ...]]
    modes: Mapping[str, object]
    tables: Mapping[str, Mapping[object, object]]
    modules: Mapping[str, object]


def take(*, ops: bool = True) -> Snapshot:
    """How torch looks now. About 0.15 s; a part of that without the ops."""
    functions = dict(_functions())
    return Snapshot(_ops() if ops else {}, functions, dict(_modes()), _tables(), dict(sys.modules))


def compare(before: Snapshot, after: Snapshot, own: str, allowed: Iterable[str]) -> tuple[Finding, ...]:
    """What a kernel of this id changed that is not its own; `allowed` are the ops namespaces it may add to."""
    spaces = frozenset(allowed)
    found = [
        Finding("HUB_DISPATCHER_CHANGED", name, after.ops.get(name, b"").hex())
        for name, digest in sorted(before.ops.items())
        if after.ops.get(name) != digest
    ]
    added = namespaces(frozenset(after.ops) - frozenset(before.ops))
    found += [Finding("HUB_NAMESPACE_FOREIGN", space) for space in sorted(added - spaces)]
    found += [
        Finding("HUB_MODE_LEFT_ON", f"{name} is {after.modes.get(name)}, was {value}")
        for name, value in before.modes.items()
        if after.modes.get(name) != value
    ]
    found += [
        Finding("HUB_FUNCTION_REPLACED", name)
        for name, parts in before.functions.items()
        if [*map(id, parts)] != [*map(id, after.functions.get(name, ()))]
    ]
    found += _table_findings(before.tables, after.tables, spaces)
    found += _module_findings(before.modules, after.modules, own)
    return tuple(found)


def namespaces(names: Iterable[str] | None = None) -> frozenset[str]:
    """The ops namespaces among these names, or of this process now."""
    if names is None:
        import torch

        names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.split("::")[0] for name in names)


def _ops() -> dict[str, bytes]:
    """Op name → digest of everything registered for it."""
    import torch

    dump = torch._C._dispatch_dump
    return {
        name: hashlib.blake2b(dump(name).encode(), digest_size=16).digest()
        for name in torch._C._dispatch_get_all_op_names()
    }


def _functions() -> Iterator[tuple[str, tuple[object, ...]]]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _WATCHED or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            kind = type(value)  # isinstance asks the value, and some answer with a warning
            if issubclass(kind, type):
                yield f"{name}.{attribute}", (value,)
                if id(value) not in seen and value.__module__.partition(".")[0] == "torch":
                    seen.add(id(value))
                    for method, function in list(vars(value).items()):
                        if isinstance(function, FunctionType | classmethod | staticmethod | property):
                            yield f"{name}.{attribute}.{method}", _parts(function)
            elif kind in (FunctionType, BuiltinFunctionType):
                yield f"{name}.{attribute}", _parts(value)
    yield from _overloads()


def _overloads() -> Iterator[tuple[str, tuple[object, ...]]]:
    """The ops as Python knows them: an implementation given to one of them is not seen by the dispatcher."""
    import torch
    from torch._ops import OpOverload, OpOverloadPacket

    for space in list(vars(torch.ops).values()):
        for packet in list(vars(space).values()) if isinstance(space, ModuleType) else ():
            if not isinstance(packet, OpOverloadPacket):
                continue
            yield f"torch.ops.{packet._qualified_op_name}", (packet, packet._op)
            for overload in list(vars(packet).values()):
                if isinstance(overload, OpOverload):
                    kernels = [part for pair in sorted(overload.py_kernels.items(), key=str) for part in pair]
                    yield f"torch.ops.{overload}", (overload, overload._op, *kernels)


def _parts(value: Any) -> tuple[object, ...]:
    if isinstance(value, FunctionType):
        return (value, value.__code__, value.__defaults__)
    return (value,)


def _modes() -> Iterator[tuple[str, object]]:
    import torch

    asked: dict[str, Callable[[], object]] = {
        "function modes": torch._C._len_torch_function_stack,
        "dispatch modes": torch._C._len_torch_dispatch_stack,
        "grad mode": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "autocast on CPU": lambda: torch.is_autocast_enabled("cpu"),
        "autocast on CUDA": lambda: torch.is_autocast_enabled("cuda"),
        "default dtype": torch.get_default_dtype,
        "default device": lambda: str(torch.get_default_device()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "TF32 in cuDNN": lambda: torch.backends.cudnn.allow_tf32,
        "cuDNN": lambda: torch.backends.cudnn.enabled,
        "anomaly mode": torch.is_anomaly_enabled,
        "included dispatch keys": lambda: str(torch._C._dispatch_tls_local_include_set()),
        "excluded dispatch keys": lambda: str(torch._C._dispatch_tls_local_exclude_set()),
        "hooks of all modules": lambda: [len(getattr(torch.nn.modules.module, name)) for name in _HOOKS],
        "trace function": sys.gettrace,
        "profile function": sys.getprofile,
    }
    for name, ask in asked.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            yield name, ask()


def _tables() -> dict[str, dict[object, object]]:
    found: dict[str, dict[object, object]] = {}
    for name, attribute in _TABLES:
        table = getattr(sys.modules.get(name), attribute, None)
        if isinstance(table, dict):
            for key, value in list(table.items()):
                if isinstance(value, dict):  # one for each kind
                    found[f"{name}.{attribute}[{key}]"] = dict(value)
                else:
                    found.setdefault(f"{name}.{attribute}", {})[key] = value
    return found


def _table_findings(
    before: Mapping[str, Mapping[object, object]], after: Mapping[str, Mapping[object, object]], spaces: frozenset[str]
) -> Iterator[Finding]:
    for name, table in before.items():
        now = after.get(name, {})
        for key, value in table.items():
            if now.get(key) is not value:
                yield Finding("HUB_DECOMPOSITION_CHANGED", f"{key} in {name}")
        for key in now:
            space = getattr(key, "namespace", None) or str(key).partition(".")[0]
            if key not in table and space not in spaces:
                yield Finding("HUB_DECOMPOSITION_CHANGED", f"{key} in {name}")


def _module_findings(before: Mapping[str, object], after: Mapping[str, object], own: str) -> Iterator[Finding]:
    from layerzero_hub.source import id_of

    for name, module in before.items():
        if after.get(name, module) is not module:
            yield Finding("HUB_ID_TAKEN", name, "a module of this process")
    for name, module in after.items():
        if name not in before and id_of(module) not in (None, name.partition(".")[0]):
            yield Finding("HUB_ID_TAKEN", name, "a name that is not the kernel's")
    for finder in sys.meta_path:
        if type(finder).__module__.partition(".")[0] == own:
            yield Finding("HUB_FUNCTION_REPLACED", "sys.meta_path")


_SINGLETON: Final = "_ZN3c1010Dispatcher13realSingletonEv"
# A node of the list of ops: two links, then name and overload as strings of 32 bytes, then what is registered.
_NAMES: Final = 16
_AFTER: Final = 80
_MAX_OPS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Where the dispatcher of this process, and of its forks, lies.

    A forked process has torch's objects at the same addresses as its parent, so the parent knows where to look. How the
    dispatcher lies in memory is not promised by torch: `find` compares what it reads in its own memory with what torch
    says, and sees a change that it makes itself in a fork; where either fails there is no answer, and callers say so.
    """

    address: int
    size: int

    @classmethod
    def find(cls) -> Self | None:
        """The dispatcher of this process, or None where its memory does not look as known."""
        import torch

        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            singleton = getattr(library, _SINGLETON)
            singleton.restype = ctypes.c_void_p
            usable = ctypes.CDLL(None).malloc_usable_size
            usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
            address = int(singleton())
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                size = int(usable(struct.unpack("<Q", os.pread(memory.fileno(), 8, address))[0]))
            found = cls(address, size)
            if not _AFTER < size < 65536 or set(found.read(os.getpid())) != set(torch._C._dispatch_get_all_op_names()):
                return None
            return found if found._sees_a_change() else None
        except (OSError, AttributeError, struct.error, ValueError):
            return None

    def read(self, pid: int) -> Mapping[str, bytes]:
        """Op name → what its memory holds, of a process that stands still. Raises OSError or ValueError."""
        found: dict[str, bytes] = {}
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            memory = file.fileno()
            (node,) = struct.unpack("<Q", os.pread(memory, 8, self.address))
            while node != self.address:
                data = os.pread(memory, self.size, node)
                if len(data) < _AFTER or len(found) > _MAX_OPS:
                    raise ValueError("the list of ops has no end")
                text = []
                for at in (_NAMES, _NAMES + 32):
                    place, length = struct.unpack_from("<QQ", data, at)
                    if length > 4096:
                        raise ValueError("an op's name is no text")
                    text.append(os.pread(memory, length, place).decode("utf-8") if length else "")
                found[".".join(text) if text[1] else text[0]] = data[_AFTER:]
                (node,) = struct.unpack_from("<Q", data)
        return found

    def changed(self, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> tuple[str, ...]:
        """Ops that were there before and are gone or different now; what an op caches for Python does not count."""
        differ = [name for name, data in before.items() if data != after.get(name)]
        return tuple(sorted(name for name in differ if not _is_cache(before[name], after.get(name, b""))))

    def _sees_a_change(self) -> bool:
        """Whether an op replaced in a fork is seen from here, and nothing else."""
        import torch

        before = self.read(os.getpid())
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                library = torch.library.Library("aten", "IMPL")
                library.impl("special_zeta", lambda x, y: x, "CPU")
                os.write(ready[1], b"x")
                os.close(done[1])
                os.read(done[0], 1)
            finally:
                os._exit(0)
        os.close(ready[1])
        try:
            os.read(ready[0], 1)
            return self.changed(before, self.read(child)) == ("aten::special_zeta",)
        finally:
            for end in (ready[0], *done):
                os.close(end)
            os.waitpid(child, 0)


def _is_cache(one: bytes, other: bytes) -> bool:
    """Whether the one word that differs was empty: a registration also changes the count of registrations."""
    if len(one) != len(other):
        return False
    places = [at for at in range(0, len(one), 8) if one[at : at + 8] != other[at : at + 8]]
    return len(places) == 1 and not any(one[places[0] : places[0] + 8])
