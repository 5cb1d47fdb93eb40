"""Compilers in processes of their own: spawned, of the lowest priority, without a GPU, killed at their deadline.

They are children like those of isolated backends (`layerzero.isolation.worker`), with other orders: a call is
described by its metadata alone, what is compiled goes into the cache folder, and one that fails is not used again.
Nothing of a compiler holds up this process but the wait of the thread that asked.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from layerzero.forking import in_child
from layerzero.isolation.process import Settings
from layerzero.isolation.wire import IsolationFault, Placed, fault, pack, span, tensors_in, unpack
from layerzero.isolation.worker import Worker
from layerzero.model.artifact import CompileOrder, NeedsDevice
from layerzero.model.device import DeviceSpec
from layerzero.model.grouped import GroupedBatch
from layerzero.model.kernel import KernelSpec
from layerzero.model.kv_cache import PagedBatch

IDLE_S: Final = 20.0  # a compiler that nobody asks for so long is ended
_BATCHES: Final = (PagedBatch, GroupedBatch)  # sent as what they are made of: their fields without a default
_NO_GPU: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def order_text(
    kernel: KernelSpec, args: tuple[Any, ...], kwargs: dict[str, Any], context: dict[str, Any], needs_grad: bool
) -> str:
    """An order for a compiler. Raises Unsendable for arguments that have no form outside this process."""
    given = [part for item in (*args, *kwargs.values()) for part in _parts(item)]
    return json.dumps({
        "compiler": kernel.compiler,
        "kernel_id": kernel.kernel_id,
        "function": kernel.function,
        "args": [_packed(item) for item in args],
        "kwargs": {name: _packed(item) for name, item in kwargs.items()},
        "grads": [item.requires_grad for item in tensors_in(given)],
        "context": context,
        "needs_grad": needs_grad,
    })  # fmt: skip


def _parts(item: Any) -> tuple[Any, ...]:
    """What a batch is made of; anything else is itself."""
    if not isinstance(item, _BATCHES):
        return (item,)
    made_of = [field for field in fields(item) if field.init and field.default is field.default_factory is MISSING]
    return tuple(getattr(item, field.name) for field in made_of)


def _packed(item: Any) -> Any:
    packed = [pack(part, _described) for part in _parts(item)]
    return {"batch": type(item).__name__, "parts": packed} if isinstance(item, _BATCHES) else packed[0]


def _unpacked(data: Any, made: Callable[[Placed], Tensor]) -> Any:
    if not isinstance(data, dict) or "batch" not in data:
        return unpack(data, made)
    (kind,) = (kind for kind in _BATCHES if kind.__name__ == data["batch"])
    return kind(*(unpack(part, made) for part in data["parts"]))


def _described(item: Tensor) -> Placed:
    shape, strides = tuple(item.shape), tuple(item.stride())
    return Placed("meta", 0, span(shape, strides) * item.itemsize, item.dtype, shape, strides)


def follow(text: str) -> str:
    """In the compiler's process: carry out an order; JSON that says what became of it."""
    order, started = json.loads(text), time.monotonic()
    grads = iter(order["grads"])

    def made(placed: Placed) -> Tensor:
        found = torch.empty_strided(placed.shape, placed.strides, dtype=placed.dtype, device="meta")
        return found.requires_grad_() if next(grads) else found

    compiler: Callable[[CompileOrder], Sequence[str] | None] = resolve_name(order["compiler"])
    given = CompileOrder(
        order["kernel_id"],
        order["function"],
        tuple([_unpacked(item, made) for item in order["args"]]),
        {name: _unpacked(item, made) for name, item in order["kwargs"].items()},
        order["context"],
        DeviceSpec.from_json(order["context"]["device"]),
        order["needs_grad"],
    )
    try:
        libraries = compiler(given)
    except NeedsDevice as error:
        return json.dumps({"needs_device": str(error)[:300], "in_thread": error.in_thread})
    return json.dumps({"seconds": time.monotonic() - started, "libraries": list(libraries or ())})


class Compilers:
    """The compilers of this process; as many at a time as ask at a time, which the queue bounds."""

    def __init__(self) -> None:
        self._start()
        in_child(self._forked)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[float, Worker]] = []
        self._busy: set[Worker] = set()
        self._closed = False

    def ask(self, text: str, deadline_s: float, env: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Have an order carried out; what `follow` says. Raises IsolationFault for whatever keeps it from that.

        `env` says where artifacts go; a compiler that was started with another one is ended.
        """
        settings = Settings(
            "compiler", env=(*sorted(env.items()), *((name, "") for name in _NO_GPU)), deadline_s=deadline_s,
            start_s=max(120.0, deadline_s),  # who goes last may wait long for a processor
            memory_mb=1.0, arena_mb=1.0, background=True,
        )  # fmt: skip
        with self._lock:
            if self._closed:
                raise fault("ISOLATION_START_FAILED", "this process ends")
            fitting = [item for item in self._free if item[1].settings == settings]
            others = [worker for _, worker in self._free if worker.settings != settings]
            worker = fitting.pop()[1] if fitting else Worker(settings)
            self._free = fitting
            self._busy.add(worker)
            atexit.unregister(self.close)
            atexit.register(self.close)  # last, so called first: before a queue waits for the thread that asks here
        for other in others:
            other.close(wait=False)
        well = False
        try:
            found: dict[str, Any] = json.loads(worker.call(f"{__name__}:follow", (text,), {}))
            well = True
            return found
        except IsolationFault as error:
            raise (fault("ISOLATION_START_FAILED", "this process ends") if self._closed else error) from None
        finally:
            with self._lock:
                self._busy.discard(worker)
                if well:
                    self._free.append((time.monotonic(), worker))
            if not well:
                worker.close(wait=False)

    def end_idle(self, idle_s: float = IDLE_S) -> float | None:
        """End those that nobody asked for so long; the seconds until the next one's turn, None when there is none."""
        now = time.monotonic()
        with self._lock:
            old = [worker for since, worker in self._free if now - since >= idle_s]
            self._free = [item for item in self._free if item[1] not in old]
            left = min((since for since, _ in self._free), default=None)
        for worker in old:
            worker.close(wait=False)
        return None if left is None else max(0.0, left + idle_s - now)

    @property
    def pids(self) -> tuple[int, ...]:
        with self._lock:
            every = [*self._busy, *(worker for _, worker in self._free)]
        return tuple(worker.pid for worker in every if worker.pid is not None)

    def close(self) -> None:
        """End all of them at once, whatever they are doing, and start no more: this process ends."""
        with self._lock:
            self._closed, busy = True, list(self._busy)
        self.end_idle(-1.0)
        for worker in busy:
            worker.kill()

    def _forked(self) -> None:
        every = [*self._busy, *(worker for _, worker in self._free)]
        self._start()
        for worker in every:
            worker.after_fork()


compilers = Compilers()
