"""vLLM with LayerZero beside stock vLLM on a CPU: tokens, throughput, start-up. Run it with the Python that has vLLM.

    python benchmarks/vllm.py --machine NAME [--models FOLDER] [--small] [--pairs N] [--rounds N] [--prompts N]

For each model two engines live at once, one with LAYERZERO_VLLM=on and one without; they take turns, so that what else
the machine does weighs on both alike. A process keeps what luck its memory had: stock beside stock came out 1.03. So
there are several pairs, ours started second in one and first in the next, and the geometric mean of the pairs counts.
Each starts with an empty folder for compiled code, after an engine that leaves behind what vLLM keeps of a model's
class, which it finds out in a process of its own. Models are random checkpoints
of about 100 M parameters (--small: 5 M) whose query and key weights are large enough for attention to be peaked. Greedy
tokens are compared in float32. Where vLLM has no quick kernel for a dtype (bfloat16 on a CPU without its instructions)
--scale shortens prompts and answers, and --batched-tokens the batch that vLLM starts with (one number for each dtype,
or for all). Where stock vLLM ends at its first request, ours is timed alone, and nothing is compared. The file is
written after each model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPES = ("llama", "qwen3", "gemma")
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True}  # of the shape "moe"
SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4} | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LARGE = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8} | {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
COMMON = {"head_dim": 64, "max_position_embeddings": 2048}
ENGINE = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256, "seed": 0}
# what is timed: prompts, their tokens, new tokens
CASES = {"decode B1": (1, 32, 48), "decode B8": (8, 32, 48), "prefill": (8, 400, 1)}
LEAST, LEAST_FIRST, MEAN = 0.97, 1.15, 1.05  # tokens a second over stock's: a case, bfloat16's decode B1, the mean
START = 1.15  # seconds of start-up over stock's
PARTING = 1e-5  # a difference of the two best log-probabilities that either engine may decide its way


# -- models ----------------------------------------------------------------------------------------------------------
def make_model(shape: str, folder: Path, sizes: dict[str, int]) -> Path:
    """A saved random checkpoint; made once."""
    where = folder / shape
    if where.exists():
        return where
    import torch
    import transformers

    torch.manual_seed(0)
    names = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma2", "moe": "Qwen3Moe"}
    options: dict[str, Any] = {**sizes, **COMMON, "tie_word_embeddings": shape == "gemma"}
    if shape == "gemma":
        options |= {"sliding_window": 64, "query_pre_attn_scalar": 64}
        options |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if shape == "moe":
        options |= {**EXPERTS, "moe_intermediate_size": sizes["intermediate_size"] // 4}
    config = getattr(transformers, f"{names[shape]}Config")(**options)
    model = getattr(transformers, f"{names[shape]}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                peaked = 4.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                weight.normal_(std=1.0 if "embed_tokens" in name else peaked / math.sqrt(weight.shape[-1]))
    model.save_pretrained(where)
    return where


def mixed_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Short and long prompts, a third of them with a common beginning for the prefix cache."""
    draw = random.Random(0)
    shared = [draw.randrange(vocabulary) for _ in range(80)]
    lengths = (3, 17, 60, 130, 300)
    return [
        (shared if index % 3 == 0 else []) + [draw.randrange(vocabulary) for _ in range(draw.choice(lengths))]
        for index in range(count)
    ]


# -- one engine, in a process of its own -----------------------------------------------------------------------------
def serve(model: str, dtype: str, options: dict[str, Any]) -> None:
    """Answer one JSON request a line: prompts and new tokens in, seconds, tokens and best log-probabilities out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints on both; answers go alone
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(model=model, dtype=dtype, skip_tokenizer_init=True, **{**ENGINE, **options})
    print(json.dumps({"start_s": time.perf_counter() - begin}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        wanted = {"max_tokens": asked["new"], "logprobs": 2 if asked["compare"] else None}
        sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **wanted)
        prompts = [TokensPrompt(prompt_token_ids=one) for one in asked["prompts"]]
        begin = time.perf_counter()
        found = [one.outputs[0] for one in engine.generate(prompts, sampling, use_tqdm=False)]
        answer: dict[str, Any] = {
            "seconds": time.perf_counter() - begin,
            "tokens": [list(one.token_ids) for one in found],
        }
        if asked["compare"]:
            best = [
                [sorted((item.logprob for item in step.values()), reverse=True)[:2] for step in one.logprobs]
                for one in found
            ]
            answer["gaps"] = [[pair[0] - pair[1] for pair in one] for one in best]
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """A process that serves one model, with or without LayerZero."""

    def __init__(self, model: Path, dtype: str, mode: str, options: dict[str, Any], env: dict[str, str]) -> None:
        # -P: a file of this name beside it must not be taken for vLLM
        words = [sys.executable, "-P", __file__, "--serve", str(model), dtype, json.dumps(options)]
        given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        given |= {"OMP_WAIT_POLICY": "passive", "LAYERZERO_VLLM": mode}
        self.caches = tempfile.TemporaryDirectory()
        given["TORCHINDUCTOR_CACHE_DIR"] = self.caches.name
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **given, **env}
        )
        self.start_s: float = self._answer()["start_s"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompts: list[list[int]], new: int, *, compare: bool = False) -> dict[str, Any]:
        """Tokens of all prompts, and the seconds they took."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new, "compare": compare}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        with self.caches, self.process:  # closes both pipes and waits
            pass


@contextmanager
def engines(
    model: Path, dtype: str, options: dict[str, Any], reports: Path, *, ours_first: bool = False
) -> Iterator[tuple[Engine, Engine]]:
    """Stock and ours, started one after the other."""
    ways = {"off": {}, "on": {"LAYERZERO_VLLM_REPORTS": str(reports)}}
    order = reversed(ways) if ours_first else iter(ways)
    found = {mode: Engine(model, dtype, mode, options, ways[mode]) for mode in order}
    try:
        yield found["off"], found["on"]
    finally:
        for engine in found.values():
            engine.close()


# -- comparing -------------------------------------------------------------------------------------------------------
def partings(stock: dict[str, Any], ours: dict[str, Any]) -> list[float]:
    """Where tokens part: the difference of stock's two best log-probabilities at that token, for each prompt."""
    found = []
    for one, other, gaps in zip(stock["tokens"], ours["tokens"], stock["gaps"], strict=True):
        part = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        found += [] if part is None else [gaps[part]]
    return found


def ended(engine: Engine) -> str | None:
    """How an engine ended at its first request; None where it answers."""
    try:
        engine.generate([[1, 2, 3]], 2)
    except SystemExit as end:
        return str(end)
    return None


def measured(
    stock: Engine | None, ours: Engine, rounds: int, vocabulary: int, cases: dict[str, tuple[int, int, int]]
) -> Iterator[dict[str, Any]]:
    """The seconds of both by case, in turns."""
    draw = random.Random(1)
    pair = [ours] if stock is None else [stock, ours]
    for name, (count, length, new) in cases.items():
        seconds: dict[Engine, list[float]] = {engine: [] for engine in pair}
        for turn in range(rounds + 1):  # the first one warms up
            prompts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
            for engine in pair if turn % 2 else pair[::-1]:
                taken = engine.generate(prompts, new)["seconds"]
                seconds[engine] += [taken] if turn else []
        row: dict[str, Any] = {"case": name, "prompts": count, "prompt_tokens": length, "new_tokens": new}
        yield row | {"seconds": [[round(one, 4) for one in found] for found in seconds.values()]}


def joined(case: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One case of all pairs: tokens a second, and the mean of the pairs' median ratios of neighbours."""
    row = {**case[0], "seconds": [pair["seconds"] for pair in case]}
    work = row["prompts"] * (row["prompt_tokens"] if row["new_tokens"] == 1 else row["new_tokens"])
    *stock, ours = zip(*row["seconds"], strict=True)  # for each side the seconds of each pair
    row["tokens_s"] = round(work / statistics.median(itertools.chain(*ours)), 1)
    if stock:
        row["stock_tokens_s"] = round(work / statistics.median(itertools.chain(*stock[0])), 1)
        ratios = [statistics.median(map(operator.truediv, *pair)) for pair in row["seconds"]]
        row["by_pair"] = [round(ratio, 3) for ratio in ratios]
        row["times"] = round(statistics.geometric_mean(ratios), 3)
    return row


def figures_of(models: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of the models that were measured, and what came out."""
    found: dict[str, Any] = {}
    for model in models:
        name = f"{model['model']} {model['dtype']}"
        if "parted_beyond" in model:
            found[f"{name}: prompts whose tokens part"] = {"value": model["parted_beyond"], "at_most": 0}
        if "stock_ended" in model:
            continue
        start = round(model["start_s"] / model["stock_start_s"], 3)
        found[f"{name}: start-up over stock's"] = {"value": start, "at_most": START}
        for case in model["cases"]:
            first = model["dtype"] == "bfloat16" and case["case"] == "decode B1"
            limit = LEAST_FIRST if first else LEAST
            found[f"{name}, {case['case']}: over stock"] = {"value": case["times"], "at_least": limit}
    mean = geometric_mean(models)
    return found | ({} if mean is None else {"geometric mean": {"value": mean, "at_least": MEAN}})


def geometric_mean(models: list[dict[str, Any]]) -> float | None:
    """Of the ratios of all cases in which stock answers."""
    times = [case["times"] for model in models for case in model["cases"] if "times" in case]
    return round(math.exp(statistics.fmean(map(math.log, times))), 3) if times else None


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    sys.path.insert(0, str(Path(__file__).parent))
    from timing import RESULTS, commit, machine, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="a folder of benchmarks/results")
    parser.add_argument("--models", type=Path, default=Path("build/vllm-models"), help="where checkpoints are kept")
    parser.add_argument("--shape", nargs="+", choices=(*SHAPES, "moe"), default=SHAPES)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--small", action="store_true", help="5 M parameters: for a first look")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--pairs", type=int, default=2, help="of engines, for each model")
    parser.add_argument("--rounds", type=int, default=5, help="of each pair")
    parser.add_argument("--prompts", type=int, default=200, help="whose tokens are compared")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths of timed prompts and answers are cut by this")
    parser.add_argument("--case", nargs="+", choices=CASES, default=tuple(CASES), help="what is timed")
    parser.add_argument("--batched-tokens", type=int, nargs="+", default=[ENGINE["max_num_batched_tokens"]])
    parser.add_argument("--json", type=Path, help="where to write, instead of the machine's folder")
    given = parser.parse_args()
    sizes = SMALL if given.small else LARGE
    folder = given.models / ("small" if given.small else "large")
    tokens = dict(zip(given.dtype, given.batched_tokens * len(given.dtype), strict=False))
    cases = {
        name: (count, max(round(length * given.scale), 1), max(round(new * given.scale), 2) if new > 1 else 1)
        for name, (count, length, new) in CASES.items()
        if name in given.case
    }
    command = "python benchmarks/vllm.py " + " ".join(sys.argv[1:])
    report: dict[str, Any] = {"commit": commit(), "command": command, "machine": machine(), "sizes": sizes}
    engine = {**ENGINE, "enforce_eager": given.eager, "max_num_batched_tokens": tokens[given.dtype[0]]}
    report |= {"engine": engine, "models": []}
    for shape, dtype in itertools.product(given.shape, given.dtype):
        model = make_model(shape, folder, sizes)
        options = {"enforce_eager": given.eager, "max_num_batched_tokens": tokens[dtype]}
        if dtype == given.dtype[0]:
            Engine(model, dtype, "off", {"enforce_eager": True}, {}).close()
        reports = given.models / "reports" / f"{shape}-{dtype}"
        row: dict[str, Any] = {"model": shape, "dtype": dtype, "batched_tokens": tokens[dtype]}
        starts, found = [], []
        for pair in range(given.pairs):
            with engines(model, dtype, options, reports, ours_first=pair % 2 == 1) as (stock, ours):
                starts.append((ours.start_s, stock.start_s))
                end = ended(stock)
                if end is not None:
                    row["stock_ended"] = end
                elif dtype == "float32" and not pair:
                    prompts = mixed_prompts(given.prompts, sizes["vocab_size"])
                    apart = partings(*(engine.generate(prompts, 16, compare=True) for engine in (stock, ours)))
                    beyond = sum(gap >= PARTING for gap in apart)
                    row |= {"prompts": len(prompts), "parted": len(apart), "parted_beyond": beyond}
                alive = None if end else stock
                found.append(list(measured(alive, ours, given.rounds, sizes["vocab_size"], cases)))
        row["start_s"], row["stock_start_s"] = (round(statistics.fmean(one), 1) for one in zip(*starts, strict=True))
        row["cases"] = [joined(case) for case in zip(*found, strict=True)]
        newest = max(reports.glob("worker-*.json"), key=lambda file: file.stat().st_mtime)
        told = json.loads(newest.read_text(encoding="utf-8"))
        row["chosen"] = [
            {key: one[key] for key in ("kind", "phase", "winner", "kernel", "reason")}
            for field in ("choices", "linears", "experts", "norms")
            for one in told[field]
        ]
        report["models"].append(row)
        print(json.dumps({key: row[key] for key in row if key != "chosen"}), flush=True)
        report |= {"versions": told["versions"], "geometric_mean": geometric_mean(report["models"])}
        report["figures"] = figures_of(report["models"])
        write_json(given.json or RESULTS / given.machine / "vllm.json", report)


if __name__ == "__main__":
    main()
