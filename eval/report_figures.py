"""The page's pictures: which rows of the report each one shows, and its caption.

Reads the dictionary of `eval.report`; how a chart is drawn is in `eval.plots`. Computes no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from eval.plots import COLOURS, MARKS, Series, dot_chart, exact, heat_map, line_chart
from eval.report import PLAIN, find_rows, headline_rows, shown_rows
from eval.report_table import number

SHARES, TOKENS = (0.0, 1.0), (1.0, 2.0)  # what the axes show at least
GLYPHS = {**dict(zip(MARKS, "●■▲◆▼★", strict=True)), "soft": "– –", "s1 open": "○"}  # as MARKS in the pictures
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
        _gamma_figure(report, css),
        _dependence_figure(report, css),
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


def figure(title: str, words: str, chart: str, legend: Mapping[str, str]) -> str:
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
    return figure(title, words, line_chart(series, x_label=axis, label=title, x_range=x_range, shown=SHARES), css)


def _gamma_figure(report: Row, css: Mapping[str, str]) -> str:
    """The section `formula`: what was decoded at each γ, what follows from the survival, and the formula."""
    check, chosen = report["formula"], report["headline"]
    if not check:
        return ""
    same = find_rows(report, slice="all", dtype=check["dtype"], temperature=chosen["temperature"])
    own, last = css[chosen["proposer"]], min(check["gamma"] + 2, len(check["rows"]) - 1)
    shown = {name: [(row["gamma"], row[name]) for row in check["rows"][: last + 1] if row[name]] for name in _CURVES}
    series = [
        Series(own, [point for point in shown["measured"] if point[0]], DOTS),
        *(Series(css[r["proposer"]], [(r["gamma"], r["tokens_per_round"])], DOTS) for r in same if _beside(r, chosen)),
        Series(own, [(gamma, exact(e["value"])) for gamma, e in shown["from_survival"]], OPEN),
        Series(own, [(gamma, exact(e["value"])) for gamma, e in shown["formula"]], DASHED),
    ]
    chart = line_chart(
        series,
        x_label="γ: draft tokens per round",
        label="tokens per round against draft length, measured and by formula",
        x_range=(0, last),
        shown=TOKENS,
    )
    words = (
        f"Full marks: decoded at that γ, in {check['dtype']}. Circles: 1 + S(1) + … + S(γ), which assumes nothing. "
        "Dashed: the formula (1 − α^(γ+1)) / (1 − α), which assumes independent acceptances; "
        f"α = {number(check['alpha']['value'])}."
    )
    return figure("Tokens per pass against γ", words, chart, {**css, "from S(k)": "s1 open", "formula": "soft"})


_CURVES = ("measured", "from_survival", "formula")


def _beside(row: Row, chosen: Row) -> bool:
    """Whether a row is of another draft than the headline's, at its γ."""
    return row["proposer"] not in (PLAIN, chosen["proposer"]) and row["gamma"] == chosen["gamma"]


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
    return figure(title, words, chart, css)


def _slices(report: Row, row: Row) -> dict[str, Mapping[str, Any]]:
    run = {key: row[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    return {r["slice"]: r for r in shown_rows(report, **run)}


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
    return figure("Speed by slice", words, chart, css)


def _dependence_figure(report: Row, css: Mapping[str, str]) -> str:
    """How far the formula's assumption holds: the section `formula`."""
    check = report["formula"]
    if not check:
        return ""
    name = report["headline"]["proposer"]
    lags = [(float(one["lag"]), one["correlation"]) for one in check["autocorrelation"] if one["pairs"]]
    chart = line_chart(
        [Series(css[name], lags)],
        x_label="passes apart",
        label="correlation of acceptances so many passes apart",
        x_range=(1, max([int(at) for at, _ in lags], default=2)),
        shown=(0.0, 0.2),
    )
    words = (
        "Whether a pass whose first guess is right tells about later passes of the same text. 0 is what the formula "
        "assumes; above it, easy places and easy texts keep together."
    )
    return figure("Do acceptances hang together?", words, chart, {name: css[name]})


def _load_figure(report: Row) -> str:
    """The heat map of the section `load`, where the costs of a machine were measured."""
    load = report["load"]
    if not load:
        return ""
    found = {(one["batch"], one["context"]): one for one in load["table"]}
    batches, contexts = (sorted({key[i] for key in found}) for i in (0, 1))
    lines = [[_load_cell(found.get((batch, context))) for context in contexts] for batch in batches]
    chart = heat_map(
        lines,
        columns=[_short_count(n) for n in contexts],
        rows=[str(n) for n in batches],
        x_label="context: tokens so far",
        y_label="batch: requests at once",
        label="predicted speed-up over batch and context",
    )
    words = (
        "Predicted from measured costs: times the speed of plain decoding, and the γ that reaches it. γ 0 means: no "
        "draft pays at that load."
    )
    return figure("Speed under load", words, chart, {})


def _load_cell(one: Row | None) -> tuple[float | None, str]:
    return (None, "") if one is None else (one["speedup"]["value"], f"γ {one['gamma']}")


def _short_count(count: int) -> str:
    """`8k` for 8192: it has to fit."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
