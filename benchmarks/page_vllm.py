"""The section of the page about LayerZero inside vLLM."""

from __future__ import annotations

from typing import Any


def vllm_section(name: str, data: dict[str, Any]) -> str:
    """What one kept file says: of a CPU, or one of the four of a GPU."""
    if "answers" in data:
        return _answers(name, data)
    if "profiled" in data:
        return _profiled(name, data)
    if "tests" in data:
        return _tests(name, data)
    return _gpu(name, data) if data["machine"]["gpu"] else _cpu(name, data)


def _where(data: dict[str, Any], device: str) -> str:
    versions = data["versions"]
    return f"{device}; vLLM {versions['vllm']}, torch {versions['torch']}; commit `{data['commit']}`."


def _answers(name: str, data: dict[str, Any]) -> str:
    """How far each backend is from float32, and where tokens part from FLASH_ATTN's."""
    models = dict.fromkeys(f"{row['model']} {row['dtype']}" for row in data["answers"])
    lines = [
        f"## {name}: answers inside vLLM beside float32, {', '.join(models)}",
        "",
        f"{_where(data, data['machine']['gpu'])} Random 1B-shaped checkpoints, eager; CUSTOM is ours, pinned for every "
        "step with a prompt. The distance is that of the log-probabilities of the prompts' own tokens from the same "
        "weights in float32. How sure: the median difference of the two best log-probabilities. vLLM's check: a token "
        f"that parts is among the five best of the other side. Repeat: `{data['command']}`.",
        "",
        "| model | backend | rms from float32 | largest | how sure | part from FLASH_ATTN | beyond vLLM's check |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in data["answers"]:
        far, apart = row["from_float32"], row.get("against_flash_attn")
        parted = f"{apart['parted']} of {row['prompts']} | {apart['beyond_vllms_check']}" if apart else " | "
        figures = f"{far['rms']:.4f} | {far['largest']:.3f} | {row['sureness']:.2f}"
        lines.append(f"| {row['model']} {row['dtype']} | {row['backend']} | {figures} | {parted} |")
    return "\n".join(lines) + "\n"


def _tests(name: str, data: dict[str, Any]) -> str:
    """vLLM's own test of backends with ours in its lists."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(data["outcomes"].items()))
    kernels = sorted({kernel for row in data["tests"] for kernel in row["ours"]})
    lists = dict.fromkeys(", ".join(found) for found in data["lists"].values())
    named = ", ".join(f"`{one}`" for one in kernels)
    return (
        f"## {name}: vLLM's own test of attention backends\n\n{_where(data, data['device'])} With ours in its lists "
        f"({'; '.join(lists)}): {outcomes}; {data['with_our_kernels']} of them ran our kernels ({named}), the others "
        f"are of steps that stay vLLM's. Left out: tests that `{data['selected']}` does not name, and backends that "
        f"are not listed. Repeat: `{data['command']}`.\n"
    )


def _profiled(name: str, data: dict[str, Any]) -> str:
    """Which kernels a profiler saw in steps, beside what the workers report."""
    lines = [
        f"## {name}: kernels in a profile of vLLM's steps beside what is explained",
        "",
        f"{_where(data, data['machine']['gpu'])} One step of prompts and one of single tokens, by torch's profiler, "
        "with ours as chosen and pinned. Kernels of ours are compared, in each layer, with the reported kernel run "
        "alone on the same arguments, in a graph by how often each ran; vLLM's own with the same step of stock vLLM "
        "(of the whole step all but those "
        f"that Inductor names). Repeat: `{data['command']}`.",
        "",
        "| model | engine | step | reported | launches in attention | as explained |",
        "|---|---|---|---|---:|---|",
    ]
    for row in data["profiled"]:
        said, seen = ", ".join(f"`{one}`" for one in row["said"]), row["in_attention"]
        launches = f"{sum(seen.values())} of {len(seen)} kinds" if seen else "in a graph"
        verdict = f"no: {'; '.join(row['unlike'])}" if row["unlike"] else "yes"
        lines.append(f"| {row['model']} | {row['engine']} | {row['step']} | {said} | {launches} | {verdict} |")
    return "\n".join(lines) + "\n"


def _gpu(name: str, data: dict[str, Any]) -> str:
    """Tokens a second beside the best of vLLM's backends, with intervals."""
    winners = [one["winner"] for model in data["models"] for one in model["chosen"]]
    stock = dict.fromkeys(name for model in data["models"] for case in model["cases"] for name in case["all"])
    del stock["layerzero"]
    said = "" if "layerzero" in winners else ", so that FLASH_ATTN's own classes serve"
    lines = [
        f"## {name}: inside vLLM, {', '.join(model['model'] for model in data['models'])}",
        "",
        f"{_where(data, data['machine']['gpu'])} Dummy weights, compiled with graphs, steps of at most "
        f"{data['engine']['max_num_batched_tokens']} tokens; engines in turns. Tokens a second over the best of "
        f"{', '.join(stock)}: {data['geometric_mean']:.3f} in geometric mean; of {len(winners)} choices "
        f"{winners.count('layerzero')} are ours{said}. Repeat: `{data['command']}`.",
        "",
        "| model | case | tokens/s | vLLM's best | times | 95 % | start, s | stock |",
        "|---|---|---:|---|---:|---|---:|---:|",
    ]
    for model in data["models"]:
        once = [f"{model['start_s']:.1f}", f"{model['stock_start_s']:.1f}"]
        for case in model["cases"]:
            shape = f"{case['case']}, {case['prompts']} × {case['prompt_tokens']} + {case['new_tokens']}"
            figures = [f"{case['tokens_s']:.0f}", f"{case['stock_tokens_s']:.0f} ({case['stock']})"]
            figures += [f"{case['times']:.3f}", f"{case['low']:.3f} to {case['high']:.3f}"]
            lines.append(f"| {' | '.join([model['model'] + ' ' + model['dtype'], shape, *figures, *once])} |")
            once = ["", ""]
    return "\n".join(lines) + "\n"


def _cpu(name: str, data: dict[str, Any]) -> str:
    """Throughput, start-up and tokens of each model beside stock vLLM."""
    machine, versions, engine = data["machine"], data["versions"], data["engine"]
    winners = [one["winner"] for model in data["models"] for one in model["chosen"]]
    all_tokens = {model["dtype"]: model.get("batched_tokens") for model in data["models"]}
    others = {dtype: many for dtype, many in all_tokens.items() if many not in (None, engine["max_num_batched_tokens"])}
    steps = "".join(f" ({dtype}: {many})" for dtype, many in others.items())
    lines = [
        f"## {name}: inside vLLM, {' and '.join(dict.fromkeys(model['dtype'] for model in data['models']))}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); vLLM {versions['vllm']}, torch "
        f"{versions['torch']}; load before the run {machine['load']}; commit `{data['commit']}`. Random checkpoints of "
        f"{data['sizes']['num_hidden_layers']} layers of {data['sizes']['hidden_size']}, "
        f"{'eager' if engine['enforce_eager'] else 'compiled'}, steps of at most {engine['max_num_batched_tokens']} "
        f"tokens{steps}; two engines in turns, each with nothing compiled beforehand. Tokens a second over stock's: "
        f"{data['geometric_mean']} in geometric mean; of {len(winners)} choices "
        f"{winners.count('layerzero')} are ours. Repeat: `{data['command']}`.",
        "",
        "| model | case | tokens/s | stock | times | start, s | stock | tokens that part |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for model in data["models"]:
        parted = f"{model['parted_beyond']} of {model['prompts']} prompts" if "prompts" in model else ""
        once = [f"{model['start_s']:.1f}", f"{model['stock_start_s']:.1f}", parted]
        for case in model["cases"]:
            shape = f"{case['case']}, {case['prompts']} × {case['prompt_tokens']} + {case['new_tokens']}"
            figures = [f"{case['tokens_s']:.1f}", model.get("stock_ended", ""), ""]
            if "times" in case:
                figures[1:] = [f"{case['stock_tokens_s']:.1f}", f"{case['times']:.2f}"]
            lines.append(f"| {' | '.join([model['model'] + ' ' + model['dtype'], shape, *figures, *once])} |")
            once = ["", "", ""]
    return "\n".join(lines) + "\n"
