"""Bars of a head-to-head as one SVG file: light and dark by the reader's setting, text that can be selected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from layerzero_tune.bench.contest import Outcome

_WIDTH, _LABEL, _ROW, _HEAD, _NUMBER = 900, 290, 22, 34, 130
_STYLE = """
svg { font: 13px system-ui, sans-serif; background: #fff; } text { fill: #1b2230; } .soft { fill: #5a6475; }
.bar { fill: #8aa0c8; } .chosen { fill: #1c7c46; } .torch { fill: #b9bfca; } .case { font-weight: 600; }
@media (prefers-color-scheme: dark) { svg { background: #11141b; } text { fill: #e6eaf2; } .soft { fill: #9aa5b8; }
.bar { fill: #55678f; } .chosen { fill: #63cf92; } .torch { fill: #4a5262; } }
"""


def svg(outcomes: Sequence[Outcome]) -> str:
    """The picture: one block a case, one bar a contestant, on a scale of its own; what was chosen in green."""
    parts, top = [], 10
    for outcome in outcomes:
        rows = _rows(outcome)
        if not rows:
            continue
        parts.append(f'<text class="case" x="10" y="{top + 16}">{escape(outcome.name)}</text>')
        top += _HEAD
        longest = max(us for _, us, _ in rows)
        for name, us, kind in rows:
            width = max(2.0, (_WIDTH - _LABEL - _NUMBER) * us / longest)
            parts.append(
                f'<text x="{_LABEL - 10}" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
                f'<rect class="{kind}" x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 7}" rx="3"/>'
                f'<text class="soft" x="{_LABEL + width + 8:.1f}" y="{top + 14}">{short_time(us)}</text>'
            )
            top += _ROW
        top += 12
    height = math.ceil(top + 10)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _rows(outcome: Outcome) -> list[tuple[str, float, str]]:
    """Contestants by time, with the class of their bar."""
    rows = [(name, us, "chosen" if name == outcome.chosen else "bar") for name, us in outcome.times.items()]
    if outcome.torch.us is not None:
        rows.append(("torch default", outcome.torch.us, "torch"))
    return sorted(rows, key=lambda row: (row[1], row[0]))


def short_time(us: float) -> str:
    """A time with three digits."""
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"
