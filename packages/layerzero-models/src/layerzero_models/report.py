"""What patching did to a model: which parts compute with which op now, which were left alone and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from layerzero.json_form import Plain

__all__ = ["Left", "PatchReport", "Patched"]


@dataclass(frozen=True, slots=True)
class Patched(Plain):
    """One part that computes with LayerZero now.

    name  where it is in the model, as `named_modules` says it; "" is the model itself
    kind  class of the part
    op    the op it calls; where several, joined by " + "
    """

    name: str
    kind: str
    op: str


@dataclass(frozen=True, slots=True)
class Left(Plain):
    """One part that was looked at and left as it is, and why."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class PatchReport(Plain):
    """All of it, with the library and its version. Printed, it is counted by kind; `to_json` names every part."""

    library: str
    version: str
    model: str
    patched: tuple[Patched, ...] = ()
    left: tuple[Left, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.library} {self.version}): {len(self.patched)} parts patched"]
        for (kind, op), count in sorted(Counter((item.kind, item.op) for item in self.patched).items()):
            lines.append(f"  {count:4} × {kind}: {op}")
        for (kind, why), count in sorted(Counter((item.kind, item.why) for item in self.left).items()):
            lines.append(f"  {count:4} × {kind} left as it is: {why}")
        return "\n".join(lines)
