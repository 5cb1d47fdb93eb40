"""A whole Llama of transformers, as it comes against `lz.patch`, in one interleaved run.

    python benchmarks/models.py --machine NAME [--device cuda|cpu] [--json FILE] [--quick] [--seconds N] [--only WORDS]
                                [--width 512|2048]
    python benchmarks/models.py --machine NAME --generate [--ways NAMES] [--add] …

The model has the architecture of Llama 3.2 1B on a GPU and a small one on a CPU, with random weights, twice with the
same numbers: once as transformers runs it (`attn_implementation="sdpa"`), once patched. Contestants:

    stock         eager, dynamic cache: what everything is divided by
    patched       the same after `lz.patch`
    stock graph   the decode step of the unpatched model with a static cache in a CUDA graph
    patched graph the decode step of the patched one

Prefill is a forward pass over a prompt with logits for its last token, as `generate` makes it; decode is one token
after another, each the most probable one, over a context of --context tokens. Every round times everyone; a ratio is
the median of the ratios within a round. Logits are compared before anything is timed. Kernels are compiled first. What
a patched call costs beyond its kernel is measured around an empty kernel, as in overhead.py. Writes JSON.

With --generate whole calls of it are timed instead, after a prompt of 500 tokens (--prompt), 128 new ones, for two
architectures and two batch sizes; contestants (--ways), the first being what everything is divided by:

    stock static    `cache_implementation="static"`: transformers compiles the decode step and replays it as a graph
    patched static  the same after `lz.patch`
    graphs          `lz.patch(model, graphs=True)`
    stock, patched  eager, dynamic cache

With --add the figures that an earlier run of the same commit on the same machine left in the file are kept: each case
(--only "llama-1b B24") in a process of its own compiles for its own batch size. On a CPU everything is divided by
`stock`, in float32 and in bf16, and the step over a static cache is compiled on both sides. With --turn FILE it waits
before anything is timed: cases compile side by side in processes of their own, and are timed one after the other.

On a CPU `generate` itself is timed as well, its tokens compared, and a step of decode is divided by part. Where the
processor has no instructions for it, torch multiplies bf16 matrices a hundred times slower: there bf16 is measured with
a short context and no prompt to speak of.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from models_decoding import Decoding, Graphed, shares
from models_generate import ARCHITECTURES, WAYS, contestants_of, generate_case, log_probability_errors, made
from models_overhead import overheads
from timing import RESULTS, header, turn, write_json

import layerzero as lz

ONE_B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = {
    **ONE_B, "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
ROUNDS = 15  # at least: of five the median of ratios and the ratio of medians were 1.55 and 1.18
FEW_ROUNDS = 5  # of rounds so long that fewer than ROUNDS of them take a minute
LIMITS = {
    "prefill": 1.2,
    "decode": 1.3,
    "decode graph": 1.5,
    "cpu decode": 1.2,
    "cpu decode bf16": 1.5,
    "overhead": 3.0,
}


def models(config: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same model twice, the second one patched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaConfig(**config, attn_implementation="sdpa")
    with torch.device(device):
        stock = LlamaForCausalLM(made).to(dtype).eval()
    patched = copy.deepcopy(stock)
    return stock, lz.patch(patched)


def prompt(batch: int, length: int, vocab: int, device: str) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def timed(contestants: dict[str, Any], sync: Callable[[], None], units: int, seconds: float) -> dict[str, Any]:
    """Median ms a unit of each, and the median of each round's ratio to the first."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for call, rewind in contestants.values():
        call()
        sync()
        rewind()
    gc.collect()
    gc.disable()
    until = time.perf_counter() + seconds
    rounds = 0
    try:
        while rounds < ROUNDS or (time.perf_counter() < until and rounds < 200):
            if rounds >= FEW_ROUNDS and time.perf_counter() > until + 60:
                break
            order = list(contestants.items())
            for name, (call, rewind) in order if rounds % 2 else reversed(order):
                sync()
                start = time.perf_counter()
                call()
                sync()
                samples[name].append((time.perf_counter() - start) * 1e3 / units)
                rewind()
            rounds += 1
    finally:
        gc.enable()
    base = samples[next(iter(samples))]
    return {
        "rounds": rounds,
        "ms": {name: round(statistics.median(values), 4) for name, values in samples.items()},
        "times faster": {
            name: round(statistics.median(b / v for b, v in zip(base, values, strict=True)), 3)
            for name, values in samples.items()
        },
    }


def far(stock: torch.Tensor, patched: torch.Tensor) -> dict[str, float]:
    """How far two logits are apart, in standard deviations of the first, and how often they agree on the best."""
    error = (stock - patched).abs().max() / stock.std()
    same = (stock.argmax(-1) == patched.argmax(-1)).float().mean()
    return {"max_error_in_deviations": round(float(error), 5), "same_top1": round(float(same), 4)}


def nothing() -> None:
    pass


def errors(stock: Any, patched: Any, device: str) -> dict[str, float]:
    """Mean distance of both from the same model in float32, in standard deviations: what the dtype itself costs."""
    ids = prompt(1, 256, stock.config.vocab_size, device)
    truth = copy.deepcopy(stock).float()(ids, use_cache=False).logits
    return {
        name: round(float((model(ids, use_cache=False).logits.float() - truth).abs().mean() / truth.std()), 5)
        for name, model in (("stock", stock), ("patched", patched))
    }


def prefill_case(stock: Any, patched: Any, batch: int, length: int, device: str, sync: Any, seconds: float) -> Any:
    ids = prompt(batch, length, stock.config.vocab_size, device)

    def forward(model: Any) -> Callable[[], Any]:
        return lambda: model(ids, use_cache=True, logits_to_keep=1)

    logits = [forward(model)().logits[:, -1].float() for model in (stock, patched)]
    contestants = {"stock": (forward(stock), nothing), "patched": (forward(patched), nothing)}
    found = timed(contestants, sync, 1, seconds)
    found["tokens_per_s"] = {name: round(batch * length / ms * 1e3) for name, ms in found["ms"].items()}
    return {"batch": batch, "tokens": length, "logits": far(*logits), **found}


def decode_case(
    stock: Any, patched: Any, batch: int, context: int, device: str, sync: Any, seconds: float, steps: int, graphs: bool
) -> Any:
    ids = prompt(batch, context, stock.config.vocab_size, device)
    loops: dict[str, Any] = {"stock": Decoding(stock, ids), "patched": Decoding(patched, ids)}
    logits = far(loops["stock"].logits, loops["patched"].logits)
    failed = {}
    for name, model in (("stock graph", stock), ("patched graph", patched)) if graphs else ():
        try:
            loops[name] = Graphed(model, ids, 128)
        except Exception as error:
            failed[name] = "".join(traceback.format_exception_only(error))[:500]
            torch.cuda.synchronize()
    contestants = {name: (lambda loop=loop: loop.run(steps), loop.rewind) for name, loop in loops.items()}
    found = timed(contestants, sync, steps, seconds)
    found["tokens_per_s"] = {name: round(batch / ms * 1e3, 1) for name, ms in found["ms"].items()}
    if "stock graph" in loops and "patched graph" in loops:
        found["patched graph / stock graph"] = round(found["ms"]["stock graph"] / found["ms"]["patched graph"], 3)
        for name in ("stock graph", "patched graph"):
            loops[name].token.copy_(loops["stock"].first)  # the same token for both, even where they disagree on it
            loops[name].run(1)
        one, two = (loops[name].logits[:, -1].float() for name in ("stock graph", "patched graph"))
        logits["graphs"] = far(one, two)
        for name in ("stock graph", "patched graph"):
            loops[name].rewind()
    if not graphs:
        found["per cent of a step"] = {name: shares(loop, 2 * steps) for name, loop in loops.items()}
    return {"batch": batch, "context": context, "logits": logits, **({"failed": failed} if failed else {}), **found}


def about(benchmark: str, **more: Any) -> dict[str, Any]:
    """What a file of figures says of itself."""
    import transformers

    return {"benchmark": benchmark, **header(), "transformers": transformers.__version__, **more}


def run_generate(args: argparse.Namespace, path: Path) -> None:
    cuda = args.device == "cuda"
    sync = torch.cuda.synchronize if cuda else nothing
    lz.configure(jit="block")
    ways = args.ways.split(",") if args.ways else list(WAYS)
    if not cuda:  # nothing is captured, and what is compiled is no longer what everything is divided by
        ways = [way for way in ("stock", "patched", "stock static", "patched static") if not args.ways or way in ways]
    changes: dict[str, Any] = {"num_hidden_layers": 2} if args.quick else {}
    if not cuda:
        changes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, **changes}
    found = about("models_generate", ways=ways, weights={}, figures={})
    add = args.add
    for architecture, dtype in itertools.product(ARCHITECTURES, ["bfloat16"] if cuda else ["float32", "bfloat16"]):
        # Without instructions for bf16 a token takes the better part of a second: one short text, as in `run`.
        slow = dtype == "bfloat16" and not cuda and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        batches = (1, 24) if cuda else (1,) if slow else (1, 4)
        length, new = (500, 128) if cuda else (8, 4) if slow else (64, 32)
        names = {batch: f"{architecture} B{batch}{'' if cuda else f' {dtype}'}" for batch in batches}
        wanted = [b for b, name in names.items() if not args.only or any(w in name for w in args.only.split(","))]
        if not wanted:
            continue
        stock = made(architecture, args.device, getattr(torch, dtype), **changes)
        found["weights"][architecture] = sum(p.nbytes for p in stock.parameters())
        contestants = contestants_of(stock, ways, compiled=not cuda)
        for batch in wanted:
            ids = prompt(batch, args.prompt or length, stock.config.vocab_size, args.device)
            try:
                apart: dict[str, float] = {}

                texts = (stock, contestants, ids, min(new, 32))

                def in_turn(calls: Any, *rest: Any, apart: Any = apart, texts: Any = texts) -> Any:
                    if not apart:  # everything was called once by now
                        apart.update(log_probability_errors(*texts))
                        turn(args.turn)
                    return timed(calls, *rest)

                row = generate_case(contestants, ids, new, in_turn, sync, args.seconds)
                row["error of log-probabilities"] = apart
            except Exception:
                row = {"failed": traceback.format_exc()[-1500:]}
            if add and path.exists():
                keep_earlier(found, json.loads(path.read_text()))
            add = False
            found["figures"][names[batch]] = row
            write_json(path, found)
            print(names[batch], row.get("times faster", row.get("failed")), row.get("tokens_per_s", ""), flush=True)
        if "graphs" in contestants:
            found["figures"][names[wanted[-1]]]["patched"] = str(lz.patched(contestants["graphs"][0]))
            write_json(path, found)
        del stock, contestants
        gc.collect()


def keep_earlier(found: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Keep the figures of an earlier run of the same commit on the same machine; figures of others are dropped."""

    def measured(data: dict[str, Any]) -> Any:
        machine = {name: item for name, item in data["machine"].items() if name != "load"}
        return machine, *(data[name] for name in ("benchmark", "commit", "transformers", "ways"))

    if measured(found) == measured(earlier):
        found["command"] = f"{earlier['command']}; {found['command']}"
        for name in ("weights", "figures"):
            found[name] = {**earlier[name], **found[name]}


def run(args: argparse.Namespace, path: Path) -> None:
    cuda = args.device == "cuda"
    config, types = (ONE_B, ["bfloat16"]) if cuda else (SMALL, ["float32"])
    if not cuda:
        types.append("bfloat16")
    if not cuda and args.width == 2048:
        config = {**ONE_B, "num_hidden_layers": 4, "vocab_size": 32000}
    if args.quick:
        config = {**config, "num_hidden_layers": 2}
    sync = torch.cuda.synchronize if cuda else nothing
    lz.configure(jit="block", **({"deny": args.deny.split(",")} if args.deny else {}))
    figures: dict[str, Any] = {}
    from layerzero.dispatch.accel import accelerator

    found = about("models", accel=accelerator.native is not None, model=config, limits=LIMITS, figures=figures)

    def case(name: str, make: Callable[[], Any]) -> None:
        if args.only and not any(word in name for word in args.only.split(",")):
            return
        try:
            figures[name] = make()
        except Exception:
            figures[name] = {"failed": traceback.format_exc()[-1500:]}
        write_json(path, found)  # what was measured is kept, whatever comes next
        shown = figures[name].get("times faster") or figures[name].get("failed", "")[-300:]
        print(name, shown, figures[name].get("ms", ""), figures[name].get("logits", ""), flush=True)

    for word in types:
        stock, patched = models(config, args.device, getattr(torch, word))
        # Without instructions for bf16 a prompt takes minutes, and so does a comparison over one.
        slow = word == "bfloat16" and not cuda and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if word != "float32" and not slow:
            found.setdefault("error_to_float32", {})[word] = errors(stock, patched, args.device)
        batches = (1, 16, 64) if cuda else (1,) if slow else (1, 4)
        length = args.prompt or (4096 if cuda else 256)
        context, steps = (16, 4) if slow else (args.context, args.steps)
        if not slow:
            case(f"prefill {length} {word}", lambda s=stock, p=patched, n=length: prefill_case(
                s, p, 1, n, args.device, sync, args.seconds))  # fmt: skip
        for batch in batches:
            case(f"decode B{batch} {word}", lambda s=stock, p=patched, b=batch, c=context, n=steps: decode_case(
                s, p, b, c, args.device, sync, args.seconds, n, cuda))  # fmt: skip
        if not cuda:
            ids = prompt(1, 8 if slow else 32, config["vocab_size"], args.device)
            case(f"generate {word}", lambda s=stock, p=patched, i=ids, n=4 if slow else 32: generate_case(
                {"stock": (s, {}), "patched": (p, {})}, i, n, timed, sync, args.seconds))  # fmt: skip
        found["patched"] = str(lz.patched(patched))
        del stock, patched
        gc.collect()
    try:
        found["overhead_us"] = overheads(models({**SMALL, "num_hidden_layers": 2}, "cpu", torch.float32)[1])
    except Exception:
        found["overhead_us"] = {"failed": traceback.format_exc()[-600:]}
    print("overhead, µs:", found["overhead_us"], flush=True)
    write_json(path, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing, each case")
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--deny", default="", help="kernels that may not run, globs parted by commas")
    parser.add_argument("--width", type=int, default=512, choices=(512, 2048), help="of the model on a CPU")
    parser.add_argument("--generate", action="store_true", help="whole calls of generate, for two architectures")
    parser.add_argument("--ways", default="", help=f"of --generate, parted by commas: {', '.join(WAYS)}")
    parser.add_argument("--add", action="store_true", help="of --generate: keep the file's figures of the same commit")
    parser.add_argument("--turn", default="", help="of --generate: wait for FILE.go before timing (timing.turn)")
    parser.add_argument("--only", default="", help="cases whose names contain one of these words")
    args = parser.parse_args()
    args.context = args.context or (1024 if args.device == "cuda" else 256)
    name = "models_generate" if args.generate else "models"
    name += ".json" if args.device == "cuda" else "_cpu.json"
    with torch.no_grad():
        (run_generate if args.generate else run)(args, args.json or RESULTS / args.machine / name)


if __name__ == "__main__":
    main()
