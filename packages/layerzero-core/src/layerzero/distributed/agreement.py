"""`lz.agree`: ranks say what they are, settle what differs, and choose alike from then on."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch

from layerzero.device.memory import free_bytes
from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.distributed.channel import Channel, RankStore
from layerzero.distributed.choice import RankChoices, call_key
from layerzero.distributed.facts import Facts, Findings, digest, judge, least_of
from layerzero.errors import DistributedError, LayerZeroWarning, invalid
from layerzero.reasons import reason
from layerzero.runtime.state import state
from layerzero.selection.world import World
from layerzero.tables.file import table_from_json, table_json
from layerzero.telemetry.events import observed
from layerzero.version import __version__

_generations: dict[tuple[int, ...], itertools.count[int]] = {}


def facts_of(rank: int, world: World) -> Facts:
    """What this process says of itself."""
    spec, registry = probe_device(), world.registry
    usable = [kernel for kernel in registry.kernels.values() if registry.available(kernel.backend)]
    kernels = {kernel.kernel_id: kernel.version for kernel in usable}
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


def free_here() -> int | None:
    """Free bytes on the device this rank computes on."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count()
    return free_bytes(f"cuda:{torch.cuda.current_device()}" if cuda else "cpu")


def channel_of(group: Any, timeout: float, store: RankStore | None) -> Channel:
    """The channel of a process group; each agreement of the same ranks has one of its own."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            told = "a group was given, but torch.distributed is not initialised"
            raise invalid("VALUE_INVALID", "group", "None before init_process_group", told)
        return Channel(cast(RankStore, None), 0, (0,), timeout)  # one member never asks a store
    members = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    generation = next(_generations.setdefault(members, itertools.count(1)))
    name = f"layerzero/{digest(sorted(members))[:8]}/{generation}"
    if store is None:
        store = _own_connection(dist.distributed_c10d._get_default_store())
    return Channel(store, rank, members, timeout, name)


@lru_cache(maxsize=1)  # one connection a process group, however often its ranks agree
def _own_connection(given: Any) -> RankStore:
    """The group's store through a connection of our own: a wait holds the connection it is made on."""
    try:
        return given.clone()  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # a store that knows no copies is shared
        return given  # type: ignore[no-any-return]


_log = logging.getLogger("layerzero.distributed")


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on, in force in this process until `leave()` or `lz.reset()`.

    facts     what every rank said
    findings  what differs, and the groups of equal ranks
    """

    channel: Channel
    facts: Mapping[int, Facts]
    findings: Findings
    training: bool = False

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def size(self) -> int:
        return len(self.channel.members)

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks like this one, itself included; the first chooses for them."""
        return self.findings.group_of(self.rank)

    @property
    def leader(self) -> int:
        return self.group[0]

    @property
    def choices(self) -> RankChoices | None:
        """What the World holds of it; None after `leave()`."""
        found: RankChoices | None = state.world.ranks
        return found

    def confirm(self, op: str, *args: Any, **kwargs: Any) -> str:
        """Compare one call on all ranks of the group; returns the kernel that all of them will run.

        All must make this call. The hashes of the calls are compared first; different calls are an error. Where the
        kernels differ, that of the group's first rank holds from now on, everywhere. Ends with a barrier.
        """
        key, mine, ranking = _looked_at(op, args, kwargs)
        said = self.channel.gather(f"confirm {op}", [key, mine, ranking])
        ours = {rank: said[rank] for rank in self.group}
        if len({item[0] for item in ours.values()}) > 1:
            words = "; ".join(f"rank {rank} {item[0]}" for rank, item in ours.items())
            raise DistributedError(f"ranks call {op} differently: {words}", code="RANK_DISAGREEMENT", value=words)
        agreed, names = str(ours[self.leader][1]), ours[self.leader][2]
        unable = [rank for rank, item in ours.items() if agreed not in item[2]]
        if unable:
            fitting = [name for name in names if all(name in item[2] for item in ours.values())]
            if not fitting:
                words = "; ".join(f"rank {rank} {item[1]}" for rank, item in ours.items())
                raise DistributedError(reasons=(reason("RANK_DISAGREEMENT", words),), ranks=tuple(unable))
            agreed = fitting[0]
        if unable or any(item[1] != agreed for item in ours.values()):
            with state.changing():
                ranks: RankChoices | None = state.world.ranks
                if ranks is not None:
                    pins = {**ranks.pins, key: agreed}
                    state.publish(ranks=replace(ranks, pins=pins, fingerprint=digest([ranks.fingerprint, pins])))
        self.channel.barrier(f"confirm {op}")
        return agreed

    def refresh_memory(self) -> int | None:
        """Ask all ranks again how much memory is free; the least of the group bounds what kernels may take."""
        mine = free_here()
        said = self.channel.gather("free memory", mine)
        least = least_of([said[rank] for rank in self.group])
        if least is not None:
            state.publish(free_memory=least)
        return least

    def without(self, ranks: tuple[int, ...]) -> Agreement:
        """Agree anew among those who are left, after `ranks` were lost. All who are left must call it."""
        return _agree(self.channel.without(ranks), self.training, None)

    def leave(self) -> None:
        """Choose alone again."""
        if state.loaded:
            state.publish(ranks=None)


def _looked_at(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, list[str]]:
    world = current_world()
    spec = world.ops.get(op)
    if spec is None:
        raise invalid("OP_UNKNOWN", op, ", ".join(sorted(world.ops)))
    layout, backend = kwargs.pop("layout", None), kwargs.pop("backend", None)
    if kwargs:
        raise invalid("VALUE_INVALID", sorted(kwargs), "positional arguments of the op")
    decision = decide(spec, describe(spec, args, layout, backend, world), world)
    ranks: RankChoices | None = world.ranks
    split = ranks is not None and ranks.tp_invariant
    return call_key(decision.context, split=split), decision.chosen, list(decision.ranking)


def agree(
    group: Any = None,
    *,
    training: bool = False,
    timeout: float = 30.0,
    tp_invariant: bool | None = None,
    store: RankStore | None = None,
) -> Agreement:
    """Have the ranks of a process group compare themselves and choose alike from now on. Every rank must call it.

    group         a torch.distributed group, for example that of tensor parallelism; None: all ranks
    training      differences that inference can live with (versions, tables, a choice one rank cannot follow) raise
    timeout       seconds to wait for the others; a rank that does not come gives RANK_LOST on all, never a hang
    tp_invariant  only kernels whose result does not depend on the group's size; default: as the policy says
    store         the store to talk through; default: that of the process group

    Compared are the versions of LayerZero, torch and every kernel, policy, dispatch table, hardware and free memory.
    Ranks with equal hardware and kernels form a group whose first rank chooses for it. Hot calls talk to nobody.
    Without an initialised process group there is one rank, and nothing changes.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 86_400:
        raise invalid("VALUE_INVALID", f"timeout={timeout!r}", "seconds, above 0")
    return _agree(channel_of(group, float(timeout), store), training, tp_invariant)


@observed("agree", lambda args, out: {"ranks": len(args[0].members), "rank": args[0].rank})
def _agree(channel: Channel, training: bool, tp_invariant: bool | None) -> Agreement:
    world = state.world
    found = _told(channel, facts_of(channel.rank, world))
    findings = judge(found)
    _object(findings, found, training)
    changes = _settled(channel, found, findings, world)
    setting = world.policy.setting
    wanted = setting("distributed.tp_invariant") if tp_invariant is None else tp_invariant
    group = findings.group_of(channel.rank)
    ranks = RankChoices(
        store=channel.store,
        rank=channel.rank,
        group=group,
        size=len(channel.members),
        name=channel.name,
        fingerprint=digest([sorted(findings.excluded), group, wanted, channel.name]),
        excluded=_without_fallbacks(findings, world),
        broadcast=setting("distributed.mode") == "rank0_broadcast",
        tp_invariant=wanted,
        training=training,
        wait_s=setting("distributed.wait_s"),
    )
    channel.barrier("agree")
    state.publish(ranks=ranks if len(channel.members) > 1 else None, **changes)
    return Agreement(channel, found, findings, training)


def _told(channel: Channel, mine: Facts) -> dict[int, Facts]:
    """Facts of all ranks: hashes first, and the kernels themselves only where those differ."""
    said = channel.gather("facts", replace(mine, kernels={}).to_json())
    found = {rank: Facts.from_json(data) for rank, data in said.items()}
    if len({facts.kernels_hash for facts in found.values()}) == 1:
        return found
    kernels = channel.gather("kernels", dict(mine.kernels))
    return {rank: replace(facts, kernels=kernels[rank]) for rank, facts in found.items()}


def _object(findings: Findings, found: Mapping[int, Facts], training: bool) -> None:
    """Say what differs: an error in training, a warning in inference."""
    told = []
    if findings.versions:
        why = reason("VERSION_DISAGREEMENT", "; ".join(findings.versions[:5]))
        told.append((why, "kernels that differ are left out on every rank"))
    if findings.tables:
        why = reason("TABLE_DISAGREEMENT", ", ".join(str(rank) for rank in findings.tables))
        told.append((why, "that of the first rank is used"))
    if findings.policies:
        words = ", ".join(f"rank {rank} {facts.policy[:12]}" for rank, facts in found.items())
        told.append((reason("RANK_DISAGREEMENT", f"policies {words}"), "each rank keeps its own"))
    for why, then in told:
        if training:
            raise DistributedError(reasons=(why,))
        _log.warning("%s; %s", why, then)
        warnings.warn(f"{why}; {then}", LayerZeroWarning, stacklevel=4)


def _settled(channel: Channel, found: Mapping[int, Facts], findings: Findings, world: World) -> dict[str, Any]:
    """Changes of this rank's World: the group's table, and its least memory where memory plays a part."""
    changes: dict[str, Any] = {}
    if findings.tables:
        leads = channel.rank in findings.tables
        mine = None if not leads or world.table is None else table_json(world.table)
        tables = channel.gather("tables", mine)
        leader = findings.group_of(channel.rank)[0]
        if not leads and leader in findings.tables:
            data = tables[leader]
            changes["table"] = None if data is None else table_from_json(data)
    least = findings.free_memory[findings.group_of(channel.rank)[0]]
    if world.policy.memory_headroom_mb is not None and least is not None and len(found) > 1:
        changes["free_memory"] = least
    return changes


def _without_fallbacks(findings: Findings, world: World) -> dict[str, Any]:
    """What is left out; never the last resort of an op, without which a call could not be computed at all."""
    named = (world.registry.kernels.get(kernel_id) for kernel_id in findings.excluded)
    kept = {world.ops[kernel.op].fallback_id for kernel in named if kernel is not None and kernel.op in world.ops}
    return {kernel_id: why for kernel_id, why in findings.excluded.items() if kernel_id not in kept}
