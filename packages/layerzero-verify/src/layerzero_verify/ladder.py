"""`lz.verify`: the rungs in order, for as much as a lane has time for, and the verdict."""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from layerzero.errors import invalid
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import full_float32
from layerzero.numerics.tolerances import dtype_name
from layerzero.version import __version__
from layerzero_verify import configs, layers, models, stage_diff, training
from layerzero_verify.configs import Config
from layerzero_verify.contracts import CONTRACTS
from layerzero_verify.kernels import Bench
from layerzero_verify.lanes import LANES, Lane
from layerzero_verify.lineup import LineUp, Target, resolve
from layerzero_verify.preflight import contract, sound
from layerzero_verify.report import LEVELS, Check, Level, VerifyReport, failed
from layerzero_verify.verdict import judge

__all__ = ["Task", "verify"]

_LAYER_OPS = frozenset({"rms_norm", "linear", "rope", "attention", "add_rms_norm", "silu_and_mul", "paged_attention"})
_MODEL_OPS = (_LAYER_OPS - {"add_rms_norm", "paged_attention"}) | {
    "layer_norm",
    "embedding",
    "gelu_and_mul",
    "gemma_rms_norm",
}
_TRAINING_OPS = (_LAYER_OPS - {"paged_attention"}) | {"embedding", "cross_entropy"}
_OF = {2: "a layer", 3: "a layer", 4: "these models", 5: "a training step"}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Task:
    """A piece of a level: a label for whoever watches, and the checks it makes."""

    level: int
    label: str
    run: Callable[[], Iterable[Check]]


def verify(
    *,
    lane: str = "quick",
    op: str | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    level: int | Iterable[int] | None = None,
    config: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    model: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> VerifyReport:
    """Climb the parity ladder and say what was found; nothing raises but a request that means nothing.

    Level 1 compares each kernel with the reference in float64, level 2 a whole layer, level 3 its stages with real
    weights, level 4 real architectures with transformers' own computation, level 5 training. `lane` is "quick",
    "full" or "stress"; `op`, `kernel` and `backend` say what is under test (everything usable here if none is given);
    `level`, `config` and `dtype` restrict the rungs; `model` is a local folder of a causal language model with real
    weights for levels 3 and 4. `progress(done, total, label)` is called before each task.
    """
    started = time.perf_counter()
    plan = _lane(lane)
    wanted = _levels(level)
    word = None if dtype is None else _dtype(dtype)
    chosen = None if config is None else configs.named(config)
    compiles = plan.thorough or kernel is not None or backend is not None
    target = resolve(op=op, kernel=kernel, backend=backend, device=device, compiles=compiles)
    runner = _Runner(plan, target, wanted, chosen, word, model, seed)
    with warnings.catch_warnings(), _calm(plan.threads), full_float32():
        # A CPU without bfloat16 units says so once; the result is right all the same.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        found = runner.climb(progress or (lambda done, total, label: None))
    return VerifyReport(
        lane=lane,
        target=target.name,
        device=str(target.device),
        dtype=word or "",
        seed=seed,
        kernels=tuple(item.kernel_id for item in target.kernels),
        absent=target.absent,
        levels=found,
        verdict=judge(found, target),
        seconds=time.perf_counter() - started,
        versions=_versions(),
        notes=_notes(found, target),
    )


@contextmanager
def _calm(threads: int | None) -> Iterator[None]:
    """Random state, gradients and threads as a check wants them; afterwards as they were."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _lane(name: str) -> Lane:
    if name not in LANES:
        raise invalid("VALUE_INVALID", name, list(LANES), f"no lane {name!r}")
    return LANES[name]


def _levels(level: int | Iterable[int] | None) -> frozenset[int]:
    known = frozenset(LEVELS) - {0}
    wanted = known if level is None else frozenset({level} if isinstance(level, int) else level)
    if not wanted or not wanted <= known:
        raise invalid("VALUE_INVALID", str(level), sorted(known), f"no such level: {level}")
    return wanted


def _dtype(word: str) -> str:
    name = dtype_name(word)
    if name not in _DTYPES:
        raise invalid("DTYPE_UNSUPPORTED", word, _DTYPES, f"no dtype {word!r}")
    return name


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("layerzero", __version__), ("torch", torch.__version__)]
    if not models.missing():
        found.append(("transformers", importlib.metadata.version("transformers")))
    return tuple(found)


def _notes(found: tuple[Level, ...], target: Target) -> tuple[str, ...]:
    above = {
        name
        for rung in found
        if rung.number >= 2
        for check in rung.checks
        for name in (check.kernel, *check.served, *(item.kernel for item in check.stages))
    }
    if not any(rung.checks for rung in found if rung.number >= 2):
        return ()
    alone = [item.kernel_id for item in target.kernels if item.kernel_id not in above]
    return (f"seen at level 1 only, no layer or model here calls for them: {', '.join(alone)}",) if alone else ()


class _Runner:
    """Makes the tasks of each level and runs them."""

    def __init__(
        self,
        lane: Lane,
        target: Target,
        wanted: frozenset[int],
        config: Config | None,
        dtype: str | None,
        model: str | None,
        seed: int,
    ) -> None:
        self.lane = lane
        self.target = target
        self.wanted = wanted
        self.configs = (config,) if config is not None else tuple(configs.CONFIGS[name] for name in lane.configs)
        self.dtype = dtype
        self.folder = model
        self.seed = seed
        unsound = frozenset(item.kernel_id for item in target.kernels if sound(item))
        self.usable = tuple(item for item in target.kernels if item.kernel_id not in unsound)
        self.wrong: frozenset[str] = unsound
        self.line_ups = target.line_ups(thorough=lane.thorough, without=self.wrong)

    # -- climbing ------------------------------------------------------------------------------------
    def climb(self, progress: Callable[[int, int, str], None]) -> tuple[Level, ...]:
        """All levels asked for, the preflight first."""
        plans = {number: self._plan(number) for number in sorted({0, *self.wanted})}
        total = sum(len(tasks) for tasks, _ in plans.values())
        done = 0
        found: list[Level] = []
        for number, (tasks, why) in plans.items():
            start = time.perf_counter()
            if number >= 2 and found[-1].number == 1 and found[-1].failures:
                # What is wrong alone is wrong in a layer too; the others are tried without it.
                self.wrong |= {item.kernel for item in found[-1].failures if item.kernel}
                self.line_ups = self.target.line_ups(thorough=self.lane.thorough, without=self.wrong)
            if number >= 2 and self.wrong:
                tasks, why = self._plan(number)
            if number >= 3 and any(rung.number == 0 and rung.failures for rung in found):
                tasks, why = [], "the preflight failed; nothing heavy is run before it passes"
            checks: list[Check] = []
            for task in tasks:
                progress(done, total, task.label)
                done += 1
                try:
                    checks += task.run()
                except Exception as error:  # a check that itself breaks is a finding, not the end of the run
                    checks.append(failed(number, task.label, error))
            found.append(Level(number, tuple(checks), why, time.perf_counter() - start))
        progress(total, total, "done")
        return tuple(found)

    def _plan(self, number: int) -> tuple[list[Task], str]:
        """The tasks of a level, or why it has none."""
        if not self.target.kernels:
            return [], "no kernel under test can run here"
        if number == 0:
            return list(self._preflight()), ""
        if number == 1:
            return list(self._kernels()), ""
        if not self.line_ups:
            return [], "every kernel under test fails alone; what it would do to a layer follows from that"
        ops = {2: _LAYER_OPS, 3: _LAYER_OPS, 4: _MODEL_OPS, 5: _TRAINING_OPS}[number]
        if not self._serves(ops):
            return [], f"no kernel under test computes an op of {_OF[number]}"
        if number == 4 and models.missing():
            return [], models.missing()
        if number == 5 and self.dtype not in (None, "float32"):
            return [], "training parity is defined in float32"
        made = {2: self._layers, 3: self._stages, 4: self._models, 5: self._training}[number]
        return list(made()), ""

    def _serves(self, ops: frozenset[str]) -> bool:
        if self.target.everything:
            return True
        standing = {item for line_up in self.line_ups for item, _ in line_up.stand_ins}
        kept = {item.op for item in self.usable if item.kernel_id not in self.wrong}
        return bool((kept | standing) & ops)

    # -- the levels ----------------------------------------------------------------------------------
    def _preflight(self) -> Iterator[Task]:
        for item in self.target.kernels:
            yield Task(0, item.kernel_id, partial(contract, item, self.target.device))
        if self.wanted & {3, 4, 5} and not models.missing() and self._serves(_MODEL_OPS):
            from layerzero_verify.forward import matrix

            for line_up in self.line_ups[:1]:
                yield Task(0, f"three models [{line_up.name}]", partial(matrix, line_up, self.target.device, self.seed))

    def _kernels(self) -> Iterator[Task]:
        for item in self.usable:
            for turn in range(self.lane.seeds):
                yield Task(1, item.kernel_id, partial(self._kernel, item, self.seed + turn))

    def _kernel(self, item: KernelSpec, seed: int) -> Iterator[Check]:
        among = self.lane.kernel_dtypes
        bench = Bench(item, self.target.device, seed=seed, dtype=self.dtype, among=among)
        with bench.locked():
            yield from bench.forward()
            yield from bench.backward()
            yield from bench.repeated()
            for promise in CONTRACTS:
                yield from promise(bench)

    def _layers(self) -> Iterator[Task]:
        for line_up in self.line_ups:
            for dtype in self._dtypes(line_up):
                for config in self.configs:
                    run = partial(layers.check_layer, config, line_up, self.target.device, dtype, self.seed)
                    yield Task(2, f"layer {config.name} [{line_up.name}]", run)

    def _dtypes(self, line_up: LineUp) -> list[str]:
        """The lane's dtypes for the first line-up, its first one for the others.

        A plugin's own op has no reference behind it that would take other dtypes than its kernels do.
        """
        lane = self.lane.dtypes if line_up is self.line_ups[0] else self.lane.dtypes[:1]
        standing = {name for _, name in line_up.stand_ins}
        bound = [item.dtypes for item in self.usable if item.op in standing]
        return [name for name in ((self.dtype,) if self.dtype else lane) if all(name in known for known in bound)]

    def _stages(self) -> Iterator[Task]:
        dtype = self.dtype or "float32"
        for line_up in self.line_ups:
            if models.missing():
                run = partial(stage_diff.check_made, line_up, self.target.device, dtype, self.seed)
                yield Task(3, f"stages [{line_up.name}]", run)
                continue
            for name in self._names(self.lane.stage_models):
                yield Task(3, f"stages {name} [{line_up.name}]", partial(self._stage, name, line_up, dtype))

    def _stage(self, name: str, line_up: LineUp, dtype: str) -> Iterator[Check]:
        return stage_diff.check_stages(name, self._model(name), line_up, self.target.device, dtype)

    def _names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (self.folder,) if self.folder is not None else names

    def _model(self, name: str) -> models.Model:
        if name == self.folder:
            return models.from_folder(name, self.seed, self.lane.length)
        return models.made(name, self.seed, self.lane.length)

    def _models(self) -> Iterator[Task]:
        for line_up in self.line_ups:
            for name in self._names(self.lane.models):
                yield Task(4, f"model {name} [{line_up.name}]", partial(self._forward, name, line_up))

    def _forward(self, name: str, line_up: LineUp) -> Iterator[Check]:
        from layerzero_verify.forward import check_model

        return check_model(
            name, self._model(name), line_up, self.target.device, self.dtype or "float32", cached=self.lane.cached
        )

    def _training(self) -> Iterator[Task]:
        for line_up in self.line_ups:
            for config in self.configs if line_up is self.line_ups[0] else self.configs[:1]:
                if config.name not in self.lane.training and len(self.configs) > 1:
                    continue
                run = partial(
                    training.check_training,
                    config,
                    line_up,
                    self.target.device,
                    steps=self.lane.steps,
                    seed=self.seed,
                )
                yield Task(5, f"training {config.name} [{line_up.name}]", run)
