"""Check one definition: its own code, the ground truths against it, and every kernel of ours against it.

Everything is an Outcome. What a solution is compared with is the definition's code where that may run and is sound,
else the first ground truth; where there is neither, kernels are skipped with the reason.
"""

from __future__ import annotations

import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero.dispatch.run import current_world
from layerzero.errors import InvalidInputError, LayerZeroError, NoKernelFoundError, UnknownNameError
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import ErrorReport, Tolerance, compare, definition_tolerance, full_float32, tolerance
from layerzero.public.control import scoped
from layerzero.public.inspection import list_kernels
from layerzero.reasons import Reason, reason
from layerzero_verify.definitions import draws
from layerzero_verify.definitions.adapters import Adapter, Unsupported, adapter_for
from layerzero_verify.definitions.inputs import copied, make_inputs
from layerzero_verify.definitions.reference import CompileError, NotTrustedError, Trust, compile_reference, in_order
from layerzero_verify.definitions.schema import Definition, torch_dtype
from layerzero_verify.definitions.trace import REFERENCE, Options, Outcome, Status, Workload
from layerzero_verify.definitions.truths import Truth, find_truths
from layerzero_verify.lineup import unknown

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
            # the reason that speaks of the kernel asked for
            spoken = [item for item in error.reasons if item.code.value not in _ABOUT_OTHERS]
            why = (spoken or list(error.reasons))[0]
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


# A definition's `run`, or why there is none.
Code = Callable[..., Any] | NotTrustedError | CompileError
Draw = Callable[..., Any]


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def known_backends(names: Iterable[str]) -> None:
    """Refuse a name that is neither a kernel nor a backend here."""
    registry = current_world().registry
    known = {*registry.backends, *(kernel.backend for kernel in registry.kernels.values())}
    for name in names:
        if name not in registry.kernels and name not in known:
            raise unknown(f"unknown backend or kernel {name!r}", name, known, "BACKEND_UNKNOWN")


def _kernels_for(op: str, wanted: tuple[str, ...], device: torch.device) -> tuple[list[KernelSpec], dict[str, Reason]]:
    """The kernels of an op to try, and the reason against each of the others that were asked for.

    `wanted` names kernel ids or backends; empty means all. Whether a kernel takes a call is its own matter: dispatch
    says so when it is asked.
    """
    registry = current_world().registry
    platform = Platform.ROCM.value if device.type == "cuda" and torch.version.hip else device.type
    found = [kernel for kernel in list_kernels(op) if not wanted or {kernel.kernel_id, kernel.backend} & set(wanted)]
    named = {name for kernel in found for name in (kernel.kernel_id, kernel.backend)}
    reasons = {
        name: reason("FEATURE_UNSUPPORTED", op, detail=f"{name} has no kernel of it")
        for name in wanted
        if name not in named
    }
    for kernel in found:
        backend = registry.backends.get(kernel.backend)
        if backend is not None and not backend.available:
            reasons[kernel.kernel_id] = next(iter(backend.reasons), reason("BACKEND_NOT_INSTALLED", kernel.backend))
        elif platform not in kernel.platforms:
            reasons[kernel.kernel_id] = reason("PLATFORM_MISMATCH", platform, kernel.platforms)
    return [kernel for kernel in found if kernel.kernel_id not in reasons], reasons


def check_workloads(
    definition: Definition, workloads: Iterable[Workload], options: Options, root: Path | None = None
) -> Iterator[Started | Outcome]:
    """Check every solution on each workload, one after the other, saying when each begins.

    What cannot be tried for any workload (a library that is not here, a kernel of another device) is said once.
    """
    device = torch.device(options.device) if options.device else default_device()
    subject = _Subject.of(definition, options, device)
    unused = subject.unused
    for workload in workloads:
        blank = Outcome(definition.name, workload, "")
        yield from (replace(blank, solution=name, reason=why) for name, why in unused.items())
        unused = {}
        try:
            inputs = make_inputs(definition, workload, device, root=root)
        except LayerZeroError as error:
            yield replace(blank, solution="inputs", reason=error.reasons[0], log=str(error))
            continue
        bench = Bench(definition, workload, inputs, options)
        yield from (_check_draws if definition.op_type == "sampling" else _check_values)(bench, subject)


@dataclass(frozen=True)
class _Subject:
    """What there is to try for a definition, and the reason against everything else."""

    code: Code
    truths: list[Truth]
    adapter: Adapter | None
    kernels: list[KernelSpec]
    unused: dict[str, Reason]

    @staticmethod
    def of(definition: Definition, options: Options, device: torch.device) -> _Subject:
        try:
            code: Code = compile_reference(definition, Trust.of(options.trust))
        except (NotTrustedError, CompileError) as error:
            code = error
        truths, missing = find_truths(definition, device) if options.truths else ([], {})
        try:
            adapter = adapter_for(definition)
            kernels, unused = _kernels_for(adapter.op, options.backends, device)
        except (Unsupported, UnknownNameError) as error:
            return _Subject(code, truths, None, [], {**missing, "layerzero": error.reasons[0]})
        return _Subject(code, truths, adapter, kernels, {**missing, **unused})

    def run(self, kernel: KernelSpec) -> Callable[..., Any]:
        """The op as this kernel computes it, right or wrong: the public function, asked for the kernel by name."""
        assert self.adapter is not None
        call, op = self.adapter.call, functools.partial(public_op(self.adapter.op).function, backend=kernel.kernel_id)

        def run(inputs: dict[str, Any], **seeded: Any) -> Any:
            with scoped(on_first_use="off"):  # judging it is the work of this very check
                return call(op, inputs, **seeded)

        return run


def _check_values(bench: Bench, subject: _Subject) -> Iterator[Started | Outcome]:
    yield Started(REFERENCE, bench.workload)
    own, reference = _reference(bench, subject.code)
    yield own
    results: dict[str, Outputs] = {}
    for truth in subject.truths:
        yield Started(truth.source, bench.workload)
        found = bench.run(truth.source, truth.run, partial=truth.partial)
        if isinstance(found, Outcome):
            yield replace(found, against=REFERENCE)
            continue
        results[truth.source] = found.outputs
        if reference is None:
            yield bench.outcome(truth.source, against=REFERENCE, reason=own.reason or _unsound(own))
            continue
        # The ground truth is what the reference is measured by, so it stands on the side of the expected.
        kept = {name: tensor for name, tensor in reference.items() if name in found.outputs}
        yield bench.judge(truth.source, REFERENCE, kept, found.outputs, latency_ms=found.milliseconds)
    for one, other in itertools.combinations(results, 2):
        yield bench.judge(other, one, results[other], results[one])
    against, expected = (REFERENCE, reference) if reference is not None else next(iter(results.items()), ("", None))
    for kernel in subject.kernels:
        if expected is None:
            yield bench.outcome(kernel.kernel_id, reason=own.reason or _unsound(own), log=own.log)
            continue
        yield Started(kernel.kernel_id, bench.workload)
        found = bench.run(kernel.kernel_id, subject.run(kernel))
        if isinstance(found, Outcome):
            yield replace(found, against=against)
            continue
        outcome = bench.judge(kernel.kernel_id, against, found.outputs, expected, latency_ms=found.milliseconds)
        yield bench.steady(outcome, found) if kernel.deterministic else outcome


def _reference(bench: Bench, code: Code) -> tuple[Outcome, Outputs | None]:
    """The definition's own code: what it says of itself, and its result if that can be relied on."""
    if isinstance(code, LayerZeroError):
        return _not_run(bench, code), None
    found = bench.run(REFERENCE, lambda inputs: code(**inputs))
    if isinstance(found, Outcome):
        return found, None
    bench.reference_ms = found.milliseconds
    outcome = bench.judge(REFERENCE, "", found.outputs, None, latency_ms=found.milliseconds)
    outcome = bench.steady(outcome, found)
    return outcome, found.outputs if outcome.passed else None


def _not_run(bench: Bench, error: LayerZeroError) -> Outcome:
    """A definition's code that does not compile has failed; one that may not run is skipped."""
    if isinstance(error, CompileError):
        return bench.outcome(REFERENCE, status=Status.COMPILE_ERROR, log=str(error))
    return bench.outcome(REFERENCE, reason=error.reasons[0], log=str(error))


def _check_draws(bench: Bench, subject: _Subject) -> Iterator[Started | Outcome]:
    """Samplers: each is judged by the exact distribution, so none of them has to be right for the others to be."""
    if "probs" not in bench.inputs:
        yield bench.outcome(REFERENCE, reason=reason("FEATURE_UNSUPPORTED", "sampling from anything but probs"))
        return
    code = subject.code
    tried: list[tuple[str, Draw, bool]] = [(truth.source, _unseeded(truth.run), True) for truth in subject.truths]
    if isinstance(code, LayerZeroError):
        yield _not_run(bench, code)
    else:
        tried.insert(0, (REFERENCE, _unseeded(lambda inputs: code(**inputs)), True))
    tried += [(kernel.kernel_id, subject.run(kernel), bool(kernel.deterministic)) for kernel in subject.kernels]
    for solution, draw, steady in tried:
        yield Started(solution, bench.workload)
        yield _judged(bench, solution, draw, steady=steady)


def _judged(bench: Bench, solution: str, draw: Draw, *, steady: bool) -> Outcome:
    """Shape and dtype as for any solution, then many draws; `steady` ones have to draw the same from the same seed."""

    def seeded(inputs: dict[str, Any]) -> Any:
        return draw(inputs, generator=torch.Generator(device=bench.device).manual_seed(1))

    found = bench.run(solution, seeded)
    if isinstance(found, Outcome):
        return replace(found, against="distribution")
    outcome = bench.judge(solution, "distribution", found.outputs, None, latency_ms=found.milliseconds)
    if not outcome.passed:
        return outcome
    name = next(iter(bench.definition.outputs))
    try:
        with torch.no_grad():
            verdict = draws.judge(
                lambda i, g: in_order(bench.definition, draw(copied(i), generator=g), bench.device)[name], bench.inputs
            )
    except Exception as error:
        return replace(bench.raised(solution, error), against="distribution")
    good = verdict.ok and (verdict.deterministic or not steady)
    status = Status.PASSED if good else Status.INCORRECT_NUMERICAL
    return replace(outcome, status=status, extra=asdict(verdict), log=str(verdict))


def _unseeded(run: Callable[[dict[str, Any]], Any]) -> Draw:
    """Code that draws from torch's own generators, made to follow one of ours; afterwards they are as they were."""

    def draw(inputs: dict[str, Any], *, generator: torch.Generator) -> Any:
        seed = int(torch.randint(0, 2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng([generator.device] if generator.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return run(inputs)

    return draw


def _unsound(own: Outcome) -> Reason:
    return reason("HEALTH_CHECK_FAILED", f"the definition's own code ended with {own.status}")
