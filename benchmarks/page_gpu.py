"""Sections of the page about a GPU: what adapters add, the conformance kits, diffusion models."""

from __future__ import annotations

from typing import Any

__all__ = ["adapters_section", "diffusion_section", "kits_section"]


def _where(data: dict[str, Any]) -> str:
    machine = data["machine"]
    return (
        f"{machine.get('gpu', '')}, {machine['cpu']}; Python {machine['python']}, torch {machine['torch']}; commit "
        f"`{data['commit']}`; `{data['command']}`."
    )


def adapters_section(name: str, data: dict[str, Any]) -> str:
    """A line for each pair of vendor call and adapter."""
    limit = data["limit"]
    lines = [
        f"## {name}: adapters beside the libraries they call",
        "",
        f"{_where(data)} The same work from the same tensors, side by side in one run; an adapter may add "
        f"{100 * limit['share']:.0f} % or {limit['us']:.0f} µs, whichever is more. Device: events around the call with "
        "a cold cache. Host: what the caller waits for.",
        "",
        "| library | call | vendor µs | ours | vendor's host µs | ours | verdict |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for library, cases in data["libraries"].items():
        for case, row in cases.items():
            if "vendor_us" not in row:
                continue
            over = [word for word in ("device", "host") if not row[f"{word}_within"]]
            verdict = "within" if not over else f"over ({', '.join(over)})"
            lines.append(
                f"| {library} | {case} | {row['vendor_us']:.1f} | {row['ours_us']:.1f} | {row['vendor_host_us']:.1f} "
                f"| {row['ours_host_us']:.1f} | {verdict} |"
            )
    return "\n".join(lines)


def kits_section(name: str, data: dict[str, Any]) -> str:
    """What each backend's conformance kit said."""
    lines = [
        f"## {name}: conformance kits",
        "",
        f"{_where(data)} Pairs of declared dtype, head_dim, layout and feature; what this GPU or the others' "
        "descriptors rule out is skipped.",
        "",
        "| backend | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for backend, row in sorted(data["kits"].items()):
        lines.append(f"| {backend} | {row['passed']} | {row['failed']} | {row['skipped']} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def diffusion_section(name: str, data: dict[str, Any]) -> str:
    """One step of each model, stock and patched."""
    lines = [
        f"## {name}: diffusion models",
        "",
        f"{_where(data)} One step of a model of real size with random weights in bfloat16, stock and after `lz.patch`, "
        "in one interleaved run.",
        "",
        "| model | stock ms | patched | patched ÷ stock | kernels |",
        "|---|---:|---:|---:|---|",
    ]
    for row in data["cases"]:
        times = row["median_ms"]
        lines.append(
            f"| {row['model']} | {times['stock']:.2f} | {times['patched']:.2f} | {row['patched_over_stock']:.3f} "
            f"| {', '.join(sorted(set(row['kernels'].values())))} |"
        )
    return "\n".join(lines)
