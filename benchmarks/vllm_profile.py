"""Which kernels vLLM's steps run with LayerZero, beside what its workers report. Run it with the Python that has vLLM.

    python benchmarks/vllm_profile.py --json FILE [--models FOLDER] [--shape llama-1b …] [--dtype bfloat16]

torch's profiler looks at one step of prompts and one of single tokens, with ours as it chooses and pinned. The kernels
are held by name against what the worker reports: where that names a kernel of ours, against this kernel run alone with
the same arguments (in a captured graph, where no layer is seen: with drawn ones, and their number counts); where it
says vLLM's own, against the same step of stock vLLM, and where vLLM's TRITON_ATTN, of stock vLLM with that backend.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cuda  # takes this folder from the path again: vllm.py is not vLLM

RANGE, THEIR_RANGE = "layerzero::paged_attention", "vllm::unified_attention_with_output"
UNLIKE = "steps whose kernels are not those explained"
THEIRS, TRITON = "vLLM's own", "vLLM's TRITON_ATTN"  # as reports say it
FLASH = "flash::"  # in the names of FLASH_ATTN's kernels
PAGE = 16  # tokens of a page, as vLLM has them by default
PROFILED = (4, 256)  # prompts and their tokens: one step of prompts, then one of single tokens


def inside(trace: list[dict[str, Any]], name: str) -> list[list[str]]:
    """For each range of this name, in order, the kernels that were launched in it; on a CPU the ops."""
    spans = [item for item in trace if item.get("name") == name and item.get("cat") in ("cpu_op", "user_annotation")]
    starts = {item["args"]["correlation"]: item for item in trace if item.get("cat") in ("cuda_runtime", "cuda_driver")}
    launched = [
        (starts.get(item["args"]["correlation"]), item["name"]) for item in trace if item.get("cat") == "kernel"
    ]
    if not launched and not starts:
        launched = [(item, item["name"]) for item in trace if item.get("cat") == "cpu_op" and item["name"] != name]
    found = []
    for span in sorted(spans, key=lambda item: float(item["ts"])):
        end = span["ts"] + span["dur"]
        within = [(at, what) for at, what in launched if at is not None and at["tid"] == span["tid"]]
        found.append([what for at, what in within if span["ts"] <= at["ts"] <= end])
    return found


def seen(call: Any) -> dict[str, Any]:
    """What torch's profiler saw of a call: kernels, and those of each attention layer, ours and vLLM's."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    kind = "kernel" if torch.cuda.is_available() else "cpu_op"
    kernels = collections.Counter(item["name"] for item in trace if item.get("cat") == kind)
    found = {"kernels": dict(kernels.most_common()), "on": "cuda" if kind == "kernel" else "cpu"}
    return {**found, "ours": inside(trace, RANGE), "vllm": inside(trace, THEIR_RANGE)}


def said_of(choices: list[dict[str, Any]], kind: str, step: str) -> str:
    """The kernel that a worker reports for a kind in the profiled step."""
    timed = {one["phase"]: one["kernel"] for one in choices if one["kind"] == kind}
    if step != "decode":
        return str(next(kernel for phase, kernel in timed.items() if phase.startswith(step)))
    batches = sorted(int(phase.removeprefix("decode B")) for phase in timed if phase.startswith("decode B"))
    return str(timed[f"decode B{next((one for one in batches if one >= PROFILED[0]), batches[-1])}"])


def in_a_graph(kind: Any, dtype: Any) -> tuple[Any, ...]:
    """Arguments of ours for a step of single tokens, planned for the longest context as in a captured graph."""
    import layerzero as lz
    from layerzero_vllm import attend
    from layerzero_vllm.choice import Phase
    from layerzero_vllm.cuda import IN_GRAPHS

    longest = vllm_cuda.RATED["max_model_len"]
    drawn = attend.example(kind, Phase("decode", PROFILED[0], 1, longest), dtype)
    settings = attend.Settings(kind.head_dim**-0.5, kind.window, kind.softcap)
    batch = lz.paged_batch(drawn.block_table, drawn.seq_lens, host_lens=[longest] * PROFILED[0])
    return drawn.query, attend.interleaved(drawn.cache), batch, settings, True, IN_GRAPHS


def steps(given: argparse.Namespace) -> None:
    """One engine, in this process: its steps as the profiler sees them, and our kernels alone on the same arguments."""
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    (shape,), backend = given.shape, given.engine
    options = {**vllm_cuda.RATED, "load_format": "dummy", "async_scheduling": False, **vllm_cuda.attention_of(backend)}
    if not torch.cuda.is_available():  # vLLM takes no other backend there; nothing is compiled
        options = {"enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 2048, "load_format": "dummy"}
    model = vllm_cuda.config_of(shape, given.models)
    engine = LLM(model=str(model), dtype=given.dtype, skip_tokenizer_init=True, **options)
    draw, (count, length) = random.Random(2), PROFILED

    def prompts() -> list[Any]:
        vocabulary = vllm_cuda.SHAPES[shape][1]["vocab_size"]
        drawn = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
        return [TokensPrompt(prompt_token_ids=one) for one in drawn]

    sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=2)
    engine.generate(prompts(), sampling, use_tqdm=False)  # warms up
    for place, prompt in enumerate(prompts()):
        engine.llm_engine.add_request(str(place), prompt, sampling)
    calls: list[tuple[Any, ...]] = []
    found: dict[str, Any] = {"steps": {}, "layers": []}
    if backend == "layerzero":
        from layerzero_vllm import attend
        from layerzero_vllm.report import folder, newest, read
        from layerzero_vllm.worker import kind_of

        real = attend.attend

        def kept(*arguments: Any) -> Any:
            calls.append(arguments)
            return real(*arguments)

        attend.attend = kept
    for step in ("prefill", "decode"):
        calls.clear()
        found["steps"][step] = seen(engine.llm_engine.step)
        if backend != "layerzero":
            continue
        import layerzero as lz

        (told,) = newest(read(folder()))
        config = engine.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        kinds = [kind_of(layer.impl, vllm_cuda.DEVICE, PAGE, config) for layer in layers]
        said = [said_of(told["choices"], str(kind), step) for kind in kinds]
        in_graph = step == "decode" and torch.cuda.is_available()
        ours = [(kind, kernel) for kind, kernel in zip(kinds, said, strict=True) if kernel not in (THEIRS, TRITON)]
        drawn = [in_a_graph(kind, config.model_config.dtype) for kind, _ in ours] if in_graph else list(calls)
        alone = []
        for (_, kernel), arguments in zip(ours, drawn, strict=False):
            with lz.scoped(locks={"paged_attention": kernel}):
                real(*arguments)
                alone += seen(lambda arguments=arguments: real(*arguments))["ours"]  # type: ignore[misc]
        found["steps"][step] |= {"said": said, "alone": alone, "in_graph": in_graph}
        found["versions"] = told["versions"]
    found["torch"] = torch.__version__
    given.json.write_text(json.dumps(found), encoding="utf-8")


def unlike(step: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    """What of a step is not as its worker reports it; nothing where all is."""
    ours = [said for said in step["said"] if said not in (THEIRS, TRITON)]
    if step.get("in_graph") and ours:  # no layer is seen there, only how often a kernel ran
        expected = collections.Counter(itertools.chain.from_iterable(step["alone"]))
        wrong = [
            f"{step['kernels'].get(name, 0)} times {name[:80]} instead of {many}"
            for name, many in expected.items()
            if step["kernels"].get(name, 0) != many
        ]
        strange = [name for name in step["kernels"] if FLASH in name and len(ours) == len(step["said"])]
        return wrong + [f"{name[:80]} beside ours" for name in strange] + ([] if expected else ["nothing ran alone"])
    theirs = [place for place, said in enumerate(step["said"]) if said in (THEIRS, TRITON)]
    wrong = [] if len(step["ours"]) == len(ours) else [f"{len(step['ours'])} calls of ours instead of {len(ours)}"]
    for place, (said, one, alone) in enumerate(zip(ours, step["ours"], step["alone"], strict=False)):
        begun = one[-len(alone) :] if place == 0 and alone else one  # the first call looks at the step's batch before
        wrong += [f"layer {place} of ours: not the kernels of {said} alone"] if begun != alone else []
    layers = [[of["vllm"][place] for place in theirs if of["vllm"]] for of in (step, stock)]  # none are seen in a graph
    wrong += [] if layers[0] == layers[1] else ["other kernels in vLLM's attention layers than stock's"]
    parts = [{name: many for name, many in of["kernels"].items() if "triton_" not in name} for of in (step, stock)]
    whole = not ours and stock["on"] == "cuda"  # on a CPU linears may be ours, too
    return wrong + (["other kernels in the step than stock's"] if whole and parts[0] != parts[1] else [])


def profile(given: argparse.Namespace) -> None:
    """Four engines of each shape at once, each in a process of its own; what each step ran beside what is reported."""
    report = vllm_cuda.Report(given.json)
    report.data |= {"engine": vllm_cuda.RATED, "profiled": report.rows, "figures": {}}
    ways = {"stock": ("FLASH_ATTN", ""), "stock_triton": ("TRITON_ATTN", "")}
    ways |= {"chosen": ("layerzero", ""), "pinned": ("layerzero", "layerzero")}
    with tempfile.TemporaryDirectory() as where:
        running = {}
        for shape, (way, (backend, choice)) in itertools.product(given.shape, ways.items()):
            words = [sys.executable, "-P", __file__, "--shape", shape, "--engine", backend]
            words += ["--models", str(given.models / way), "--json", f"{where}/{shape}-{way}.json"]
            words += ["--dtype", given.dtype]
            env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
            env |= {"LAYERZERO_VLLM": "on" if backend == "layerzero" else "off", "LAYERZERO_VLLM_CHOICE": choice}
            env |= {"LAYERZERO_VLLM_REPORTS": f"{where}/{shape}-{way}", "TORCHINDUCTOR_CACHE_DIR": f"{where}/c{way}"}
            running[shape, way] = subprocess.Popen(words, env={**os.environ, **env})
        ended = {item: one.wait() for item, one in running.items()}
        if any(ended.values()):
            raise SystemExit(f"engines ended with {ended}")
        wrong = 0
        for shape in given.shape:
            told = {way: json.loads(Path(where, f"{shape}-{way}.json").read_text(encoding="utf-8")) for way in ways}
            for way, step in itertools.product(("chosen", "pinned"), ("prefill", "decode")):
                one = told[way]["steps"][step]
                other = told["stock_triton" if TRITON in one["said"] else "stock"]["steps"][step]
                row = {"model": shape, "engine": way, "step": step, "unlike": unlike(one, other)}
                row |= {"layers": len(one["said"]), "said": sorted(set(one["said"]))}
                names = [name for layer in one["ours"] or one["vllm"] for name in layer]
                row |= {"in_attention": dict(collections.Counter(names)), "kernels": one["kernels"]}
                wrong += bool(row["unlike"])
                report.data["figures"] = {UNLIKE: {"value": wrong, "at_most": 0}}
                report.add(row)
            report.data |= {"versions": told["chosen"]["versions"]}
    report.timing.write_json(report.path, report.data)


def main() -> None:
    """Profile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/vllm_profile.json"), help="where to write")
    parser.add_argument("--models", type=Path, default=Path("build/vllm-models"), help="where configs are kept")
    parser.add_argument("--shape", nargs="+", choices=vllm_cuda.SHAPES, default=["llama-1b"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--engine", help="only the steps of one engine, with this backend, in this process")
    given = parser.parse_args()
    (steps if given.engine else profile)(given)


if __name__ == "__main__":
    main()
