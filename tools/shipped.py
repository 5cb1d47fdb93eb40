"""The measurements that ship: `measurements.json` of every backend, from what `benchmarks/factory.py` took on machines.

    python -m tools.shipped [FILE …]             write them into the packages; default: results/*/factory.jsonl
    python -m tools.shipped --check [FILE …]     exit code 1 where one of them is not what would be written
    python -m tools.shipped --left-out [FILE …]  how well calls are told from the others, left out one by one
    python -m tools.shipped --raced UNTUNED.json FILE  add to FILE what a run of `benchmarks/untuned.py` has raced

Kernels that were wrong, raised or are not registered have no time and do not ship; the reference does not either, nor
do calls that were timed while other programs used more than a tenth of the cores. What --left-out finds is kept beside
each FILE as left_out.json: the error of expected times, and of choices made by them. Runs of untuned.py draw with a new
seed each time, so that what an earlier one has measured may ship; its calls bear their seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero.measurements.between import FARTHEST, Kind, Point
from layerzero.measurements.shipped import SCHEMA_VERSION, free_first, together
from layerzero.model.context import Context
from layerzero.model.situation import kind_of
from layerzero.registry.proofs import beside, sealed
from layerzero.runtime.state import state
from layerzero_cli.calls import context
from tools.requirements_doc import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from drawing import Drawn, drawn
from factory import SEED

__all__ = ["documents", "left_out", "main", "records", "rendered"]

_MOST = 4000  # calls that are drawn in search of those that were measured
_BUSY = 0.1  # share of the cores that others used: a call timed then says little
_LAUNCHED = 1.2  # times the eager time: no replay of a graph takes so long
_REFERENCE = "reference"  # the last resort, whatever it took: it may write out scores of any size


def records(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a run and its calls that were measured undisturbed, each with its cost in bytes and operations."""
    header, *lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    right = [item for item in lines if item.get("times") and item.get("base")]
    found = {item["name"]: item for item in right if item["busy"] <= _BUSY}
    if right and not found:
        raise SystemExit(f"{file}: other programs used the machine at every one of {len(right)} calls: take them anew")
    device, costs = "cpu" if header["family"].startswith("cpu") else "cuda", {}
    for seed in dict.fromkeys(item.get("seed", SEED) for item in found.values()):
        left = {name for name, item in found.items() if item.get("seed", SEED) == seed}
        for call in itertools.islice(drawn(seed, device), _MOST):
            if call.name in left:
                costs[call.name] = tuple(state.world.ops[call.op].cost(_described(call)))
                left.remove(call.name)
            if not left:
                break
    missing = sorted(found.keys() - costs.keys())
    if missing:
        raise SystemExit(f"{file}: {missing[0]} is no call that benchmarks/factory.py draws")
    return header, [{**item, "cost": costs[name]} for name, item in found.items()]


def _described(call: Drawn) -> Context:
    """A drawn call on the device it was drawn for, which need not be here."""
    device = call.options["device"]
    return context(call.op, {**call.options, "device": "h200" if device == "cuda" else device})


def raced(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a run of `benchmarks/untuned.py` as `benchmarks/factory.py` would have written them."""
    calls = {call.name: call for call in itertools.islice(drawn(data["seed"], data["device"]), data["asked"])}
    found = []
    for item in data["records"]:
        kernels = item["kernels"]
        line = {
            "op": item["op"], "kind": kind_of(_described(calls[item["name"]])), "mode": "eager", "sizes": item["sizes"],
            "base": item["torch"].get("us"), "times": _times(kernels),
            "errors": {name: kernels[name].get("error") for name in _times(kernels)},
            "refused": {name: entry["why"] for name, entry in kernels.items() if entry.get("why")},
            "busy": item["busy"],
        }  # fmt: skip
        if "graph" in item and item["graph"]["torch"].get("us"):
            line["graph"] = {"base": item["graph"]["torch"]["us"], "times": _times(item["graph"]["kernels"])}
        found.append({**line, "stage": "taken", "name": item["name"], "seed": data["seed"]})
    return found


def _times(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Without kernels that have one schedule for any batch: too few of their times are known to tell others from."""
    return {name: entry["us"] for name, entry in kernels.items() if "us" in entry and not name.endswith(".fixed")}


def _add(run: Path, file: Path) -> int:
    """Add a run to a file of the factory; what it has already is not added again."""
    header, *lines = file.read_text(encoding="utf-8").splitlines()
    data, told = json.loads(run.read_text(encoding="utf-8")), json.loads(header)
    machine = data["machine"]
    if (told["device"], told["versions"]["torch"]) != (machine["gpu"] or machine["cpu"], machine["torch"]):
        raise SystemExit(f"{run} is of {machine}, {file} of {told['device']} and {told['versions']}")
    known = {json.loads(line)["name"] for line in lines}
    new = [item for item in raced(data) if item["name"] not in known]
    if new:
        told["commit"] += f", {data['commit']} (seed {data['seed']})"
    text = [json.dumps(told, ensure_ascii=False), *lines, *(json.dumps(item, ensure_ascii=False) for item in new)]
    file.write_text("\n".join(text) + "\n", "utf-8")
    print(f"{len(new)} calls of {run} added to {file}")
    return 0


def documents(taken: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """One document for each backend, from the headers and calls of one run for each family of devices."""
    registry = state.world.registry
    made: dict[str, dict[str, Any]] = {}
    for header, calls in taken:
        for backend in sorted({name.partition(".")[0] for item in calls for name in item["times"]} - {_REFERENCE}):
            registered = [k for k in registry.kernels if k.startswith(f"{backend}.")]
            groups, graphs = (list(_groups(found, registered)) for found in (calls, _captured(calls)))
            if not groups:
                continue
            spec, versions = registry.backends[backend], header["versions"]
            vendor = spec.vendor
            entry = {
                # The version is the one they ship with; the commit is what was measured.
                "device": header["device"], "commit": header["commit"], "version": spec.version,
                "vendor": versions.get(vendor, "") if vendor else "", "torch": versions["torch"],
                "threads": header["threads"], "capped": header["capped"] or "",
                "busy": round(max(item["busy"] for item in calls), 3), "groups": groups,
            }  # fmt: skip
            if graphs:
                entry["graphs"] = graphs
            document = made.setdefault(backend, {"schema_version": SCHEMA_VERSION, "backend": backend, "families": {}})
            document["families"][header["family"]] = entry
    return {backend: sealed(document) for backend, document in made.items()}


def _captured(calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The calls that were measured in graphs, with the times they took there.

    A replay launches nothing: a time well above the eager one is that of a launch. Until November 2026 kernels whose
    launches were far behind were timed so, without a graph.
    """
    found = []
    for item in calls:
        if graph := item.get("graph"):
            times = {name: us for name, us in graph["times"].items() if us < _LAUNCHED * item["times"][name]}
            found.append({**item, **graph, "times": times})
    return found


def _groups(calls: Sequence[Mapping[str, Any]], registered: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The calls of each op and kind with the times of these kernels over torch's."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for item in calls:
        kinds.setdefault((item["op"], item["kind"], *item["sizes"]), []).append(item)
    for (op, kind, *axes), found in sorted(kinds.items()):
        names = sorted({name for item in found for name in item["times"]} & set(registered))
        if not names:
            continue
        errors = [
            [item["errors"][name] for item in found if item.get("errors", {}).get(name) is not None] for name in names
        ]
        points = [
            [*item["sizes"].values(), *map(round, item["cost"]), _short(item["base"]),
             *(_short(item["times"][name] / item["base"]) if name in item["times"] else None for name in names)]
            for item in found if item["times"].keys() & set(names)
        ]  # fmt: skip
        told = [_short(max(values)) if values else None for values in errors]
        yield {
            "op": op,
            "kind": kind,
            "axes": axes,
            "kernels": names,
            "errors": told,
            "points": sorted(points, key=str),
        }


def _short(value: float) -> float:
    """Four digits: no measurement has more."""
    return float(f"{value:.4g}")


def rendered(document: Mapping[str, Any]) -> str:
    """As it is written: one measured call a line, so that a change can be read."""
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"


def left_out(calls: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Each call told from the others of its kind: errors of expected times, and the chosen over the fastest."""
    kernels = state.world.registry.kernels
    kinds: dict[tuple[str, str], list[Point]] = {}
    axes = {item["op"]: tuple(item["sizes"]) for item in calls}
    for item in calls:
        kinds.setdefault((item["op"], item["kind"]), []).append(_point(item))
    told: dict[str, list[tuple[str, float, float, float, list[float]]]] = {"shipped": [], "roofline": []}
    for (op, kind), points in kinds.items():
        dtype, *words = kind.split()
        measured = {name: len(found) - (name == kind) for (of, name), found in kinds.items() if of == op}
        near_kinds = together(op, dtype, frozenset(words), device, measured)
        for index, point in enumerate(points):
            around = [
                known._replace(apart=apart)
                for name, apart in near_kinds.items()
                for place, known in enumerate(kinds.get((op, name), ()))
                if (name, place) != (kind, index)
            ]
            names = [name for name in point.ratios if not name.startswith(f"{_REFERENCE}.")]
            kind_of = Kind(around, axes[op])  # once for both ways: its rooflines are kept
            for way, near in (("shipped", True), ("roofline", False)) if around else ():
                item = kind_of.estimates(names, point.sizes, point.dtype, (point.bytes, point.flops), near)
                item = free_first({name: found for name, found in item.items() if name in kernels}, kernels)
                if not item:
                    continue
                errors = [abs(math.log(item[name].ratio / point.ratios[name])) for name in item]
                chosen = point.ratios[min(item, key=lambda name: item[name].ratio)]
                far = min(estimate.octaves for estimate in item.values())
                told[way].append((op, far, chosen / min(point.ratios.values()), chosen, errors))
    return {"calls": len(calls), "farthest": FARTHEST, **{way: _figures(found) for way, found in told.items()}}


def _point(item: Mapping[str, Any]) -> Point:
    ratios = {name: us / item["base"] for name, us in item["times"].items()}
    return Point(tuple(item["sizes"].values()), item["kind"].partition(" ")[0], *item["cost"], item["base"], ratios)


def _figures(found: Sequence[tuple[str, float, float, float, list[float]]]) -> dict[str, Any]:
    errors = sorted(error for *_, own in found for error in own)
    regrets = sorted(regret for _, _, regret, _, _ in found)
    reach = {
        f"{low} to {high} octaves away": [regret for _, far, regret, _, _ in found if low <= far < high]
        for low, high in ((0, 1), (1, 2), (2, 3), (3, 5), (5, 99))
    }
    ops = {op: [regret for name, _, regret, _, _ in found if name == op] for op in sorted({item[0] for item in found})}
    return {
        "calls": len(found),
        "error of a time, median": round(math.expm1(errors[len(errors) // 2]), 3),
        "error of a time, 90 %": round(math.expm1(errors[int(0.9 * len(errors))]), 3),
        "chosen ÷ fastest, geomean": _geomean(regrets),
        "chosen ÷ fastest, 95 %": round(regrets[int(0.95 * len(regrets))], 3),
        "chosen ÷ fastest, worst": round(regrets[-1], 3),
        "× torch, geomean": round(1 / _geomean([chosen for *_, chosen, _ in found]), 3),
        **{
            name: {"calls": len(own), "chosen ÷ fastest": _geomean(own)}
            for name, own in {**reach, **ops}.items()
            if own
        },
    }


def _geomean(values: Sequence[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 4)


def _places() -> dict[str, Path]:
    """Where each backend's file lies."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/capabilities.json")):
        found[json.loads(path.read_text(encoding="utf-8"))["backend"]] = beside(path, "measurements")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--raced", type=Path, metavar="UNTUNED.json")
    parser.add_argument("--out", type=Path, help="a folder to write BACKEND.measurements.json to, not the packages")
    given = parser.parse_args(argv)
    if given.raced is not None:
        return _add(given.raced, *given.files)
    files = given.files or sorted((ROOT / "benchmarks" / "results").glob("*/factory.jsonl"))
    taken = [records(file) for file in files]
    if given.left_out:
        for file, (header, calls) in zip(files, taken, strict=True):
            told = left_out(calls, header["family"].partition("-")[0])
            file.with_name("left_out.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(f"{file}: {json.dumps(told, indent=1, ensure_ascii=False)}")
        return 0
    places, wrong = _places(), []
    for backend, document in documents(taken).items():
        place = places[backend] if given.out is None else given.out / f"{backend}.measurements.json"
        text = rendered(document)
        if given.check:
            wrong += [place] if not place.is_file() or place.read_text(encoding="utf-8") != text else []
        else:
            place.write_text(text, encoding="utf-8")
            print(f"{place.name} of {backend}: {len(text)} bytes")
    for place in wrong:
        print(f"{place} is not what its measurements say: python -m tools.shipped writes it anew")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
