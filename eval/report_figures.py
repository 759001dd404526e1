"""The page's pictures: which rows of the report each one shows, and its caption.

Reads the dictionary of `eval.report`; how a chart is drawn is in `eval.plots`. The only arithmetic is the
formula's curve and the partial sums of the survival, both as `eval.acceptance` defines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eval.acceptance import formula_tokens_per_round
from eval.plots import Series, dot_chart, exact, line_chart, nice_ticks
from eval.report import PLAIN, find_rows, headline_rows
from eval.report_table import number

SHARES = (0, 0.2, 0.4, 0.6, 0.8, 1)
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
    css = {name: f"s{1 + index % 4}" for index, name in enumerate(names)}
    one_each = [next(r for r in rows if r["proposer"] == name) for name in names]
    made = [
        _depth_figure(one_each, css),
        _survival_figure(one_each, css),
        _gamma_figure(rows, css),
        _slice_figure(report, one_each, css, "alpha"),
        _slice_figure(report, one_each, css, "tokens_per_round"),
        _speed_figure(report),
    ]
    how = "greedy" if chosen["temperature"] == 0 else f"temperature {chosen['temperature']:g}"
    note = (
        f"{how}, {chosen['dtype']}, γ = {chosen['gamma']} unless a picture says otherwise. "
        "Bars are 95 % intervals, by resampling whole requests."
    )
    note = note[0].upper() + note[1:]
    return f'<p class="note">{escape(note)}</p><div class="figures">{"".join(made)}</div>'


def _figure(title: str, words: str, chart: str, legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<li class="{css}"><i></i>{escape(name)}</li>' for css, name in legend)
    listed = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f"<figure><h3>{escape(title)}</h3><p>{escape(words)}</p>{listed}{chart}</figure>"


def _by_depth(row: Row, key: str) -> list[tuple[float, Mapping[str, Any]]]:
    return [(k, e) for k, e in enumerate(row[f"{key}_interval"], start=1)]


def _depth_figure(rows: Sequence[Row], css: Mapping[str, str]) -> str:
    deepest = max(r["gamma"] for r in rows)
    series = [Series(r["proposer"], css[r["proposer"]], _by_depth(r, "alpha_by_position")) for r in rows]
    chart = line_chart(
        series,
        x_label="k: which draft token of the round",
        label="acceptance by depth",
        y_ticks=SHARES,
        x_ticks=range(1, deepest + 1),
    )
    words = "How often the k-th draft token is accepted once all before it were."
    return _figure("α by depth", words, chart, [(css[r["proposer"]], r["proposer"]) for r in rows])


def _survival_figure(rows: Sequence[Row], css: Mapping[str, str]) -> str:
    deepest = max(r["gamma"] for r in rows)
    start = (0.0, exact(1.0))
    series = [Series(r["proposer"], css[r["proposer"]], [start, *_by_depth(r, "survival")]) for r in rows]
    chart = line_chart(
        series,
        x_label="k",
        label="share of rounds with the first k draft tokens accepted",
        y_ticks=SHARES,
        x_ticks=range(deepest + 1),
    )
    words = (
        "Share of passes in which the first k draft tokens were all accepted. These shares add up to the "
        "tokens per pass."
    )
    return _figure("Survival S(k)", words, chart, [(css[r["proposer"]], r["proposer"]) for r in rows])


def _gamma_figure(rows: Sequence[Row], css: Mapping[str, str]) -> str:
    """Measured runs, the shorter γ that follow from the survival, and the formula."""
    first = rows[0]
    own = [r for r in rows if r["proposer"] == first["proposer"]]
    longest = max(own, key=lambda r: r["gamma"])
    last = max(r["gamma"] for r in rows) + 2
    name = css[first["proposer"]]
    partial = [(float(k), exact(1 + sum(s or 0 for s in longest["survival"][:k]))) for k in range(longest["gamma"] + 1)]
    known = {r["gamma"] for r in own}
    curves = [
        Series("formula", "f", _formula_curve(first, last), dots=False),
        Series("1 + ΣS(k)", name, [p for p in partial if p[0] not in known], line=False, hollow=True),
    ]
    measured = [
        Series(r["proposer"], css[r["proposer"]], [(r["gamma"], r["tokens_per_round"])], line=False)
        for r in reversed(rows)
    ]
    tops = [e["high"] or e["value"] or 1 for s in [*curves, *measured] for _, e in s.points]
    chart = line_chart(
        [*curves, *measured],
        x_label="γ: draft tokens per round",
        label="tokens per round against draft length, measured and by formula",
        y_ticks=nice_ticks(1, max(tops)),
        x_ticks=range(last + 1),
    )
    words = (
        "Full dots: decoded at that γ. Open dots: shorter γ, from the survival of the longest run. "
        f"Dashed: the formula at α = {number(first['alpha']['value'])}."
    )
    legend = [(css[n], n) for n in dict.fromkeys(r["proposer"] for r in rows)]
    return _figure("Tokens per pass against γ", words, chart, [*legend, ("f", "formula")])


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
    values = [e["high"] or e["value"] or 0 for _, dots in groups for _, e in dots]
    ticks = SHARES if key == "alpha" else nice_ticks(1, max([*values, 2]), 4)
    chart = dot_chart(groups, x_label=axis, label=title, x_ticks=ticks)
    return _figure(title, words, chart, [(css[r["proposer"]], r["proposer"]) for r in rows])


def _slices(report: Row, row: Row) -> dict[str, Mapping[str, Any]]:
    run = {key: row[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    return {r["slice"]: r for r in find_rows(report, **run)}


def _speed_figure(report: Row) -> str:
    rows = [r for r in headline_rows(report) if r["speedup"] is not None]
    if not rows:
        return ""
    css = {r["dtype"]: f"s{1 + index % 4}" for index, r in enumerate(rows)}
    found = {r["dtype"]: _slices(report, r) for r in rows}
    groups = [
        (name, [(css[d], found[d][name]["speedup"]) for d in found if found[d][name]["speedup"]])
        for name in found[rows[0]["dtype"]]
    ]
    values = [e[end] for _, dots in groups for _, e in dots for end in ("low", "high", "value")]
    known = [1.0, *(v for v in values if v is not None)]
    ticks = nice_ticks(min(known), max(known), 4)
    chart = dot_chart(
        groups,
        x_label="times the speed of plain decoding",
        label="speed-up by slice",
        x_ticks=ticks,
        mark=1.0,
    )
    words = "Tokens per second with the draft against without it. Left of the marked line the draft slows down."
    return _figure("Speed by slice", words, chart, [(css[d], d) for d in css])
