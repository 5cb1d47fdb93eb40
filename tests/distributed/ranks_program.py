"""What each rank does in test_ranks.py, under torchrun: `ranks_program.py FOLDER`; writes FOLDER/rank<RANK>.json.

Every rank plays the same scenes in the same order. Differences between ranks are made here, by giving one of them
another World, and what came of it is written down for the test to judge.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import layerzero as lz
from layerzero.distributed import agreement as module
from layerzero.errors import DistributedError, LayerZeroWarning
from layerzero.policy.layers import Level, PolicyLayer
from layerzero.runtime.policies import policies
from layerzero.runtime.state import state

warnings.simplefilter("error")
LOST_AFTER = 2.0


def refused(call: Any) -> dict[str, Any]:
    """What an error says of itself."""
    try:
        call()
    except DistributedError as error:
        return {"code": error.code.value, "ranks": list(error.ranks), "text": str(error)}
    return {"code": None}


def appears(store: Any, key: str) -> None:
    """Wait until somebody has written a key."""
    end = time.monotonic() + 120
    while not store.check([key]):
        assert time.monotonic() < end, f"{key} was never written"
        time.sleep(0.02)


def warned(call: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = call()
    return out, [str(item.message) for item in caught if item.category is LayerZeroWarning]


def scenes(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {"rank": rank}
    x, w = torch.ones(4, 8), torch.ones(8)
    last = world - 1

    started = time.monotonic()
    agreement = lz.agree(timeout=60)
    out["agree"] = {
        "seconds": time.monotonic() - started, "groups": agreement.findings.groups, "leader": agreement.leader,
        "alike": agreement.findings.alike, "ranks": sorted(agreement.facts), "free": agreement.facts[rank].free_memory,
    }  # fmt: skip
    names = {item.name for item in lz.observe(counters=False).families()}
    out["metrics"] = sorted(name for name in names if "rank" in name)

    # Hot calls ask nobody: the store is asked once, at the first call.
    lz.rms_norm(x, w)
    asked = agreement.choices.asked
    for _ in range(500):
        lz.rms_norm(x, w)
    out["hot"] = {"first": asked, "after": agreement.choices.asked}

    # The last rank would choose otherwise; it takes the first rank's word.
    if rank == last:
        policies.put("test", PolicyLayer.of(Level.PROGRAMMATIC, avoid=["torch"]))
    y = torch.ones(3, 8)
    alone = replace(state.world, ranks=None)
    own = lz.select("rms_norm", y, w).chosen if rank != last else None
    if rank == last:
        from layerzero.dispatch.run import decide, describe

        spec = alone.ops["rms_norm"]
        own = decide(spec, describe(spec, (y, w, 1e-6), None, None, alone), alone).chosen
    lz.rms_norm(y, w)
    report = lz.explain("rms_norm", y, w)
    out["follows"] = {"own": own, "chosen": report.chosen, "ran": report.ran, "text": str(report)}

    # ... unless it cannot run that kernel: then it goes on with its own, says so, and is counted.
    z = torch.ones(5, 8)
    if rank == last:
        policies.put("test", PolicyLayer.of(Level.PROGRAMMATIC, deny=[report.chosen]))
    dist.barrier()
    before = agreement.choices.disagreements
    lz.rms_norm(z, w)
    out["cannot"] = {"chosen": lz.which("rms_norm", z, w), "more": agreement.choices.disagreements - before}
    # Compared on purpose, the group finds a kernel that all of them can run.
    out["confirmed"] = agreement.confirm("rms_norm", torch.ones(6, 8), w, 1e-6)
    out["then"] = lz.which("rms_norm", torch.ones(6, 8), w)
    width = 16 if rank != last else 24
    wrong = (torch.ones(6, width), torch.ones(width), 1e-6)
    out["other call"] = refused(lambda: agreement.confirm("rms_norm", *wrong))
    policies.put("test", None)

    # Another version of one kernel on the last rank.
    agreement.leave()
    if rank == last:
        registry = state.world.registry
        kernel = registry.kernels["torch.rms_norm.native"]
        state.publish(registry=registry.replace([replace(kernel, version="9.9")]))
    out["training"] = refused(lambda: lz.agree(training=True, timeout=60))
    other, said = warned(lambda: lz.agree(timeout=60))
    out["inference"] = {
        "warnings": said, "chosen": lz.which("rms_norm", x, w), "groups": other.findings.groups,
        "why": [str(item) for item in lz.explain("rms_norm", x, w).reasons["torch.rms_norm.native"]],
    }  # fmt: skip
    other.leave()
    lz.reset()

    # Another dispatch table on the last rank: the first rank's is used by all.
    tables = [lz.solve([lz.explain("rms_norm", torch.ones(n, 8), w).context], model_id=str(n)) for n in (4, 64)]
    state.obey(tables[1 if rank == last else 0])
    out["table training"] = refused(lambda: lz.agree(training=True, timeout=60))
    state.obey(tables[1 if rank == last else 0])
    other, said = warned(lambda: lz.agree(timeout=60))
    table = state.world.table
    out["table"] = {
        "hash": None if table is None else table.content_hash,
        "first": tables[0].content_hash,
        "said": said,
    }
    other.leave()
    lz.reset()

    # Memory counts by the poorest rank.
    lz.configure(memory_headroom_mb=1)
    known = module.free_here
    module.free_here = lambda: (64 + rank) << 20 if rank == last else 1 << 40
    other = lz.agree(timeout=60)
    out["memory"] = {"world": state.world.free_memory, "said": [f.free_memory for f in other.facts.values()]}
    out["memory again"] = [other.refresh_memory(), state.world.free_memory]
    module.free_here = known
    other.leave()
    lz.reset()

    # Tensor parallelism: heads split over ranks, unevenly; results must not depend on the group's size.
    out["tp"] = tensor_parallel(rank, world)

    # A rank that does not come: the others learn it after their deadline, it learns it too, and those who are left go
    # on. It comes when the verdict is written, and the leader begins when the others have spoken: however slow the
    # machine is, nobody else is late.
    agreement = lz.agree(timeout=60)
    channel = agreement.channel
    here_now = f"{channel.name}/{channel.round + 1}"
    if rank == last:
        appears(channel.store, f"{here_now}/verdict")
    elif rank == channel.leader:
        for other_rank in range(1, last):
            appears(channel.store, f"{here_now}/said/{other_rank}")
    channel.timeout_s = LOST_AFTER if rank == channel.leader else 60.0
    out["late"] = refused(lambda: channel.gather("roll call", rank))
    channel.timeout_s = 60.0
    if rank != last:
        left = agreement.without(tuple(out["late"]["ranks"]))
        out["left"] = {"ranks": sorted(left.facts), "chosen": lz.which("rms_norm", x, w)}
        left.leave()
    lz.reset()
    return out


def tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    from layerzero.model.situation import situation
    from layerzero.numerics import assert_close, tolerance

    torch.manual_seed(7)
    heads = 2 * world + 1
    q, k, v = (torch.randn(2, heads, 12, 16) for _ in range(3))
    with_all = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()
    share = torch.tensor_split(torch.arange(heads), world)[rank]
    # A kernel that is ahead of all others and depends on the size of the group.
    registry = state.world.registry
    tempting = replace(
        registry.kernels["sdpa.attention.math"], kernel_id="other.attention.fast", backend="other", priority=999.0,
        tp_invariant=False,
    )  # fmt: skip
    state.publish(registry=registry.add([tempting]))
    mine = (q[:, share], k[:, share], v[:, share])
    before = lz.which("attention", *mine)
    agreement = lz.agree(timeout=60, tp_invariant=True)
    assert_close(lz.attention(*mine), with_all[:, share], tolerance("attention", "float32"))
    report = lz.explain("attention", *mine)
    asked, told = agreement.choices.asked, situation(report.context)
    agreement.leave()
    lz.reset()
    return {
        "heads": len(share), "before": before, "chosen": report.chosen, "asked": asked,
        "codes": [item.code.value for item in report.reasons["other.attention.fast"]],
        "tp_size": report.context.tp_size, "tp_rank": report.context.tp_rank, "situation": list(map(str, told)),
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        found = scenes(rank, world)
    finally:
        torch.set_num_threads(1)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
