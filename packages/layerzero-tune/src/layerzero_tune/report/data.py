"""What `lz report` shows, as values: measured cases, and the figures over them. Pure; reading files is elsewhere.

oracle       the fastest candidate kernel of a case, in the same run
torch        the fixed torch code for the case (`layerzero_tune.timing.baselines`)
a library    its fastest kernel wherever it has one, torch elsewhere
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero_tune.perfdb.exchange import entries_of
from layerzero_tune.timing.host_load import BUSY, LIMIT

FORMAT = "layerzero-bench/1"
SLOWER = 0.95  # so much of torch's speed or less is worth a reader's eye
_NOT_LIBRARIES = frozenset({"reference"})


@dataclass(frozen=True, slots=True)
class Timed:
    """One kernel in one case: µs a call, and the largest error against the reference."""

    us: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One case. `chosen` is what LayerZero runs; `call_us` the public call itself, dispatch included.

    busy   others used the machine meanwhile; `rule` what counts as a time; None and "" where the file does not say
    """

    name: str
    op: str
    dtype: str
    sizes: Mapping[str, int]
    device: str
    mode: str
    chosen: str
    kernels: Mapping[str, Timed]
    torch_us: float | None = None
    call_us: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    causal: bool = False
    busy: bool | None = False
    rule: str = ""

    @property
    def best(self) -> str:
        return min(self.kernels, key=lambda name: (self.kernels[name].us, name))

    @property
    def oracle_us(self) -> float:
        return min(item.us for item in self.kernels.values())

    @property
    def floor_us(self) -> float:
        """The fastest of all, torch included: what a library is held against."""
        return min(self.oracle_us, self.torch_us if self.torch_us is not None else math.inf)

    @property
    def chosen_us(self) -> float:
        return self.kernels[self.chosen].us

    @property
    def ratio(self) -> float:
        """Chosen over oracle; 1 is perfect."""
        return self.chosen_us / self.oracle_us

    @property
    def over_fastest(self) -> float:
        """Chosen over the fastest of all, torch included: the headline."""
        return self.chosen_us / self.floor_us

    @property
    def behind(self) -> str:
        """Why torch default was faster than what ran, by more than a reader can overlook; "" where it was not."""
        if self.torch_us is None or self.speedup is None or self.speedup >= SLOWER:
            return ""
        if self.busy:
            return "others used the machine meanwhile: measure again when it is quiet"
        if self.oracle_us <= self.torch_us and self.chosen != self.best:
            return f"{self.best} is as fast as torch; the choice was made by other times than these: lz tune"
        if self.call_us is not None and self.chosen_us * SLOWER <= self.torch_us:
            return f"the kernel keeps up; finding it adds {self.call_us - self.chosen_us:.1f} µs to a call this short"
        return f"no kernel that may run here is as fast; the nearest is {self.best}"

    @property
    def speedup(self) -> float | None:
        """Times faster than torch; of the public call where it was timed, dispatch and all."""
        if self.torch_us is None:
            return None
        return self.torch_us / (self.call_us if self.call_us is not None else self.chosen_us)


@dataclass(frozen=True, slots=True)
class Share:
    """How near one way of doing everything comes to the fastest of all: geometric mean and worst over the cases."""

    geomean: float
    worst: float
    worst_case: str
    used_in: int
    cases: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures over some cases. `libraries` by name, with `torch default` for torch everywhere; `busy` counts cases
    that were measured while others used the machine."""

    cases: int
    ratio: Share | None
    speedup: float | None
    slowest: tuple[str, float] | None
    layerzero: Share | None
    libraries: Mapping[str, Share]
    busy: int = 0

    @property
    def ways(self) -> list[tuple[str, Share]]:
        """LayerZero, then each single library, the nearest to the fastest first; none where nothing was chosen."""
        own = [] if self.layerzero is None else [("LayerZero", self.layerzero)]
        return [*own, *sorted(self.libraries.items(), key=lambda item: item[1].geomean)] if own else []

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible, rounded to what the measurement can hold."""

        def share(item: Share | None) -> dict[str, Any] | None:
            if item is None:
                return None
            return {**asdict(item), "geomean": round(item.geomean, 4), "worst": round(item.worst, 4)}

        return {
            "cases": self.cases,
            **({"busy_cases": self.busy} if self.busy else {}),
            "tuned_over_oracle": share(self.ratio),
            "speedup_over_torch": None if self.speedup is None else round(self.speedup, 3),
            "slowest_against_torch": None if self.slowest is None else [self.slowest[0], round(self.slowest[1], 3)],
            "layerzero_over_fastest": share(self.layerzero),
            "library_over_fastest": {name: share(item) for name, item in self.libraries.items()},
        }


def figures(cases: Sequence[Measured]) -> Figures:
    """What the page and the benchmark say about cases."""
    timed = [case for case in cases if case.chosen in case.kernels]
    against = {case.name: found for case in timed if (found := case.speedup) is not None}
    slowest = min(against.items(), key=lambda item: item[1], default=None)
    names = {name.partition(".")[0] for case in timed for name in case.kernels}
    libraries = {
        name: _share([(case, *alone) for case in timed if (alone := _alone(name, case)) is not None])
        for name in sorted(names - _NOT_LIBRARIES)
    }
    libraries["torch default"] = _share([(case, case.torch_us, True) for case in timed if case.torch_us is not None])
    return Figures(
        len(timed),
        _share([(case, case.chosen_us, True) for case in timed], oracle=True),
        geometric_mean(against.values()) if against else None,
        slowest,
        _share([(case, case.chosen_us, True) for case in timed]),
        {name: item for name, item in libraries.items() if item is not None},
        sum(case.busy is True for case in timed),
    )


def _alone(library: str, case: Measured) -> tuple[float, bool] | None:
    """The time of a case with one library only, torch where it has nothing; None where neither was timed."""
    own = [item.us for name, item in case.kernels.items() if name.partition(".")[0] == library]
    if own:
        return min(own), True
    return None if case.torch_us is None else (case.torch_us, False)


def _share(items: Sequence[tuple[Measured, float, bool]], *, oracle: bool = False) -> Share | None:
    ratios = {case.name: us / (case.oracle_us if oracle else case.floor_us) for case, us, _ in items}
    if not ratios:
        return None
    worst = max(ratios, key=lambda name: ratios[name])
    return Share(geometric_mean(ratios.values()), ratios[worst], worst, sum(used for *_, used in items), len(ratios))


def phase(case: Measured) -> str:
    """What a case is in the words of the field: prefill, decode, paged decode, or the op itself."""
    if case.op in ("attention", "paged_attention", "varlen_attention", "mla_paged_attention"):
        word = {"attention": "", "paged_attention": "paged ", "varlen_attention": "varlen "}.get(case.op, "latent ")
        return f"{word}{'decode' if case.sizes.get('seq_len_q') == 1 else 'prefill'}"
    return case.op


# -- reading ----------------------------------------------------------------------------------------
def from_json(data: Any, source: str) -> list[Measured]:
    """The cases of a file that `lz bench` or benchmarks/tuned.py wrote; ConfigurationError says what is wrong."""
    found_cases = []
    for index, item in enumerate(entries_of(data, "cases", [FORMAT], source, "no measurements")):
        try:
            case = _case(item)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = f"cases[{index}]"
            message = f"{source}: {where} is not readable: {type(error).__name__}: {error}"
            raise ConfigurationError(message, code="SCHEMA_INVALID", value=where) from None
        if case.kernels:
            found_cases.append(case)
    return found_cases


def _case(item: Mapping[str, Any]) -> Measured:
    kernels, refused = {}, {}
    for name, entry in item["kernels"].items():
        if "us" in entry:
            us = _number(entry, "us")
            if not us:
                raise ValueError(f"us is {us!r}")
            kernels[str(name)] = Timed(us, _number(entry, "error"))
        else:
            refused[str(name)] = str(entry.get("why", "not timed"))
    sizes = {str(name): int(size) for name, size in item["sizes"].items()}
    # Others used the machine: other programs its cores, or other guests its host; None: not written down.
    busy, stolen = _number(item, "busy"), _number(item, "stolen")
    disturbed = None if busy is stolen is None else (busy or 0.0) > BUSY or (stolen or 0.0) > LIMIT
    return Measured(
        str(item["name"]), str(item["op"]), str(item["dtype"]), sizes, str(item["device"]), str(item["mode"]),
        str(item["chosen"]), kernels, _number(item.get("torch", {}), "us"), _number(item.get("call", {}), "us"),
        refused, item.get("causal", "none") not in ("none", False), disturbed, str(item.get("rule", "")),
    )  # fmt: skip


def _number(item: Mapping[str, Any], name: str) -> float | None:
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


# -- winner maps: cases laid out by the two sizes that matter for their op ------------------------------
@dataclass(frozen=True, slots=True)
class Axes:
    """Where a case stands: the value down and across, and what else tells it from its neighbours."""

    down: str
    down_value: tuple[int, ...]
    across: str
    across_value: tuple[int, ...]
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Map:
    """One table: its title, what goes down and across, and the cases in each cell."""

    title: str
    down: str
    across: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], tuple[Measured, ...]]


# Sizes that grow with traffic and widths of a model, those first that tell more of a call.
_DOWN = ("seq_len_q", "rows", "tokens", "batch")
_ACROSS = ("head_dim", "n", "vocab", "hidden")


def backend(kernel_id: str) -> str:
    """The library a kernel comes from."""
    return kernel_id.partition(".")[0]


def backends(cases: Sequence[Measured]) -> list[str]:
    """Backends in the order of how often they are chosen; those never chosen last."""
    count = Counter(backend(case.chosen) for case in cases)
    every = {*count, *(backend(kernel) for case in cases for kernel in case.kernels)}
    return sorted(every, key=lambda name: (-count[name], name))


def axes(case: Measured) -> Axes:
    """How a case stands on its map."""
    sizes = case.sizes
    if "head_dim" in sizes and "seq_len_k" in sizes:
        rows, columns = sizes.get("seq_len_q", 1), sizes["seq_len_k"]
        heads, kv = sizes.get("num_heads", 1), sizes.get("num_kv_heads", sizes.get("num_heads", 1))
        rest = f"B{sizes.get('batch', 1)} H{heads}" + (f"/{kv}" if kv != heads else "")
        if rows not in (1, columns):
            return Axes("queries → keys", (rows, columns), "head_dim", (sizes["head_dim"],), rest)
        causal = " causal" if case.causal and rows > 1 else ""
        return Axes("length", (columns,), "head_dim", (sizes["head_dim"],), rest + causal)
    names = list(sizes) or ["size"]
    down = next((name for name in _DOWN if name in sizes), names[0])
    across = next((name for name in _ACROSS if name in sizes), names[-1])
    shown = {"seq_len_q": "length"}.get(down, down)
    rest = f"k {sizes['k']}" if case.op == "linear" and sizes.get("k") not in (None, sizes.get("n")) else ""
    return Axes(shown, (sizes.get(down, 0),), across, (sizes.get(across, 0),), rest)


def maps(cases: Sequence[Measured]) -> list[Map]:
    """One map for each kind of call, dtype, device and mode, attention first."""
    groups: dict[tuple[str, ...], list[Measured]] = {}
    several = {name: len({getattr(case, name) for case in cases}) > 1 for name in ("device", "mode")}
    for case in cases:
        key = (phase(case), case.dtype, case.device if several["device"] else "", case.mode if several["mode"] else "")
        groups.setdefault(key, []).append(case)
    ordered = sorted(groups.items(), key=lambda item: ("head_dim" not in item[1][0].sizes, item[0]))
    return [_map(key, found) for key, found in ordered]


def _map(key: tuple[str, ...], cases: Sequence[Measured]) -> Map:
    placed = [(axes(case), case) for case in cases]
    rows = sorted({(at.down_value[-1:], at.down_value) for at, _ in placed})
    columns = sorted({at.across_value for at, _ in placed})
    cells: dict[tuple[str, str], list[Measured]] = {}
    for at, case in placed:
        cells.setdefault((_word(at.down_value), _word(at.across_value)), []).append(case)
    downs = dict.fromkeys(at.down for at, _ in placed)
    return Map(
        ", ".join(word for word in key if word),
        " or ".join(downs),
        placed[0][0].across,
        tuple(_word(value) for _, value in rows),
        tuple(map(_word, columns)),
        {place: tuple(found) for place, found in cells.items()},
    )


def _word(value: tuple[int, ...]) -> str:
    return " → ".join(f"{part:,}".replace(",", "\u2009") for part in value)
