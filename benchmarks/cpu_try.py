"""Tries what could end a process, or takes long, in a process that nothing depends on (cpu_prepare.py starts it).

    python cpu_try.py zentorch|compile --threads N --part I/N [--from INDEX] [--only GROUP …] [--dead WORDS …]

`zentorch`: every peer of every case that zentorch has an op for, at the case's own sizes. `compile`: the eager form of
every case worth a compiler, into Inductor's cache, where the benchmark finds it. A line of JSON goes out before each
attempt and one after it, so that whoever reads them knows which one a crash belongs to. A peer that died once is named
by `--dead` ("peer|op|dtype") and not tried again on calls of that kind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cpu
import cpu_cases_attention
import cpu_peers
from cpu_case import Asked, Call, Case


def attempts(kind: str, case: Case, peers: dict[str, str]) -> Iterator[tuple[str, str, Call]]:
    """Name, kind of call and call of everything that is to be tried for a case."""
    made = case.make()
    asked, eager = made["lz"], made["eager"]
    assert isinstance(asked, Asked) and not isinstance(eager, Asked)
    of = f"{asked.op}|{asked.args[0].dtype}"
    if kind == "compile":
        yield "compile", of, cpu_peers.compiled(eager, drawn=case.group == "sampling").call
        return
    for peer in cpu_peers.peers_of(asked, peers):
        yield peer.name, of, peer.once or peer.call


def said(**words: object) -> None:
    """One line, at once: what comes next may be the end."""
    print(json.dumps(words), flush=True)


def main() -> int:
    """Try them in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("zentorch", "compile"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dead", nargs="*", default=[])
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    os.environ.setdefault("LAYERZERO_PERFDB", "off")
    peers = {given.kind: cpu_peers.load([given.kind])[given.kind]}
    said(loaded=peers[given.kind])
    if peers[given.kind].startswith("cannot"):
        return 0
    cpu_cases_attention.COLD = 1  # two copies are enough where nothing is timed
    groups = cpu_peers.COMPILED if given.kind == "compile" else cpu_peers.ZENTORCH
    part, parts = map(int, given.part.split("/"))
    wanted = [case for case in cpu.cases() if case.group in groups and (not given.only or case.group in given.only)]
    with torch.no_grad():
        for index, case in enumerate(wanted):
            if index < given.first or index % parts != part:
                continue
            for name, of, call in attempts(given.kind, case, peers):
                at = {"index": index, "case": cpu.key(case), "peer": name, "kind": f"{name}|{of}"}
                if at["kind"] in given.dead:
                    if (index, name) > (given.first, ""):
                        said(why="not tried: it died on a call of this kind", **at)
                    continue
                said(trying=True, **at)
                try:
                    call()
                    call()
                except Exception as error:
                    said(why=f"raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200], **at)
                else:
                    said(done=True, **at)
            said(done=True, index=index, case=cpu.key(case), peer="")  # also where there was nothing to try
    said(finished=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
