"""The inputs of a workload: numbers as given, tensors from files of the dataset, the rest made up, but valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import BackendNotAvailableError, ConfigurationError, InvalidInputError, invalid
from layerzero_verify.definitions.constraints import violated
from layerzero_verify.definitions.making import Maker
from layerzero_verify.definitions.schema import Definition, torch_dtype
from layerzero_verify.definitions.trace import InputSource, Workload


def make_inputs(
    definition: Definition, workload: Workload, device: torch.device | str, *, root: Path | None = None
) -> dict[str, Any]:
    """Every input in the definition's order, on the device; the same workload always gives the same numbers.

    `root` is the dataset's folder, where safetensors files are looked for. A workload that contradicts its definition
    is refused with the axis, input or constraint.
    """
    sizes = _sizes(definition, workload)
    unknown = sorted(set(workload.inputs) - set(definition.inputs))
    if unknown:
        raise _refused(definition, workload, f"gives {unknown[0]}, which is no input", unknown[0], definition.inputs)
    known = {
        name: _given(definition, workload, name, source, sizes, root)
        for name, source in workload.inputs.items()
        if source.kind != "random"
    }
    _keep(definition, workload, sizes)
    try:
        made = Maker(definition, sizes, known, f"{definition.name} {workload.uuid}").fill()
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise _refused(definition, workload, "cannot be made up", f"{type(error).__name__}: {error}", "") from error
    _keep(definition, workload, {**sizes, **made})
    place = torch.device(device)
    return {name: item.to(place) if isinstance(item, Tensor) else item for name, item in made.items()}


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Fresh tensors: a kernel may write into what it is given."""
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in inputs.items()}


def _keep(definition: Definition, workload: Workload, values: dict[str, Any]) -> None:
    """Refuse values that break a constraint; those that need a value not there yet wait."""
    broken, _ = violated(definition.constraints, values)
    if broken:
        raise _refused(definition, workload, f"does not keep {broken[0]}", dict(workload.axes), broken[0])


def _sizes(definition: Definition, workload: Workload) -> dict[str, int]:
    missing = [axis for axis in definition.var_axes if axis not in workload.axes]
    if missing:
        raise _refused(definition, workload, f"does not give the axis {missing[0]}", missing[0], definition.var_axes)
    fixed = definition.const_axes
    for axis, size in workload.axes.items():
        if axis in fixed and fixed[axis] != size:
            raise _refused(definition, workload, f"changes the constant axis {axis}", size, fixed[axis])
    return {**workload.axes, **fixed}


def _given(
    definition: Definition, workload: Workload, name: str, source: InputSource, sizes: dict[str, int], root: Path | None
) -> Any:
    spec = definition.inputs[name]
    if source.kind == "scalar":
        if spec.shape is not None:
            raise _refused(definition, workload, f"gives a number for the tensor {name}", source.value, spec.shape)
        return source.value
    tensor = _tensor(source, root)
    shape = definition.shape(spec, sizes)
    if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(spec.dtype):
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise _refused(definition, workload, f"{name} in {source.path} does not fit", found, f"{spec.dtype} {shape}")
    return tensor


def _tensor(source: InputSource, root: Path | None) -> Tensor:
    if root is None:
        raise ConfigurationError(
            f"{source.path} is relative to a dataset, and none is given", code="CONFIG_FILE_MISSING", value=source.path
        )
    path = (root / source.path).resolve()
    if root.resolve() not in path.parents:
        raise ConfigurationError(
            f"{source.path} is outside the dataset", code="PATH_NOT_TRUSTED", value=source.path, limit=str(root)
        )
    if not path.is_file():
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path))
    try:
        from safetensors import safe_open
    except ImportError:
        raise BackendNotAvailableError(
            "safetensors is not installed", value="safetensors", limit="'layerzero-verify[definitions]'"
        ) from None
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.get_tensor(source.key)  # type: ignore[no-any-return]
    except Exception as error:  # the library raises types of its own for a bad file and for a missing key
        raise ConfigurationError(
            f"{source.path}: {source.key} cannot be read: {error}", code="SCHEMA_INVALID", value=source.path
        ) from None


def _refused(
    definition: Definition, workload: Workload, problem: str, value: object, limit: object
) -> InvalidInputError:
    return invalid(
        "SHAPE_INVALID",
        str(value),
        ", ".join(limit) if isinstance(limit, (tuple, list, dict)) else str(limit),
        f"the workload {workload.uuid} of {definition.name} {problem}",
    )
