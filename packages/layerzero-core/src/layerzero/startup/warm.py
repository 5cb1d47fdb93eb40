"""Warm-up: have every kernel compiled, loaded and bound that given calls will need, before a request needs it.

Critical calls block; the rest is compiled by the queue beside the requests. Whatever is not ready in time is left to
the fallback, as selection says.

A manifest names the calls of a deployment and which are critical, in a JSON file people may edit. It names the model
and holds the hash of the configuration it was made from, so that one left over from another model is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from layerzero.dispatch import compiling as jit
from layerzero.dispatch.bind import bind
from layerzero.dispatch.decide import decide
from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero.files import write_whole
from layerzero.jit import cache as jit_cache
from layerzero.model.artifact import Artifact, words_of
from layerzero.model.context import Context
from layerzero.model.variants import twins
from layerzero.policy.rules import matches_any
from layerzero.reasons import Reason, reason
from layerzero.recording.traffic import Recorded, call_to_json, calls_from_json, read_mapping, volume
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for
from layerzero.selection.world import World, unchecked

_log = logging.getLogger("layerzero.jit")
_ROUNDS = 4  # a critical call whose kernel fails gets its next one, so often
FORMAT = "layerzero-warmup/1"
_SHARE = 0.9  # of recorded calls: those that make up this share of the traffic block, the rest follows
_DECODE_TOKENS = 64  # of a model's calls: those of so few tokens are decode steps, which every request waits for


@dataclass(frozen=True, slots=True)
class Item:
    """One call to be ready for."""

    context: Context
    critical: bool = False
    strides: tuple[tuple[int, ...] | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Calls to be ready for, critical ones first."""

    items: tuple[Item, ...]
    model_id: str = ""
    config_hash: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        calls = [call_to_json(item, "critical") for item in self.items]
        head = {"format": FORMAT, "model_id": self.model_id, "config_hash": self.config_hash}
        write_whole(Path(path), json.dumps({**head, "calls": calls}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Manifest:
        """Read the file. Raises ConfigurationError for one that is missing, damaged or of another kind."""
        data = read_mapping(path)
        if data.get("format") != FORMAT or not isinstance(data.get("calls"), list):
            raise ConfigurationError(
                f"{Path(path).name}: no warm-up manifest", code="SCHEMA_VERSION_UNKNOWN",
                value=str(data.get("format")), limit=FORMAT,
            )  # fmt: skip

        def item(context: Context, entry: dict[str, Any], strides: Any) -> Item:
            if not isinstance(entry["critical"], bool):
                raise ValueError(f"critical is {entry['critical']!r}, expected true or false")
            return Item(context, entry["critical"], strides)

        items = calls_from_json(path, data["calls"], item)
        return Manifest(_ordered(items), str(data.get("model_id", "")), str(data.get("config_hash", "")))

    def require(self, config: Mapping[str, Any]) -> None:
        """Raise when this manifest was made from another configuration than this one."""
        found = config_hash(config)
        if self.config_hash and found != self.config_hash:
            raise ConfigurationError(
                "the manifest was made from another model configuration", code="CONFIG_INVALID",
                value=f"config {found[:12]}", limit=f"config {self.config_hash[:12]}",
                hint="make it again: lz warmup CONFIG --write MANIFEST",
            )  # fmt: skip


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a file calls itself a warm-up manifest."""
    name = Path(path)
    return name.is_file() and name.suffix == ".json" and read_mapping(path).get("format") == FORMAT


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of a model configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def mark_critical(calls: Iterable[Recorded]) -> tuple[Item, ...]:
    """Which calls everybody waits for: of recorded ones the most frequent, of a model's the decode steps."""
    given = sorted(calls, key=lambda call: -call.count)
    recorded = len({call.count for call in given}) > 1
    total, seen = sum(call.count for call in given), 0
    items = []
    for call in given:
        critical = seen < _SHARE * total if recorded else _tokens(call.context) <= _DECODE_TOKENS
        seen += call.count
        items.append(Item(call.context, critical, call.strides))
    return _ordered(items)


def _tokens(ctx: Context) -> int:
    rows = ctx.dim("rows") or ctx.dim("tokens")
    return rows if rows is not None else (ctx.dim("batch") or 1) * (ctx.dim("seq_len_q") or 1)


def _ordered(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple(sorted(items, key=lambda item: not item.critical))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one artifact: `reason` is None when it is ready."""

    artifact: Artifact
    critical: bool
    seconds: float
    reason: Reason | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel_id": self.artifact[0],
            "key": list(self.artifact[1][2:]),
            "critical": self.critical,
            "seconds": round(self.seconds, 3),
            "reason": None if self.reason is None else self.reason.to_json(),
        }


@dataclass
class Warmup:
    """A warm-up under way or done. `ready` and `failed` grow while the background works; `wait` waits for it."""

    calls: int = 0
    bound: int = 0
    already: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    unready: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    asked: set[Artifact] = field(default_factory=set)
    items: tuple[Item, ...] = ()

    @property
    def compiled(self) -> tuple[str, ...]:
        """Artifacts that were compiled or loaded, in words."""
        return tuple(words_of(item.artifact) for item in self.outcomes if item.reason is None)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """What could not be compiled, and critical ones that were not ready in time."""
        return tuple(item for item in (*self.outcomes, *self.unready) if item.reason is not None)

    @property
    def ok(self) -> bool:
        """Whether every critical call has its kernel."""
        return not any(item.critical for item in self.failed)

    @property
    def waiting(self) -> int:
        return len(self.asked - {item.artifact for item in self.outcomes})

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the background; True when everything asked for is done."""
        return not jit.queue().wait(self.asked, timeout)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "calls": self.calls,
            "bound": self.bound,
            "already_ready": self.already,
            "artifacts": [item.to_json() for item in self.outcomes],
            "not_ready": [item.to_json() for item in self.unready],
            "waiting": self.waiting,
            "seconds": round(self.seconds, 3),
        }


Told = Callable[[int, int], None]
Kernels = Sequence[str] | Callable[[Context], list[str]]


@jit.short_turns()
def warm(
    items: Sequence[Item],
    *,
    kernels: Kernels = (),
    timeout_s: float | None = None,
    workers: int | None = None,
    told: Told | None = None,
) -> Warmup:
    """Have the kernels of these calls compiled; returns when the critical ones are ready or the time is over.

    `kernels` names others to compile as well (globs over ids and backends); without it those that selection would
    choose. A function gives the very kernels of each call, which are then compiled and neither proven nor bound: for a
    tuning that follows. `told(done, all)` hears of progress, from any thread.
    """
    started = time.monotonic()
    deadline = None if timeout_s is None else started + timeout_s
    state.warmup = result = Warmup(calls=len(items), items=_ordered(items))
    queue = jit.queue()
    if workers is not None:
        queue.workers = workers
    critical = [item for item in items if item.critical]
    for turn in range(_ROUNDS):
        jobs = _jobs(result.items if turn == 0 else critical, kernels, result, urgent=turn > 0)
        if turn and not jobs:
            break
        result.asked.update(jobs)
        # A backend that compiles all its kernels at once does so first, while the others compile theirs.
        manager = state.plugin_manager
        hooks = [] if turn or manager is None else manager.hook.layerzero_warmup.get_hookimpls()
        if callable(kernels):
            backends = {job.kernel_id.partition(".")[0] for job in jobs.values()}
            hooks = [impl for impl in hooks if impl.plugin_name in backends]
        own = {impl.plugin_name for impl in hooks}
        for after in (False, True):
            for artifact, job in jobs.items():
                if (job.kernel_id.partition(".")[0] in own) is after:
                    # Refused where a request has asked for it already: it is being compiled.
                    queue.submit(artifact, partial(_compile, job, result, told), urgent=job.critical)
            if not after:
                _call(hooks, items)
        mine = [artifact for artifact, job in jobs.items() if job.critical]
        left = queue.wait(mine, None if deadline is None else max(0.0, deadline - time.monotonic()))
        jit.publish()
        if left:
            late = reason("JIT_TIMEOUT", None, f"{timeout_s:g}")
            result.unready += [Outcome(artifact, True, timeout_s or 0.0, late) for artifact in sorted(left)]
            break
    if not callable(kernels):
        for item in items:
            _prove(item.context)
        result.bound = sum(_bind(item.context) for item in critical)
    result.seconds = time.monotonic() - started
    return result


@dataclass
class _Job:
    item: Item
    kernel_id: str
    critical: bool
    began: int = field(default_factory=lambda: state.generation)


def _jobs(items: Sequence[Item], kernels: Kernels, result: Warmup, *, urgent: bool) -> dict[Artifact, _Job]:
    """The artifacts these calls lack, and those that are on disk but not yet in this process, each once.

    Of the calls that share an artifact the smallest is compiled on: a kernel that is the same for all lengths need
    not see the longest.
    """
    world = state.world
    found: dict[Artifact, _Job] = {}
    done = {item.artifact for item in result.outcomes}
    for item in items:
        wanted = kernels(item.context) if callable(kernels) else _wanted(item.context, world, kernels)
        if not item.context.needs_grad:
            wanted = each_once(wanted, world)
        for kernel_id in wanted:
            artifact = artifact_for(world.registry.kernels[kernel_id], item.context, world)
            if artifact in done:
                continue
            known = found.get(artifact)
            if known is None:
                found[artifact] = _Job(item, kernel_id, item.critical or urgent)
                continue
            known.critical = known.critical or item.critical
            if volume(item.context) < volume(known.item.context):
                known.item = item
    return found


def _wanted(ctx: Context, world: World, kernels: Sequence[str]) -> list[str]:
    """Kernels to have ready for a call: the one selection waits for, the compiled one it chose, and those named."""
    decision = select(ctx, world)
    wanted = list(decision.pending[:1])
    chosen = world.registry.kernels.get(decision.chosen)
    if not wanted and chosen is not None and chosen.jit:
        wanted.append(chosen.kernel_id)
    if kernels:
        for candidate in decision.candidates:
            kernel = world.registry.kernels[candidate.kernel_id]
            lacks_only_that = [why.code for why in candidate.reasons] in (["JIT_NOT_READY"], ["JIT_NEEDS_DEVICE"])
            if kernel.jit and (candidate.accepted or lacks_only_that):
                if matches_any(tuple(kernels), kernel.kernel_id, kernel.backend) and kernel.kernel_id not in wanted:
                    wanted.append(kernel.kernel_id)
    return wanted


def each_once(names: list[str], world: World) -> list[str]:
    """Without those that are another of them where no gradient is asked for: what that compiles is theirs too."""
    specs = {name: world.registry.kernels[name] for name in names}
    homes = Counter(
        spec.function.partition(":")[0]
        for spec in specs.values()
        if spec.backend not in world.enclosed  # whose vendor must not be imported here
    )
    for home, count in homes.items():
        if count > 1:
            jit_cache.prepare()  # some vendors read where their cache is when they are imported
            with contextlib.suppress(Exception):  # who cannot be imported says so when it is compiled
                importlib.import_module(home)
    same = twins(specs)
    return [name for name in names if name not in same]


def _compile(job: _Job, result: Warmup, told: Told | None) -> None:
    """In a thread of the queue: build the call's tensors, compile, and write down what became of it."""
    from layerzero.dispatch.beside import compile_elsewhere, compiles_elsewhere
    from layerzero.tuning.inputs import build

    if job.began != state.generation:
        return
    world, started = state.world, time.monotonic()
    ctx, kernel = job.item.context, world.registry.kernels[job.kernel_id]
    artifact = artifact_for(kernel, ctx, world)
    if artifact in world.ready:
        result.already += 1
    try:
        call = build(ctx, seed=0, strides=job.item.strides)
        given = world.ops[ctx.op], ctx, job.kernel_id, call.args, job.began
        if not job.critical and compiles_elsewhere(kernel) and artifact not in world.ready:
            # after the warm-up has returned requests are served
            why = compile_elsewhere(*given, paced=result.seconds > 0.0)
        else:
            why = jit.compile_now(*given)
    except LayerZeroError as error:
        why = error.reasons[0] if error.reasons else reason("JIT_FAILED", str(error))
    except Exception as error:  # no memory for the inputs, above all
        why = reason("JIT_FAILED", f"{type(error).__name__}: {error}"[:300])
    result.outcomes.append(Outcome(artifact, job.critical, time.monotonic() - started, why))
    if told is not None:
        told(len(result.outcomes), len(result.asked))


def _prove(ctx: Context) -> None:
    """Hold the kernel a call would run against the baseline on a drawn example, so that no request waits for that."""
    checked: set[str] = set()
    while True:  # ends: each kernel is checked once; one that is wrong makes way for the next
        world = state.world
        spec = world.ops[ctx.op]
        decision = decide(spec, ctx, world)
        kernel = world.registry.kernels.get(decision.chosen)
        if kernel is None or kernel.kernel_id in checked or not unchecked(spec, kernel, ctx, world):
            return
        from layerzero.dispatch.first_use import ahead

        checked.add(kernel.kernel_id)
        try:
            ahead(spec, ctx, world, bind(spec, decision, world))
        except LayerZeroError as error:
            _log.warning("%s cannot be checked ahead: %s", kernel.kernel_id, error)
            return


def _bind(ctx: Context) -> int:
    """Make the choice for a critical call and import its kernel, so that no request pays for that."""
    world = state.world
    try:
        decision = decide(world.ops[ctx.op], ctx, world)
        if decision.chosen:
            bind(world.ops[ctx.op], decision, world)
            return 1
    except LayerZeroError as error:
        _log.warning("%s cannot be made ready: %s", ctx.op, error)
    return 0


def _call(hooks: Iterable[Any], items: Iterable[Item]) -> None:
    """Let backends with needs of their own do their part; one that raises costs only itself."""
    shapes = [{**item.context.to_json(), "critical": item.critical} for item in items] if hooks else []
    for impl in hooks:
        try:
            impl.function(shapes)
        except Exception:
            _log.exception("layerzero_warmup of %s raised", impl.plugin_name)
