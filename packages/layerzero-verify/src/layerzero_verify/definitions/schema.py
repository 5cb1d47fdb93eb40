"""A Definition: what a kernel computes, as flashinfer-bench writes it down.

Axes are constant (a number) or variable; inputs and outputs have shapes made of axis names and a dtype; a shape of None
is a Python number. `reference` is Python source with a function `run`; reading a Definition never runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from layerzero.errors import ConfigurationError
from layerzero.files import decode_strictly
from layerzero.json_form import plain

_MAX_BYTES = 16 * 1024 * 1024
MISSING: Any = object()
# The format's name of a dtype, and torch's.
_DTYPES = "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float4_e2m1 int64 int32 int16 int8 bool"
DTYPES: Mapping[str, str] = {name: name for name in _DTYPES.split()} | {"float4_e2m1": "float4_e2m1fn_x2"}

Value = TypeVar("Value")


def read_text(path: Path) -> str:
    """The file as UTF-8 text; a missing, unreadable, huge or binary file is refused with its name."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigurationError(
                f"{path} is too large", code="CONFIG_FILE_TOO_LARGE", value=f"{size} bytes", limit=_MAX_BYTES
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise at(str(path), f"cannot be read: {error}") from None


def parse_json(text: str, where: str) -> Any:
    """JSON without duplicate keys and without NaN; every refusal names the place."""
    try:
        return decode_strictly(
            text,
            lambda key: ValueError(f"duplicate key {key!r}"),
            lambda word: ValueError(f"{word} is not JSON"),
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise at(where, f"is not JSON: {reason}") from None


def at(where: str, problem: str, *, value: object = None, limit: object = None) -> ConfigurationError:
    """The error for a file that says something impossible."""
    return ConfigurationError(
        f"{where}: {problem}",
        code="SCHEMA_INVALID",
        value=value if value is not None else where,
        limit=limit,
        hint=None if limit is None else f"expected {limit}",
    )


def take(data: Any, name: str, kind: type[Value] | tuple[type, ...], where: str, default: Any = MISSING) -> Value:
    """One field of a JSON object, of the kind expected. A bool is no number, as everywhere in JSON."""
    if not isinstance(data, Mapping):
        raise at(where, f"expected an object, got {type(data).__name__}")
    if name not in data or (data[name] is None and default is not MISSING):
        if default is MISSING:
            raise ConfigurationError(
                f"{where}: {name} is missing", code="SCHEMA_FIELD_MISSING", value=f"{where}: {name}"
            )
        return default  # type: ignore[no-any-return]
    found = data[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join(item.__name__ for item in kinds)
        raise at(f"{where}: {name}", f"expected {wanted}, got {type(found).__name__}", limit=wanted)
    return found  # type: ignore[return-value]


def take_map(data: Any, name: str, where: str) -> dict[str, Any]:
    """A field that is an object with non-empty names."""
    found = take(data, name, dict, where)
    if any(not key for key in found):
        raise at(f"{where}: {name}", "holds an empty name")
    return dict(found)


def take_name(data: Any, name: str, where: str) -> str:
    """A field that becomes part of a file name: it must not be able to leave its folder."""
    found = take(data, name, str, where)
    if not found or found[0] == "." or any(sign in found for sign in "/\\\0"):
        raise at(f"{where}: {name}", f"{found!r} cannot be a file name", value=found, limit="a name without slashes")
    return found


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension: constant where `value` is a number, given by each workload where it is None."""

    value: int | None = None
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        kind = {"type": "var"} if self.value is None else {"type": "const", "value": self.value}
        return {**kind, **({"description": self.description} if self.description else {})}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (axis names; None for a Python number) and dtype of an input or output."""

    shape: tuple[str, ...] | None
    dtype: str
    description: str = ""

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    def to_json(self) -> dict[str, Any]:
        plain = {"shape": None if self.shape is None else list(self.shape), "dtype": self.dtype}
        return {**plain, **({"description": self.description} if self.description else {})}


@dataclass(frozen=True)
class Definition:
    """What to compute. `source` is the file it was read from, which decides whether its code may run."""

    name: str
    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    tags: tuple[str, ...] = ()
    description: str = ""
    constraints: tuple[str, ...] = ()
    source: Path | None = field(default=None, compare=False)

    @property
    def const_axes(self) -> dict[str, int]:
        return {name: axis.value for name, axis in self.axes.items() if axis.value is not None}

    @property
    def var_axes(self) -> tuple[str, ...]:
        return tuple(name for name, axis in self.axes.items() if axis.value is None)

    @property
    def stage(self) -> str:
        """Which stage the tags or the name speak of: decode, prefill, or nothing."""
        words = [tag.removeprefix("stage:").strip() for tag in self.tags if tag.startswith("stage:")]
        return next((word for word in ("decode", "prefill") if word in words or word in self.name), "")

    def shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """A shape in numbers; `sizes` are those of the variable axes."""
        if spec.shape is None:
            return None
        known = {**sizes, **self.const_axes}
        return tuple(known[axis] for axis in spec.shape)

    def constant(self, name: str) -> int | float | None:
        """A number the definition fixes under this name: a constant axis, or a literal the reference assigns to it.

        The source is only read: `EPS = 1e-5` anywhere in it gives 1e-5 for "eps". Two different numbers give None.
        """
        axes = {axis.lower(): value for axis, value in self.const_axes.items()}
        if name.lower() in axes:
            return axes[name.lower()]
        found: set[Any] = {
            node.value.value
            for node in ast.walk(ast.parse(self.reference))
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) in (int, float)
            and any(isinstance(target, ast.Name) and target.id.lower() == name.lower() for target in node.targets)
        }
        return found.pop() if len(found) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """As in the file: flashinfer-bench reads it back."""
        optional = {"tags": list(self.tags), "description": self.description, "constraints": list(self.constraints)}
        return {
            "name": self.name,
            "op_type": self.op_type,
            **{key: value for key, value in optional.items() if value},
            **{key: plain(getattr(self, key)) for key in ("axes", "inputs", "outputs")},
            "reference": self.reference,
        }


def load_definition(path: Path) -> Definition:
    """Read one definition file. A file that says something impossible is refused with file, key and value."""
    return parse_definition(parse_json(read_text(path), path.name), source=path)


def parse_definition(data: Any, source: Path | None = None) -> Definition:
    """A Definition from its JSON. Keys the format does not know are left aside, as flashinfer-bench does."""
    where = source.name if source is not None else "definition"
    name = take_name(data, "name", where)
    axes = {key: _axis(item, f"{where}: axes.{key}") for key, item in take_map(data, "axes", where).items()}
    inputs, outputs = (
        {key: _tensor(item, f"{where}: {side}.{key}", axes) for key, item in take_map(data, side, where).items()}
        for side in ("inputs", "outputs")
    )
    both = sorted(set(inputs) & set(outputs))
    if both:
        raise at(where, f"{both[0]} is both an input and an output", value=both[0])
    if not outputs:
        raise at(f"{where}: outputs", "is empty")
    return Definition(
        name,
        take_name(data, "op_type", where),
        axes,
        inputs,
        outputs,
        _source(take(data, "reference", str, where), where),
        _words(data, "tags", where),
        take(data, "description", str, where, ""),
        _expressions(data, where),
        source,
    )


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for the format's name."""
    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def _axis(data: Any, where: str) -> Axis:
    # flashinfer-bench leaves out what has its default value, the type of an axis too.
    kind = take(data, "type", str, where, "const" if isinstance(data, dict) and "value" in data else "var")
    description = take(data, "description", str, where, "")
    if kind == "var":
        return Axis(None, description)
    if kind != "const":
        raise at(f"{where}: type", f"{kind!r} is unknown", value=kind, limit="const or var")
    value = take(data, "value", int, where)
    if value < 0:
        raise at(f"{where}: value", f"{value} is negative", value=value, limit="0 or more")
    return Axis(value, description)


def _tensor(data: Any, where: str, axes: Mapping[str, Axis]) -> TensorSpec:
    dtype = take(data, "dtype", str, where)
    if dtype not in DTYPES:
        raise at(f"{where}: dtype", f"{dtype!r} is unknown", value=dtype, limit=", ".join(DTYPES))
    description = take(data, "description", str, where, "")
    if data.get("shape", MISSING) is None:  # a value here: it means a Python number
        return TensorSpec(None, dtype, description)
    shape = tuple(take(data, "shape", list, where))
    for axis in shape:
        if not isinstance(axis, str) or axis not in axes:
            raise at(f"{where}: shape", f"names the axis {axis!r}, which axes does not define", value=str(axis))
    return TensorSpec(shape, dtype, description)


def _source(text: str, where: str) -> str:
    """Only parsed, never run: that it is Python with a `run` is part of the format."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise at(f"{where}: reference", f"is not Python: {error}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise at(f"{where}: reference", "has no top-level function run", limit="def run(...)")
    return text


def _expressions(data: Any, where: str) -> tuple[str, ...]:
    found = _words(data, "constraints", where)
    for text in found:
        try:
            ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise at(f"{where}: constraints", f"{text!r} is not an expression", value=text) from None
    return found


def _words(data: Any, name: str, where: str) -> tuple[str, ...]:
    found = take(data, name, list, where, [])
    if any(not isinstance(item, str) or not item for item in found):
        raise at(f"{where}: {name}", "expected non-empty strings")
    return tuple(found)
