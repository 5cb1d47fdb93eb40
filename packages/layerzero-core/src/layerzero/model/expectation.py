"""How long a kernel is expected to take beside torch's own code, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from layerzero.json_form import Plain

# What a kernel's place in a ranking rests on, the strongest first.
MEASURED: Final = "measured here"
SHIPPED: Final = "shipped measurements"
ROOFLINE: Final = "roofline estimate"
PRIORITY: Final = "priority"


@dataclass(frozen=True, slots=True)
class Expectation(Plain):
    """What somebody else's measurements say of one kernel and one call.

    ratio     its time over that of the code a torch user would write
    base_us   what that code is expected to take, in µs
    source    SHIPPED, between measured sizes; ROOFLINE, from bytes, operations and the rates the kernel reached
    machine   the device that was measured, with commit and torch
    nearest   the nearest measured sizes, and how many octaves away they are
    noise     ratios that are closer than this say nothing: more where the machine was busy
    """

    ratio: float
    base_us: float
    source: str
    machine: str
    commit: str
    torch: str
    nearest: tuple[tuple[str, int], ...]
    octaves: float
    noise: float

    def to_json(self) -> dict[str, Any]:
        figures = {name: round(getattr(self, name), 4) for name in ("ratio", "base_us", "octaves")}
        return Plain.to_json(self) | figures | {"nearest": dict(self.nearest)}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.nearest)
        where = f"{self.machine}, commit {self.commit}, torch {self.torch}"
        return (
            f"{self.source}: {self.ratio:.2f} x torch's time; nearest {sizes}, {self.octaves:.1f} octaves away; {where}"
        )
