"""The sections of the benchmark page about whole models: steps, calls of `generate` and `generate_batch`, training."""

from __future__ import annotations

from typing import Any

__all__ = ["models_section", "training_section"]

_WAYS = ("stock", "patched", "stock graph", "patched graph")


def _apart(row: dict[str, Any]) -> str:
    """How far the logits are apart, or for whole texts whether the tokens are the same."""
    if "logits" in row:
        return f"{row['logits']['max_error_in_deviations']:.4f} σ"
    return "the same tokens" if row["identical"] else f"the same {row['agree']} first tokens of {row['new']}"


def _step(case: str, row: dict[str, Any]) -> str:
    """Where a step of decode goes, largest part first; nothing for what was not divided."""
    found = row.get("per cent of a step")
    if not found:
        return ""
    words = [
        f"{way}: " + ", ".join(f"{part} {share:.0f} %" for part, share in _largest(shares))
        for way, shares in found.items()
    ]
    return f"\nA step of {case}, as a profiler divides it: {'; '.join(words)}."


def _largest(shares: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((part, share) for part, share in shares.items() if share >= 1.0), key=lambda item: -item[1])


def _generate_section(name: str, data: dict[str, Any]) -> str:
    machine, ways = data["machine"], data["ways"]
    cuda = "--device cpu" not in data["command"] and machine["gpu"]
    device = machine["gpu"] if cuda else f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    rows = [row for row in data["figures"].values() if "prompt" in row]
    lengths = f"{rows[0]['new']} new tokens after {rows[0]['prompt']}, " if rows else ""
    lines = [
        f"## {name}: generate ({'GPU' if cuda else 'CPU'})",
        "",
        f"{device}; Python {machine['python']}, torch {machine['torch']}, transformers {data['transformers']}; load "
        f"before the run {machine['load']}; commit `{data['commit']}`; {lengths}random weights. Tokens a second of "
        f"whole calls, and how many times faster than `{ways[0]}`. Repeat: `{data['command']}`.",
        "",
        f"| case | {' | '.join(ways)} | tokens |",
        "|---|" + "---:|" * (len(ways) + 1),
    ]
    for case, row in data["figures"].items():
        if "tokens_per_s" not in row:
            lines.append(f"| {case} | failed |" + " |" * len(ways))
            continue
        cells = [f"{row['tokens_per_s'][way]:,.0f} ({row['times faster'][way]:.2f}×)" for way in ways]
        lines.append(f"| {case} | {' | '.join(cells)} | {_apart(row)} |")
    for case, row in data["figures"].items():
        if "step_ms" in row:
            steps = ", ".join(f"{way} {ms:.2f} ms" for way, ms in row["step_ms"].items())
            errors = ", ".join(f"{way} {error:.4f}" for way, error in row.get("error of log-probabilities", {}).items())
            off = f" Log-probabilities are off float32's by {errors}." if errors else ""
            lines.append(f"\n{case}: a step takes {steps}.{off}")
    return "\n".join(lines) + "\n"


def _taken_on(data: dict[str, Any]) -> str:
    """Machine, versions and commit, in a line."""
    machine = data["machine"]
    return (
        f"{machine['gpu'] or machine['cpu']}; Python {machine['python']}, torch {machine['torch']}, transformers "
        f"{data['transformers']}; load before the run {machine['load']}; commit `{data['commit']}`. "
        f"Repeat: `{data['command']}`."
    )


def _batching_section(name: str, data: dict[str, Any]) -> str:
    rows = [
        f"| {way} | {data['tokens_per_s'][way]:,.0f} ({faster:.2f}×) | {data['same'][way]} of {data['prompts']} |"
        for way, faster in data["speedup"].items()
    ]
    return "\n".join([
        f"## {name}: generate_batch", "",
        f"{_taken_on(data)} {data['architecture']} with random weights, {data['prompts']} prompts of {data['tokens']} "
        f"tokens together, {data['new']} new ones each. Tokens a second, how many times faster than `sdpa`, and "
        "requests with the very tokens of it.", "",
        "| attention | tokens/s | same tokens |", "|---|---:|---:|", *rows, "",
    ])  # fmt: skip


def training_section(name: str, data: dict[str, Any]) -> str:
    """A compiled training step: stock, patched, and Liger's patched model."""
    rows = [
        f"| {way} | {ms:.1f} ({data['speedup'][way]:.2f}×) | {data['peak_mib'][way]:,} | {data['loss'][way]:.4f} |"
        for way, ms in data["ms"].items()
    ]
    rows += [  # in a process of its own, for its memory
        f"| {way} | | {mib:,} | {data['loss'][way]:.4f} |"
        for way, mib in data["peak_mib"].items()
        if way not in data["ms"]
    ]
    return "\n".join([
        f"## {name}: a training step", "",
        f"{_taken_on(data)} Forward and backward of a Llama of 1B, {data['batch']} texts of {data['length']} tokens, "
        "compiled. Milliseconds, how many times faster than stock, and what a step needs beside the weights.", "",
        "| model | ms | peak MiB | loss |", "|---|---:|---:|---:|", *rows, "",
    ])  # fmt: skip


def models_section(name: str, data: dict[str, Any]) -> str:
    """A Llama of transformers as it comes, and after `lz.patch`; or whole calls of `generate` or `generate_batch`."""
    if data["benchmark"] == "models_generate":
        return _generate_section(name, data)
    if data["benchmark"] == "models_batching":
        return _batching_section(name, data)
    machine, model = data["machine"], data["model"]
    device = machine["gpu"] if "--device cpu" not in data["command"] else None
    device = device or f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']})"
    lines = [
        f"## {name}: a whole Llama, patched ({'GPU' if machine['gpu'] and device == machine['gpu'] else 'CPU'})",
        "",
        f"{device}; Python {machine['python']}, torch {machine['torch']}, transformers {data['transformers']}; load "
        f"before the run {machine['load']}; commit `{data['commit']}`; {model['num_hidden_layers']} layers of width "
        f"{model['hidden_size']}, random weights. Tokens a second, and how many times faster than `stock`, the "
        f"unpatched model run eagerly. Repeat: `{data['command']}`.",
        "",
        "| case | stock | patched | stock graph | patched graph | logits apart by |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case, row in data["figures"].items():
        if "tokens_per_s" not in row:
            lines.append(f"| {case} | failed | | | | |")
            continue
        cells = [
            f"{row['tokens_per_s'][way]:,.0f} ({row['times faster'][way]:.2f}×)" if way in row["tokens_per_s"] else ""
            for way in _WAYS
        ]
        lines.append(f"| {case} | {' | '.join(cells)} | {_apart(row)} |")
    lines += [text for case, row in data["figures"].items() if (text := _step(case, row))]
    extra = data.get("overhead_us", {})
    if extra and "failed" not in extra:
        shown = ", ".join(f"{kind} {value:.2f}" for kind, value in extra.items())
        accel = "with" if data["accel"] else "without"
        lines += ["", f"A patched call beyond its kernel, µs, {accel} layerzero-accel (limit 3): {shown}."]
    return "\n".join(lines) + "\n"
