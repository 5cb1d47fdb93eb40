"""`lz vllm explain`: what the workers of vLLM chose, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Answer, Block, Line, Table
from layerzero_cli.verbs import OK, PROBLEM, verb
from layerzero_vllm.report import folder, newest, read


@click.group("vllm")
def vllm() -> None:
    """LayerZero inside vLLM: what its workers run."""


@verb(vllm)
@click.argument("reports", required=False, type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="workers of earlier engines too")
def explain(reports: Path | None, everything: bool) -> Answer:
    """Kernels of each layer kind and phase with times and reasons, as the workers of the newest engine report them.

    REPORTS is the folder they write to; default: LAYERZERO_VLLM_REPORTS, or a folder of the user's cache.
    """
    where = reports or folder()
    found = read(where)
    shown = found if everything else newest(found)
    if not shown:
        hint = "start vLLM with LAYERZERO_VLLM=on; it writes when the engine has started"
        return Answer({"workers": []}, [Line(f"no worker has reported to {where}", "warn"), Line(hint)], PROBLEM)
    blocks = [block for data in shown for block in _worker(data)]
    return Answer({"workers": shown}, blocks, PROBLEM if any(data["breakers"] for data in shown) else OK)


def _worker(data: dict[str, Any]) -> Iterator[Block]:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    yield Line(f"rank {data['rank']} of {data['world_size']}, process {data['pid']}: {data['model']} ({versions})")
    rows = [
        (one["kind"], one["phase"], one["kernel"], _times(one["times"]), one["reason"])
        for field in ("choices", "linears", "experts", "norms")
        for one in data.get(field, ())
    ]
    yield Table(("layers", "phase", "kernel", "µs", "why"), rows, indent=2)
    counted = ", ".join(f"{count} {phase}" for phase, count in data["steps"].items())
    yield Line(f"steps: {counted or 'none yet'}", indent=2)
    for name, why in data["breakers"].items():
        yield Line(f"set aside: {name} ({why}); other kernels serve its calls", "warn", indent=2)
    for said in data["warnings"]:
        yield Line(said, "warn", indent=2)


def _times(times: dict[str, float]) -> str:
    return ", ".join(f"{who} {value:.0f}" for who, value in times.items())
