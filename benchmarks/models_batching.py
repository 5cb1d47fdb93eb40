"""`generate_batch` of 64 mixed prompts: transformers' own sdpa, the same with our attention, and the patched model."""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from models_generate import ARCHITECTURES, made
from timing import header, turn, write_json

import layerzero as lz


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Prompts of 16 to `longest` tokens, the same every time."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=draw).tolist() for length in lengths]


def batched(model: Any, given: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """The new tokens of each prompt, and the seconds from the first request to the last token.

    The manager is kept: graphs are captured in the first call, which nobody times. Starting and ending its thread takes
    a second or two in which nothing is computed, and is not counted.
    """
    known = transformers.ContinuousBatchingConfig.__dataclass_fields__
    pages = len(given) * (max(map(len, given)) + new + 255) // 256 + 8
    wanted: dict[str, Any] = {"max_batch_tokens": 2048, "num_blocks": pages, "auto_switch_to_flash": False}
    config = transformers.ContinuousBatchingConfig(**{name: wanted[name] for name in wanted if name in known})
    settings: Any = transformers.GenerationConfig
    greedy = settings(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        given, generation_config=greedy, continuous_batching_config=config, persistent_manager=True,
        record_timestamps=True,
    )  # fmt: skip
    ordered = [found[name] for name in sorted(found, key=lambda name: int(name.rsplit("_", 1)[-1]))]
    lost = [item for item in ordered if not item.timestamps]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(ordered)} requests failed: {lost[0].error or 'no error is given'}")
    seconds = max(item.timestamps[-1] for item in ordered) - min(item.created_time for item in ordered)
    return [item.generated_tokens for item in ordered], seconds


def race(stock: Any, given: list[list[int]], new: int, rounds: int, place: str) -> dict[str, Any]:
    """Seconds from request to last token, the contestants in turn; how many requests have the tokens of sdpa."""
    by_name = copy.deepcopy(stock)
    lz.enable_transformers()
    by_name.set_attn_implementation("layerzero")
    contestants = {"sdpa": stock, "layerzero": by_name, "patched": lz.patch(copy.deepcopy(stock))}
    tokens: dict[str, list[list[int]]] = {}
    for name, model in contestants.items():
        begin = time.perf_counter()
        tokens[name], _ = batched(model, given, new)
        print(f"{name}: first call {time.perf_counter() - begin:.1f} s", flush=True)
    turn(place)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, model in contestants.items():
            seconds[name].append(batched(model, given, new)[1])
        print({name: round(times[-1], 3) for name, times in seconds.items()}, flush=True)
    least = {name: min(times) for name, times in seconds.items()}
    return {
        "prompts": len(given), "tokens": sum(map(len, given)), "new": new, "rounds": rounds,
        "seconds": {name: [round(item, 4) for item in times] for name, times in seconds.items()},
        "tokens_per_s": {name: round(len(given) * new / time, 1) for name, time in least.items()},
        "speedup": {name: round(least["sdpa"] / time, 3) for name, time in least.items()},
        "same": {name: sum(map(list.__eq__, tokens["sdpa"], found)) for name, found in tokens.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--architecture", default="llama-1b", choices=sorted(ARCHITECTURES))
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the architecture has")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1000)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deny", default="", help="kernels that may not run, globs parted by commas")
    parser.add_argument("--turn", default="", help="wait for FILE.go before anything is timed (timing.turn)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.deny:
        lz.configure(deny=args.deny.split(","))
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    changes = {"num_hidden_layers": args.layers} if args.layers else {}
    stock = made(args.architecture, args.device, dtype, **changes)
    given = prompts(args.prompts, args.longest, 1000)
    figures = {
        "benchmark": "models_batching",
        **header(),
        "architecture": args.architecture, **changes, "device": args.device, "dtype": str(dtype),
        "transformers": transformers.__version__, "denied": args.deny,
        **race(stock, given, args.new, args.rounds, args.turn),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
