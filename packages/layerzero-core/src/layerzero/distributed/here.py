"""This process as one rank among others: what it says of itself, and through which store it talks."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch

from layerzero.device.memory import free_bytes
from layerzero.device.probe import probe_device
from layerzero.distributed.channel import Channel, RankStore
from layerzero.distributed.facts import Facts, digest
from layerzero.errors import InvalidInputError
from layerzero.model.device import DeviceSpec
from layerzero.selection.world import World
from layerzero.version import __version__

_generations: dict[tuple[int, ...], itertools.count[int]] = {}
_connections: dict[str, Any] = {}


def facts_of(rank: int, world: World, device: DeviceSpec | None = None) -> Facts:
    """What this process says of itself."""
    spec = probe_device() if device is None else device
    kernels = kernels_of(world)
    return Facts(
        rank=rank,
        layerzero=__version__,
        torch=str(torch.__version__),
        hardware=spec.hardware_signature,
        device=spec.name or spec.device_type,
        kernels_hash=digest(kernels),
        policy=world.policy.policy_hash,
        table="" if world.table is None else world.table.content_hash,
        measurements=world.measurements.fingerprint,
        free_memory=free_here(),
        kernels=kernels,
    )


def kernels_of(world: World) -> dict[str, str]:
    """Usable kernels and their versions."""
    registry = world.registry
    return {
        kernel.kernel_id: kernel.version
        for kernel in sorted(registry.kernels.values(), key=lambda item: item.kernel_id)
        if registry.available(kernel.backend)
    }


def free_here() -> int | None:
    """Free bytes on the device this rank computes on."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count()
    return free_bytes(f"cuda:{torch.cuda.current_device()}" if cuda else "cpu")


def channel_of(group: Any, timeout: float, store: RankStore | None) -> Channel:
    """The channel of a process group; each agreement of the same ranks has one of its own."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise InvalidInputError(
                "a group was given, but torch.distributed is not initialised", code="VALUE_INVALID", value="group",
                limit="None before init_process_group",
            )  # fmt: skip
        return Channel(cast(RankStore, None), 0, (0,), timeout)  # one member never asks a store
    members = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    generation = next(_generations.setdefault(members, itertools.count(1)))
    name = f"layerzero/{digest(sorted(members))[:8]}/{generation}"
    return Channel(_own_connection() if store is None else store, rank, members, timeout, name)


def _own_connection() -> RankStore:
    """The group's store through a connection of our own: a wait holds the connection it is made on."""
    from torch.distributed.distributed_c10d import _get_default_store

    given: Any = _get_default_store()
    if _connections.get("of") is not given:  # one connection a process group, however often its ranks agree
        try:
            _connections["own"] = given.clone()
        except (AttributeError, RuntimeError):  # a store that knows no copies is shared
            _connections["own"] = given
        _connections["of"] = given
    return _connections["own"]  # type: ignore[no-any-return]
