"""layerzero-accel, where it is installed: the hot path of the public functions in C. Looked for once, at import.

It changes how fast a choice is found, never which one: whatever it cannot key, it hands to the function in Python. What
stands in its way is kept as a reason for `lz doctor`; LAYERZERO_ACCEL=off leaves it aside, =on refuses to go without.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from layerzero.dispatch.bind import Bound
from layerzero.dispatch.hot import HOT_LIMIT
from layerzero.env import read_one
from layerzero.errors import BackendNotAvailableError
from layerzero.reasons import Reason, reason
from layerzero.runtime.current import now, scope
from layerzero.runtime.state import state

# What both sides agree on: the arguments of `setup` and `function`, what `modes` answers. The library carries its own.
SEAM: Final = 5


# The dispatch keys that are included in a thread while ops are followed: by dispatch modes, by functorch, by the tracer
# of torch.jit.trace, and by modes before dispatch.
_FOLLOWERS = ("Python", "FuncTorchDynamicLayerFrontMode", "Tracer", "PreDispatch")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The C library, set up, or the reason why there is none; `wanted` is LAYERZERO_ACCEL, None where it is not set."""

    native: Any = None
    why: Reason | None = None
    wanted: bool | None = None

    @property
    def functions(self) -> Any:
        """Its half in Python: which public functions have a C form, and what that must know of them."""
        return importlib.import_module(f"{self.native.__package__}.functions")


def look() -> Accelerator:
    """Load and set up the library. Raises only where LAYERZERO_ACCEL=on and it cannot be used."""
    wanted: bool | None = read_one("accel")
    if wanted is False:
        return Accelerator(wanted=False)
    native, why = _load()
    if why is not None and wanted:
        raise BackendNotAvailableError(f"LAYERZERO_ACCEL=on, but {why.message}", reasons=(why,))
    return Accelerator(native, why, wanted)


def _load() -> tuple[Any, Reason | None]:
    try:
        native: Any = importlib.import_module("layerzero_accel._hot")
    except ModuleNotFoundError as error:
        if error.name == "layerzero_accel":
            return None, reason("BACKEND_NOT_INSTALLED", "layerzero-accel", "layerzero-accel")
        return None, reason("ACCEL_NOT_BUILT")
    except ImportError as error:
        return None, reason("ACCEL_UNFIT", str(error))
    if native.SEAM != SEAM:
        return None, reason("ACCEL_UNFIT", f"it speaks version {native.SEAM} of the interface, the core {SEAM}")
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, reason("ACCEL_UNFIT", f"torch {torch.__version__} has no DLPack exchange API (2.10 brought it)")
    try:
        native.setup(
            exchange,
            Tensor,
            Parameter,
            inspect.getattr_static(Tensor, "requires_grad"),
            torch.is_grad_enabled,
            torch._C._is_any_autocast_enabled,
            torch._C._get_deterministic_algorithms,
            now,
            scope.get,
            type(now)(),
            Bound.__new__(Bound),
            HOT_LIMIT,
            torch._C._len_torch_dispatch_stack,
            torch._C._get_tracing_state,
            vars(forward_ad),
            vars(profiler),
            tuple(int(key) for key in _followers()),
        )
    except Exception as error:
        return None, reason("ACCEL_UNFIT", f"{type(error).__name__}: {error}")
    native.trust(_answers_as_torch(native.modes) and _sees_followers(native.follows))
    state.on_swap(lambda world: native.forget())
    return native, None


def _answers_as_torch(modes: Callable[[], tuple[int, int] | None]) -> bool:
    """Whether what the library reads of gradients and autocast by itself is what torch says, on and off.

    It finds both by names inside torch's libraries, which torch may change; then it asks as everybody does.
    """
    if modes() is None:
        return False
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for on in (None, "cpu", "cuda"):
                    for kind in before:
                        torch.set_autocast_enabled(kind, kind == on)
                    if modes() != (grad, on is not None):
                        return False
    finally:
        for kind, was in before.items():
            torch.set_autocast_enabled(kind, was)
    return True


def _followers() -> list[Any]:
    parse: Callable[[str], Any] = torch._C._parse_dispatch_key
    return [parse(name) for name in _FOLLOWERS]


def _sees_followers(follows: Callable[[], bool | None]) -> bool:
    """Whether the library sees each key that is included while ops are followed, and nothing where none is."""
    if follows() is not False:
        return False
    for key in _followers():
        with torch._C._IncludeDispatchKeyGuard(key):  # no op of torch runs in here
            if follows() is not True:
                return False
    return follows() is False


accelerator: Final = look()
