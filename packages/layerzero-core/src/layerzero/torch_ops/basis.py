"""Selection while a graph is traced, and the guard that goes with it.

The kernel of a traced call is selected on stand-ins of its fake tensors. Where it is plain torch, it is written into
the graph, which is then only right as long as that selection is: so each graph has a `Basis`, the selections that were
written into it, and Dynamo asks it before every run. A World in which one of them comes out differently makes Dynamo
trace again. A graph that holds an opaque op needs no such guard: the op selects when it runs.

A size that a graph leaves open has a hint (the size it was traced with) and a range. Selection is asked with the hint,
and then with other sizes of the range, on tensors that only look so: nothing here compares a symbol, so no guard on
any size comes of it.
"""

from __future__ import annotations

import itertools
import logging
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.adapt import adapt
from layerzero.dispatch.late import current_world
from layerzero.dispatch.run import decide, describe
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.isolation.wire import span
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.selection.compiled import asked, in_graph
from layerzero.selection.engine import select
from layerzero.selection.world import World, boundaries, unchecked
from layerzero.torch_ops import traced

# Sizes beyond this are not tried: no axis of a model is longer.
_LONGEST = 1 << 20
# What torch can count in a tensor: its bytes are an int64.
_MOST_BYTES = (1 << 63) - 1
# So many combinations of sizes are tried at most.
_TRIALS = 300

# What torch puts in place of a number that a graph leaves open, and that number's type.
_SYMBOLIC: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

Sizes = Mapping[Any, int]


class Unknown(Exception):
    """A size without a hint: data-dependent, known only when the graph runs."""


class Impossible(Exception):
    """Sizes, each in its range, that no tensor can have together: its bytes would not fit into 63 bits."""


def _nodes(args: Sequence[Any]) -> Iterator[Any]:
    for item in args:
        if isinstance(item, Tensor):
            yield from (part.node for part in (*item.shape, *item.stride()) if isinstance(part, torch.SymInt))
        elif type(item) in _SYMBOLIC:
            yield item.node
        elif isinstance(item, (list, tuple)):
            yield from _nodes(item)


def symbols_of(args: Sequence[Any]) -> dict[Any, tuple[int, int, int]]:
    """Each free symbol with its hint and its range. Raises Unknown where one has no hint."""
    found: dict[Any, tuple[int, int, int]] = {}
    for node in _nodes(args):
        env = node.shape_env
        for symbol in env.replace(node.expr).free_symbols:
            if symbol in found:
                continue
            # Renamed between releases of torch; the old name warns.
            hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
            if symbol not in hints:
                raise Unknown(str(symbol))
            known = env.var_to_range.get(symbol)
            low, high = (2, _LONGEST) if known is None else (_bounded(known.lower), _bounded(known.upper))
            found[symbol] = (int(hints[symbol]), low, high)
    return found


def _bounded(limit: Any) -> int:
    # A limit may be an infinity of sympy's, which can be compared but is no int.
    return _LONGEST if limit > _LONGEST else max(0, int(limit))


def ends(symbols: Mapping[Any, tuple[int, int, int]]) -> Iterator[Sizes]:
    """The low ends of all ranges together, then each range's high end by itself: all at once no tensor could have."""
    lows = {symbol: low for symbol, (_, low, _) in symbols.items()}
    yield lows
    for symbol, (_, _, high) in symbols.items():
        yield lows | {symbol: high}


def sizes_to_try(symbols: Mapping[Any, tuple[int, int, int]], more: Sequence[int] = ()) -> Iterator[Sizes]:
    """Assignments over the ranges: powers of two, the ends, and `more`; of several symbols in all combinations."""
    each = []
    for hint, low, high in symbols.values():
        wanted = {low, min(high, _LONGEST), hint, *(1 << i for i in range(21)), *more}
        each.append(sorted(value for value in wanted if low <= value <= high))
    while len(each) > 0 and math.prod(map(len, each)) > _TRIALS:
        longest = max(range(len(each)), key=lambda i: len(each[i]))
        if len(each[longest]) <= 3:
            raise Unknown("too many open sizes")
        each[longest] = each[longest][::2] + each[longest][-1:]
    for values in itertools.product(*each):
        yield dict(zip(symbols, values, strict=True))


def stand_ins(args: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """The arguments with meta tensors in place of fake ones, and with numbers in place of symbols."""
    return tuple(_stand_in(item, sizes, True) for item in args)


def placed_stand_ins(args: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """The same with fake tensors that say where they lie: torch's own checks of a call ask for that."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return tuple(_stand_in(item, sizes, False) for item in args)


def _stand_in(item: Any, sizes: Sizes, meta: bool) -> Any:
    if isinstance(item, Tensor):
        shape = [_number(part, sizes) for part in item.shape]
        strides = [_number(part, sizes) for part in item.stride()]
        # Dense or as it is strided, whichever is more: torch computes both.
        if max(span(shape, strides), math.prod(shape)) * item.itemsize > _MOST_BYTES:
            raise Impossible(f"{shape} with strides {strides}")
        made = torch.empty_strided(shape, strides, dtype=item.dtype, device="meta" if meta else item.device)
        return made.requires_grad_(True) if item.requires_grad else made
    if isinstance(item, (list, tuple)):
        return type(item)(_stand_in(part, sizes, meta) for part in item)
    return _number(item, sizes)


def _number(item: Any, sizes: Sizes) -> Any:
    make = _SYMBOLIC.get(type(item))
    if make is None:
        return item
    from sympy import Integer  # type: ignore[import-untyped] # here only: where there are symbols, it is loaded

    node = item.node
    expr = node.shape_env.replace(node.expr).xreplace({symbol: Integer(size) for symbol, size in sizes.items()})
    if expr.free_symbols:
        raise Unknown(str(expr))
    return make(expr)


def signature(args: Sequence[Any]) -> str:
    """The shapes and strides with their symbols, as text: equal ones are decided alike."""
    return ";".join(f"{item.shape}{item.stride()}" if isinstance(item, Tensor) else str(item) for item in args)


_log = logging.getLogger("layerzero.torch_ops")

# Answers beside the name of a kernel's form: the op's plain form, its opaque op, and that op with its gradient.
PLAIN, OPAQUE, FOREIGN = "plain", "", "foreign"


class Question(NamedTuple):
    """One traced call: the op, its canonical arguments with fake tensors, and whether a gradient is traced with it."""

    op: str
    args: tuple[Any, ...]
    layout: str | None
    backend: str | None
    grad: bool


class _Made(NamedTuple):
    spec: OperationSpec
    context: Context
    grad: bool
    answer: str


class Basis:
    """What one graph's written-out kernels depend on."""

    def __init__(self) -> None:
        self._made: dict[tuple[Context, bool], _Made] = {}
        self._good: World | None = None
        self._alike: set[str] = set()
        # Switches of torch that some kernel of these ops looks at, each with what it said.
        self._switches: tuple[tuple[Callable[[], bool], bool], ...] = ()

    def add(self, made: Sequence[_Made], world: World) -> None:
        """Count these selections, made in this World, among those that must hold."""
        self._made.update({(item.context, item.grad): item for item in made})
        ops = {item.spec.op_id for item in self._made.values()}
        names = {name for op in ops for kernel in world.registry.by_op(op) for name in kernel.guards}
        watched = [modes.SWITCHES[name] for name in sorted(names & modes.SWITCHES.keys())]
        self._switches = tuple((switch, switch()) for switch in watched)
        self._good = None
        self._alike.clear()

    def holds(self, _: Any = None) -> bool:
        """Whether each selection comes out as it did. Asked before every run of the graph; never raises."""
        try:
            world = current_world()
            for switch, was in self._switches:
                if switch() is not was:
                    return False
            if world is self._good:
                return True
            if world.fingerprint in self._alike:  # a scope entered again: another World that selects alike
                self._good = world
                return True
            for item in self._made.values():
                found = _written(_probed(item.spec, item.context, world), item.grad, world)
                if found != item.answer:
                    _log.info("%s: %s was written into a graph, now it is %s", item.spec.op_id, item.answer, found)
                    return False
            self._good = world
            self._alike.add(world.fingerprint)
        except LayerZeroError:
            return False  # traced again, the call says itself what is wrong
        return True


def basis_of(graph: Any, guard: Callable[[Basis], None]) -> Basis:
    """The basis of the graph that is being traced, kept in the tracer's own object; a new one is guarded."""
    found: Basis | None = getattr(graph, "layerzero_basis", None)
    if found is None:
        found = Basis()
        guard(found)
        graph.layerzero_basis = found
    return found


def answer(question: Question, basis: Callable[[], Basis]) -> str:
    """What stands in the graph for a call: the name of a kernel's form, `PLAIN`, or "" for the opaque op.

    Where open sizes could change the choice, or where it cannot be made, the opaque op stays; with a gradient the op's
    plain form.
    """
    instead = PLAIN if question.grad else OPAQUE
    if any(isinstance(item, torch.SymFloat) for item in question.args):
        return instead  # torch's own functions take a scale or an eps as a constant; the opaque op as it comes
    world = current_world()
    spec = world.ops[question.op]
    try:
        symbols = symbols_of(question.args)
        hints = {symbol: hint for symbol, (hint, _, _) in symbols.items()}
        first = _context(spec, question, hints, world)
        key = ("traced", first, question.grad, signature(question.args) if symbols else "")
        made: tuple[_Made, ...] | None = world.memo.get(key)
        if made is None:
            made = world.memo[key] = tuple(_made(spec, question, first, symbols, world))
    except (LayerZeroError, Unknown) as error:
        _log.debug("%s: %s; decided when the graph runs", question.op, error)
        return instead
    if not made:
        return instead
    basis().add(made, world)
    return OPAQUE if made[0].answer == FOREIGN else made[0].answer


def _context(spec: OperationSpec, question: Question, sizes: Sizes, world: World) -> Context:
    where = next((item.device for item in question.args if isinstance(item, Tensor)), torch.device("cpu"))
    device = modes.device_spec(where)
    if where.type == "cuda" and question.op == "attention" and torch.cuda.is_available():
        # torch's own kernels have vetoes of their own (`ops.attention`), which look at where the tensors lie.
        try:
            args = placed_stand_ins(question.args, sizes)
            return describe(spec, args, question.layout, question.backend, world, device)
        except RuntimeError:
            _log.info("torch cannot check fake tensors; its vetoes are left to the kernel", exc_info=True)
    args = stand_ins(question.args, sizes)
    return describe(spec, args, question.layout, question.backend, world, device)


def _made(spec: OperationSpec, question: Question, first: Context, symbols: Any, world: World) -> list[_Made]:
    """The selections for the sizes of the trace and, where sizes are open, for others; empty unless they agree."""
    chosen = _written(decide(spec, first, world), question.grad, world)
    found = [_Made(spec, first, question.grad, chosen)]
    if not chosen or not symbols:
        return found if chosen else []
    more: set[int] = set()
    for ctx, sizes in _elsewhere(spec, question, ends(symbols), world):
        for (axis, size), (_, before) in zip(ctx.dims, first.dims, strict=False):
            if size == before:
                continue
            edges = boundaries(world, spec.op_id, axis)
            if edges is None:
                return []  # a kernel or a rule looks at this size exactly
            cuts = [edge for edge in edges if edge & (edge - 1)]
            if cuts and list(sizes.values()) != [size]:
                return []  # a limit on a size that is computed from others
            more.update(cuts, (cut + 1 for cut in cuts))
    for ctx, _ in _elsewhere(spec, question, sizes_to_try(symbols, sorted(more)), world):
        if _written(_probed(spec, ctx, world), question.grad, world) != chosen:
            return []
        found.append(_Made(spec, ctx, question.grad, chosen))
    return found


def _probed(spec: OperationSpec, ctx: Context, world: World) -> Decision:
    """The decision a call would get, for one that nobody has made: neither announced nor remembered."""
    return select(ctx, world) if world.table is None else decide(spec, ctx, world)


def _elsewhere(
    spec: OperationSpec, question: Question, tried: Iterable[Sizes], world: World
) -> Iterator[tuple[Context, Sizes]]:
    """The contexts at these sizes; those that mean no call are left out."""
    for sizes in tried:
        try:
            yield _context(spec, question, sizes, world), sizes
        except (InvalidInputError, Impossible):
            continue  # a table that is too short for such a length, or a tensor that cannot be


def compiled(decision: Decision, world: World) -> Decision:
    """What a decision for an eager call is inside a graph, where no gradient is traced; its notes say what stands
    there."""
    return in_graph(decision, world, lambda kernel: _open(kernel, world))


def _open(kernel: KernelSpec, world: World) -> bool:
    return bool(kernel.traceable) and kernel.backend not in world.enclosed


def _written(decision: Decision, grad: bool, world: World) -> str:
    """What can be written out: the kernel for a graph, or where a gradient is traced the best that can be.

    With a gradient a foreign kernel stands there only where somebody asks for it: times are those of forward passes.
    """
    kernels = world.registry.kernels
    ranking = decision.ranking if grad else (compiled(decision, world).chosen,)
    if grad:
        opened = [name in kernels and _open(kernels[name], world) for name in ranking]
        instead = next((name for name, plain in zip(ranking, opened, strict=True) if plain), "")
        if ranking and not opened[0] and asked(decision, instead):
            return FOREIGN
    for kernel_id in ranking:
        kernel = kernels.get(kernel_id)
        if kernel is None or not _open(kernel, world):
            continue
        steps = sorted(step.name for step in decision.transforms(kernel_id))
        # What has to be done to the inputs, the plain form of an op does not need; that of attention is slower.
        if kernel.traceable == PLAIN or (steps and decision.op != "attention"):
            return PLAIN
        if unchecked(world.ops[decision.op], kernel, decision.context, world):
            continue
        try:
            return _form(kernel, decision.context, steps)
        except (AttributeError, ImportError):
            _log.info("what %s names as traceable cannot be imported", kernel_id, exc_info=True)
    return OPAQUE


def _form(kernel: KernelSpec, ctx: Context, steps: list[str]) -> str:
    """The name of what is traced for a kernel in calls such as this one: an attribute of `traced`.

    Not a key of a dict, of which Dynamo knows only what it held when it was first met. Around an attention kernel
    stands what its decision says has to be done to the inputs, by the code that eager calls run (`dispatch.adapt`).
    """
    path = kernel.function if kernel.traceable == "itself" else kernel.traceable
    words = [path]
    if ctx.op == "attention":
        layout = "" if ctx.layout is None else ctx.layout.value
        rank = "folded" if ctx.folded else str(ctx.rank)
        words += [rank, layout, ctx.dtype, ctx.autocast or "", ctx.device.device_type, *steps]
    name = re.sub(r"\W", "_", "|".join(words))
    if not hasattr(traced, name):
        found = pkgutil.resolve_name(path)
        setattr(traced, name, adapt(found, ctx, steps, True) if ctx.op == "attention" else found)
    return name
