"""The error across the blocks as a picture: SVG by itself, readable on light and on dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from caracal_runtimes.bisect.layers import LayerError

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 40, 58
_FLOOR = -9  # decade that stands for no error at all
_STYLE = """
.caracal-layers{font:12px system-ui,sans-serif;--ink:#1d2129;--faint:#d5d9e0;--run:#0b62c4;--own:#b4540a;--limit:#b3261e}
@media (prefers-color-scheme:dark){.caracal-layers{--ink:#e6e8ec;--faint:#3c424c;--run:#6cb0ff;--own:#f0a35e;--limit:#ff8a80}}
.caracal-layers text{fill:var(--ink)}.caracal-layers .grid{stroke:var(--faint)}
.caracal-layers .run{stroke:var(--run);fill:none;stroke-width:2}.caracal-layers .run-dot{fill:var(--run)}
.caracal-layers .own{fill:var(--own)}.caracal-layers .limit{stroke:var(--limit);stroke-dasharray:5 4}
"""


def layer_svg(layers: Sequence[LayerError], limit: float | None = None, title: str = "Error across the blocks") -> str:
    """A line for the provider's own run, bars for what each block adds by itself; the scale is logarithmic.

    Args:
        layers: in the model's order.
        limit: drawn as a line.
        title: for people and for readers of the screen.
    """
    figures = [value for layer in layers for value in (layer.relative_l2, layer.own_relative_l2) if value is not None]
    decades = [_decade(value) for value in [*figures, *([limit] if limit else [])]]
    low = min([math.floor(value) for value in decades] or [_FLOOR])
    high = max([math.ceil(value) for value in decades] or [0])
    low, high = max(low, _FLOOR), max(high, low + 1)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(layers))

    def x(index: int) -> float:
        return _LEFT + step * (index + 0.5)

    def y(value: float) -> float:
        share = (min(max(_decade(value), low), high) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    base = _HEIGHT - _BOTTOM
    parts = [
        f'<svg class="caracal-layers" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{_STYLE.strip()}</style>",
        f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="18" text-anchor="end">line: the whole run; bars: each block alone</text>',
    ]
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}"/>')
        label = "0" if decade == _FLOOR else f"1e{decade}"
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    every = max(1, math.ceil(len(layers) / 16))
    for index, layer in enumerate(layers):
        tip = f"block {layer.label}: {layer.relative_l2:.2e}"
        if layer.own_relative_l2 is not None:
            top = y(layer.own_relative_l2)
            wide = min(28.0, step * 0.6)
            tip += f", its own {layer.own_relative_l2:.2e}"
            parts.append(
                f'<rect class="own" x="{x(index) - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{base - top:.1f}"><title>{escape(tip)}</title></rect>'
            )
        if index % every == 0:
            number, _, kind = layer.label.partition(" ")
            short = {"sliding_attention": "swa"}.get(kind, kind)
            parts.append(f'<text x="{x(index):.1f}" y="{base + 16}" text-anchor="middle">{escape(number)}</text>')
            if every == 1 and step > 24:
                parts.append(f'<text x="{x(index):.1f}" y="{base + 31}" text-anchor="middle">{escape(short)}</text>')
    points = " ".join(f"{x(index):.1f},{y(layer.relative_l2):.1f}" for index, layer in enumerate(layers))
    parts.append(f'<polyline class="run" points="{points}"/>')
    parts += [
        f'<circle class="run-dot" cx="{x(index):.1f}" cy="{y(layer.relative_l2):.1f}" r="3.5">'
        f"<title>{escape(f'block {layer.label}: {layer.relative_l2:.2e}')}</title></circle>"
        for index, layer in enumerate(layers)
    ]
    if limit:
        parts.append(
            f'<line class="limit" x1="{_LEFT}" y1="{y(limit):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(limit):.1f}"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{y(limit) - 5:.1f}" text-anchor="end">limit {limit:.0e}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">block</text>'
        f'<text transform="translate(14 {(_TOP + base) / 2}) rotate(-90)" text-anchor="middle">relative L2</text></svg>'
    )
    return "".join(parts)


def _decade(value: float) -> float:
    """The logarithm; NaN and infinity stand at the top, nothing at the bottom."""
    if not math.isfinite(value):
        return 2.0
    return math.log10(value) if value > 0 else float(_FLOOR)
