"""The policy layers of the process, and how they become the World's policy.

Order of strength: call > context manager > programmatic > environment > file; deny adds up over all of them.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero import env
from layerzero.model.config import Policy
from layerzero.policy.layers import PolicyLayer, from_env, merge, next_expiry
from layerzero.runtime.state import state
from layerzero.runtime.timers import timers

if TYPE_CHECKING:
    from layerzero.policy.watch import FileWatch


class Policies:
    """Layers by source. Changing one merges again and swaps the World."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._files: tuple[PolicyLayer, ...] | None = None
        self._env: PolicyLayer | None = None
        self._set: dict[str, PolicyLayer] = {}
        self._watch: FileWatch | None = None
        self.last_error: Exception | None = None

    def merged(self, scoped: tuple[PolicyLayer, ...] = ()) -> Policy:
        """The policy of all layers, with those of a scope on top."""
        with self._lock:
            layers = (*self.base(), *self._set.values(), *scoped)
        return merge(layers, now=time.monotonic())

    def base(self) -> tuple[PolicyLayer, ...]:
        """Layers of files and environment, read once."""
        with self._lock:
            if self._env is None:
                self._env = from_env(env.read(os.environ))
            if self._files is None:
                from layerzero.policy.load import load_discovered

                self._files = tuple(load_discovered(env.read(os.environ)))
            return (*self._files, self._env)

    def put(self, name: str, layer: PolicyLayer | None) -> None:
        """Set, replace or (None) remove a programmatic layer, and publish. An invalid result changes nothing."""
        with self._lock:
            before = dict(self._set)
            self._set.pop(name, None)
            if layer is not None:
                self._set[name] = layer
            try:
                self.merged()
            except Exception:
                self._set = before
                raise
        self.publish()

    def load(self, path: str | Path, *, watch: bool = False) -> PolicyLayer:
        """Read a policy file in place of any found before; with `watch` later `poll` calls reload it."""
        from layerzero.policy.watch import FileWatch

        watched = FileWatch(Path(path))
        with self._lock:
            self._files = (watched.layer,)
            self._watch = watched if watch else None
        self.publish()
        return watched.layer

    def poll(self) -> bool:
        """Reload a watched file if it changed. A bad new file keeps the old policy and is kept in `last_error`."""
        with self._lock:
            if self._watch is None:
                return False
            outcome = self._watch.poll()
            self.last_error = outcome.error
            if not outcome.changed:
                return False
            self._files = (outcome.layer,)
        self.publish()
        return True

    def publish(self) -> None:
        """Swap the World's policy, forget timeboxes that are over, and arm the clock for the next one."""
        state.refresh_policy()
        with self._lock:
            now = time.monotonic()
            self._set = {name: layer for name, layer in self._set.items() if not layer.expired(now)}
            deadline = next_expiry(layer for layer in (*self.base(), *self._set.values()) if not layer.expired(now))
        if deadline is None:
            timers.cancel("policy")
        else:
            timers.after("policy", deadline - now, self.publish)

    def reset(self) -> None:
        """Forget every layer and read environment and files again at the next use. For tests."""
        with self._lock:
            self._files, self._env, self._watch = None, None, None
            self._set.clear()
            self.last_error = None
        timers.cancel("policy")


policies = Policies()
