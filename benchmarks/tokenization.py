"""What `lz.tokenize` costs beside calling the library: short texts, batches, a repeated system prompt. Keeps JSON.

    python benchmarks/tokenization.py --machine NAME [--json FILE] [--quick]

Every ratio is one of medians from one interleaved run: `lz.tokenize` with the library's own kernel locked, against the
library called as its documentation does. "selected" is the kernel that selection takes. The tokenizers are trained
here; the vocabulary is small, the text is English, so a token is short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

import layerzero as lz
from layerzero.runtime.state import state
from layerzero_tokenizers import CACHE, load, small

SHORT = "The quick brown fox jumps over the lazy dog, and the dog does not mind; it's 12 o'clock."
SYSTEM = " ".join(small.CORPUS[0:3] * 60)
LIMITS = {"single short text": 1.10, "batch of 1 000": 1.02, "system prompt": 20.0, "selection µs": 3.0}


def libraries() -> dict[str, tuple[Any, Callable[[str], Any], Callable[[list[str]], Any], str]]:
    """name -> (object, its own call for a text, its own call for a batch, kernel id)."""
    hf, enc, sp = small.gpt2(), small.encoding(), small.processor("bpe")
    return {
        "tokenizers": (
            hf, lambda text: hf.encode(text).ids, lambda texts: [item.ids for item in hf.encode_batch(texts)],
            "tokenizers.tokenize.fast",
        ),
        "tiktoken": (
            enc, lambda text: enc.encode(text, allowed_special="all"),
            lambda texts: enc.encode_batch(texts, allowed_special="all"), "tiktoken.tokenize.bpe",
        ),
        "sentencepiece": (sp, sp.encode, sp.encode, "sentencepiece.tokenize.processor"),
    }  # fmt: skip


def prompt_of(tokens: int, encode: Callable[[str], Any]) -> str:
    """A system prompt of about so many tokens."""
    size = len(SYSTEM)
    return SYSTEM[: size * tokens // len(encode(SYSTEM))].rsplit(" ", 1)[0]


def measure_one(tok: Any, one: Callable[[str], Any], many: Callable[[list[str]], Any], kernel: str, rounds: int) -> Any:
    """Every figure of one library."""
    handle, few = load(tok), max(5, rounds // 4)
    texts = [f"{SHORT} {index}" for index in range(1_000)]

    def ours() -> Any:
        return lz.tokenize(SHORT, handle)

    lz.lock("tokenize", kernel)
    single = interleaved({"lz": ours, "own": lambda: one(SHORT)}, rounds=rounds, batch=40)
    batch = interleaved({"lz": lambda: lz.tokenize(texts, handle), "own": lambda: many(texts)}, rounds=rounds, batch=1)
    system, questions = prompt_of(2_000, one), iter(range(10**9))
    handle.remember(system)
    calls = {
        "lz": lambda: lz.tokenize(f"{system} What is {next(questions)}?", handle),
        "own": lambda: one(f"{system} What is {next(questions)}?"),
    }
    cached = interleaved(calls, rounds=few, batch=2)
    empty = around_nothing(handle, rounds)
    lz.unlock("tokenize")
    best = interleaved({"lz": ours, "own": lambda: one(SHORT)}, rounds=rounds, batch=40)
    return {
        "single_us": in_us(single),
        "batch_us": in_us(batch),
        "system_us": in_us(cached),
        "system_tokens": len(one(system)),
        "splits": handle.splits,
        "selected": lz.which("tokenize", SHORT, handle),
        "selected_us": in_us(best),
        "ratios": {
            "single short text": round(single["lz"] / single["own"], 3),
            "batch of 1 000": round(batch["lz"] / batch["own"], 3),
            "system prompt": round(cached["own"] / cached["lz"], 1),
            "selection µs": round(empty, 2),
            "selected, short text": round(best["lz"] / best["own"], 3),
        },
    }


def around_nothing(handle: Any, rounds: int) -> float:
    """µs of the path around a kernel that does nothing: key and look-up alone."""
    world = state.world.hot.items()
    mine = [b for key, b in world if key[0] == "tokenize" and key[1] == handle.lz_key and key[2] is str]
    bound = mine[0]
    run, bound.run = bound.run, lambda *args: None
    try:
        found = interleaved(
            {
                "lz": lambda: lz.tokenize(SHORT, handle),
                "nothing": lambda: bound.run(SHORT, handle, True, False, True),
            },
            rounds=rounds,
            batch=400,
        )
    finally:
        bound.run = run
    return (found["lz"] - found["nothing"]) / 1e3


def in_us(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value / 1e3, 2) for name, value in found.items()}


def measure(quick: bool) -> dict[str, Any]:
    rounds = 10 if quick else 60
    libraries_ = {name: measure_one(*parts, rounds) for name, parts in libraries().items()}
    stats = CACHE.stats()
    cache = {"bytes": stats.bytes, "max_bytes": stats.max_bytes, "hits": stats.hits, "revalidated": stats.revalidated}
    return {"libraries": libraries_, "cache": cache}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="folder under benchmarks/results for the JSON")
    parser.add_argument("--json", type=Path, help="write the JSON to this file instead")
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test, not a figure")
    options = parser.parse_args()
    about = machine()
    data = {
        "command": f"python benchmarks/tokenization.py --machine {options.machine}",
        "commit": commit(),
        "machine": about,
        "limits": LIMITS,
        **measure(options.quick),
    }
    for name, item in data["libraries"].items():
        for figure, value in item["ratios"].items():
            limit = LIMITS.get(figure)
            print(f"{name:14} {figure:22} {value:8.3f}  {'' if limit is None else f'limit {limit}'}")
    write_json(options.json or RESULTS / options.machine / "tokenizers.json", data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
