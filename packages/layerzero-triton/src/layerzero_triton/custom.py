"""A user's own Triton kernel as a candidate for an op, in a few lines.

    @kernel(
        op="silu_and_mul", name="mine", kernel=my_kernel, grid=("rows", "ceil(hidden / BLOCK)"),
        constants={"BLOCK": 1024}, dtypes=("float16", "bfloat16"),
    )
    def mine(x):
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        rows, hidden = out.numel() // out.shape[-1], out.shape[-1]
        return Arguments((x, out, hidden), out, rows=rows, hidden=hidden)

The decorated function takes the op's canonical arguments and says what the kernel is launched with. From the rest a
`KernelSpec` is made: LayerZero holds the grid, whose formulas speak of the op's sizes and the constants, against the
limits of the device before it selects the kernel. What is not declared is not supported.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from layerzero.errors import ConfigurationError, invalid
from layerzero.model.enums import Platform
from layerzero.model.formula import Formula
from layerzero.model.kernel import KernelSpec, Limit

_own: dict[str, CustomKernel] = {}
own = SimpleNamespace()  # the adapters by name: a KernelSpec names its function as text
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,47}\Z")
_LARGEST = (2**31 - 1, 65535, 65535)


class Arguments:
    """What one call launches the kernel with: its arguments before the constants, the result, and the op's sizes."""

    __slots__ = ("result", "sizes", "values")

    def __init__(self, values: Sequence[Any], result: Any, **sizes: int) -> None:
        self.values = tuple(values)
        self.result = result
        self.sizes = sizes


@dataclass(frozen=True, slots=True)
class CustomKernel:
    """A registered kernel. Calling it launches it without any selection."""

    spec: KernelSpec
    source: Any
    arguments: Callable[..., Arguments]
    grid: tuple[Formula, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    compiled: set[Any] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Launch on the current stream and return the result."""
        from layerzero_triton import cache
        from layerzero_triton.interpret import mend

        mend()
        made = self.arguments(*args, **options)
        if not isinstance(made, Arguments):
            expected = "Arguments(values, result, **sizes)"
            raise invalid("TYPE_INVALID", f"{self.spec.kernel_id} returned {type(made).__name__}", expected)
        grid = tuple(formula(lambda name: self._size(made, name)) for formula in self.grid)
        if 0 in grid:
            return made.result
        if any(not 0 < size <= limit for size, limit in zip(grid, _LARGEST, strict=False)):
            raise invalid("LAUNCH_CONFIG_INVALID", f"{self.spec.kernel_id}, grid {grid}", _LARGEST[: len(grid)])
        values = (*made.values, *(value for _, value in self.constants))
        if type(self.source).__name__ == "InterpretedFunction":
            self.source[grid](*values)
            return made.result
        kinds = tuple(_kind(value) for value in made.values)
        known = kinds in self.compiled
        with contextlib.nullcontext() if known else cache.scoped():
            self.source[grid](*values, num_warps=self.warps, num_stages=self.stages)
        if not known:
            self.compiled.add(kinds)
        return made.result

    def _size(self, made: Arguments, name: str) -> int:
        if name not in made.sizes:
            expected = f"a size that its function returns: {', '.join(sorted(made.sizes)) or 'none'}"
            raise invalid("VALUE_INVALID", f"{self.spec.kernel_id}: {name} in its grid", expected)
        return made.sizes[name]


def _kind(value: Any) -> Any:
    """What Triton compiles anew for: dtype and alignment of a tensor, a whole number's class."""
    if hasattr(value, "data_ptr"):
        return value.dtype, value.get_device(), value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "int", value == 1, value % 16 == 0, abs(value) >= 2**31
    return type(value)


def kernel(
    *,
    op: str,
    name: str,
    kernel: Any,
    grid: Sequence[str | int],
    dtypes: Iterable[str],
    constants: Mapping[str, Any] | None = None,
    warps: int = 4,
    stages: int = 3,
    features: Iterable[str] = (),
    limits: Mapping[str, Limit] | None = None,
    platforms: Iterable[str] | None = None,
    priority: float = 40.0,
    jit_key: Sequence[str] = ("dtype",),
    **declared: Any,
) -> Callable[[Callable[..., Arguments]], CustomKernel]:
    """A decorator that registers a kernel as `triton.<op>.<name>`; `declared` are further fields of `KernelSpec`.

    `kernel` is the function made by `@triton.jit`; its constants (`tl.constexpr`) are given by name. Raises
    ConfigurationError where the parts do not fit together. From then on the kernel is a candidate like any other.
    """
    fixed = dict(constants or {})
    _check_launch(op, name, fixed, warps, stages)
    _check_constants(kernel, fixed)
    formulas = _formulas(grid, fixed)
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    places = tuple(platforms or (("cpu",) if interpreted else ("cuda", "rocm")))
    spec = KernelSpec(
        kernel_id=f"triton.{op}.{name}",
        op=op,
        backend="triton",
        function=f"layerzero_triton.custom:own.{op}__{name}",
        platforms=frozenset(Platform(word) for word in places),
        dtypes=frozenset(dtypes),
        features=frozenset(features),
        limits=tuple((limits or {}).items()),
        priority=priority,
        grid_layout=(*formulas, *(Formula("1"),) * (3 - len(formulas))),
        jit=not interpreted,
        jit_key=() if interpreted else tuple(jit_key),
        **declared,
    )

    def register(arguments: Callable[..., Arguments]) -> CustomKernel:
        made = CustomKernel(spec, kernel, arguments, formulas, tuple(fixed.items()), warps, stages)
        setattr(own, f"{op}__{name}", made)
        _own[spec.kernel_id] = made
        _publish(made)
        return made

    return register


def registered() -> tuple[CustomKernel, ...]:
    """Every kernel the program has registered, in order."""
    return tuple(_own.values())


def unregister(kernel_id: str) -> None:
    """Take a kernel out again; one that is not there is no error."""
    from layerzero.runtime.state import state

    if _own.pop(kernel_id, None) is not None and state.loaded and kernel_id in state.world.registry:
        state.publish(registry=state.world.registry.without(kernels=(kernel_id,)))


def _publish(made: CustomKernel) -> None:
    """Put the kernel into the registry in force; before plugins are discovered the plugin's own hook does it."""
    # Beyond what a plugin may import: this is the program's own doing, at a time of its choosing.
    from layerzero.runtime.state import state

    if not state.loaded:
        return
    registry = state.world.registry
    if made.spec.kernel_id in registry:
        registry = registry.without(kernels=(made.spec.kernel_id,))
    state.publish(registry=registry.add((made.spec,)))


def _check_launch(op: str, name: str, constants: Mapping[str, Any], warps: int, stages: int) -> None:
    if not _NAME.match(name):
        raise ConfigurationError(code="KERNEL_ID_INVALID", value=name, limit=f"triton.{op}.<lowercase name>")
    if warps not in (1, 2, 4, 8, 16, 32):
        raise _misfit(f"warps {warps}", "1, 2, 4, 8, 16, 32")
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= 16:
        raise _misfit(f"stages {stages}", "1 to 16")
    for word, value in constants.items():
        if word.startswith("BLOCK") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1)
        ):
            raise _misfit(f"{word} {value}", "a power of two: Triton's ranges have no other length")


def _misfit(value: str, limit: str) -> ConfigurationError:
    return ConfigurationError(code="LAUNCH_CONFIG_INVALID", value=value, limit=limit)


def _check_constants(source: Any, given: Mapping[str, Any]) -> None:
    function = getattr(source, "fn", None)
    if function is None or not hasattr(source, "arg_names"):
        raise ConfigurationError(
            code="TYPE_INVALID",
            value=f"kernel, a {type(source).__name__}",
            limit="a function made by @triton.jit",
        )
    wanted = [
        name for name, annotation in getattr(function, "__annotations__", {}).items() if "constexpr" in str(annotation)
    ]
    if sorted(wanted) != sorted(given):
        found = f"constants {', '.join(sorted(given)) or 'none'}"
        raise _misfit(found, f"its tl.constexpr arguments: {', '.join(wanted) or 'none'}")
    last = list(source.arg_names)[len(source.arg_names) - len(wanted) :]
    if last != list(given):
        raise _misfit(", ".join(given), f"its last arguments, in their order: {', '.join(last)}")


def _formulas(grid: Sequence[str | int], constants: Mapping[str, Any]) -> tuple[Formula, ...]:
    """The grid with its constants put in: what remains are sizes of the op."""
    if not 1 <= len(grid) <= 3:
        raise _misfit(f"{len(grid)} axes", "1 to 3")
    numbers = {word: str(value) for word, value in constants.items() if isinstance(value, int)}
    texts = []
    for axis in grid:
        text = str(axis)
        for word, value in numbers.items():
            text = re.sub(rf"\b{re.escape(word)}\b", value, text)
        texts.append(text)
    return tuple(Formula(text) for text in texts)
