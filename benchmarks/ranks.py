"""Ranks that agree, disagree and die: how long it takes, and that nobody ever waits without end.

    python benchmarks/ranks.py --machine NAME        eight ranks, 1 000 disagreements, 20 killed (about four minutes)
    python benchmarks/ranks.py --ranks 4 --rounds 50 --kills 2

Every rank is a process of its own, joined by gloo; the store lies in this process, which is never killed. All ranks
play the same seeded rounds and write down what came of each; a round counts only if all of them found the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import RESULTS, commit, machine, write_json

TARGET_S = 2.0
DEADLINE_S = 2.5
KINDS = ("same", "version", "version in training", "table", "policy", "memory", "question", "choice", "late")


# -- one rank ----------------------------------------------------------------------------------------------------
def joined(rank: int, world: int, port: int) -> Any:
    """The store of this rank, in the process group of all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world)
    return store


def agreeing(rank: int, rounds: int) -> dict[str, Any]:
    """Seconds of `lz.agree`, from a moment at which all are ready."""
    import torch.distributed as dist

    import layerzero as lz

    started = time.monotonic()
    lz.list_kernels()  # plugins are discovered once, whether or not ranks agree
    loading, times = time.monotonic() - started, []
    for _ in range(rounds):
        dist.barrier()
        started = time.monotonic()
        found = lz.agree(timeout=60)
        times.append(time.monotonic() - started)
        assert found.size == dist.get_world_size() and found.findings.alike
    return {"seconds": times, "loading": loading}


def disagreeing(rank: int, world: int, rounds: int, seed: int) -> dict[str, Any]:
    """Play rounds in which one rank, drawn by lot, differs in one thing."""
    import logging
    import warnings

    import layerzero as lz
    from layerzero.distributed import agreement
    from layerzero.distributed.channel import Channel
    from layerzero.errors import DistributedError
    from layerzero.runtime.state import state

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = lz.agree(timeout=60).channel.store
    plain = agreement.facts_of(rank, state.world)
    chance, outcomes, times = random.Random(seed), [], []
    for number in range(rounds):
        # Lateness costs a deadline: one round in forty.
        kind = "late" if number % 40 == 39 else KINDS[chance.randrange(len(KINDS) - 1)]
        odd = chance.randrange(world)
        me = odd == rank
        channel = Channel(store, rank, tuple(range(world)), 0.4 if kind == "late" else 60.0, f"round{number}")
        facts = replace(plain, kernels={"a.x.y": "1", "b.x.y": "1"}, kernels_hash="1")
        if me and kind.startswith("version"):
            facts = replace(facts, kernels={"a.x.y": "2", "b.x.y": "1"}, kernels_hash="2")
        elif me and kind == "policy":
            facts = replace(facts, policy="other")
        elif me and kind == "memory":
            facts = replace(facts, free_memory=7)
        started = time.monotonic()
        try:
            if kind == "question":
                channel.gather("tables" if me else "facts", 0)
                out: Any = "nothing"
            elif kind == "late":
                if me:
                    time.sleep(1.0)
                channel.gather("facts", 0)
                out = "nothing"
            elif kind == "table":
                said = channel.gather("facts", "other" if me else "same")
                out = sorted(rank for rank, word in said.items() if word == "other")
            elif kind == "choice":
                mine = "b" if me else "a"
                out = store.compare_set(f"round{number}/choice", "", mine).decode() in ("a", "b")
                channel.barrier("choice")
                out = store.get(f"round{number}/choice").decode()
            else:
                agreement.facts_of = lambda *_, facts=facts: facts  # type: ignore[misc] # what this rank says of itself
                found = agreement._agree(channel, kind == "version in training", None)
                out = [sorted(found.findings.excluded), found.findings.policies, found.findings.free_memory[0] == 7]
        except DistributedError as error:
            out = [error.code.value, list(error.ranks)]
        times.append(time.monotonic() - started)
        outcomes.append([kind, odd, out])
    return {"outcomes": outcomes, "seconds": times}


def expected(kind: str, odd: int) -> Any:
    """What a round must end with; None where that is a matter of who came first."""
    return {
        "same": [[], False, False],
        "version": [["a.x.y"], False, False],
        "version in training": ["VERSION_DISAGREEMENT", []],
        "table": [odd],
        "policy": [[], True, False],
        "memory": [[], False, True],
        "question": ["RANK_DISAGREEMENT", []],
    }.get(kind)


def gone_in(error: Any) -> set[int]:
    """The ranks an error says are lost; any other error is one."""
    if error.code != "RANK_LOST" or not error.ranks:
        raise error
    return set(error.ranks)


def surviving(rank: int, port: int, folder: Path) -> dict[str, Any]:
    """Talk until told to stop; when ranks are lost, go on with those who are left."""
    import layerzero as lz
    from layerzero.errors import DistributedError

    agreement = lz.agree(timeout=DEADLINE_S)
    lost: set[int] = set()
    recoveries: list[float] = []
    rounds = 0
    (folder / f"ready{rank}").write_text("")
    while True:
        started = time.monotonic()
        try:
            said = agreement.channel.gather("work", (folder / "stop").exists())
            rounds += 1
            if said[agreement.channel.leader]:
                break
            time.sleep(0.002)
        except DistributedError as error:
            gone = gone_in(error)
            while True:
                try:
                    agreement = agreement.without(tuple(gone))
                    break
                except DistributedError as again:
                    gone |= gone_in(again)
            lost |= gone
            recoveries.append(time.monotonic() - started)
    return {"lost": sorted(lost), "seconds": recoveries, "rounds": rounds, "members": list(agreement.channel.members)}


def child(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    joined(args.rank, args.ranks, args.port)
    folder = Path(args.folder)
    if args.child == "agree":
        out = agreeing(args.rank, args.rounds)
    elif args.child == "disagree":
        out = disagreeing(args.rank, args.ranks, args.rounds, args.seed)
    else:
        out = surviving(args.rank, args.port, folder)
    (folder / f"rank{args.rank}.json").write_text(json.dumps(out))
    os._exit(0)  # a group of which some members are dead cannot be destroyed in order


# -- all of them -------------------------------------------------------------------------------------------------
class Fleet:
    """Ranks as processes, and the store they meet in."""

    def __init__(self, job: str, args: argparse.Namespace, **more: Any) -> None:
        import torch.distributed as dist

        self.folder = Path(tempfile.mkdtemp(prefix="layerzero-ranks-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = {"child": job, "port": self.store.port, "ranks": args.ranks, "folder": self.folder, **more}
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LAYERZERO_PERFDB": "off",
            "LAYERZERO_JIT": "off",
            "LAYERZERO_PLUGINS": "",
        }
        self.processes = []
        for rank in range(args.ranks):
            words = [word for key, value in {**options, "rank": rank}.items() for word in (f"--{key}", str(value))]
            log = (self.folder / f"log{rank}").open("w")
            self.processes.append(subprocess.Popen([sys.executable, __file__, *words], env=env, stdout=log, stderr=log))

    def finish(self, seconds: float, killed: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
        """What every living rank found; one that does not end in time is the failure this program looks for."""
        end = time.monotonic() + seconds
        try:
            for rank, process in enumerate(self.processes):
                if rank in killed:
                    continue
                try:
                    code = process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise SystemExit(f"rank {rank} hangs:\n{(self.folder / f'log{rank}').read_text()}") from None
                if code:
                    raise SystemExit(f"rank {rank} ended with {code}:\n{(self.folder / f'log{rank}').read_text()}")
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        alive = [rank for rank in range(len(self.processes)) if rank not in killed]
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in alive]


def agree_figures(args: argparse.Namespace) -> dict[str, Any]:
    found = Fleet("agree", args, rounds=args.agreements).finish(300)
    slowest = [max(times) for times in zip(*(item["seconds"] for item in found), strict=True)]
    return {
        "ranks": args.ranks, "agreements": len(slowest), "first_s": slowest[0],
        "discovery_before_s": max(item["loading"] for item in found),
        "median_s": statistics.median(slowest), "max_s": max(slowest), "target_s": TARGET_S,
    }  # fmt: skip


def disagree_figures(args: argparse.Namespace) -> dict[str, Any]:
    found = Fleet("disagree", args, rounds=args.rounds, seed=args.seed).finish(1_200)
    counts: dict[str, int] = {}
    for number, outcomes in enumerate(zip(*(item["outcomes"] for item in found), strict=True)):
        kind, odd, out = outcomes[0]
        if any(other != outcomes[0] for other in outcomes):
            raise SystemExit(f"round {number} ({kind}): ranks found different things: {outcomes}")
        want = expected(kind, odd)
        if want is not None and out != want:
            raise SystemExit(f"round {number} ({kind}): found {out}, expected {want}")
        if kind == "late" and (out[0] != "RANK_LOST" or odd not in out[1]):
            raise SystemExit(f"round {number}: rank {odd} was late, found {out}")
        counts[kind] = counts.get(kind, 0) + 1
    slowest = [max(times) for times in zip(*(item["seconds"] for item in found), strict=True)]
    return {
        "ranks": args.ranks, "rounds": len(slowest), "seed": args.seed, "kinds": counts,
        "median_s": statistics.median(slowest), "max_s": max(slowest), "deadlocks": 0,
    }  # fmt: skip


def kill_figures(args: argparse.Namespace) -> dict[str, Any]:
    chance, killed, recoveries, worlds, first = random.Random(args.seed), 0, [], 0, 0
    while killed < args.kills:
        worlds += 1
        fleet = Fleet("survive", args)
        end = time.monotonic() + 240
        while len(list(fleet.folder.glob("ready*"))) < args.ranks:
            if time.monotonic() > end or any(p.poll() is not None for p in fleet.processes):
                fleet.finish(1)
            time.sleep(0.1)
        dead: set[int] = set()
        for _ in range(min(args.ranks - 3, args.kills - killed)):
            time.sleep(chance.uniform(0.1, 1.5))  # in a round, between two, or while the last death is dealt with
            victim = chance.choice([rank for rank in range(args.ranks) if rank not in dead])
            first += victim == min(rank for rank in range(args.ranks) if rank not in dead)
            os.kill(fleet.processes[victim].pid, signal.SIGKILL)
            dead.add(victim)
        time.sleep(2 * DEADLINE_S + 2)  # the last death, dealt with
        (fleet.folder / "stop").write_text("")
        found = fleet.finish(120, frozenset(dead))
        left = [rank for rank in range(args.ranks) if rank not in dead]
        for item in found:
            if item["members"] != left or item["lost"] != sorted(dead):
                raise SystemExit(f"after {sorted(dead)} died, a rank has {item}")
        recoveries += [max(times) for times in zip(*(item["seconds"] for item in found), strict=False)]
        killed += len(dead)
    return {
        "killed": killed, "of_them_first": first, "worlds": worlds, "deadline_s": DEADLINE_S,
        "recovery_median_s": statistics.median(recoveries or [0.0]), "recovery_max_s": max(recoveries, default=0.0),
        "hangs": 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="folder of benchmarks/results to write ranks.json to")
    parser.add_argument("--json", type=Path, help="file to write instead")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--agreements", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    for name, kind in (("child", str), ("port", int), ("rank", int), ("folder", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    data: dict[str, Any] = {
        "benchmark": "ranks", "command": " ".join(["python", "benchmarks/ranks.py", *sys.argv[1:]]), "commit": commit(),
        "machine": machine(),
    }  # fmt: skip
    for name, measure in (("agree", agree_figures), ("disagree", disagree_figures), ("kills", kill_figures)):
        started = time.monotonic()
        data[name] = {**measure(args), "took_s": round(time.monotonic() - started, 1)}
        print(f"{name}: {json.dumps(data[name])}", flush=True)
    where = args.json or (RESULTS / args.machine / "ranks.json" if args.machine else None)
    if where is not None:
        write_json(where, data)
    if data["agree"]["max_s"] > TARGET_S:
        sys.exit(f"{args.ranks} ranks needed {data['agree']['max_s']:.2f} s to agree, the target is {TARGET_S} s")


if __name__ == "__main__":
    main()
