"""A graph that names a backend which is not here: a saved program outlives the machine it was made on."""

from __future__ import annotations

import logging
from functools import lru_cache

from layerzero.dispatch.late import current_world

_log = logging.getLogger("layerzero.torch_ops")


def present(backend: str) -> str | None:
    """The backend as named; None, said once, where it is not here and the policy's `on_fault` is "fallback".

    Otherwise the name stays, and the call is refused with the reason: nothing else runs in place of what was asked for.
    """
    world = current_world()
    if world.policy.on_fault != "fallback":
        return backend
    known = world.registry
    if backend in known.kernels or backend in known.backends or known.by_backend(backend):
        own = known.backends.get(known.kernels[backend].backend if backend in known.kernels else backend)
        if own is None or own.available:
            return backend
    _missed(backend)
    return None


@lru_cache(maxsize=256)
def _missed(backend: str) -> None:
    _log.warning("a graph asks for backend %s, which is not here; on_fault is fallback: selected without it", backend)
