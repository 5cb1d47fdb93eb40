"""Every exception LayerZero raises on purpose.

    LayerZeroError
     ├─ InvalidInputError (ValueError,       the caller's arguments cannot mean anything; torch raises a
     │                     RuntimeError)     RuntimeError for most of them
     ├─ UnknownNameError (LookupError)       an op, kernel, backend or device that does not exist
     ├─ NoKernelFoundError                   nothing, not even the reference, may run
     ├─ LockedKernelError                    the op is locked to a kernel that cannot run
     ├─ KernelExecutionError                 every candidate raised, or a retry was not safe
     │   └─ DeviceLostError                  the device answers nothing more to this process
     ├─ CudaGraphUnsafeError                 no graph-safe kernel inside a capture
     ├─ BackendNotAvailableError             the backend is not installed or does not work here
     ├─ ConfigurationError                   a setting, file or variable is wrong
     │   ├─ PolicyValidationError            a policy file or rule is wrong (line and key named)
     │   ├─ CapabilitiesError                a capabilities.json is wrong (key named)
     │   └─ DispatchTableError               a dispatch table is missing, damaged or edited
     ├─ PluginError                          a plugin broke the contract
     ├─ PackageMissingError (ImportError)    a package beside the core is not installed
     ├─ PlanMismatchError                    a checked plan was called with other arguments
     ├─ SelectionTimeoutError (TimeoutError) waiting for a selection took too long
     ├─ TuningError                          a call cannot be measured here
     ├─ DistributedError                     ranks disagree, or one does not answer
     └─ CacheCorruptionError                 a stored cache cannot be trusted

Each carries `.code` (a ReasonCode) and `.reasons` (all that apply, the first being the cause).
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any

from layerzero.reasons import Reason, ReasonCode, reason

__all__ = [
    "BackendNotAvailableError",
    "CacheCorruptionError",
    "CapabilitiesError",
    "ConfigurationError",
    "CudaGraphUnsafeError",
    "DeviceLostError",
    "DispatchTableError",
    "DistributedError",
    "InvalidInputError",
    "KernelExecutionError",
    "LayerZeroError",
    "LayerZeroWarning",
    "LockedKernelError",
    "NoKernelFoundError",
    "PackageMissingError",
    "PlanMismatchError",
    "PluginError",
    "PolicyValidationError",
    "SelectionTimeoutError",
    "TuningError",
    "UnknownNameError",
]


class LayerZeroWarning(UserWarning):
    """Something was decided for the caller that the caller should say explicitly."""


class LayerZeroError(Exception):
    """Base of all: says what happened (`body`), which value met which limit, and what to do."""

    default_code = "VALUE_INVALID"

    def __init_subclass__(cls, code: str = "", **kwargs: object) -> None:
        """`code` is what an error of this class has where none is given."""
        super().__init_subclass__(**kwargs)
        cls.default_code = code or cls.default_code

    def __init__(
        self,
        message: str = "",
        *,
        code: ReasonCode | str | None = None,
        value: object = None,
        limit: object = None,
        reasons: Iterable[Reason] = (),
        hint: str | None = None,
    ) -> None:
        given = tuple(reasons)
        if code is None:
            code = given[0].code if given else self.default_code
        self.code: ReasonCode = ReasonCode(code)
        if not given:
            given = (reason(self.code, value, limit),)
        self.reasons: tuple[Reason, ...] = given
        self.hint = given[0].hint if hint is None else hint
        self.body = message or given[0].message
        text = f"{self.body} [{self.code.value}]"
        super().__init__(f"{text}; {self.hint}" if self.hint else text)


class InvalidInputError(LayerZeroError, ValueError, RuntimeError):
    """The arguments of a call contradict each other or the op.

    A RuntimeError too: that is what torch raises for such arguments, so code that handles torch's handles this one.
    """


def invalid(
    code: ReasonCode | str, value: object = None, limit: object = None, message: str = "", hint: str | None = None
) -> InvalidInputError:
    """The refusal of an argument, to be raised: the code, what was given, what is expected, words of one's own.

    Where the words leave out what was given or what is expected, it is added to them.
    """
    why = reason(code, value, limit)
    if message and why.limit is not None and str(why.limit) not in message and "expected" not in message:
        given = "" if str(why.value) in message else f": got {why.value}"
        message = f"{message}{given}, expected {why.limit}"
    return InvalidInputError(message, reasons=(why,), hint=hint)


class UnknownNameError(LayerZeroError, LookupError, code="OP_UNKNOWN"):
    """A name that no op, kernel, backend or device bears."""


class NoKernelFoundError(LayerZeroError, code="NO_KERNEL"):
    """Every candidate, the reference included, was rejected."""


class LockedKernelError(NoKernelFoundError, code="LOCKED_KERNEL_UNAVAILABLE"):
    """The op is locked to a kernel that cannot run for this call."""


class KernelExecutionError(LayerZeroError, code="KERNEL_RAISED"):
    """A kernel raised and no other candidate could take over."""


class DeviceLostError(KernelExecutionError, code="DEVICE_LOST"):
    """An error no later call on that device survives: the process must be restarted."""


class CudaGraphUnsafeError(LayerZeroError, code="CUDA_GRAPH_UNSAFE"):
    """Inside a graph capture no safe kernel exists."""


class BackendNotAvailableError(LayerZeroError, code="BACKEND_NOT_INSTALLED"):
    """The backend is missing or unusable on this machine."""


class ConfigurationError(LayerZeroError, code="CONFIG_INVALID"):
    """A setting, a file or an environment variable is wrong; `.line` and `.key` are the place, where it is known."""

    def __init__(self, message: str = "", *, line: int | None = None, key: str | None = None, **kwargs: object) -> None:
        super().__init__(message, **kwargs)  # type: ignore[arg-type]
        self.line = line
        self.key = key


class PolicyValidationError(ConfigurationError, code="POLICY_INVALID"):
    """A policy is wrong; `.line` and `.key` point at the place when it came from a file."""


class CapabilitiesError(ConfigurationError, code="SCHEMA_INVALID"):
    """A capabilities descriptor is wrong; `.key` points at the field."""


class DispatchTableError(ConfigurationError, code="PLAN_FILE_INVALID"):
    """A dispatch table cannot be read or does not hold here."""


class PackageMissingError(LayerZeroError, ImportError, code="PACKAGE_MISSING"):
    """A name or verb of a package beside the core that is not installed."""


class PluginError(LayerZeroError, code="PLUGIN_REGISTER_FAILED"):
    """A plugin broke the plugin contract."""


class PlanMismatchError(LayerZeroError, code="PLAN_ARGUMENTS_CHANGED"):
    """A plan made with check=True was called with arguments it was not bound for."""


class SelectionTimeoutError(LayerZeroError, TimeoutError, code="SELECTION_TIMEOUT"):
    """A thread waited too long for another thread's selection."""


class TuningError(LayerZeroError, code="TUNING_IMPOSSIBLE"):
    """A call cannot be measured here."""


class DistributedError(LayerZeroError, code="RANK_DISAGREEMENT"):
    """Ranks disagree, or one does not answer; `.ranks` names those that are meant, where that is known."""

    def __init__(self, message: str = "", *, ranks: tuple[int, ...] = (), **kwargs: object) -> None:
        super().__init__(message, **kwargs)  # type: ignore[arg-type]
        self.ranks = ranks


class CacheCorruptionError(LayerZeroError, code="CACHE_CORRUPT"):
    """A stored cache failed its check."""


# -- warnings that are errors ------------------------------------------------------------------------------------
_here = threading.local()
_shown = ("default", SimpleNamespace(match=lambda text: getattr(_here, "importing", False)), Warning, None, 0)


@contextmanager
def importing() -> Iterator[None]:
    """This thread imports a library: where warnings are errors, what it remarks is shown meanwhile and not raised.

    The filter stays: `warnings.catch_warnings` would put back what other threads had in their list for a moment.
    """
    filters: Any = warnings.filters
    if filters and filters[0] is not _shown and any(item[0] == "error" for item in filters):
        filters.insert(0, _shown)
    before, _here.importing = getattr(_here, "importing", False), True
    try:
        yield
    finally:
        _here.importing = before


# -- names that are not known -------------------------------------------------------------------------------------
def nearest(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Those of the known names that are most like this one."""
    import difflib  # start-up time

    return difflib.get_close_matches(name, list(known), count, cutoff)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The hint for a name that nobody bears: the nearest one that somebody does, else what to do."""
    found = nearest(name, known, 1, cutoff)
    return f"did you mean {found[0]}?" if found else otherwise


def one_line(error: BaseException, most: int = 400) -> str:
    """An exception in words, its type first, on one line of at most so many characters."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")[:most]


def import_reason(function: str, error: BaseException) -> Reason:
    """Why an adapter "module:name" cannot be imported: it is not there, or what it imports raised."""
    module, _, name = function.partition(":")
    gone = isinstance(error, AttributeError) and error.name == name.partition(".")[0]
    if gone or (isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name)):
        return reason("KERNEL_FUNCTION_MISSING", function, detail=one_line(error, 300))
    return reason("BACKEND_IMPORT_FAILED", one_line(error, 300))


# -- whose exception is it? -----------------------------------------------------------------------------------------
def from_outside(error: BaseException) -> bool:
    """Whether an exception that passed through a kernel was raised for the caller: it is then nobody's fault.

    A signal handler's (a timeout, say), or that of a hook on saved tensors, by which torch.utils.checkpoint ends its
    recomputation. Both are Python functions that run in the middle of whatever is running, so they stand in the
    traceback: a handler is given the very frame that it interrupted, hooks are known to torch.
    """
    known = _called_from_outside()
    seen: BaseException | None = error
    while seen is not None:
        step = seen.__traceback__
        while step is not None:
            if step.tb_frame.f_code in known or _interrupts(step.tb_frame):
                return True
            step = step.tb_next
        seen = seen.__cause__
    return False


def _interrupts(frame: FrameType) -> bool:
    """Whether a function was called with its caller's frame: as handlers of signals and trace functions are."""
    caller, code = frame.f_back, frame.f_code
    if caller is None or code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS) == 0:
        return False
    here = frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    given = [here.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = here.get(code.co_varnames[count])
        given.extend(rest if isinstance(rest, tuple) else ())
    found = any(item is caller for item in given)
    if type(here) is dict:  # a copy that the frame would keep, and with it what a kernel held (before Python 3.13)
        here.clear()
    return found


def _called_from_outside() -> set[CodeType]:
    """The code of the handlers of signals, and of torch's hooks for the tensors that a gradient will need."""
    found: list[object] = [signal.getsignal(number) for number in signal.valid_signals()]
    torch = sys.modules.get("torch")
    if torch is not None:
        found.extend(torch._C._autograd._top_saved_tensors_default_hooks(True) or ())
    return {code for item in found if (code := _code_of(item)) is not None}


def _code_of(item: Any) -> CodeType | None:
    while isinstance(item, functools.partial):
        item = item.func
    item = getattr(item, "__func__", item)
    if not isinstance(item, FunctionType) and callable(item):
        item = type(item).__call__
    code = getattr(item, "__code__", None)
    return code if isinstance(code, CodeType) else None
