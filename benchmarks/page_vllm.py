"""The section of the page about LayerZero inside vLLM."""

from __future__ import annotations

from typing import Any


def vllm_section(name: str, data: dict[str, Any]) -> str:
    """Throughput, start-up and tokens of each model beside stock vLLM."""
    machine, versions, engine = data["machine"], data["versions"], data["engine"]
    winners = [one["winner"] for model in data["models"] for one in model["chosen"]]
    lines = [
        f"## {name}: inside vLLM, {' and '.join(dict.fromkeys(model['dtype'] for model in data['models']))}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); vLLM {versions['vllm']}, torch "
        f"{versions['torch']}; load before the run {machine['load']}; commit `{data['commit']}`. Random checkpoints of "
        f"{data['sizes']['num_hidden_layers']} layers of {data['sizes']['hidden_size']}, "
        f"{'eager' if engine['enforce_eager'] else 'compiled'}, steps of at most {engine['max_num_batched_tokens']} "
        f"tokens; two engines in turns, each with nothing compiled beforehand. Tokens a second over stock's: "
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
            figures = [f"{case['tokens_s']:.1f}", f"{case['stock_tokens_s']:.1f}", f"{case['times']:.2f}"]
            lines.append(f"| {' | '.join([model['model'] + ' ' + model['dtype'], shape, *figures, *once])} |")
            once = ["", "", ""]
    return "\n".join(lines) + "\n"
