"""A bar for each case: how many times as fast as torch eager, on a logarithmic axis; a tick where the floor lies."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["plot"]

LEFT, WIDE, HIGH = 330, 900, 20


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Write the SVG, whole or not at all."""
    if not rows:
        return
    most = max(max(row["speedup"], row["us"]["eager"] / row["us"].get("floor", row["us"]["lz"])) for row in rows)
    decades = max(1.0, math.log10(most) + 0.05)
    scale = (WIDE - LEFT - 70) / (decades + 0.5)

    def at(ratio: float) -> float:
        return LEFT + scale * (math.log10(max(ratio, 0.32)) + 0.5)

    height = HIGH * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDE}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="13">{escape(title)}</text>',
    ]
    for power in range(int(decades) + 1):
        x = at(10.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{height - 22}" stroke="#ccc"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{10**power}×</text>')
    for index, row in enumerate(rows):
        y = 30 + HIGH * index
        left, right = sorted((at(1.0), at(row["speedup"])))
        colour = "#3a7" if row["speedup"] >= 1.0 else "#c44"
        name = escape(f"{row['group']} {row['case']}")
        wide = right - left
        parts.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{left:.1f}" y="{y + 2}" width="{wide:.1f}" height="{HIGH - 6}" fill="{colour}"/>')
        parts.append(f'<text x="{right + 4:.1f}" y="{y + 12}">{row["speedup"]:.1f}</text>')
        if "floor" in row["us"]:
            x = at(row["us"]["eager"] / row["us"]["floor"])
            low = y + HIGH - 2
            parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{low}" stroke="#222" stroke-width="2"/>')
    parts.append("</svg>\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("\n".join(parts), encoding="utf-8")
    os.replace(temporary, path)
