"""The section of the benchmark page about whole models, rendered from models.json and models_cpu.json."""

from __future__ import annotations

from typing import Any

__all__ = ["models_section"]

_WAYS = ("stock", "patched", "stock graph", "patched graph")


def models_section(name: str, data: dict[str, Any]) -> str:
    """A Llama of transformers as it comes, and after `lz.patch`."""
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
        lines.append(f"| {case} | {' | '.join(cells)} | {row['logits']['max_error_in_deviations']:.4f} σ |")
    extra = data.get("overhead_us", {})
    if extra and "failed" not in extra:
        shown = ", ".join(f"{kind} {value:.2f}" for kind, value in extra.items())
        accel = "with" if data["accel"] else "without"
        lines += ["", f"A patched call beyond its kernel, µs, {accel} layerzero-accel (limit 3): {shown}."]
    return "\n".join(lines) + "\n"
