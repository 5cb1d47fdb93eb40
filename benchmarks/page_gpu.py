"""Sections of the page about a GPU: its tests, the conformance kits, what adapters add, diffusion models,
linear attention, experts and quantized products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "adapters_section",
    "diffusion_section",
    "experts_section",
    "kits_section",
    "linear_attention_section",
    "ops_section",
    "tests_section",
]


def _where(data: dict[str, Any]) -> str:
    machine = data["machine"]
    processors = ", ".join(filter(None, (machine.get("gpu"), machine["cpu"])))
    return (
        f"{processors}; Python {machine['python']}, torch {machine['torch']}; commit "
        f"`{data['commit']}`; `{data['command']}`."
    )


def _section(title: str, about: str, head: str, rows: Iterable[Sequence[str]]) -> str:
    """A heading, what it is about, and a table; columns of `head` that end in a colon hold numbers."""
    names = [name.strip() for name in head.split("|")]
    lines = [f"## {title}", "", about, "", f"| {' | '.join(name.rstrip(':') for name in names)} |"]
    lines.append("|" + "|".join("---:" if name.endswith(":") else "---" for name in names) + "|")
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def adapters_section(name: str, data: dict[str, Any]) -> str:
    """A line for each pair of vendor call and adapter."""
    limit = data["limit"]
    about = (
        f"{_where(data)} The same work from the same tensors, side by side in one run; an adapter may add "
        f"{100 * limit['share']:.0f} % or {limit['us']:.0f} µs, whichever is more. Device: events around the call with "
        "a cold cache. Host: what the caller waits for."
    )
    pairs = [
        (library, case, *(f"{row[key]:.1f}" for key in _TIMES), _verdict(row))
        for library, cases in data["libraries"].items()
        for case, row in cases.items()
        if "vendor_us" in row
    ]
    head = "library | call | vendor µs: | ours: | vendor's host µs: | ours: | verdict"
    return _section(f"{name}: adapters beside the libraries they call", about, head, pairs)


def ops_section(name: str, data: dict[str, Any]) -> str:
    """A line for each public op and the torch code in its place."""
    about = (
        f"{_where(data)} Tiny tensors, in turns; medians, and what an op takes more than torch's own lines, by the "
        f"medians or the least, whichever is less. {data['host_within']} of {len(data['ops'])} are within "
        f"{data['limit']['us']:.0f} µs."
    )
    keys = ("torch_us", "op_us", "more_us")
    rows = [
        (op, *(f"{row[key]:.1f}" for key in keys), "within" if row["host_within"] else "over")
        for op, row in data["ops"].items()
        if "more_us" in row
    ]
    title = f"{name}: host time of every op on {data['device']}"
    return _section(title, about, "op | torch µs: | ours: | more: | verdict", rows)


_TIMES = ("vendor_us", "ours_us", "vendor_host_us", "ours_host_us")


def _verdict(row: dict[str, Any]) -> str:
    over = [word for word in ("device", "host") if not row[f"{word}_within"]]
    return "within" if not over else f"over ({', '.join(over)})"


def _counts(name: str, row: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """What some tests came to, and how long they took."""
    return (name, *(str(row.get(key, 0)) for key in keys), f"{row['seconds']:.0f}")


def kits_section(name: str, data: dict[str, Any]) -> str:
    """What each backend's conformance kit said."""
    about = (
        f"{_where(data)} Pairs of declared dtype, head_dim, layout and feature; what this device or the others' "
        "descriptors rule out is skipped, and what a library would first have to compile for a minute."
    )
    rows = [
        (*_counts(backend, row, "passed", "failed", "skipped", "not_compiled"), row["commit"])
        for backend, row in sorted(data["kits"].items())
    ]
    head = "backend | passed: | failed: | skipped: | of these not compiled: | seconds: | commit"
    return _section(f"{name}: conformance kits", about, head, rows)


def tests_section(name: str, data: dict[str, Any]) -> str:
    """A whole run of the tests that need a GPU."""
    about = (
        f"{_where(data)} {data['passed']:,} passed, {data['failed']} failed, {data['skipped']} skipped. What "
        "`lz doctor` said on that machine is in `doctor.txt`, the reasons for and against every kernel of eleven "
        "typical calls (`python benchmarks/explain.py`) in `explain.txt`, beside the JSON."
    )
    rows = [_counts(part, row, "passed", "failed", "skipped") for part, row in data["parts"].items()]
    head = "tests | passed: | failed: | skipped: | seconds:"
    return _section(f"{name}: the tests that need a GPU", about, head, rows)


def diffusion_section(name: str, data: dict[str, Any]) -> str:
    """One step of each model, stock and patched."""
    about = (
        f"{_where(data)} One step of a model of real size with random weights in bfloat16, stock and after `lz.patch`, "
        "in one interleaved run."
    )
    rows = [
        (
            row["model"],
            *(f"{row['median_ms'][who]:.2f}" for who in ("stock", "patched")),
            f"{row['patched_over_stock']:.3f}",
            ", ".join(sorted(set(row["kernels"].values()))),
        )
        for row in data["cases"]
    ]
    return _section(
        f"{name}: diffusion models", about, "model | stock ms: | patched: | patched ÷ stock: | kernels", rows
    )


def linear_attention_section(name: str, data: dict[str, Any]) -> str:
    """The ops of linear attention beside transformers and libraries."""
    packages = ", ".join(f"{dist} {data[dist]}" for dist in ("fla-core", "flashinfer-python") if dist in data)
    about = (
        f"{_where(data)} Calls of the sizes of released models, in turns: how many times faster than transformers with "
        f"what is installed beside it ({packages or 'nothing'}), than transformers alone, and than a library called "
        "directly." + (f" {data['note']}." if "note" in data else "")
    )
    rows = [
        (
            f"{row['op']} B{row['batch']} T{row['tokens']} {row['dtype']}",
            f"`{row['kernel']}`",
            f"{row['us']:,.1f}",
            *(f"{row[key]:.2f}" if key in row else "" for key in ("times", "transformers_bare_times")),
            ", ".join(f"{row[f'{who}_times']:.2f} ({who})" for who in ("fla", "flashinfer") if f"{who}_times" in row),
        )
        for row in data["cases"]
    ]
    head = "call | kernel | µs: | × transformers: | × transformers alone: | × library"
    return _section(f"{name}: linear attention", about, head, rows)


def experts_section(name: str, data: dict[str, Any]) -> str:
    """Experts, quantized products, latent attention and sinks beside what they are held against."""
    means = ", ".join(f"{model} {value:.2f}" for model, value in data["geomean"].items())
    about = (
        f"{_where(data)} How many times faster than bfloat16: `F.linear`; of plain experts `torch.moe.grouped` on a "
        "GPU, the loop of eager mode on a CPU; of quantized ones our own bfloat16, on a CPU for one token that loop. "
        "Latent attention: a share of what reading the cache (16 heads) or multiplying (128 heads) takes at best; "
        f"decode with sinks beside the same without. Geometric means over the tokens: {means or 'none'}. A call with a "
        "commit behind it was measured at that one."
    )
    rows = [
        (
            _experts_call(row) + (f", {row['commit'][:8]}" if "commit" in row else ""),
            f"`{row['kernel']}`",
            f"{row['chosen_us']:,.1f}",
            f"{row['times']:.2f}" if "times" in row else "",
            f"{row['goal']:g}" if row.get("goal") else "",
            "yes" if row.get("chosen_right") else f"no: {row.get('chosen_seen', '')}",
        )
        for row in data["cases"]
    ]
    head = "call | kernel | µs: | times: | goal: | within the tolerance"
    return _section(f"{name}: experts, quantized products, latent attention", about, head, rows)


def _experts_call(row: dict[str, Any]) -> str:
    if row["op"] == "moe":
        return f"{row['model']} {row.get('format', 'bfloat16')}, {row['tokens']:,} tokens"
    if row["op"] == "linear":
        scales = "blocks" if row["granularity"] == "block" else "channels"
        rows = "rows encoded" if row["act"] else "rows plain"
        return f"linear {row['m']}x{row['n']}x{row['k']} {row['format']}, {scales}, {rows}"
    what = f"latent, {row['heads']} heads" if "heads" in row else "with sinks"
    return f"paged decode {what}, B{row['batch']} Sk{row['length']}"
