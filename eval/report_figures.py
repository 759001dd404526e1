"""The page's pictures: which rows of the report each one shows, and its caption.

Reads the dictionary of `eval.report`; how a chart is drawn is in `eval.plots`. The only arithmetic is the
formula's curve and the partial sums of the survival, both as `eval.acceptance` defines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from eval.acceptance import formula_tokens_per_round
from eval.plots import COLOURS, MARKS, Series, dot_chart, exact, heat_map, line_chart
from eval.report import PLAIN, find_rows, headline_rows
from eval.report_table import number

SHARES, TOKENS = (0.0, 1.0), (1.0, 2.0)  # what the axes show at least
GLYPHS = {
    **dict(zip(MARKS, "●■▲◆▼★", strict=True)),
    "soft": "– –",
    "s1 open": "○",
}  # the legend's, as MARKS in pictures
DOTS = {"linestyle": ""}
OPEN = {"linewidth": 1.1, "markerfacecolor": COLOURS["card"]}
DASHED = {"color": COLOURS["soft"], "linestyle": "--", "marker": ""}
Row = Mapping[str, Any]


def figures(report: Row) -> str:
    """The pictures of the headline's setting, with every draft in it but plain decoding (1 everywhere)."""
    chosen = report["headline"]
    same = {"dtype": chosen["dtype"], "temperature": chosen["temperature"]}
    rows = [r for r in find_rows(report, slice="all", **same) if r["proposer"] != PLAIN]
    if not rows:
        return "<p>Only plain decoding was measured: one token per pass, nothing to draw.</p>"
    rows.sort(key=lambda r: (r["proposer"] != chosen["proposer"], r["gamma"] != chosen["gamma"]))
    names = list(dict.fromkeys(r["proposer"] for r in rows))
    css = dict(zip(names, cycle(MARKS), strict=False))
    one_each = [next(r for r in rows if r["proposer"] == name) for name in names]
    made = [
        _depth_figure(one_each, css, "alpha_by_position"),
        _depth_figure(one_each, css, "survival"),
        _gamma_figure(rows, css),
        _slice_figure(report, one_each, css, "alpha"),
        _slice_figure(report, one_each, css, "tokens_per_round"),
        _speed_figure(report),
        _load_figure(report),
    ]
    how = "greedy" if chosen["temperature"] == 0 else f"temperature {chosen['temperature']:g}"
    note = (
        f"{how}, {chosen['dtype']}, γ = {chosen['gamma']} unless a picture says otherwise. "
        "Bars are 95 % intervals, by resampling whole requests."
    )
    note = note[0].upper() + note[1:]
    return f'<p class="note">{escape(note)}</p><div class="figures">{"".join(made)}</div>'


def _figure(title: str, words: str, chart: str, legend: Mapping[str, str]) -> str:
    keys = "".join(f'<li><i class="{css}">{GLYPHS[css]}</i>{escape(name)}</li>' for name, css in legend.items())
    return f'<figure><h3>{escape(title)}</h3><p>{escape(words)}</p><ul class="legend">{keys}</ul>{chart}</figure>'


_BY_DEPTH = {
    "alpha_by_position": (
        "α by depth",
        "k: which draft token of the round",
        "How often the k-th draft token is accepted once all before it were.",
    ),
    "survival": (
        "Survival S(k)",
        "k",
        "Share of passes in which the first k draft tokens were all accepted. These shares add up to the "
        "tokens per pass.",
    ),
}


def _depth_figure(rows: Sequence[Row], css: Mapping[str, str], key: str) -> str:
    title, axis, words = _BY_DEPTH[key]
    start = [(0, exact(1.0))] if key == "survival" else []
    series = [Series(css[r["proposer"]], [*start, *enumerate(r[f"{key}_interval"], start=1)]) for r in rows]
    x_range = (1 - len(start), max(r["gamma"] for r in rows))
    return _figure(title, words, line_chart(series, x_label=axis, label=title, x_range=x_range, shown=SHARES), css)


def _gamma_figure(rows: Sequence[Row], css: Mapping[str, str]) -> str:
    """Measured runs, the shorter γ that follow from the survival, and the formula."""
    first = rows[0]
    own = [r for r in rows if r["proposer"] == first["proposer"]]
    longest = max(own, key=lambda r: r["gamma"])
    last = max(r["gamma"] for r in rows) + 2
    partial = [(float(k), exact(1 + sum(s or 0 for s in longest["survival"][:k]))) for k in range(longest["gamma"] + 1)]
    series = [
        *(Series(css[r["proposer"]], [(r["gamma"], r["tokens_per_round"])], DOTS) for r in rows),
        Series(css[first["proposer"]], partial, OPEN),
        Series(css[first["proposer"]], _formula_curve(first, last), DASHED),
    ]
    chart = line_chart(
        series,
        x_label="γ: draft tokens per round",
        label="tokens per round against draft length, measured and by formula",
        x_range=(0, last),
        shown=TOKENS,
    )
    words = (
        "Full marks: decoded at that γ. Circles: 1 + S(1) + … + S(γ), which assumes nothing. Dashed: the formula "
        f"(1 − α^(γ+1)) / (1 − α) at α = {number(first['alpha']['value'])}, which assumes independent acceptances."
    )
    return _figure("Tokens per pass against γ", words, chart, {**css, "from S(k)": "s1 open", "formula": "soft"})


def _formula_curve(row: Row, last: int) -> list[tuple[float, Mapping[str, Any]]]:
    alpha = row["alpha"]["value"]
    if alpha is None:
        return []
    return [(float(g), exact(formula_tokens_per_round(alpha, g))) for g in range(last + 1)]


_BY_SLICE = {
    "alpha": ("α by slice", "α", "Share of the judged draft tokens accepted, per kind of traffic."),
    "tokens_per_round": ("Tokens per pass by slice", "tokens per pass", "Plain decoding is 1."),
}


def _slice_figure(report: Row, rows: Sequence[Row], css: Mapping[str, str], key: str) -> str:
    title, axis, words = _BY_SLICE[key]
    found = {r["proposer"]: _slices(report, r) for r in rows}
    names = list(dict.fromkeys(name for slices in found.values() for name in slices))
    groups = [(name, [(css[p], slices[name][key]) for p, slices in found.items() if name in slices]) for name in names]
    chart = dot_chart(groups, x_label=axis, label=title, shown=SHARES if key == "alpha" else TOKENS)
    return _figure(title, words, chart, css)


def _slices(report: Row, row: Row) -> dict[str, Mapping[str, Any]]:
    run = {key: row[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    return {r["slice"]: r for r in find_rows(report, **run)}


def _speed_figure(report: Row) -> str:
    rows = [r for r in headline_rows(report) if r["speedup"] is not None]
    if not rows:
        return ""
    css = dict(zip([r["dtype"] for r in rows], cycle(MARKS), strict=False))
    found = {r["dtype"]: _slices(report, r) for r in rows}
    groups = [
        (name, [(css[d], found[d][name]["speedup"]) for d in found if found[d][name]["speedup"]])
        for name in found[rows[0]["dtype"]]
    ]
    label = "times the speed of plain decoding"
    chart = dot_chart(groups, x_label=label, label="speed-up by slice", shown=(1.0, 1.0), mark=1.0)
    words = "Tokens per second with the draft against without it. Left of the marked line the draft slows down."
    return _figure("Speed by slice", words, chart, css)


def _load_figure(report: Row) -> str:
    """The heat map of the section `load`, where the costs of this machine were measured."""
    load = report["load"]
    if not load:
        return ""
    chart = heat_map(
        load["speedup"],
        columns=[_short_count(n) for n in load["contexts"]],
        rows=[str(n) for n in load["batches"]],
        x_label="context: tokens before the answer's next one",
        y_label="batch: requests at once",
        label="predicted speed-up over batch and context",
    )
    words = (
        "Predicted times the speed of plain decoding, at the best γ of each load, from measured costs. Below 1 a draft "
        "slows the server down."
    )
    return _figure("Speed under load", words, chart, {})


def _short_count(count: int) -> str:
    """`8k` for 8192: it has to fit."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
