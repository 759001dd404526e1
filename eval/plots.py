"""Charts as inline SVG, drawn by matplotlib: lines over whole numbers and dots per group with intervals, heat maps.

Colours are the page's: matplotlib gets stand-ins, which become the page's CSS variables in the SVG, so that a
chart follows dark, light and print; text stays text. This module does not know what the numbers mean.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 330, 222  # the viewBox: near the pixels of a card on a phone, so that 12 means 12 there
ROW = 18.5  # height of one dot of a dot chart
MARKS = {"s1": "o", "s2": "s", "s3": "^", "s4": "D", "s5": "v", "s6": "*"}  # a series' colour and its shape
COLOURS = {name: f"#fe00{i:02x}" for i, name in enumerate(["ink", "soft", "rule", "card", "good", "bad", *MARKS])}
_CELLS, _CELL = 7, 36.0  # columns of a heat map that have room for figures; the height of a cell
WHISKER: dict[str, Any] = {"linewidth": 5, "alpha": 0.3, "capstyle": "round"}
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11.8,
    "font.sans-serif": "DejaVu Sans",  # to measure with, wider than most; the page sets its own
    "axes.labelcolor": COLOURS["soft"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 8,  # clear of a mark on the axis
    "ytick.major.pad": 6,
    "figure.facecolor": "none",
    "grid.color": COLOURS["rule"],
    "axes.autolimit_mode": "round_numbers",
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "lines.markersize": 7,
    "lines.markeredgewidth": 1.3,
}
Estimate = Mapping[str, Any]  # value, low, high: a number or None


@dataclass(frozen=True)
class Series:
    """Points (x, estimate). css: a key of MARKS; look: what differs from a line with full marks, for matplotlib."""

    css: str
    points: Sequence[tuple[float, Estimate]]
    look: Mapping[str, Any] = field(default_factory=dict)


def exact(value: float) -> dict[str, float | None]:
    """A point without an interval."""
    return {"value": value, "low": None, "high": None}


def line_chart(
    series: Sequence[Series], *, x_label: str, label: str, x_range: tuple[int, int], shown: tuple[float, float]
) -> str:
    """Values over the whole numbers of x_range; the other axis covers at least `shown`. The first series is on
    top and in its place, the others are a little beside it: their intervals would lie on each other."""
    order = list(dict.fromkeys(one.css for one in series))

    def draw(axes: Axes) -> None:
        for one in reversed(series):
            nth = order.index(one.css)
            aside = min(0.12, 0.6 / len(order)) * ((nth + 1) // 2) * (1 if nth % 2 else -1)
            points = [(at + aside, e) for at, e in one.points if e["value"] is not None]
            look = {"color": COLOURS[one.css], "marker": MARKS[one.css], **one.look}
            for at, e in points:
                if e["low"] is not None:
                    axes.vlines(at, e["low"], e["high"], color=look["color"], **WHISKER)
            if points:
                axes.plot([at for at, _ in points], [e["value"] for _, e in points], **look)
        axes.set_xlim(x_range[0] - 0.35, x_range[1] + 0.35)
        axes.locator_params("x", nbins=12, integer=True)
        axes.grid(axis="y")

    return _svg(draw, x_label=x_label, label=label, shown=shown, height=HEIGHT)


def dot_chart(
    groups: Sequence[tuple[str, Sequence[tuple[str, Estimate]]]],
    *,
    x_label: str,
    label: str,
    shown: tuple[float, float],
    mark: float | None = None,
) -> str:
    """Groups of rows, one row per series (css, estimate), each with its interval and its value in figures."""
    tops = [sum(max(len(dots), 1) + 0.6 for _, dots in groups[:i]) for i in range(len(groups) + 1)]

    def draw(axes: Axes) -> None:
        for top, (_, dots) in zip(tops, groups, strict=False):
            for index, (css, e) in enumerate(dots):
                _dot(axes, css, e, top + index)
        if mark is not None:
            axes.axvline(mark, color=COLOURS["ink"], linestyle=":", linewidth=1.2)
        axes.set_ylim(tops[-1] - 0.9, -0.7)
        centres = [top + (len(dots) - 1) / 2 for top, (_, dots) in zip(tops, groups, strict=False)]
        axes.set_yticks(centres, [_short(name) for name, _ in groups], color=COLOURS["ink"])
        axes.grid(axis="x")

    return _svg(draw, x_label=x_label, label=label, shown=shown, height=ROW * tops[-1] + 44)


def _dot(axes: Axes, css: str, estimate: Estimate, y: float) -> None:
    value = estimate["value"]
    look: dict[str, Any] = {"color": COLOURS[css]}
    if estimate["low"] is not None:
        axes.hlines(y, estimate["low"], estimate["high"], **look, **WHISKER)
    if value is not None:
        axes.plot([value], [y], marker=MARKS[css], **look)
    figure = "–" if value is None else f"{value:.2f}"
    axes.text(1.03, y, figure, va="center", transform=axes.get_yaxis_transform(), **look)


def heat_map(
    cells: Sequence[Sequence[tuple[float | None, str]]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    x_label: str,
    y_label: str,
    label: str,
    middle: float = 1.0,
) -> str:
    """A cell per value and its note, the first row on top: above `middle` in one colour, below in another, the more
    the fuller.

    Both stand in the cells, so that nothing is said by colour alone; where columns are too many for that, only colour
    is left.
    """
    room = len(columns) <= _CELLS

    def draw(axes: Axes) -> None:
        for y, line in enumerate(cells):
            for x, (value, note) in enumerate(line):
                _heat_cell(axes, x, y, value, middle)
                if room:
                    figure = "–" if value is None else f"{value:.2f}"
                    axes.text(x, y - 0.19, figure, ha="center", va="center", color=COLOURS["ink"])
                    axes.text(x, y + 0.25, note, ha="center", va="center", fontsize=10.9, color=COLOURS["ink"])
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        every = 1 if room else 2
        axes.set_xticks(range(0, len(columns), every), columns[::every])
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylabel(y_label)

    return _svg(draw, x_label=x_label, label=label, shown=(0.0, 0.0), height=_CELL * len(rows) + 50)


def _heat_cell(axes: Axes, x: int, y: int, value: float | None, middle: float) -> None:
    """The ground of one cell: full colour at three times the middle or a third of it."""
    from matplotlib.patches import Rectangle

    shade = 0.0 if value is None or value <= 0 else min(1.0, abs(math.log(value / middle)) / math.log(3.0))
    colour = COLOURS["good" if value is not None and value >= middle else "bad"]
    corner = (x - 0.47, y - 0.47)
    axes.add_patch(Rectangle(corner, 0.94, 0.94, facecolor=colour, edgecolor="none", alpha=0.06 + 0.5 * shade))


def _short(name: str, length: int = 17) -> str:
    name = " ".join(name.split())
    return name if len(name) <= length else name[: length - 1] + "…"


def _svg(draw: Callable[[Axes], None], *, x_label: str, label: str, shown: tuple[float, float], height: float) -> str:
    """Figure and SVG without pyplot and its global state, and without the user's own matplotlib settings."""
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with style.context({**STYLE, "svg.hashsalt": label}, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has its own fonts
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        axes = figure.add_subplot(xlabel=x_label, frame_on=False)
        axes.locator_params(nbins=6, steps=[1, 2, 5, 10])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.update_datalim([(value, value) for value in shown])
        draw(axes)
        axes.autoscale_view()
        for artist in axes.findobj():
            artist.set_clip_on(False)
        nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        figure.savefig(buffer, format="svg", metadata=nothing)
    # What comes before the drawing is for a file of its own; ids that nothing refers to would be there six times.
    body = re.sub(r' id="[\w.]+_\d+"', "", buffer.getvalue().partition("</defs>")[2])
    for name, colour in COLOURS.items():
        body = body.replace(f": {colour}", f": var(--{name})")
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">{body}'
