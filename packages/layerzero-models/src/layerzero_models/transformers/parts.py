"""The forwards that patched parts get, and what each of them keeps. All are methods, so that a copy of a model made
with `copy.deepcopy` is patched too, by itself.

Each asks first whether it is traced: what Dynamo sees a forward read it guards, and asks again before every run. A
traced norm reads two attributes of its module that cannot change by themselves: a part of which nothing else is read
Dynamo skips as a whole, as it does with those of the unpatched model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _any_hook

from layerzero import list_kernels, which
from layerzero.errors import LayerZeroError
from layerzero.model.enums import Platform
from layerzero_models.transformers import quick
from layerzero_models.transformers.probes import DTYPES, Rules

STATE = "_layerzero"  # where a patched part keeps what it needs
SINGLE = True  # state of a linear layer by itself: none, but it marks the forward as ours
# What a traced norm needs; GEMMA is None where its own forward is traced.
GEMMA, EPS = "_layerzero_gemma", "_layerzero_eps"
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_TORCH = ("torch.", "reference.")  # products that `F.linear` makes without a selection before it


# -- linear layers of one input, and which are worth a kernel of their own -----------------------------
def unfit(parts: Sequence[Any]) -> str:
    """Why these cannot be laid side by side; empty when they can."""
    first = parts[0]
    for part in parts:
        if type(part) is not nn.Linear:
            return f"{type(part).__name__} is not a plain nn.Linear"
        if "forward" in vars(part):
            return "a projection has a forward of its own"
        if type(part.weight) is not nn.Parameter or type(part.weight.data) is not Tensor:
            return "the weights are not plain tensors"
        if part.weight.device.type == "meta":
            return "the weights are on the meta device"
        same = (part.in_features, part.weight.dtype, part.weight.device, part.bias is None)
        if same != (first.in_features, first.weight.dtype, first.weight.device, first.bias is None):
            return "the projections differ in width, dtype, device or bias"
    if len({id(part.weight) for part in parts}) < len(parts):
        return "projections share one weight"
    return ""


class Neighbours:
    """Linears of one input, laid side by side in memory: the parameters stay the same objects with the same values,
    their data become neighbouring rows of one matrix. Whoever moves or replaces them later breaks the neighbourhood;
    that is noticed at the next call, and each works by itself again.

    `weight` and `bias` are those of all of them, `sizes` the rows of each, and `product` the function that multiplies.
    """

    __slots__ = ("_hooks", "_places", "bias", "parts", "product", "sizes", "stash", "weight")

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.parts = tuple(parts)
        self.sizes = [part.out_features for part in parts]
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        # What the first of several called in a row computed for the others: (input, results).
        self.stash: tuple[Any, ...] | None = None
        self._hooks = tuple(hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks))
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self.weight = self._joined("weight")
        self.bias: Tensor | None = None if parts[0].bias is None else self._joined("bias")

    def _joined(self, name: str) -> Tensor:
        owned = [part._parameters for part in self.parts]
        with torch.no_grad():
            whole = torch.cat([own[name].data for own in owned])  # type: ignore[union-attr]
            for own, piece in zip(owned, torch.split(whole, self.sizes), strict=True):
                own[name].data = piece  # type: ignore[union-attr]
                self._places.append((own, name, piece.data_ptr()))
        return whole

    def together(self) -> bool:
        """Whether one product may stand for all: nobody needs a gradient, moved a weight or hangs on a projection."""
        if torch.is_grad_enabled() or any(self._hooks) or _any_hook():  # type: ignore[no-untyped-call]
            return False
        for own, name, place in self._places:
            if own[name].data_ptr() != place:
                return False
        return True

    def part(self) -> None:
        """Give every parameter memory of its own again."""
        self.stash = None
        with torch.no_grad():
            for own, name, place in self._places:
                if own[name].data_ptr() == place:
                    own[name].data = own[name].data.clone()


def few_rows(op: str, weight: Tensor) -> int:
    """Rows up to which a kernel made for few rows may run an op with such a weight; 0 where there is none."""
    name, cpu = str(weight.dtype).removeprefix("torch."), weight.device.type == "cpu"
    found = list_kernels(op, available=True)
    fit = [kernel for kernel in found if name in kernel.dtypes and cpu == (Platform.CPU in kernel.platforms)]
    limits = [limit.max for kernel in fit for dim, limit in kernel.limits if dim == "rows"]
    return max((most for most in limits if most is not None), default=0)


class Linears:
    """What one patch asked about products, by size, dtype, device and bias.

    Decode multiplies one row a sequence with every weight, and that is most of the time of a step. Whether `lz.linear`
    gains anything is asked once, when the model is patched: on a CPU of the selection, elsewhere whether there is a
    kernel for few rows. Which kernel runs is decided at every call, as for any op.
    """

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._known: dict[Any, bool] = {}

    def worth(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether one row or four times this weight run on another kernel than torch's product, or all are asked."""
        if self._everything:
            return True
        if weight.device.type != "cpu":  # many rows are a vendor's product, which is what torch calls too
            return few_rows("linear", weight) > 0
        case = (weight.shape, weight.dtype, bias is None)
        if case not in self._known:
            x = torch.zeros((4, weight.shape[1]), dtype=weight.dtype)
            try:
                with torch.no_grad():
                    rest = (weight.detach(), None if bias is None else bias.detach())
                    kernels = [which("linear", x[:rows], *rest) for rows in (1, 4)]
                self._known[case] = not all(kernel.startswith(_TORCH) for kernel in kernels)
            except LayerZeroError:  # a policy under which nothing may run, or a size no kernel takes
                self._known[case] = False
        return self._known[case]

    def single(self, model: nn.Module, joined: Iterable[Neighbours]) -> Iterator[tuple[str, nn.Linear]]:
        """The plain linear layers that are not computed together with others, where it is worth it."""
        taken = {id(part) for neighbours in joined for part in neighbours.parts}
        for name, module in model.named_modules():
            if id(module) in taken or type(module) is not nn.Linear or unfit((module,)):
                continue
            if self.worth(module.weight, module.bias):
                yield name, module


# -- norms, and the sums before them ------------------------------------------------------------------
class Rms:
    """State of a norm. `ready` is (x, its norm, its version), computed by the layer before together with the sum x.

    `same` are the dtypes (of input and weight) whose result has the input's, as the op's has; `rules` are all.
    """

    __slots__ = ("eps", "facts", "gemma", "ready", "rules", "same")

    def __init__(self, module: Any, gemma: bool, eps: float, rules: Rules) -> None:
        self.gemma, self.eps, self.facts, self.rules = gemma, eps, quick.Facts(module._parameters), rules
        self.same = frozenset(pair for pair, result in rules.items() if result is pair[0])
        self.ready: tuple[Tensor, Tensor, int] | None = None


def rms_norm(self: Any, x: Tensor) -> Tensor:
    """A patched RMSNorm."""
    weight = self._parameters["weight"]
    if _compiling():
        gemma = self._layerzero_gemma
        if gemma is None or x.dtype is not weight.dtype or x.dtype not in DTYPES:
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        return quick.norm(gemma, x, weight, self._layerzero_eps, None)
    state: Rms = self._layerzero
    ready = state.ready
    if ready is not None:
        state.ready = None
        if ready[0] is x and x._version == ready[2]:
            return ready[1]
    if (x.dtype, weight.dtype) in state.same:
        return quick.norm(state.gemma, x, weight, state.eps, state.facts)
    result = state.rules.get((x.dtype, weight.dtype))
    if result is None:  # dtypes in which it was not recognised
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    op = "gemma_rms_norm" if state.gemma else "rms_norm"
    return quick.public(op, x.float(), weight.float(), state.eps).to(result)  # type: ignore[no-any-return]


def layer_norm(self: Any, x: Tensor) -> Tensor:
    """A patched LayerNorm; torch's own where input and weight differ in dtype, with its own rules for that."""
    own = self._parameters
    weight = own["weight"]
    if weight is not None and weight.dtype is not x.dtype and not _any_autocast():
        return F.layer_norm(x, self.normalized_shape, weight, own["bias"], self.eps)
    return quick.layer(x, own["weight"], own["bias"], self.eps, None if _compiling() else self._layerzero)


def add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x), in one kernel where nothing else wants to know of the norm."""
    if _compiling():
        total = residual + x
        return norm(total), total
    state: Rms = norm._layerzero
    weight = norm._parameters["weight"]
    if (
        torch.is_grad_enabled()
        or norm._forward_hooks
        or norm._forward_pre_hooks
        or x.dtype is not residual.dtype
        or (x.dtype, weight.dtype) not in state.same
    ):
        total = residual + x
        return norm(total), total
    return quick.add_norm(state.gemma, x, residual, weight, state.eps, state.facts)


def end(layer: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual + x at the end of a layer; the norm that comes next is taken in the same kernel and kept for it.

    Not where a gradient is needed, under torch.compile, in inference mode (where a later write into the sum could not
    be noticed), or where somebody hangs on the layer.
    """
    if _compiling():
        return residual + x
    state: Following = layer._layerzero
    norm = state.norm
    if (
        norm is None
        or torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or layer._forward_hooks
        or norm._forward_hooks
        or norm._forward_pre_hooks
        or x.dtype is not residual.dtype
        or (x.dtype, norm._parameters["weight"].dtype) not in norm._layerzero.same
    ):
        return residual + x
    kept: Rms = norm._layerzero
    normed, total = quick.add_norm(kept.gemma, x, residual, norm._parameters["weight"], kept.eps, kept.facts)
    kept.ready = (total, normed, total._version)
    return total


@dataclass(slots=True, eq=False)
class Following:
    """State of a decoder layer: the norm that takes its result, None where that is not known."""

    norm: Any


@dataclass(slots=True, eq=False)
class Projected:
    """State of one of several projections: all of them, and the place of this one."""

    all: Neighbours
    place: int


def first(self: Any, x: Tensor) -> Tensor:
    """The first of several projections of one input: computes all, keeps the others' for them."""
    if _compiling():
        return F.linear(x, self.weight, self.bias)
    neighbours: Neighbours = self._layerzero.all
    if not neighbours.together():
        return F.linear(x, self.weight, self.bias)
    whole = neighbours.product(x, neighbours.weight, neighbours.bias)
    own, *others = torch.split_with_sizes(whole, neighbours.sizes, -1)
    neighbours.stash = (x, *others)
    return own


def second(self: Any, x: Tensor) -> Tensor:
    """Another projection of the input the first one was just given; of any other input it computes its own."""
    if not _compiling():
        state: Projected = self._layerzero
        neighbours = state.all
        stash = neighbours.stash
        if stash is not None and stash[0] is x:
            if state.place == len(neighbours.sizes) - 1:
                neighbours.stash = None
            found: Tensor = stash[state.place]
            return found
    return F.linear(x, self.weight, self.bias)


def linear(self: Any, x: Tensor) -> Tensor:
    """A patched linear layer; the module's own product where a gradient is needed or a graph is traced."""
    own = self._parameters
    weight = own["weight"]
    if _compiling() or _grad_enabled() or x.dtype is not weight.dtype:
        return F.linear(x, weight, own["bias"])
    return quick.product(x, weight, own["bias"])  # type: ignore[no-any-return]


def conv1d(self: Any, x: Tensor) -> Tensor:
    """A patched Conv1D of GPT-2, which is a linear layer with its weight turned; as `linear` otherwise."""
    own = self._parameters
    weight = own["weight"]
    if _compiling() or _grad_enabled() or x.dtype is not weight.dtype:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return quick.product(x, weight.t(), own["bias"])  # type: ignore[no-any-return]


def embedding(self: Any, ids: Tensor) -> Tensor:
    """A patched embedding; as `linear` otherwise."""
    if _grad_enabled() or _compiling():
        return F.embedding(ids, self.weight, self.padding_idx)
    return quick.public("embedding", ids, self._parameters["weight"], self.padding_idx)  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class Apart:
    """State of a gated MLP whose projections stay two products: names of the three, the op between and its rest."""

    names: tuple[str, ...]
    op: str
    rest: tuple[str, ...]


def gated_apart(self: Any, x: Tensor) -> Tensor:
    """A patched SwiGLU or GeGLU that calls its own projections, whose hooks and replacements run."""
    if _compiling():
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    state: Apart = self._layerzero
    gate, up, down = (self._modules[name] for name in state.names)
    mixed = getattr(down, "weight", gate.weight).dtype is not gate.weight.dtype
    if self.training or _grad_enabled() or mixed:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    out: Tensor = down(quick.activate(state.op, torch.cat((gate(x), up(x)), -1), state.rest))
    return out


@dataclass(slots=True, eq=False)
class Gated:
    """State of a gated MLP: its two projections in, the one back, the op between.

    `casts` is whether it was seen to cast between projections of two dtypes; up to `few` rows are given to `lz.mlp`,
    which calls the activation by its `word`.
    """

    both: Neighbours
    down: str
    op: str
    rest: tuple[str, ...]
    word: str
    casts: bool
    few: int


def _untouched(part: Any) -> bool:
    """Whether a projection is a plain product and nobody hangs on it."""
    own = vars(part)
    return (
        type(part) is nn.Linear
        and part._parameters["bias"] is None
        and not (part._forward_hooks or part._forward_pre_hooks)
        and ("forward" not in own or STATE in own)
    )


def gated(self: Any, x: Tensor) -> Tensor:
    """A patched SwiGLU or GeGLU: one product, one activation, and the module's own projection back."""
    if _compiling():
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    state: Gated = self._layerzero
    both = state.both
    down = self._modules[state.down]
    mixed = getattr(down, "weight", both.weight).dtype is not both.weight.dtype
    if self.training or not both.together() or (mixed and not state.casts):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    if not mixed and x.numel() <= state.few * x.shape[-1] and both.bias is None and _untouched(down):
        return quick.public("mlp", x, both.weight, down._parameters["weight"], None, state.word)  # type: ignore[no-any-return]
    wide = quick.activate(state.op, both.product(x, both.weight, both.bias), state.rest)
    out: Tensor = down(wide.to(down.weight.dtype) if mixed else wide)
    return out
