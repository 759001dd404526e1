"""Small charts as inline SVG: lines over a depth or a draft length, dots per slice, each with intervals.

Drawn by hand rather than by a plotting library, so that colours follow the page (dark, light, print), text
stays text, and a chart weighs a few kilobytes. Colours and fonts are the page's: here are only class names.
This module does not know what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 360, 236
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 10, 38
ROW = 19  # height of one dot of a dot chart


@dataclass(frozen=True)
class Series:
    """Points (x, estimate); an estimate has value, low, high. `css`: s1, s2, … or f for a formula."""

    name: str
    css: str
    points: Sequence[tuple[float, Mapping[str, Any]]]
    line: bool = True
    dots: bool = True
    hollow: bool = False


def exact(value: float) -> dict[str, float | None]:
    """A point without an interval."""
    return {"value": value, "low": None, "high": None}


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    raw = max(high - low, 1e-9) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _text(x: float, y: float, content: str, anchor: str = "middle", css: str = "tick") -> str:
    return f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _svg(label: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(body)
        + "</svg>"
    )


def _present(points: Sequence[tuple[float, Mapping[str, Any]]]) -> list[tuple[float, Mapping[str, Any]]]:
    return [(x, e) for x, e in points if e["value"] is not None]


def line_chart(
    series: Sequence[Series], *, x_label: str, label: str, y_ticks: Sequence[float], x_ticks: Sequence[int]
) -> str:
    """Values over whole numbers; series are shifted by a few pixels so that intervals do not overlap."""
    categories = x_ticks[0] > 0
    edge = 0.35 if categories else 0.2
    x = _Scale(x_ticks[0] - edge, max(x_ticks[-1], x_ticks[0] + 1) + edge, LEFT, WIDTH - RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    body = []
    for tick in y_ticks:
        body.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"))
        body.append(_text(LEFT - 7, y(tick) + 3.5, f"{tick:g}", "end"))
    body += [_text(x(tick), HEIGHT - BOTTOM + 16, str(tick)) for tick in x_ticks]
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, css="axis"))
    dodged = [s for s in series if s.dots]
    for one in series:
        shift = 7.0 * (dodged.index(one) - (len(dodged) - 1) / 2) if one.dots and categories else 0.0
        body.append(_curve(one, x, y, shift))
    return _svg(label, HEIGHT, body)


def _curve(series: Series, x: _Scale, y: _Scale, shift: float) -> str:
    points = [(round(x(at) + shift, 1), e) for at, e in _present(series.points)]
    parts = []
    if series.line and len(points) > 1:
        path = " ".join(f"{at},{y(e['value'])}" for at, e in points)
        parts.append(f'<polyline class="line" points="{path}"/>')
    if series.dots:
        for at, e in points:
            if e["low"] is not None:
                parts.append(_line(at, y(e["low"]), at, y(e["high"]), "whisker"))
            css = "hollow" if series.hollow else "dot"
            parts.append(f'<circle class="{css}" cx="{at}" cy="{y(e["value"])}" r="4"/>')
    return f'<g class="{series.css}">{"".join(parts)}</g>'


def dot_chart(
    groups: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]],
    *,
    x_label: str,
    label: str,
    x_ticks: Sequence[float],
    mark: float | None = None,
) -> str:
    """One group of rows per slice, one dot per series (css, estimate), each with its interval and value."""
    longest = max(len(_short(name)) for name, _ in groups)
    left = min(128.0, 14 + 6.4 * longest)
    right = WIDTH - 44
    x = _Scale(x_ticks[0], x_ticks[-1], left, right)
    body, at = [], float(TOP)
    rows = []
    for name, dots in groups:
        height = ROW * max(len(dots), 1) + 9
        rows.append(_text(left - 9, round(at + height / 2 + 1, 1), _short(name), "end", "name"))
        for index, (css, e) in enumerate(dots):
            rows.append(_dot(css, e, x, at + ROW * (index + 0.5) + 2))
        at += height
    for tick in x_ticks:
        body.append(_line(x(tick), TOP, x(tick), at, "grid"))
        body.append(_text(x(tick), at + 15, f"{tick:g}"))
    if mark is not None:
        body.append(_line(x(mark), TOP - 4, x(mark), at, "mark"))
    body.append(_text((left + right) / 2, at + 33, x_label, css="axis"))
    return _svg(label, at + 38, body + rows)


def _dot(css: str, estimate: Mapping[str, Any], x: _Scale, at: float) -> str:
    value = estimate["value"]
    if value is None:
        return f'<g class="{css}">{_text(x.start + 4, at + 3.5, "–", "start", "value")}</g>'
    parts = []
    if estimate["low"] is not None:
        parts.append(_line(x(estimate["low"]), at, x(estimate["high"]), at, "whisker"))
    parts.append(f'<circle class="dot" cx="{x(value)}" cy="{at}" r="4"/>')
    parts.append(_text(WIDTH - 4, at + 3.5, f"{value:.2f}", "end", "value"))
    return f'<g class="{css}">{"".join(parts)}</g>'


def _short(name: str, length: int = 17) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
