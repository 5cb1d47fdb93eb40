"""`lz.patch`, `lz.unpatch`, `lz.patched`: LayerZero inside a model of another library, and out again."""

from __future__ import annotations

import importlib
import importlib.metadata
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from layerzero.dispatch.beside import import_adapters
from layerzero.dispatch.late import current_world
from layerzero.errors import BackendNotAvailableError, invalid
from layerzero.json_form import Plain

_RECORD = "_layerzero_patch"
# sizes of a call that a model fixes; the others come with its inputs
_MODEL_SIZES = frozenset({"hidden", "num_heads", "num_kv_heads", "head_dim"})


class _Absent:
    """Stands for "had none". A class, since copying a patched model copies the record and must keep it the same."""


class Changes:
    """A list of what was replaced where. `undo` goes backwards, so that a thing changed twice ends as it began.

    Only what an object holds itself is recorded: an attribute that came from its class is deleted at the end, which
    brings the class's own back.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` another attribute, and remember the one it has."""
        self._made.append((owner, name, vars(owner).get(name, _Absent)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._made:
            owner, name, before = self._made.pop()
            if before is _Absent:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True, slots=True)
class Patched(Plain):
    """One part that computes with LayerZero now.

    name  where it is in the model, as `named_modules` says it; "" is the model itself
    kind  class of the part
    op    the op it calls; where several, joined by " + "
    """

    name: str
    kind: str
    op: str


@dataclass(frozen=True, slots=True)
class Left(Plain):
    """One part that was looked at and left as it is, and why."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class GraphReport(Plain):
    """The CUDA graphs of a model patched with `graphs=True`, as they are now.

    captured  (batch size, places of the cache) of each captured step
    steps     decode steps that ran so
    memory    bytes kept between calls: caches, and what the graphs need
    limit     bytes they may take
    plain     why calls of `generate` took the plain path, and how many; none of 0 yet: every call will
    """

    captured: tuple[tuple[int, int], ...]
    steps: int
    memory: int
    limit: int
    plain: Mapping[str, int]

    def __str__(self) -> str:
        memory = f"{self.memory >> 20} of {self.limit >> 20} MiB"
        sizes = ", ".join(f"{batch} × {places}" for batch, places in self.captured) or "none"
        lines = [f"  graphs of batch × places: {sizes}; {self.steps} steps; {memory}"]
        lines += [f"  {count:4} × generate on the plain path: {why}" for why, count in sorted(self.plain.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Ran(Plain):
    """Calls of one kind that run by one kernel.

    sizes  of the call that was decided; lengths that grow stand for their bucket
    why    the time it is expected to take, or what it was ranked by
    """

    op: str
    kernel: str
    sizes: Mapping[str, int]
    why: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items())
        return f"{self.op}: {self.kernel}  {self.why}\n    {sizes}"


@dataclass(frozen=True, slots=True)
class PatchReport(Plain):
    """All of it, with the library and its version. Printed, it is counted by kind; `to_json` names every part."""

    library: str
    version: str
    model: str
    patched: tuple[Patched, ...] = ()
    left: tuple[Left, ...] = ()
    graphs: GraphReport | None = None
    sizes: frozenset[int] = frozenset()

    def kernels(self) -> tuple[Ran, ...]:
        """What runs the ops of the patched parts, after a run: the calls this process has decided that have its sizes.

        A call of another model with the same widths and heads is the same call, and runs by the same kernel;
        `lz.explain(model, inputs)` runs a model once and tells part by part.
        """
        ops = {op for item in self.patched for op in item.op.split(" + ")}
        found = {}
        for bound in list(current_world().hot.values()):
            decision, kernel = bound.decision, bound.kernel_id
            own = all(value in self.sizes for name, value in decision.context.dims if name in _MODEL_SIZES)
            if decision.op in ops and own:
                winner = decision.candidate(kernel)
                why = winner.speed or f"ranked by {winner.source}"
                found[decision.context, kernel] = Ran(decision.op, kernel, dict(decision.context.dims), why)
        return tuple(sorted(found.values(), key=lambda item: (item.op, item.kernel, str(item.sizes))))

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.library} {self.version}): {len(self.patched)} parts patched"]
        for (kind, op), count in sorted(Counter((item.kind, item.op) for item in self.patched).items()):
            lines.append(f"  {count:4} × {kind}: {op}")
        for (kind, why), count in sorted(Counter((item.kind, item.why) for item in self.left).items()):
            lines.append(f"  {count:4} × {kind} left as it is: {why}")
        if self.graphs is not None:
            lines.append(str(self.graphs))
        return "\n".join(lines)


class Record:
    """One patched model: what was changed, which parts compute with LayerZero now and which were left.

    It lies on the model itself, so that a copy of the model has its own and can be unpatched by itself.
    """

    def __init__(self) -> None:
        self.changes = Changes()
        self.patched: list[Patched] = []
        self.left: list[Left] = []
        self.report: PatchReport | None = None

    def did(self, name: str, module: Any, op: str) -> None:
        self.patched.append(Patched(name, type(module).__name__, op))

    def leave(self, name: str, module: Any, why: str) -> None:
        self.left.append(Left(name, type(module).__name__, why))

    def undo(self) -> None:
        self.changes.undo()


def apply(model: nn.Module, record: Record, library: str, version: str, *steps: Callable[..., None]) -> PatchReport:
    """Take steps, each given the model and the record; all of them or, where one raises, none."""
    try:
        for step in steps:
            step(model, record)
    except BaseException:
        record.undo()
        raise
    parts = tuple(record.patched), tuple(record.left)
    report = PatchReport(library, version, type(model).__name__, *parts, sizes=_sizes(model))
    record.report = report
    vars(model)[_RECORD] = record
    return report


def _sizes(model: nn.Module) -> frozenset[int]:
    """Every size of a model's weights, and every whole number its modules hold, such as their heads."""
    held = {value for module in model.modules() for value in vars(module).values() if type(value) is int}
    weights = (*model.parameters(), *model.buffers())
    config: Any = getattr(model, "config", None)
    told = config.to_dict().values() if hasattr(config, "to_dict") else ()
    return frozenset(held | {size for weight in weights for size in weight.shape} | {n for n in told if type(n) is int})


def record_of(model: nn.Module) -> Record | None:
    """The record of a patched model; None for one that is not."""
    return vars(model).get(_RECORD)


def report_of(model: nn.Module) -> PatchReport | None:
    """What was patched in a model; None for one that is not."""
    record = record_of(model)
    return None if record is None else record.report


def restore(model: nn.Module) -> PatchReport | None:
    """Put back what was replaced in a model; what that was, None for one that was not patched."""
    record: Record | None = vars(model).pop(_RECORD, None)
    if record is None:
        return None
    record.undo()
    return record.report


def over(function: Any, names: Mapping[str, Any], code: types.CodeType | None = None) -> Any:
    """The function, with other code where that is given, over other values of some of its global names. Without
    `__name__`: torch.compile would look them up in the module of that name, where they are not."""
    known = {name: item for name, item in {**function.__globals__, **names}.items() if name != "__name__"}
    how = function.__name__, function.__defaults__, function.__closure__
    made = types.FunctionType(code or function.__code__, known, *how)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__"):
        setattr(made, name, getattr(function, name))
    return made


def version_of(library: str, oldest: tuple[int, int]) -> str:
    """The version of a library here; an error where there is none, or one from before what we enter by."""
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise BackendNotAvailableError(
            code="BACKEND_NOT_INSTALLED", value=library, limit=f"'layerzero-models[{library}]'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < oldest:
        raise BackendNotAvailableError(
            f"{library} {found} is too old to patch", code="BACKEND_VERSION_MISMATCH", value=found,
            limit=f">={'.'.join(map(str, oldest))}",
        )  # fmt: skip
    return found


# Top-level package of a model's class (or of a class it derives from) -> the module that knows its models, loaded by
# name at first use. Such a module has three functions: `patch(model, **options)`, `unpatch(model)` and
# `patched(model)`, the last two returning a PatchReport or None.
PATCHERS: dict[str, str] = {
    "diffusers": "layerzero_models.diffusers",
    "transformers": "layerzero_models.transformers",
}

Model = TypeVar("Model")


def patch(model: Model, **options: Any) -> Model:
    """Make a model use LayerZero's ops, in place, and return it; `lz.patched(model)` lists what changed.

        model = lz.patch(AutoModelForCausalLM.from_pretrained(name))
        pipe = lz.patch(StableDiffusionPipeline.from_pretrained(name))

    Options for transformers: skip=(), everything=False, joined=True, graphs=False, graph_memory=None; for diffusers:
    attention=True, norms=True, feed_forward=False, text_encoders=True (docs/transformers.md, docs/diffusers.md).
    Weights are not copied or moved. On a GPU the libraries of its kernels are imported here.
    """
    patcher_of(model).patch(model, **options)
    where = getattr(model, "device", None)
    if isinstance(where, torch.device) and where.type == "cuda":
        import_adapters(where)
    return model


def unpatch(model: Model) -> Model:
    """Undo `lz.patch`, exactly, and return the model. A model that was never patched stays as it is."""
    patcher_of(model).unpatch(model)
    return model


def patched(model: Any) -> PatchReport | None:
    """What `lz.patch` did to a model: parts patched, parts left alone and why. None for one that is not patched."""
    found: PatchReport | None = patcher_of(model).patched(model)
    return found


def patcher_of(model: Any) -> Any:
    """The module that patches models of this kind; an error that names the libraries known otherwise."""
    for kind in type(model).__mro__:
        name = PATCHERS.get(kind.__module__.partition(".")[0])
        if name is not None:
            return importlib.import_module(name)
    expected, name = f"a model of {' or '.join(sorted(PATCHERS))}", type(model).__name__
    told = f"{type(model).__module__}.{name} is not a model lz.patch knows"
    hint = "call lz.attention, lz.rms_norm, … in the model's own code, or patch the parts of it that are such models"
    raise invalid("TYPE_INVALID", name, expected, told, hint)
