"""The stations of the tour and what the tour found at each: plain values, made once, rendered three ways."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from layerzero.json_form import Plain, plain
from layerzero.model.decision import Candidate
from layerzero.model.device import DeviceSpec
from layerzero_tune.demo.block import Sizes

_SAME = 0.05


@dataclass(frozen=True, slots=True)
class Station(Plain):
    """One op of the block, as a newcomer should meet it."""

    key: str
    op: str
    title: str
    group: str
    lesson: str


GROUPS = {"in": "Tokens in", "attention": "Attention", "mlp": "MLP", "out": "Token out", "decode": "Decode, one token"}

_data = json.loads(files("layerzero_tune.demo").joinpath("stations.json").read_text(encoding="utf-8"))
# In the order in which `forward` calls the ops of a prefill; of a decode step only what it does differently.
PREFILL, DECODE = (tuple(Station(*row) for row in _data[part]) for part in ("prefill", "decode"))


@dataclass(frozen=True, slots=True)
class Check(Plain):
    """A result held against the reference. `detail` says how, `max_error` how far off it was."""

    ok: bool
    max_error: float
    detail: str


@dataclass(frozen=True, slots=True)
class Stop(Plain):
    """What was found at a station.

    `chosen` is the decision, `ran` what dispatch noted when it ran: they differ after a failover. `others_us` times
    the accepted kernels that were not chosen, `plan_us` the same call pre-bound by `lz.plan`; `torch_us` is the same
    step in plain torch.
    """

    station: Station
    shape: str
    chosen: str
    ran: str | None
    candidates: tuple[Candidate, ...]
    check: Check
    lz_us: float
    torch_us: float
    others_us: dict[str, float] = field(default_factory=dict)
    plan_us: float | None = None

    @property
    def kernel(self) -> str:
        return self.ran or self.chosen

    @property
    def verdict(self) -> str:
        return verdict(self.lz_us, self.torch_us)

    def why_not(self) -> list[tuple[str, str]]:
        """(kernel id, one short line) for each kernel that did not run."""
        lines = []
        for item in self.candidates:
            if item.kernel_id == self.kernel:
                continue
            if item.accepted:
                text = f"fits, scored {item.score:g}" if item.score is not None else "fits"
                if "another" in item.outdone:
                    text += f", {item.outdone}"
                if item.kernel_id in self.others_us:
                    text += f"; timed here: {verdict(self.others_us[item.kernel_id], self.lz_us)}"
            else:
                text = item.reasons[0].message if item.reasons else "refused"
                if len(item.reasons) > 1:
                    text += f" (and {len(item.reasons) - 1} more)"
            lines.append((item.kernel_id, text))
        return lines

    def to_json(self) -> dict[str, Any]:
        found = Plain.to_json(self)
        return {**found.pop("station"), **found, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class DecodeStep(Plain):
    """One decode step: what dispatch had to do for it, and how long it took."""

    context: int
    selections: int
    lz_us: float
    torch_us: float


@dataclass(frozen=True, slots=True)
class Tour:
    """Everything the demo found."""

    version: str
    device: DeviceSpec
    dtype: str
    sizes: Sizes
    facts: tuple[tuple[str, str], ...]
    stops: tuple[Stop, ...]
    decode: tuple[DecodeStep, ...]
    decode_calls: int
    agreement: Check
    counters: dict[str, int]
    first_pass_us: float
    lz_us: float
    torch_us: float
    seconds: float

    @property
    def kernels_considered(self) -> int:
        return len({item.kernel_id for stop in self.stops for item in stop.candidates})

    @property
    def failed(self) -> list[str]:
        titles = [stop.station.title for stop in self.stops if not stop.check.ok]
        return titles if self.agreement.ok else [*titles, "paged against dense attention"]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def decode_selections(self) -> int:
        return sum(step.selections for step in self.decode)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "ok": self.ok,
            "failed": self.failed,
            "device": self.device.to_json(),
            "dtype": self.dtype,
            "sizes": plain(self.sizes),
            "facts": dict(self.facts),
            "kernels_considered": self.kernels_considered,
            "prefill": {name: getattr(self, name) for name in ("first_pass_us", "lz_us", "torch_us")},
            "stops": plain(self.stops),
            "decode": {
                "steps": len(self.decode),
                "calls": self.decode_calls,
                "selections": self.decode_selections,
                "paged_matches_dense": self.agreement.to_json(),
                "counters": self.counters,
                "each": plain(self.decode),
            },
            "seconds": self.seconds,
        }


def verdict(us: float, against: float) -> str:
    """`us` compared with `against` in words; within five percent they are the same."""
    ratio = max(us, against) / min(us, against)
    if ratio <= 1 + _SAME:
        return "same"
    return f"{ratio:.2f}"[:4].rstrip(".") + f"× {'slower' if us > against else 'faster'}"
