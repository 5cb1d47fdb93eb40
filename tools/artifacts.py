"""The artifacts of a test run, in one folder: what was declared, decided, measured and logged.

    python -m tools.artifacts build/artifacts

capabilities.json         every registered kernel with its constraints; capabilities.sha256 its hash
dispatch_table.json       a table solved for a small decode loop; schema.json says against which schema it was checked
perfdb.json               a snapshot of the measured times behind it
selections.log            every selection of the run, as logged
traces.jsonl              the whole trace of each decision, one JSON object a line
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

import layerzero as lz
from layerzero.files import write_whole
from layerzero.perfdb.store import PerfDB
from layerzero.runtime.state import state
from layerzero.tables.file import SCHEMA_VERSION, TABLE, load_table
from layerzero_tune.perfdb.exchange import export_json

__all__ = ["emit"]


def emit(folder: Path) -> list[Path]:
    """Write every artifact; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "selections.log"
    handler = logging.FileHandler(log, mode="w", encoding="utf-8")
    logger = logging.getLogger("layerzero.selection")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        state.cache.invalidate_all()
        with lz.record() as recording, torch.no_grad():
            _work()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()
    with tempfile.TemporaryDirectory() as place:
        db = PerfDB(Path(place) / "perf.db")
        lz.tune(recording.traffic, database=db.path, seconds=0.05, compile=False, device="cpu")
        export_json(db, folder / "perfdb.json")
        lz.solve(recording.traffic, folder / "dispatch_table.json", database=db.path, device="cpu")
        db.close()
    table = load_table(folder / "dispatch_table.json")
    report = {
        "schema_version": SCHEMA_VERSION, "valid": True, "entries": len(table.entries),
        "content_hash": table.content_hash, "schema": TABLE.schema(),
    }  # fmt: skip
    write_whole(folder / "schema.json", json.dumps(report, indent=1) + "\n")
    registry = state.world.registry
    declared = {name: kernel.to_json() for name, kernel in sorted(registry.kernels.items())}
    text = json.dumps(declared, indent=1, sort_keys=True, default=str) + "\n"
    write_whole(folder / "capabilities.json", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_whole(
        folder / "capabilities.sha256", f"{digest}  capabilities.json\n{registry.capabilities_hash}  registry\n"
    )
    traces = [lz.explain(ctx.op, ctx).to_json() for ctx in recording.traffic.contexts]
    write_whole(folder / "traces.jsonl", "".join(f"{line}\n" for line in traces))
    names = ("capabilities.json", "capabilities.sha256", "dispatch_table.json", "schema.json", "perfdb.json")
    return [*(folder / name for name in names), log, folder / "traces.jsonl"]


def _work() -> None:
    torch.manual_seed(0)
    q, cache, weight = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 32, 32), torch.ones(32)
    for length in range(1, 33):
        lz.rms_norm(lz.attention(q, cache[:, :, :length], cache[:, :, :length]), weight)


if __name__ == "__main__":
    for path in emit(Path(sys.argv[1] if len(sys.argv) > 1 else "build/artifacts")):
        print(path)
