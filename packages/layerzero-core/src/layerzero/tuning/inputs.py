"""Real tensors for a described call: `build(context, device=..., seed=...)`.

    call = build(context, device="cuda", seed=0)
    bound.run(*call.args)                       # canonical arguments, what every kernel takes
    lz.attention(**call.kwargs)                 # the same call for the public function
    with conditions(context): ...               # autocast, grad, determinism and switches as described

The arguments come from the op's own `example` or that of the op it stands for: all dtypes, layouts, GQA,
masks (tensors, blocks, chunks), windows, packed and paged batches, quantized and packed weights, gradients.
Tokenization has none: a context names its tokenizer and does not hold it.

A context says less than a call. What it leaves open is chosen so that describing the built call gives the context
again: a mask is [Sq, Sk], every sequence of a paged batch is as long as the longest, sequences of a packed batch are
as even as the longest one allows, softcap is 30. Strides follow the recorded class: "swapped" is a transposed view,
"other" a slice of a larger buffer (a KV cache); `strides` gives the exact ones where they are known. A size rounded up
to the end of its bucket is fine, too: lengths are then cut to what fits together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.context import Context, Strides, element_bytes
from layerzero.model.op import Op, OperationSpec
from layerzero.runtime.current import builtin_ops
from layerzero.runtime.state import state

ArgumentStrides = Sequence[Sequence[int] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call with its tensors.

    args    canonical arguments, in the order of the op's specification
    kwargs  the same call as keywords of the public function
    layout  of the tensors, for ops whose layout is no canonical argument
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    layout: str | None = None


class Draw:
    """Seeded numbers on a device, in the dtypes and strides of one context."""

    def __init__(self, ctx: Context, device: torch.device, seed: int, choices: Mapping[str, Any] | None = None) -> None:
        self.ctx = ctx
        self._choices = choices or {}
        self.device = device
        spec = op_named(ctx.op)
        self.autocast = ctx.autocast is not None and spec is not None and spec.autocast
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def dtype(self, place: int = 0) -> torch.dtype:
        """The dtype of the main tensor at a place. Under autocast a context names what it is cast to, not from."""
        words = self.ctx.dtypes
        word = words[place] if place < len(words) else self.ctx.dtype
        found = torch.float32 if self.autocast and word != "float64" else getattr(torch, word, None)
        if not isinstance(found, torch.dtype):
            raise invalid("DTYPE_UNSUPPORTED", word, "a dtype of torch", f"unknown dtype {word!r}")
        return found

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Gaussian numbers, contiguous. Integer and boolean dtypes get small whole numbers."""
        wanted = self.dtype() if dtype is None else dtype
        drawn_in = wanted if wanted in (torch.float16, torch.bfloat16, torch.float64) else torch.float32
        if self._generator is None:  # on meta no number is kept, and torch would import its compiler to draw some
            return torch.empty(shape, device=self.device, dtype=wanted)
        found = torch.randn(shape, generator=self._generator, device=self.device, dtype=drawn_in).mul_(scale)
        if self.choice("positive"):  # sums of one sign, which a narrow accumulator cannot hold
            found = found.abs_().mul_(0.25).add_(0.5)
        if wanted is torch.bool:
            return found > 0
        return found if wanted is drawn_in else found.to(wanted)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(max(high, 1), shape, generator=self._generator, device=self.device, dtype=dtype)

    def main(self, *shape: int, place: int = 0, axis: int = -2, odd: bool = True) -> Tensor:
        """A main tensor: in the context's dtype and stride class, and with a gradient where one is asked for.

        `axis` is the one along which a slice of a larger buffer is taken; `odd=False` stays contiguous where the class
        is "other", since one odd tensor among several makes it so.
        """
        found = self.normal(*shape, dtype=self.dtype(place), scale=self.choice("magnitude", 1.0))
        if odd or self.ctx.strides.order == "swapped" or self.ctx.strides.last != 1:
            found = self.laid(found, axis)
        if not self.ctx.aligned_pointers:  # the same, its first element not at a multiple of 16 bytes
            steps = found.stride()
            size = 1 + sum((n - 1) * step for n, step in zip(found.shape, steps, strict=True) if n > 0)
            view = found.new_zeros(size + 1).as_strided(found.shape, steps, 1)
            found = view if 0 in steps else view.copy_(found)
        return self.leaf(found)

    def laid(self, tensor: Tensor, axis: int = -2) -> Tensor:
        return lay(tensor, self.ctx.strides, axis)

    def rows_of(self, rows: str, width: str) -> tuple[int, ...]:
        """A shape of the recorded rank, from the names of two sizes: all rows on the axis before the last."""
        rank, last = self.ctx.rank, self.size(width)
        return (last,) if rank == 1 else (*(1,) * (rank - 2), self.size(rows), last)

    def leaf(self, tensor: Tensor) -> Tensor:
        """The tensor, with a gradient where the context asks for one."""
        return tensor.requires_grad_() if self.ctx.needs_grad and tensor.is_floating_point() else tensor

    def index(self, usual: str = "int64") -> torch.dtype:
        return getattr(torch, self.ctx.index_dtype or usual)  # type: ignore[no-any-return]

    def generator(self) -> torch.Generator | None:
        if "generator" not in self.ctx.needs or self._generator is None:
            return None
        return torch.Generator(self.device).manual_seed(1234)

    def choice(self, name: str, default: Any = None) -> Any:
        """What a context leaves open, as whoever draws wants it: a softcap, lengths of sequences, a kind of mask."""
        return self._choices.get(name, default)

    def size(self, name: str, default: int = 1) -> int:
        return int(dict(self.ctx.dims).get(name, default))


def buildable(op: str) -> bool:
    """Whether calls of an op can be built."""
    spec = op_named(op)
    return isinstance(spec, Op) and spec.example is not None


def build(
    context: Context, *, device: torch.device | str | None = None, seed: int = 0, strides: ArgumentStrides | None = None
) -> Call:
    """Tensors for a context on a device (default: the context's own); equal seeds give equal numbers on a device.

    `strides` are those of the tensor arguments in order, as `strides_of` gives them. Raises InvalidInputError for an op
    whose calls cannot be made up.
    """
    spec = op_named(context.op)
    if not isinstance(spec, Op) or not callable(spec.example):
        known = "a tensor or sampling op; a tokenizer cannot be made from its name"
        raise invalid("OP_UNKNOWN", context.op, known, f"no inputs can be made for {context.op}")
    where = torch.device(device or f"{context.device.device_type}:{context.device.index}")
    draw = Draw(context, where, seed)
    with torch.no_grad() if not context.needs_grad else contextlib.nullcontext():
        args = spec.example(draw)
    layout = context.layout.value if context.layout is not None and "layout" not in spec.arguments else None
    if strides is not None:
        if len(strides) != len(args):
            raise invalid("VALUE_INVALID", f"strides of {len(strides)} arguments", f"those of {len(args)}")
        args = tuple(_strided(item, given) for item, given in zip(args, strides, strict=True))
    kwargs = spec.keywords(args) if spec.keywords else dict(zip(spec.arguments, args, strict=False))
    if layout is not None:
        kwargs["layout"] = layout
    if context.backend is not None:
        kwargs["backend"] = context.backend
    return Call(args, kwargs, layout)


def op_named(op: str) -> OperationSpec | None:
    """The op of this name, or the built-in one whose arguments it takes."""
    if op in builtin_ops:
        return builtin_ops[op]
    spec = state.world.ops.get(op)
    return spec if spec is None or not spec.stands_for else builtin_ops[spec.stands_for]


# -- how tensors lie -------------------------------------------------------------------------------
def lay(tensor: Tensor, wanted: Strides, axis: int = -2) -> Tensor:
    """The same numbers in a stride class."""
    if wanted.last != 1 and tensor.ndim and tensor.shape[-1] > 1:
        return _stepped(tensor, wanted.last)
    if wanted.order == "swapped" and tensor.ndim == 4:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if wanted.order == "other":
        return _sliced(tensor, wanted.aligned, axis)
    return tensor


def _stepped(tensor: Tensor, step: int) -> Tensor:
    """With a stride in the last axis: a transpose where the step is that of one, else every step-th element."""
    shape = tensor.shape
    if step == 0:
        return tensor[..., :1].expand(shape)
    if tensor.ndim >= 2 and step == shape[-2]:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if step == tensor.numel() // shape[-1]:
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    wide = tensor.new_zeros((*shape[:-1], shape[-1] * step))
    wide[..., ::step] = tensor
    return wide[..., ::step]


def _sliced(tensor: Tensor, aligned: bool, axis: int) -> Tensor:
    """A slice of a larger buffer: along `axis` where that leaves a gap, else along the last axis."""
    if tensor.ndim == 0:
        return tensor
    if not aligned or tensor.ndim < 3 or math.prod(tensor.shape[:axis]) < 2:
        axis, room = -1, 1 if not aligned else 16 // element_bytes(str(tensor.dtype).removeprefix("torch."))
    else:
        room = max(1, tensor.shape[axis] // 8)
    shape = list(tensor.shape)
    shape[axis] += room
    wide = tensor.new_zeros(shape)
    view = wide.narrow(axis, 0, tensor.shape[axis])
    view.copy_(tensor)
    return view


def _strided(item: Any, given: Sequence[int] | None) -> Any:
    # A mask or positions may have been recorded with more axes than a context tells: those stay as they are.
    if not isinstance(item, Tensor) or given is None or len(given) != item.ndim or list(item.stride()) == list(given):
        return item
    grad = item.requires_grad
    wide = torch.empty_strided(item.shape, list(given), dtype=item.dtype, device=item.device)
    if all(step > 0 or size <= 1 for size, step in zip(item.shape, given, strict=True)):
        with torch.no_grad():
            wide.copy_(item)
    else:  # an expanded axis: every row is the same
        wide = item.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in given)].expand(item.shape)
    return wide.requires_grad_() if grad else wide


# -- the state of torch ------------------------------------------------------------------------------
@contextlib.contextmanager
def conditions(context: Context) -> Iterator[None]:
    """Torch's modes as the context describes them: grad, autocast, determinism, and switches that were off."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(context.needs_grad))
        if context.autocast is not None:
            kind = context.device.device_type
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, context.autocast)))
        if context.deterministic and not was[0]:
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, was[0], warn_only=was[1])
        for word, (read, write) in _SWITCHES.items():
            if word in context.switched_off and read():
                write(False)
                stack.callback(write, True)
        yield


_cuda = torch.backends.cuda
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], Any]]] = {
    "sdp_flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "sdp_mem_efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "sdp_math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "sdp_cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
}
