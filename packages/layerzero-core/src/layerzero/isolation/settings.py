"""How one backend is isolated, as a value: from the policy's entry and the backend's own declaration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerzero.model.kernel import BackendSpec
from layerzero.plugin.enclosure import Enclosure


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a child is started with. Equal settings share one child.

    deadline_s   a call that has no answer by then is given up and its child ended
    start_s      the same for starting the child and importing the vendor
    memory_mb    the most shared host memory (and memory per device) tensors of one call may take
    background   of the lowest priority and with bounded memory: for work that nobody waits for
    """

    backend: str
    env: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    deadline_s: float = 30.0
    start_s: float = 120.0
    memory_mb: float = 4096.0
    arena_mb: float = 64.0
    background: bool = False
    grace_s: float = field(default=0.25, compare=False)

    @staticmethod
    def of(backend: str, entry: Mapping[str, Any], spec: BackendSpec | None = None) -> Settings:
        """Merge the policy's entry with what the backend declares; the policy is stronger, hidden names add up."""
        declared: Mapping[str, Any] = {} if spec is None else spec.isolation
        env = {**declared.get("env", {}), **entry.get("env", {})}
        hide = (*entry.get("hide", ()), *declared.get("hide", ()))
        numbers: dict[str, Any] = {
            name: float(entry[name]) for name in ("deadline_s", "start_s", "memory_mb") if name in entry
        }
        return Settings(
            backend,
            tuple(sorted((str(name), str(value)) for name, value in env.items())),
            tuple(os.path.abspath(place) for place in entry.get("path", ())),
            tuple(dict.fromkeys(hide)),
            **numbers,
        )

    @property
    def enclosure(self) -> Enclosure:
        """What the child sees otherwise than this process."""
        return Enclosure(self.path, self.hide)

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the child: this one, the entry's on top, the entry's folders first on its path."""
        made = {name: value for name, value in base.items() if name != "PYTHONPATH"}
        made["LAYERZERO_ISOLATION"] = "in_process"  # a kernel that calls LayerZero itself starts no further children
        made.update(self.env)
        before = made.get("PYTHONPATH", base.get("PYTHONPATH", ""))
        # Where this process found things, the child finds them too: the adapter's package above all.
        ours = [place for place in sys.path if place and os.path.isabs(place) and not place.endswith(".zip")]
        made["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([*self.path, *filter(None, before.split(os.pathsep)), *ours])
        )
        return made
