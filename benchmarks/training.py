"""One training step of a 1B Llama, compiled: stock, patched with head and loss in one op, and Liger's patched model.

In `patched` head and loss stand in the compiled graph, which holds some rows of the logits at a time; `patched apart`
has them behind the compiled body, where a kernel does.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from models_generate import made
from timing import header, turn, write_json

import layerzero as lz


def step_of(model: Any, ids: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
    """Forward and backward of the next-token loss; the optimizer is the same for all and stays out."""
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return lz.ops.linear_cross_entropy(hidden, model.lm_head.weight, targets)  # type: ignore[no-any-return]

    def hidden_of(ids: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=ids).last_hidden_state  # type: ignore[no-any-return]

    body: Any = {
        "patched": lambda ids: head(hidden_of(ids)),
        "patched apart": hidden_of,
    }.get(name, lambda ids: model(input_ids=ids, labels=ids).loss)
    body = torch.compile(body)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = head(body(ids)) if name == "patched apart" else body(ids)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def contestants_of(stock: Any, names: list[str]) -> dict[str, Any]:
    """The model of each name."""
    found: dict[str, Any] = {}
    for name in names:
        model = stock if name == "stock" else copy.deepcopy(stock)
        if name.startswith("patched"):
            lz.patch(model)
        elif name == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        found[name] = model
    return found


def profiled(step: Callable[[], Any], steps: int = 3, most: int = 25) -> dict[str, Any]:
    """Kernels of a step: µs on the device of all of them, and µs and launches of those that take the longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            own = found.setdefault(event.name[:100], [0.0, 0.0])
            own[0] += event.self_device_time_total / steps
            own[1] += 1 / steps
    ordered = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    total = sum(us for us, _ in found.values())
    return {"us": round(total), "longest": {name: [round(us, 1), round(n, 2)] for name, (us, n) in ordered}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="stock,patched,patched apart,liger")
    parser.add_argument("--profile", action="store_true", help="kernels of a step, on a GPU")
    parser.add_argument("--add", action="store_true", help="keep memory and loss of others in the file, of this commit")
    parser.add_argument("--turn", default="", help="wait for FILE.go before anything is timed (timing.turn)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lz.configure(jit="block")
    cuda = args.device == "cuda"
    changes = {"num_hidden_layers": args.layers} if args.layers else {}
    stock = made("llama-1b", args.device, torch.bfloat16 if cuda else torch.float32, **changes).train()
    ids = torch.randint(0, 1000, (args.batch, args.length), generator=torch.Generator().manual_seed(1)).to(args.device)
    times: dict[str, list[float]] = {}
    losses, memory, kernels, steps = {}, {}, {}, {}
    for name, model in contestants_of(stock, args.only.split(",")).items():
        steps[name] = step_of(model, ids, name)
        begin = time.perf_counter()
        for _ in range(3):
            losses[name] = round(float(steps[name]()), 5)
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            steps[name]()
            # what a step needs beside the weights of all contestants, which are on the device together
            memory[name] = (torch.cuda.max_memory_allocated() - before) >> 20
            model.zero_grad(set_to_none=True)
        print(f"{name}: loss {losses[name]}, {memory.get(name)} MiB, {time.perf_counter() - begin:.1f} s", flush=True)
        times[name] = []
    if "patched apart" in steps:
        x = torch.zeros(ids.numel(), 2048, dtype=stock.dtype, device=args.device, requires_grad=True)
        kernels["linear_cross_entropy"] = lz.which("linear_cross_entropy", x, stock.lm_head.weight, ids.flatten())
    turn(args.turn)
    for _ in range(args.rounds):
        for name, step in steps.items():
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3)
    middle = {name: statistics.median(found) for name, found in times.items()}
    figures = {
        "benchmark": "training",
        **header(),
        "transformers": transformers.__version__, **changes, "batch": args.batch,
        "length": args.length, "rounds": args.rounds, "ms": {name: round(ms, 2) for name, ms in middle.items()},
        "speedup": {name: round(middle["stock"] / ms, 3) for name, ms in middle.items() if "stock" in middle},
        "peak_mib": memory, "loss": losses, "kernels": kernels,
    }  # fmt: skip
    earlier = json.loads(args.json.read_text()) if args.add and args.json.exists() else {}
    if earlier.get("commit") == figures["commit"] and earlier["machine"]["gpu"] == figures["machine"]["gpu"]:
        figures["command"] = f"{earlier['command']}; {figures['command']}"
        for name in ("peak_mib", "loss"):
            figures[name] = {**earlier[name], **figures[name]}
    print(json.dumps(figures, indent=1))
    if args.json:
        write_json(args.json, figures)
    if args.profile and cuda:
        for name, step in steps.items():
            kernels[name] = profiled(step)
            print(f"{name}: {kernels[name]['us']} us on the device")
            for kernel, (us, launches) in kernels[name]["longest"].items():
                print(f"  {us:10.1f} us {launches:6.1f}x {kernel}", flush=True)
        if args.json:
            write_json(args.json, figures)


if __name__ == "__main__":
    main()
