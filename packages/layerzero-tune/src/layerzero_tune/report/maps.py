"""Winner maps: cases laid out by the two sizes that matter for their op. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerzero_tune.report.data import Measured, phase


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
    count: dict[str, int] = {}
    for case in cases:
        for kernel in case.kernels:
            count.setdefault(backend(kernel), 0)
        count[backend(case.chosen)] = count.get(backend(case.chosen), 0) + 1
    return sorted(count, key=lambda name: (-count[name], name))


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
        tuple(_word(value) for value in columns),
        {place: tuple(found) for place, found in cells.items()},
    )


def _word(value: tuple[int, ...]) -> str:
    return " → ".join(f"{part:,}".replace(",", "\u2009") for part in value)
