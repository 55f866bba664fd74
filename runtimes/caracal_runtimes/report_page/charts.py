"""Pictures of a report as SVG inside the page, whose style sheet gives them their colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from caracal_runtimes.report_page.figures import bound, decimal, scientific
from caracal_runtimes.report_page.markup import Html, element, join

WIDTH = 380  # of every picture: narrow enough for a telephone, so that text keeps its size everywhere
_LOG_FROM = 20.0  # largest over smallest from which on a linear scale would hide the small ones
_FLOOR = 1e-12  # stands for no error at all
_CEILING = 1e6


class LayerError(Protocol):
    """Error of what one block hands on; `own_relative_l2` is of the block run alone on the reference's values."""

    @property
    def label(self) -> str:
        """The block and its kind."""

    @property
    def tensor(self) -> str:
        """The value in the graph."""

    @property
    def relative_l2(self) -> float:
        """In the provider's own run."""

    @property
    def own_relative_l2(self) -> float | None:
        """Of the block alone; None where it could not be run."""


@dataclass(frozen=True)
class Bar:
    """One value; `judged` is False for one in the provider's own settings."""

    label: str
    value: float
    judged: bool = True


def bars(title: str, unit: str, values: Sequence[Bar]) -> Html:
    """Horizontal bars, each with its value; logarithmic where the values are far apart, which is said."""
    values = [bar for bar in values if math.isfinite(bar.value) and bar.value >= 0]
    if not values:
        return Html("")
    left, right, row, top = 0, 64, 36, 40
    positive = [bar.value for bar in values if bar.value > 0]
    largest, smallest = max(positive, default=1.0), min(positive, default=1.0)
    logarithmic = largest / smallest > _LOG_FROM
    height = top + row * len(values) + (20 if logarithmic else 0)
    base = math.floor(math.log10(smallest) - 0.3) if logarithmic else 0
    span = math.log10(largest) - base if logarithmic else largest

    def length(value: float) -> float:
        if value <= 0:
            return 0.0
        share = (math.log10(value) - base) / span if logarithmic else value / span
        return max(1.5, share * (WIDTH - left - right))

    scale = f"log scale from {10.0**base:,g}" if logarithmic else "from 0"
    parts = [
        _text(0, 14, title, class_="strong"),
        _text(0, 30, f"{unit}, {scale}", class_="muted"),
    ]
    if logarithmic:
        for decade in range(base + 1, math.floor(math.log10(largest)) + 1):
            x = left + length(10.0**decade)
            parts += [
                _line(x, top, x, height - 16, "grid"),
                _text(round(x, 1), height - 4, f"{10.0**decade:,g}", class_="muted", text_anchor="middle"),
            ]
    for index, bar in enumerate(values):
        y = top + row * index
        kind = "bar" if bar.judged else "bar fast"
        wide = length(bar.value)
        parts.append(
            element(
                "g",
                element("title", f"{bar.label}: {decimal(bar.value)} {unit}"),
                _text(left, y + 14, _short(bar.label, 50), class_="halo"),
                element("rect", x=left, y=y + 19, width=f"{wide:.1f}", height=10, class_=kind),
                _text(round(left + wide + 6, 1), y + 28, decimal(bar.value), class_="halo"),
            )
        )
    return _svg(height, f"{title}, {unit}", parts)


def layer_chart(title: str, layers: Sequence[LayerError], limit: float | None, decades: tuple[int, int]) -> Html:
    """The error across the blocks: a line for the provider's own run, bars for what each block adds by itself.

    Args:
        title: the provider.
        layers: in the model's order.
        limit: of the whole model's output, drawn as a line.
        decades: the first and the last of the logarithmic scale, the same for pictures that are compared.
    """
    height, left, right, top, bottom = 250, 46, 10, 26, 46
    low, high = decades
    base = height - bottom
    step = (WIDTH - left - right) / max(1, len(layers))

    def x(index: int) -> float:
        return round(left + step * (index + 0.5), 1)

    def y(value: float) -> float:
        share = (math.log10(min(max(value, _FLOOR), _CEILING)) - low) / (high - low)
        return round(base - min(max(share, 0.0), 1.0) * (base - top), 1)

    parts = [_text(0, 14, _short(title, 50), class_="strong")]
    every = max(1, math.ceil((high - low) / 7))
    for decade in range(low, high + 1, every):
        at = y(10.0**decade)
        parts += [_line(left, at, WIDTH - right, at, "grid"), _text(left - 6, at + 4, f"1e{decade}", text_anchor="end")]
    thin = min(16.0, step * 0.55)
    labelled = max(1, math.ceil(len(layers) / 12))
    points: list[list[str]] = [[]]
    marks = []
    for index, layer in enumerate(layers):
        own = layer.own_relative_l2
        tip = f"{layer.label} ({layer.tensor}): relative L2 {scientific(layer.relative_l2)}"
        tip += f", its own {scientific(own)}" if own is not None else ", its own not known"
        if own is not None:
            at = top if not math.isfinite(own) else y(own)
            shape = element(
                "rect",
                element("title", tip),
                x=f"{x(index) - thin / 2:.1f}",
                y=at,
                width=f"{thin:.1f}",
                height=f"{max(1.0, base - at):.1f}",
                class_="own",
            )
            parts.append(shape)
        if math.isfinite(layer.relative_l2):
            points[-1].append(f"{x(index)},{y(layer.relative_l2)}")
            marks.append(
                element("circle", element("title", tip), cx=x(index), cy=y(layer.relative_l2), r=3.5, class_="run-dot")
            )
        else:  # the line breaks where there is no number
            points.append([])
            marks.append(
                element("g", element("title", tip), _text(x(index), top + 10, "✗", class_="lost", text_anchor="middle"))
            )
        if index % labelled == 0:
            parts.append(_text(x(index), base + 16, _short(layer.label.partition(" ")[0], 8), text_anchor="middle"))
    parts += [element("polyline", points=" ".join(run), class_="run") for run in points if len(run) > 1]
    parts += marks
    if limit is not None and 10.0**low <= limit <= 10.0**high:
        at = y(limit)
        parts += [
            _line(left, at, WIDTH - right, at, "limit"),
            _text(WIDTH - right, at - 5, f"limit of the output {bound(limit)}", class_="halo", text_anchor="end"),
        ]
    parts.append(_text((left + WIDTH - right) / 2, height - 8, "block", class_="muted", text_anchor="middle"))
    return _svg(height, f"Error across the blocks, {title}", parts)


def decades_of(layers: Sequence[Sequence[LayerError]], limits: Sequence[float]) -> tuple[int, int]:
    """A scale on which all of these have a place."""
    values = [value for row in layers for layer in row for value in (layer.relative_l2, layer.own_relative_l2)]
    figures = [
        math.log10(min(max(value, _FLOOR), _CEILING))
        for value in [*values, *limits]
        if value is not None and math.isfinite(value) and value > 0
    ]
    low = math.floor(min(figures, default=-8.0) - 0.2)
    return low, max(math.ceil(max(figures, default=0.0)), low + 1)


def _svg(height: float, title: str, parts: Sequence[Html]) -> Html:
    return element(
        "svg", element("title", title), join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title
    )


def _text(x: float, y: float, text: str, **attributes: object) -> Html:
    return element("text", text, x=x, y=y, **attributes)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return element("line", x1=round(x1, 1), y1=round(y1, 1), x2=round(x2, 1), y2=round(y2, 1), class_=kind)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
