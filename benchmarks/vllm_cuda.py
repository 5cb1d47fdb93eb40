"""vLLM 0.26 with LayerZero beside stock vLLM on a GPU: answers, throughput, kernels. Run it with vLLM's Python.

    python benchmarks/vllm_cuda.py answers --json FILE [--models FOLDER] [--kind flat copying] [--dtype bfloat16 …]
    python benchmarks/vllm_cuda.py rates --json FILE [--shape llama-1b …]… [--stock FLASH_ATTN …] [--seconds N …]
    python benchmarks/vllm_cuda.py checkpoints|classes [--models FOLDER]

`answers` asks how far our attention may move a model's answers before it is a fault. Backends of one model live in one
process, ours pinned for every step with a prompt; each is compared with FLASH_ATTN and with the same weights in float32
by transformers. What TRITON_ATTN does, and FLASH_ATTN with the prompts in smaller batches, says what is ordinary. One
model is random, and its answers are flat: the two best tokens lie close together. The other copies what it attends
to, and its answers are sure.

`rates` gives tokens a second, compiled and with graphs, ours as it chooses at the start. Engines live at once, start
together (those of the shapes of one --shape) and take turns. A few rounds of all say which of vLLM's backends is best
in a case; A+B is the pair with A in full layers and B in those with a window. Further rounds are of that one and ours,
one after the other and then the other way round: a second run in a row finds the GPU warmer, and the ratio of such a
block of two rounds does not see it. Weights are vLLM's dummies: only their number matters.

The last two make beforehand what the others would: the checkpoints, and what vLLM keeps of a model's class.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:] = [item for item in sys.path if Path(item or ".").resolve() != HERE.resolve()]  # vllm.py is not vLLM

ONE_B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
ONE_B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
# what is timed: the class of its config and its sizes
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": ("Llama", {**ONE_B, "head_dim": 64}),
    "llama-8b": (
        "Llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "gemma-2b": (  # every second layer has the window
        "Gemma2",
        {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512},
    ),
}
SHAPES["small"] = (  # to try it on a CPU
    "Llama",
    {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
)
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1}
OPTIONS |= {"kv_cache_memory_bytes": 6 << 30, "enable_flashinfer_autotune": False}
# many engines share the GPU: pages for 64 sequences of 192 tokens, and graphs of what is timed
RATED = {**OPTIONS, "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.03}
RATED |= {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]}}
CASES = {"decode B1": (1, 128, 64), "decode B64": (64, 128, 64), "prefill": (8, 1024, 1)}
DEVICE = "cuda"
FURTHER = 1.1  # of the rms of the further of vLLM's backends: two of one kind differ by a few per cent
LEAST, MEAN = 0.98, 1.0  # tokens a second over the best of vLLM's: the low end of each case's interval, and the mean
RANKED = 3  # rounds of all engines that say which of vLLM's is best
LOOKED_AT = 5  # vLLM's check_logprobs_close: a token that parts is among this many best ones of the other side


def beside(name: str) -> Any:
    """A module of this folder, which is not on the path."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- answers ---------------------------------------------------------------------------------------------------------
def make_copying(flat: Path, where: Path) -> Path:
    """The checkpoint `flat` with heads that carry over the tokens they attend to, which the head then reads."""
    if where.exists():
        return where
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(flat, dtype=torch.bfloat16)
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        for layer in model.model.layers:
            values = layer.self_attn.v_proj.weight.unflatten(0, (-1, model.config.head_dim))
            layer.self_attn.o_proj.weight.copy_(4 * values.repeat_interleave(heads, 0).flatten(0, 1).T)
            layer.mlp.down_proj.weight.mul_(0.25)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight / 4)
    model.save_pretrained(where)
    return where


def checkpoints(given: argparse.Namespace) -> dict[str, Path]:
    """The models whose answers are compared, made once."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        folders = {"flat": beside("vllm").make_model("llama", given.models / "1b", ONE_B)}
    torch.set_default_dtype(torch.float32)
    if "copying" in given.kind:
        folders["copying"] = make_copying(folders["flat"], given.models / "1b" / "copying")
    return folders


def truth(where: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the prompts' own tokens after the first, in float32 with nothing fused."""
    import torch
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(where, dtype=torch.float32, attn_implementation="eager").to(DEVICE)
    found = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = torch.tensor([prompt], device=DEVICE)
            scores = model(tokens).logits[0, :-1].log_softmax(-1)
            found.append(scores.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return found


def answers_of(engine: Any, prompts: list[list[int]], at_once: int) -> dict[str, Any]:
    """Greedy tokens with their best log-probabilities, and those of the prompts' own tokens."""
    from vllm import SamplingParams, TokensPrompt

    wanted = {"max_tokens": 16, "logprobs": LOOKED_AT, "prompt_logprobs": 0}
    sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **wanted)
    given = [TokensPrompt(prompt_token_ids=one) for one in prompts]
    found = []
    for first in range(0, len(given), at_once):
        found += engine.generate(given[first : first + at_once], sampling, use_tqdm=False)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in found],
        "best": [
            [{token: item.logprob for token, item in step.items()} for step in one.outputs[0].logprobs] for one in found
        ],
        "prompts": [
            [step[token].logprob for token, step in zip(prompt[1:], one.prompt_logprobs[1:], strict=True)]
            for prompt, one in zip(prompts, found, strict=True)
        ],
    }


def moved(one: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    """How far log-probabilities of the same tokens lie apart."""
    apart = [abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    rms = math.sqrt(statistics.fmean(item * item for item in apart))
    return {"tokens": len(apart), "rms": round(rms, 5), "median": round(statistics.median(apart), 5)} | {
        "largest": round(max(apart), 5)
    }


def compared(stock: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Where greedy tokens part, how sure stock was there, and whether vLLM's own check would let it pass."""
    gaps, refused, at_first = [], 0, 0
    for place, (one, two) in enumerate(zip(stock["tokens"], other["tokens"], strict=True)):
        part = next((at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if part is None:
            continue
        best = stock["best"][place][part], other["best"][place][part]
        refused += one[part] not in best[1] or two[part] not in best[0]
        at_first += part == 0
        upper = sorted(best[0].values(), reverse=True)
        gaps.append(round(upper[0] - upper[1], 4))
    said = {"parted": len(gaps), "parted_at_first": at_first, "beyond_vllms_check": refused, "gaps": sorted(gaps)}
    return {**said, "prompt_logprobs": moved(stock["prompts"], other["prompts"])}


def sureness(run: dict[str, Any]) -> float:
    """The median difference of the two best log-probabilities: near nothing where answers are flat."""
    pairs = [sorted(step.values(), reverse=True)[:2] for one in run["best"] for step in one]
    return round(statistics.median(first - second for first, second in pairs), 4)


def answers(given: argparse.Namespace) -> None:
    """Every backend of every model and dtype; what each moves."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LAYERZERO_VLLM": "on", "LAYERZERO_VLLM_CHOICE": "layerzero"}
    os.environ.setdefault("LAYERZERO_VLLM_REPORTS", str(given.models / "reports"))
    report = Report(given.json)
    options = {**OPTIONS, "kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
    report.data |= {"sizes": ONE_B, "engine": options, "answers": report.rows, "figures": {}}
    folders = checkpoints(given)
    prompts = beside("vllm").mixed_prompts(given.prompts, ONE_B["vocab_size"])
    right = {kind: truth(folders[kind], prompts) for kind in given.kind}
    report.say(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, truth in float32")
    from vllm import LLM

    for kind in given.kind:
        for dtype in given.dtype:
            runs: dict[str, dict[str, Any]] = {}
            for backend in ("FLASH_ATTN", "CUSTOM", "TRITON_ATTN"):
                engine = LLM(
                    model=str(folders[kind]),
                    dtype=dtype,
                    skip_tokenizer_init=True,
                    attention_backend=backend,
                    **options,
                )
                runs[backend] = answers_of(engine, prompts, len(prompts))
                if backend == "FLASH_ATTN":
                    runs["FLASH_ATTN, prompts in eights"] = answers_of(engine, prompts, 8)
                for name in list(runs)[-1 - (backend == "FLASH_ATTN") :]:
                    row: dict[str, Any] = {"model": kind, "dtype": dtype, "backend": name, "prompts": len(prompts)}
                    row |= {"sureness": sureness(runs[name]), "from_float32": moved(right[kind], runs[name]["prompts"])}
                    if name != "FLASH_ATTN":
                        row["against_flash_attn"] = compared(runs["FLASH_ATTN"], runs[name])
                    report.add(row)
                del engine
            report.data["figures"] |= figures_of(kind, dtype, [row for row in report.rows if row["dtype"] == dtype])
    report.keep(workers(Path(os.environ["LAYERZERO_VLLM_REPORTS"])))


def figures_of(kind: str, dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of ours: no further from float32 than vLLM's own backends, and no token beyond vLLM's own check."""
    of = {row["backend"]: row for row in rows if row["model"] == kind}
    ours, theirs = of["CUSTOM"], max(row["from_float32"]["rms"] for name, row in of.items() if name != "CUSTOM")
    found = {f"{kind}, {dtype}: rms from float32 over vLLM's": {"value": ours["from_float32"]["rms"] / theirs}}
    found = {name: {"value": round(item["value"], 3), "at_most": FURTHER} for name, item in found.items()}
    if kind == "copying":
        beyond = ours["against_flash_attn"]["beyond_vllms_check"]
        found[f"{kind}, {dtype}: prompts beyond vLLM's check"] = {"value": beyond, "at_most": 0}
    return found


# -- rates -----------------------------------------------------------------------------------------------------------
def config_of(shape: str, folder: Path) -> Path:
    """A folder with nothing but a config: vLLM draws dummy weights."""
    import transformers

    name, sizes = SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=4096)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(folder / shape)
    return folder / shape


def classes(given: argparse.Namespace) -> None:
    """Let vLLM ask what the classes of all shapes are, which it keeps."""
    from vllm.config import ModelConfig

    for shape in SHAPES:
        print(ModelConfig(model=str(config_of(shape, given.models)), skip_tokenizer_init=True).architecture, flush=True)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by drawing the rounds anew."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def blocks(rounds: list[tuple[float, float]]) -> list[float]:
    """Ratios of blocks of two rounds (seconds of stock, of ours), the second of which ran in the other order."""
    pairs = zip(rounds[::2], rounds[1::2], strict=True)
    return [math.sqrt(one[0] * other[0] / (one[1] * other[1])) for one, other in pairs]


def timed(engines: dict[str, Any], vocabulary: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each case: ours over the quickest of the others, which rounds of their own have found."""
    draw, names = random.Random(1), list(engines)

    def run(case: str, order: list[str]) -> dict[str, float]:
        count, length, _ = CASES[case]
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
        return {name: engines[name].generate(prompts, CASES[case][2])["seconds"] for name in order}

    ranked: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in CASES}
    for turn in range(RANKED + 1):
        for case in CASES:
            for name, taken in run(case, names[turn % len(names) :] + names[: turn % len(names)]).items():
                ranked[case][name] += [taken] if turn else []  # the first one warms up
    least = {case: {name: statistics.median(found) for name, found in ranked[case].items()} for case in CASES}
    best = {case: min((name for name in names if name != "layerzero"), key=least[case].__getitem__) for case in CASES}
    longest = max(found["layerzero"] for found in least.values())
    taken: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    until, turn = time.time() + seconds, 0
    while time.time() < until or turn < 2:
        for case, stock in best.items():
            for _ in range(min(max(round(longest / least[case]["layerzero"] / 2), 1), 3)):  # short ones more often
                for order in ([stock, "layerzero"], ["layerzero", stock]):
                    found = run(case, order)
                    taken[case].append((found[stock], found["layerzero"]))
        turn += 1
    for case, (count, length, new) in CASES.items():
        work, ratios = count * (length if new == 1 else new), blocks(taken[case])
        low, high = interval(ratios)
        rates = [round(work / statistics.median(found), 1) for found in zip(*taken[case], strict=True)]
        row = {"case": case, "prompts": count, "prompt_tokens": length, "new_tokens": new, "rounds": len(taken[case])}
        row |= {"stock": best[case], "stock_tokens_s": rates[0], "tokens_s": rates[1]}
        row["all"] = {name: round(work / found, 1) for name, found in least[case].items()}
        row |= {"times": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}
        yield {**row, "seconds": [[round(second, 4) for second in pair] for pair in taken[case]]}


def attention_of(name: str) -> dict[str, Any]:
    """The options of an engine with this backend, or with a pair of them."""
    if "+" not in name:
        return {"attention_backend": "CUSTOM" if name == "layerzero" else name}
    full, window = name.split("+")
    return {"attention_config": {"backend": full, "backend_per_kind": {"sliding_window": window}}}


def rates(given: argparse.Namespace) -> None:
    """Engines of each group of shapes, started together; tokens a second."""
    report = Report(given.json)
    report.data |= {"engine": {**RATED, "enforce_eager": False}, "models": report.rows, "figures": {}}
    seconds = list(given.seconds)
    for group in given.shape or [["llama-1b"]]:
        _rate(given, report, group, [seconds.pop(0) if len(seconds) > 1 else seconds[0] for _ in group])


def _rate(given: argparse.Namespace, report: Report, group: list[str], seconds: list[float]) -> None:
    base, began = beside("vllm"), time.time()
    folders = {shape: config_of(shape, given.models) for shape in group}
    engines_of = {
        shape: {
            name: base.Engine.__new__(base.Engine)
            for name in [*given.stock, "layerzero"]
            if "+" not in name or "sliding_window" in SHAPES[shape][1]
        }
        for shape in folders
    }

    def start(shape: str, name: str) -> None:
        options = {**RATED, "load_format": "dummy", **attention_of(name)}
        # engines that start together do not share what vLLM compiles
        env = {"LAYERZERO_VLLM_REPORTS": str(given.models / "reports" / shape), "VLLM_DISABLE_COMPILE_CACHE": "1"}
        engine = engines_of[shape][name]
        engine.__init__(folders[shape], "bfloat16", "on" if name == "layerzero" else "off", options, env)
        report.say(f"{shape} {name}: started in {engine.start_s:.1f} s")

    wanted = [(shape, name) for shape, found in engines_of.items() for name in found]
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        begun = {item: pool.submit(start, *item) for item in wanted}
        concurrent.futures.wait(begun.values(), timeout=given.start_by)
        for (shape, name), one in begun.items():
            if not one.done():
                engines_of[shape][name].process.kill()
    for (shape, name), one in begun.items():
        if one.exception() is not None:
            report.say(f"{shape} {name} is left out: {one.exception()!r}")
            del engines_of[shape][name]
    report.say(f"all started after {time.time() - began:.0f} s")
    for (shape, engines), budget in zip(engines_of.items(), seconds, strict=True):
        if len(engines) < 2 or "layerzero" not in engines:
            continue
        if given.core is not None:  # the threads that launch take turns on one core
            for engine in engines.values():
                os.sched_setaffinity(engine.process.pid, {given.core})
        row: dict[str, Any] = {"model": shape, "dtype": "bfloat16", "sizes": SHAPES[shape][1]}
        row |= {"start_s": round(engines["layerzero"].start_s, 1)}
        row |= {"stock_start_s": round(min(engines[name].start_s for name in engines if name != "layerzero"), 1)}
        row["cases"] = list(timed(engines, SHAPES[shape][1]["vocab_size"], budget))
        told = workers(given.models / "reports" / shape)
        row["chosen"] = [
            {key: one[key] for key in ("kind", "phase", "winner", "kernel", "reason")} for one in told["choices"]
        ]
        times = [case["times"] for model in [*report.rows, row] for case in model["cases"]]
        report.data["geometric_mean"] = mean = round(math.exp(statistics.fmean(map(math.log, times))), 4)
        report.data["figures"] |= {
            f"{shape}, {case['case']}: low end": {"value": case["low"], "at_least": LEAST} for case in row["cases"]
        }
        report.data["figures"]["geometric mean"] = {"value": mean, "at_least": MEAN}
        report.add(row)
        report.keep(told)
    for engines in engines_of.values():
        for engine in engines.values():
            engine.close()


# -- what is kept ----------------------------------------------------------------------------------------------------
def workers(folder: Path) -> dict[str, Any]:
    """The newest report of a worker."""
    newest = max(folder.glob("worker-*.json"), key=lambda file: file.stat().st_mtime)
    told: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))
    return told


class Report:
    """Rows as they come, printed and written each time: what is cut off keeps what it has."""

    def __init__(self, path: Path) -> None:
        self.timing, self.path, self.began = beside("timing"), path, time.time()
        self.rows: list[dict[str, Any]] = []
        self.data: dict[str, Any] = self.timing.header()

    def say(self, words: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.time() - self.began:6.1f}] {words}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """One more row."""
        self.rows.append(row)
        short = {key: value for key, value in row.items() if key not in ("sizes", "chosen", "kernels")}
        if "cases" in short:
            short["cases"] = [{**case, "seconds": len(case["seconds"])} for case in row["cases"]]
        self.say(json.dumps(short))
        self.timing.write_json(self.path, self.data)

    def keep(self, told: dict[str, Any]) -> None:
        """The versions and choices of a worker beside the rows."""
        self.data |= {"versions": told["versions"]}
        self.timing.write_json(self.path, self.data)


WHAT = {"answers": answers, "rates": rates, "checkpoints": checkpoints, "classes": classes}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(WHAT))
    parser.add_argument("--json", type=Path, default=Path("build/vllm_cuda.json"), help="where to write")
    parser.add_argument("--models", type=Path, default=Path("build/vllm-models"), help="where checkpoints are kept")
    parser.add_argument("--kind", nargs="+", choices=("flat", "copying"), default=("flat", "copying"))
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=("bfloat16", "float16")
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--shape", nargs="+", action="append", choices=SHAPES, help="those of one option live at once")
    parser.add_argument("--stock", nargs="+", default=("FLASH_ATTN",), help="vLLM's backends to compare with, or pairs")
    parser.add_argument("--core", type=int, help="where the engines' own threads run, in turns")
    parser.add_argument("--start-by", type=float, help="seconds after which engines that are not ready are left out")
    parser.add_argument("--seconds", type=float, nargs="+", default=[40.0], help="of rounds for each shape")
    given = parser.parse_args()
    WHAT[given.what](given)


if __name__ == "__main__":
    main()
