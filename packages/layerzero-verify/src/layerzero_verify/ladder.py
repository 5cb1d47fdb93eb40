"""`lz.verify`: the rungs in order, for as much as a lane has time for, and the verdict; a checklist for new models."""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from layerzero.errors import invalid
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import full_float32
from layerzero.numerics.tolerances import dtype_name
from layerzero.version import __version__
from layerzero_verify import forward, layers, models, training
from layerzero_verify.block import CONFIGS, Config
from layerzero_verify.kernels import CONTRACTS, Bench, contract, sound
from layerzero_verify.lineup import LineUp, Target, resolve, unknown
from layerzero_verify.report import LEVELS, Check, Level, VerifyReport, failed, judge


@dataclass(frozen=True)
class Lane:
    """What a lane covers; as it stands the quick one, under a minute on two cores: what every change should pass.

    `thorough` adds a line-up for each backend's kernels to the one that selection makes; `compositions` prove a kernel
    that declares batch_invariant, with each seed. `kernel_dtypes` are those level 1 tries, None for all that a kernel
    declares. `threads` is how many torch may use, None leaves that as it is: most of the ladder's tensors are so small
    that a second thread only gets in the way, and the stress lane runs with all of them.
    """

    configs: tuple[str, ...] = ("tiny", "gqa")
    dtypes: tuple[str, ...] = ("float32",)
    models: tuple[str, ...] = ("llama", "mistral", "qwen", "gemma", "gpt2", "t5", "vit")
    stage_models: tuple[str, ...] = ("llama",)
    training: tuple[str, ...] = ("tiny",)
    steps: int = 5
    seeds: int = 1
    length: int = 12
    thorough: bool = False
    cached: bool = False
    kernel_dtypes: tuple[str, ...] | None = ("float32", "float16", "bfloat16")
    threads: int | None = 1
    compositions: int = 24


# Under ten minutes: every config, model, dtype and backend.
_FULL = Lane(
    configs=tuple(CONFIGS),
    dtypes=("float32", "bfloat16", "float16"),
    models=models.MODELS,
    stage_models=("llama", "mistral", "qwen"),
    training=tuple(CONFIGS),
    steps=20,
    seeds=3,
    length=24,
    thorough=True,
    cached=True,
    kernel_dtypes=None,
    compositions=334,
)
# As long as it takes: many seeds, long sequences, hundreds of training steps.
_STRESS = replace(_FULL, steps=200, seeds=20, length=96, threads=None)
LANES: dict[str, Lane] = {"quick": Lane(), "full": _FULL, "stress": _STRESS}

# Before anybody relies on a new architecture, in this order.
STEPS = tuple(
    {"step": step, "command": f"lz verify {options}"}
    for step, options in (
        (
            "Kernels: every op the model calls for, forward and backward; a new op or option gets its own cases",
            "--level 1 --lane full",
        ),
        (
            "Layer: all stages of one layer; one that is not RMSNorm + GQA + SwiGLU gets a test of its own",
            "--level 2 --lane full",
        ),
        ("Weight conversion: the saved weights, loaded and laid out, give the same stages", "--level 3 --model FOLDER"),
        (
            "Forward parity: logits within 1e-3 and the same top-1 at every position",
            "--level 4 --model FOLDER --lane full",
        ),
        ("Training: 5 to 20 steps of SGD, weights within 1e-3 and 1e-2", "--level 5 --lane full"),
        ("Stress: 100 and more steps, the two loss curves together, no drift", "--level 5 --lane stress"),
    )
)


_LAYER_OPS = frozenset({"rms_norm", "linear", "rope", "attention", "add_rms_norm", "silu_and_mul", "paged_attention"})
_MODEL_OPS = _LAYER_OPS - {"add_rms_norm", "paged_attention"}
_MODEL_OPS |= {"layer_norm", "embedding", "gelu_and_mul", "gemma_rms_norm"}
_TRAINING_OPS = (_LAYER_OPS - {"paged_attention"}) | {"embedding", "cross_entropy"}
# By level: the ops it is made of, and what that is called.
_OPS = {
    2: (_LAYER_OPS, "a layer"),
    3: (_LAYER_OPS, "a layer"),
    4: (_MODEL_OPS, "these models"),
    5: (_TRAINING_OPS, "a training step"),
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
# A piece of a level: a label for whoever watches, and the checks it makes.
Task: TypeAlias = tuple[str, Callable[[], Iterable[Check]]]
Value = TypeVar("Value")


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
    """Compare kernels, layers, models and training with references; only invalid arguments raise.

    Level 1 compares each kernel with the reference in float64, level 2 a whole layer, level 3 its stages with real
    weights, level 4 real architectures with transformers' own computation, level 5 training. `lane` is "quick",
    "full" or "stress"; `op`, `kernel` and `backend` say what is under test (everything usable here if none is given);
    `level`, `config` and `dtype` restrict the levels; `model` is a local folder of a causal language model with real
    weights for levels 3 and 4. `progress(done, total, label)` is called before each task.
    """
    started = time.perf_counter()
    plan, wanted = named(LANES, lane), _levels(level)
    word = None if dtype is None else dtype_name(dtype)
    if word not in (None, *_DTYPES):
        raise invalid("DTYPE_UNSUPPORTED", dtype, _DTYPES, f"no dtype {dtype!r}")
    chosen = tuple(named(CONFIGS, name) for name in (plan.configs if config is None else (config,)))
    compiles = plan.thorough or kernel is not None or backend is not None
    target = resolve(op=op, kernel=kernel, backend=backend, device=device, compiles=compiles)
    runner = _Runner(plan, target, wanted, chosen, word, model, seed)
    with warnings.catch_warnings(), _calm(plan.threads), full_float32():
        # A CPU without bfloat16 units says so once; the result is right all the same.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        found = runner.climb(progress or (lambda done, total, label: None))
    versions = {"layerzero": __version__, "torch": torch.__version__}
    if not models.missing():
        versions["transformers"] = importlib.metadata.version("transformers")
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
        versions=tuple(versions.items()),
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


def named(table: Mapping[str, Value], name: str) -> Value:
    """What stands under a name, or an error that lists them."""
    if name not in table:
        raise unknown(f"there is no {name!r}", name, table)
    return table[name]


def _levels(level: int | Iterable[int] | None) -> frozenset[int]:
    known = frozenset(LEVELS) - {0}
    wanted = known if level is None else frozenset({level} if isinstance(level, int) else level)
    if not wanted or not wanted <= known:
        raise invalid("VALUE_INVALID", str(level), sorted(known), f"no such level: {level}")
    return wanted


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


@dataclass
class _Runner:
    """Makes the tasks of each level and runs them. `wrong` are kernels that take no part any more."""

    lane: Lane
    target: Target
    wanted: frozenset[int]
    configs: tuple[Config, ...]
    dtype: str | None
    folder: str | None
    seed: int
    wrong: frozenset[str] = frozenset()
    line_ups: tuple[LineUp, ...] = ()

    def __post_init__(self) -> None:
        self._leave_out(item.kernel_id for item in self.target.kernels if sound(item))

    def _leave_out(self, kernels: Iterable[str]) -> None:
        self.wrong |= frozenset(kernels)
        self.line_ups = self.target.line_ups(thorough=self.lane.thorough, without=self.wrong)

    @property
    def usable(self) -> list[KernelSpec]:
        return [item for item in self.target.kernels if item.kernel_id not in self.wrong]

    # -- climbing ------------------------------------------------------------------------------------
    def climb(self, progress: Callable[[int, int, str], None]) -> tuple[Level, ...]:
        plans = {number: self._plan(number) for number in sorted({0, *self.wanted})}
        total = sum(len(tasks) for tasks, _ in plans.values())
        done = 0
        found: list[Level] = []
        for number, (tasks, why) in plans.items():
            start = time.perf_counter()
            if number >= 2 and found[-1].number == 1:
                # What is wrong alone is wrong in a layer too; the others are tried without it.
                self._leave_out(item.kernel for item in found[-1].failures if item.kernel)
            if number >= 2 and self.wrong:
                tasks, why = self._plan(number)
            if number >= 3 and any(rung.number == 0 and rung.failures for rung in found):
                tasks, why = [], "the preflight failed; nothing heavy is run before it passes"
            checks: list[Check] = []
            for label, run in tasks:
                progress(done, total, label)
                done += 1
                try:
                    checks += run()
                except Exception as error:  # a check that itself breaks is a finding, not the end of the run
                    checks.append(failed(number, label, error))
            found.append(Level(number, tuple(checks), why, time.perf_counter() - start))
        progress(total, total, "done")
        return tuple(found)

    def _plan(self, number: int) -> tuple[list[Task], str]:
        """The tasks of a level, or why it has none."""
        if not self.target.kernels:
            return [], "no kernel under test can run here"
        if number >= 2:
            ops, what = _OPS[number]
            if not self.line_ups:
                return [], "every kernel under test fails alone; what it would do to a layer follows from that"
            if not self._serves(ops) and not self._brought():
                return [], f"no kernel under test computes an op of {what}"
            if number == 4 and models.missing():
                return [], models.missing()
            if number == 5 and self.dtype not in (None, "float32"):
                return [], "training parity is defined in float32"
        made = (self._preflight, self._kernels, self._layers, self._stages, self._models, self._training)[number]
        own = [] if number in (2, 3, 5) and not self._serves(_OPS[number][0]) else list(made())
        return [*own, *(self._climbed(number) if number in (2, 3, 5) else ())], ""

    def _serves(self, ops: frozenset[str]) -> bool:
        standing = {item for line_up in self.line_ups for item, _ in line_up.stand_ins}
        return self.target.everything or bool(({item.op for item in self.usable} | standing) & ops)

    def _brought(self) -> tuple[str, ...]:
        """Models of other packages that call an op under test; without one named, in the longer lanes alone."""
        if models.missing() or self.folder is not None or (self.target.everything and not self.lane.thorough):
            return ()
        ops = {item.op for item in self.usable}
        return tuple(name for name, found in models.brought().items() if ops & set(found[3]))

    def _climbed(self, number: int) -> Iterator[Task]:
        checks: dict[int, Callable[..., Iterator[Check]]] = {
            2: forward.check_layers,
            3: forward.check_stages,
            5: partial(forward.check_training, steps=self.lane.steps),
        }
        for line_up in self.line_ups:
            yield from self._of_models(f"level {number} of", checks[number], line_up, self._brought())

    def _of_models(
        self, word: str, check: Callable[..., Iterator[Check]], line_up: LineUp, names: tuple[str, ...]
    ) -> Iterator[Task]:
        """A check of each of these models in a line-up; a folder takes the place of all."""

        def run(name: str, made: Callable[..., models.Model]) -> Iterator[Check]:
            model = made(name, self.seed, self.lane.length)
            return check(name, model, line_up, self.target.device, self.dtype or "float32")

        made = models.made if self.folder is None else models.from_folder
        for name in names if self.folder is None else (self.folder,):
            yield f"{word} {name} [{line_up.name}]", partial(run, name, made)

    # -- the levels ----------------------------------------------------------------------------------
    def _preflight(self) -> Iterator[Task]:
        for item in self.target.kernels:
            yield item.kernel_id, partial(contract, item, self.target.device)
        if self.wanted & {3, 4, 5} and not models.missing() and self._serves(_MODEL_OPS):
            for line_up in self.line_ups[:1]:
                yield f"three models [{line_up.name}]", partial(forward.matrix, line_up, self.target.device, self.seed)

    def _kernels(self) -> Iterator[Task]:
        for item in self.usable:
            for turn in range(self.lane.seeds):
                yield item.kernel_id, partial(self._kernel, item, self.seed + turn)

    def _kernel(self, item: KernelSpec, seed: int) -> Iterator[Check]:
        among = self.lane.kernel_dtypes
        bench = Bench(item, self.target.device, seed=seed, dtype=self.dtype, among=among)
        with bench.locked():
            yield from bench.forward()
            yield from bench.backward()
            yield from bench.repeated()
            yield from bench.composed(self.lane.compositions)
            for promise in CONTRACTS:
                yield from promise(bench)

    def _layers(self) -> Iterator[Task]:
        for line_up in self.line_ups:
            for dtype in self._dtypes(line_up):
                for config in self.configs:
                    run = partial(layers.check_layer, config, line_up, self.target.device, dtype, self.seed)
                    yield f"layer {config.name} [{line_up.name}]", run

    def _dtypes(self, line_up: LineUp) -> list[str]:
        """The lane's dtypes for the first line-up, its first one for the others.

        A plugin's own op has no reference behind it that would take other dtypes than its kernels do.
        """
        lane = self.lane.dtypes if line_up is self.line_ups[0] else self.lane.dtypes[:1]
        standing = {name for _, name in line_up.stand_ins}
        bound = [item.dtypes for item in self.usable if item.op in standing]
        return [name for name in ((self.dtype,) if self.dtype else lane) if all(name in known for known in bound)]

    def _stages(self) -> Iterator[Task]:
        device, dtype = self.target.device, self.dtype or "float32"
        for line_up in self.line_ups:
            if models.missing():
                yield f"stages [{line_up.name}]", partial(layers.check_made, line_up, device, dtype, self.seed)
            else:
                yield from self._of_models("stages", layers.check_stages, line_up, self.lane.stage_models)

    def _models(self) -> Iterator[Task]:
        check = partial(forward.check_model, cached=self.lane.cached)
        own = self.lane.models if self._serves(_MODEL_OPS) else ()
        for line_up in self.line_ups:
            yield from self._of_models("model", check, line_up, (*own, *self._brought()))

    def _training(self) -> Iterator[Task]:
        options = {"steps": self.lane.steps, "seed": self.seed}
        for line_up in self.line_ups:
            for config in self.configs if line_up is self.line_ups[0] else self.configs[:1]:
                if config.name in self.lane.training or len(self.configs) == 1:
                    run = partial(training.check_training, config, line_up, self.target.device, **options)
                    yield f"training {config.name} [{line_up.name}]", run
