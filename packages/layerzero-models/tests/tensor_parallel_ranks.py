"""One rank of test_tensor_parallel.py: `python tensor_parallel_ranks.py RANK WORLD FOLDER`.

Reads FOLDER/inputs.pt, runs every layer on this rank's shards over gloo, and writes FOLDER/rank<RANK>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import layerzero as lz
from layerzero.errors import InvalidInputError


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def outcome(out, slope, **leaves):
    """The result and the gradient of each leaf for one slope of the (whole or partial) result."""
    grads = torch.autograd.grad(out, list(leaves.values()), slope.to(out.dtype))
    return {"out": out.detach(), **{name: grad for name, grad in zip(leaves, grads, strict=True)}}


def part(tensor, dim, rank, world):
    return torch.tensor_split(tensor, world, dim)[rank].contiguous()


def layers(given, rank, world):
    """name -> outcome, for one dtype."""
    x, slope = given["x"], given["slope"]
    found = {}

    def column(name, weight, bias, **options):
        mine, w, b = leaf(x), leaf(lz.shard_weight(weight, 0, rank, world)), leaf(lz.shard_weight(bias, 0, rank, world))
        out = lz.column_linear(mine, w, b, "gelu", **options)
        wanted = given[f"slope of {weight.shape[0]}"]
        found[name] = outcome(out, wanted if options else part(wanted, -1, rank, world), x=mine, weight=w, bias=b)

    column("column", given["even"], given["even bias"])
    column("column gathered", given["even"], given["even bias"], gather_output=True)
    column("column uneven gathered", given["uneven"], given["uneven bias"], gather_output=True, out_features=11)

    def row(name, whole, weight, **options):
        mine = leaf(whole if options.get("split_input") else part(whole, -1, rank, world))
        w, b = leaf(lz.shard_weight(weight, 1, rank, world)), leaf(given["row bias"])
        found[name] = outcome(lz.row_linear(mine, w, b, **options), slope, x=mine, weight=w, bias=b)

    row("row", x, given["row"])
    row("row from the whole", x, given["row"], split_input=True)
    row("row uneven", given["wide x"], given["row uneven"], split_input=True)
    row("row uneven parts", given["wide x"], given["row uneven"])
    row("row summed in its dtype", x, given["row"], reduce_dtype=x.dtype)

    mine, gate_up = leaf(x), leaf(lz.shard_weight(given["gate_up"], 0, rank, world, parts=2))
    down = leaf(lz.shard_weight(given["down"], 1, rank, world))
    out = lz.row_linear(lz.silu_and_mul(lz.column_linear(mine, gate_up)), down)
    found["block"] = outcome(out, slope, x=mine, gate_up=gate_up, down=down)
    return found


def main(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    inputs = torch.load(folder / "inputs.pt")
    found = {name: layers(given, rank, world) for name, given in inputs.items()}

    first = dist.new_group([0])
    weight = inputs["float32"]["even"]
    try:
        alone = lz.column_linear(inputs["float32"]["x"], weight, group=first, gather_output=True)
        found["group of one"] = {"out": alone}
    except InvalidInputError as error:
        found["group of one"] = {"refused": (str(error.code), str(error))}
    try:
        lz.column_linear(inputs["float32"]["x"], weight[:1], gather_output=True, out_features=11)
    except InvalidInputError as error:
        found["wrong shard"] = {"refused": (str(error.code), str(error))}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
