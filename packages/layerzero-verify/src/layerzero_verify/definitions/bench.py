"""One workload with its inputs: runs a solution on copies of them and judges what comes out."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError, LayerZeroError, NoKernelFoundError
from layerzero.numerics import ErrorReport, Tolerance, compare, definition_tolerance, full_float32, tolerance
from layerzero.reasons import Reason, reason
from layerzero_verify.definitions.inputs import copied
from layerzero_verify.definitions.outcome import Options, Outcome
from layerzero_verify.definitions.reference import in_order
from layerzero_verify.definitions.schema import Definition, torch_dtype
from layerzero_verify.definitions.trace import Status, Workload

Outputs = dict[str, Tensor]
Run = Callable[[dict[str, Any]], Any]

# A kernel whose code cannot be had at all did not compile, as far as the format's words go.
_NOT_BUILT = frozenset({"KERNEL_FUNCTION_MISSING", "BACKEND_IMPORT_FAILED", "JIT_FAILED"})
_LOW_BIT = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "float4_e2m1": "nvfp4"}
_PRODUCTS = frozenset({"gemm", "moe"})
_ABOUT_OTHERS = frozenset({"NO_KERNEL", "BACKEND_NOT_REQUESTED", "POLICY_LOCKED_OUT"})


@dataclass(frozen=True, slots=True)
class Started:
    """A solution is about to run: whoever watches knows which one hangs or crashes."""

    solution: str
    workload: Workload


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of the first run, those of the last, and the median milliseconds of a run, copying left out."""

    outputs: Outputs
    again: Outputs
    milliseconds: float


@dataclass
class Bench:
    """The workload, its inputs on the device, and how long the definition's own code took for them."""

    definition: Definition
    workload: Workload
    inputs: dict[str, Any]
    options: Options
    reference_ms: float = 0.0

    @property
    def device(self) -> torch.device:
        return next((item.device for item in self.inputs.values() if isinstance(item, Tensor)), torch.device("cpu"))

    def outcome(self, solution: str, **fields: Any) -> Outcome:
        return Outcome(self.definition.name, self.workload, solution, **fields)

    def start(self, solution: str) -> Started:
        return Started(solution, self.workload)

    def run(self, solution: str, run: Run, *, partial: bool = False) -> Result | Outcome:
        """Run once for the outputs, then for the time; or the Outcome of a solution that could not be run."""
        definition = self.definition
        if partial:  # a truth that gives the first output only
            definition = replace(definition, outputs=dict(list(definition.outputs.items())[:1]))
        try:
            with torch.no_grad(), full_float32():  # the bounds assume that TF32 is off
                outputs = in_order(definition, run(copied(self.inputs)), self.device)
                outputs = {name: tensor.clone() for name, tensor in outputs.items()}  # a solution may reuse its memory
                last, times = None, []
                for _ in range(max(self.options.repeats, 1)):
                    fresh = copied(self.inputs)
                    self._wait()
                    begun = time.perf_counter()
                    last = run(fresh)
                    self._wait()
                    times.append(1e3 * (time.perf_counter() - begun))
                return Result(outputs, in_order(definition, last, self.device), sorted(times)[len(times) // 2])
        except Exception as error:
            return self.raised(solution, error)

    def raised(self, solution: str, error: Exception) -> Outcome:
        """A refusal with reasons is a skip; a kernel that could not be loaded did not compile; the rest failed."""
        cause = error.__cause__ if isinstance(error, LayerZeroError) and error.__cause__ is not None else error
        if isinstance(error, NotImplementedError):
            return self.outcome(solution, reason=reason("FEATURE_UNSUPPORTED", str(error)))
        if isinstance(error, (NoKernelFoundError, InvalidInputError)):
            why = _own_reason(error)
            status = Status.COMPILE_ERROR if why.code.value in _NOT_BUILT else None
            return self.outcome(solution, status=status, reason=why, log=str(error))
        log = "".join(traceback.format_exception(cause))
        return self.outcome(solution, status=Status.RUNTIME_ERROR, log=log)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def bounds(self, output: str) -> Tolerance:
        return bounds(self.definition, output, rtol=self.options.rtol, atol=self.options.atol)

    def judge(self, solution: str, against: str, actual: Outputs, expected: Outputs | None, **fields: Any) -> Outcome:
        """Shape, then dtype, then numbers. Without `expected` the definition's own words are all there is."""
        made = functools.partial(self.outcome, solution, against=against)
        for name, tensor in actual.items():
            shape = self.definition.shape(self.definition.outputs[name], self.workload.axes) or ()
            if tuple(tensor.shape) != shape:
                log = f"{name}: shape {list(tensor.shape)}, expected {list(shape)}"
                return made(status=Status.INCORRECT_SHAPE, log=log)
        for name, tensor in actual.items():
            wanted = torch_dtype(self.definition.outputs[name].dtype)
            if tensor.dtype != wanted:
                return made(status=Status.INCORRECT_DTYPE, log=f"{name}: dtype {tensor.dtype}, expected {wanted}")
        errors: dict[str, ErrorReport] = {}
        lines = []
        for name in actual if expected is not None else ():
            assert expected is not None
            if name in expected:
                errors[name] = compare(actual[name], expected[name], self.bounds(name))
            lines.append(f"{name}: {errors[name] if name in errors else f'not compared, {against} does not give it'}")
        status = Status.PASSED if all(report.ok for report in errors.values()) else Status.INCORRECT_NUMERICAL
        return made(
            status=status, errors=errors, log="\n".join(lines), reference_latency_ms=self.reference_ms, **fields
        )

    def steady(self, outcome: Outcome, result: Result) -> Outcome:
        """A passed outcome stays so only if a second run on the same inputs gave the same bits."""
        if not outcome.passed:
            return outcome
        for name, tensor in result.outputs.items():
            if not torch.equal(_bits(tensor), _bits(result.again[name])):
                report = compare(result.again[name], tensor, self.bounds(name))
                log = f"{name}: two runs on the same inputs differ\n{report}"
                return replace(outcome, status=Status.INCORRECT_NUMERICAL, log=log, errors={name: report})
        return replace(outcome, extra={**outcome.extra, "deterministic": True})


def _bits(tensor: Tensor) -> Tensor:
    """The memory of a tensor, so that NaN equals itself and -0.0 does not equal 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _own_reason(error: LayerZeroError) -> Reason:
    """Of all the reasons in a refusal, the one that speaks of the kernel asked for."""
    spoken = [item for item in error.reasons if item.code.value not in _ABOUT_OTHERS]
    return (spoken or list(error.reasons))[0]


def bounds(definition: Definition, output: str, *, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """The bounds for one output; `rtol` and `atol` override the table's numbers, not its hit ratio.

    FP8 or FP4 anywhere among the inputs means a hit ratio. A float32 output of half-precision inputs (a log-sum-exp)
    has the general float32 bounds; float32 products grow with the length of their sum.
    """
    dtype = definition.outputs[output].dtype
    tensors = [spec for spec in definition.inputs.values() if spec.floating and spec.shape is not None]
    low = next((_LOW_BIT[spec.dtype] for spec in tensors if spec.dtype in _LOW_BIT), None)
    found = definition_tolerance(low if low is not None and definition.outputs[output].floating else dtype)
    if low is None and dtype == "float32":
        if any(spec.dtype in ("float16", "bfloat16") for spec in tensors):
            found = _wider(found, tolerance("", "float32"))
        if definition.op_type in _PRODUCTS:
            longest = max((definition.const_axes.get(spec.shape[-1], 1) for spec in tensors if spec.shape), default=1)
            found = _wider(found, tolerance("gemm", "float32", k=longest))
    return replace(found, rtol=found.rtol if rtol is None else rtol, atol=found.atol if atol is None else atol)


def _wider(one: Tolerance, other: Tolerance) -> Tolerance:
    return replace(one, rtol=max(one.rtol, other.rtol), atol=max(one.atol, other.atol))
