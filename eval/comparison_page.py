"""The comparison as one self-contained HTML page, in the report's style.

Reads the dictionary of `eval.comparison` and nothing else; computes no number. What comes from data is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from eval.comparison import MEASURES, Row, label, tables
from eval.comparison_table import by_slice, place, shown, shown_columns, slices_of, title
from eval.page_parts import definitions, document, facts, row, section, table
from eval.plots import MARKS, dot_chart
from eval.report_figures import figure
from eval.report_table import with_interval

LEAD = (
    "A language model writes one token per pass. A draft guesses the next γ tokens, and the model checks all of them "
    "in a single pass. Here several drafts, trained heads and rivals that need no training, guessed on the same "
    "requests. More tokens per pass is better, as long as the draft itself costs little: speed is what counts."
)
DIFFERENCES = (
    "To the first: how many tokens a round a draft yields less those of the first draft of its table, on the same "
    "requests. Requests differ more than drafts do; in pairs that cancels, so this interval decides, not the overlap "
    "of two others. One that holds 0 means: these requests cannot tell the two apart."
)


def render_page(comparison: Mapping[str, Any]) -> str:
    """The whole page."""
    body = [_head(comparison)]
    for ranking, rows in tables(comparison):
        body.append(section(title(comparison, ranking), _block(comparison, ranking, rows)))
    body.append(section("What the words mean", definitions(comparison["definitions"])))
    body.append(section("Where this comes from", _provenance(comparison)))
    return document("Draftsmith comparison", "".join(body))


def _head(comparison: Mapping[str, Any]) -> str:
    over = f"Draftsmith comparison · {comparison['target'].get('name', 'the target')}"
    findings = "".join(f"<li>{escape(text)}</li>" for text in _findings(comparison))
    return (
        f'<header><p class="over">{escape(over)}</p><h1>{escape(comparison["verdict"])}</h1>'
        f'<p class="lead">{escape(LEAD)}</p><ul class="findings">{findings}</ul></header>\n'
    )


def _findings(comparison: Mapping[str, Any]) -> list[str]:
    """Of the first table: where each draft is weakest, and what nothing can be said about."""
    ranking, rows = tables(comparison)[0]
    found = [f"Ranked by {MEASURES[ranking['by']]}.", *comparison["machines"]]
    for one in rows:
        part = next((s for s in one["slices"] if s["slice"] == one["worst_slice"]), None)
        if part and len(one["slices"]) > 1:
            words = f"{with_interval(part['tokens_per_round'])} tokens per pass"
            found.append(f"{label(one)} is weakest on {part['slice']}: {words} over {part['requests']} requests.")
    if any(one["difference"] is None for one in rows[1:]):
        found.append("Differences are missing where the traces of a run are gone or of an older version.")
    return found


def _block(comparison: Mapping[str, Any], ranking: Row, rows: Sequence[Row]) -> str:
    columns = shown_columns(rows)
    head = ["draft", "place", *(one.title for one in columns)]
    lines = [row([label(r), place(r), *(shown(c.value(r)) for c in columns)], _css(r)) for r in rows]
    names = slices_of(rows)
    by = [row([label(r), *(by_slice(r, name) for name in names)], _css(r)) for r in rows]
    return (
        f'<div class="figures">{_speed(rows)}{_differences(rows)}{_slices(rows)}</div>'
        + table(head, lines, "All requests")
        + (table(["draft", *names], by, "Tokens per pass by slice; each draft's worst is marked") if names else "")
        + f'<p class="note">{escape(DIFFERENCES)}</p>'
    )


def _css(one: Row) -> str:
    return "all" if one["rank"] == 1 else ""


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    return dict(zip((label(one) for one in rows), cycle(MARKS), strict=False))


def _speed(rows: Sequence[Row]) -> str:
    """What the drafts are worth in time, predicted where that is what they are ranked by."""
    key = "predicted" if any(one["predicted"] for one in rows) else "speedup"
    css = _marks(rows)
    known = [one for one in rows if one[key] and one[key]["value"] is not None]
    if not known:
        return ""
    groups = [(label(one), [(css[label(one)], one[key])]) for one in known]
    x_label = "times the speed of plain decoding"
    chart = dot_chart(groups, x_label=x_label, label="speed by draft", shown=(1.0, 1.0), mark=1.0)
    how = "Predicted at the load, from measured costs" if key == "predicted" else "Measured, one request at a time"
    return figure("Speed", f"{how}. Left of the marked line the draft slows down.", chart, {})


def _differences(rows: Sequence[Row]) -> str:
    css = _marks(rows)
    apart = [one for one in rows if one["difference"]]
    if not apart:
        return ""
    groups = [(label(one), [(css[label(one)], one["difference"]["tokens_per_round"])]) for one in apart]
    words = f"Tokens per pass less those of {label(rows[0])}, on the same requests. Left of the marked line is fewer."
    x_label = "difference in tokens per pass"
    chart = dot_chart(groups, x_label=x_label, label="difference to the first", shown=(-0.1, 0.1), mark=0.0)
    return figure("Difference to the first", words, chart, {})


def _slices(rows: Sequence[Row]) -> str:
    css = _marks(rows)
    groups = [("all", [(css[label(one)], one["tokens_per_round"]) for one in rows])]
    for name in slices_of(rows):
        found = [(label(one), part) for one in rows for part in one["slices"] if part["slice"] == name]
        groups.append((name, [(css[who], part["tokens_per_round"]) for who, part in found]))
    chart = dot_chart(groups, x_label="tokens per pass", label="tokens per pass by slice", shown=(1.0, 2.0))
    return figure("Tokens per pass", "Over all requests and per kind of traffic. Plain decoding is 1.", chart, css)


def _provenance(comparison: Mapping[str, Any]) -> str:
    origin = {key: value for key, value in comparison.get("provenance", {}).items() if key != "config"}
    heads = {
        label(one): {"sha256": one["sha256"], "run": one["run"]}
        for one in comparison["rows"]
        if one["tokens"] is not None
    }
    note = '<p class="note">All numbers are in comparison.json, the differences by slice too.</p>'
    return facts({"target": comparison["target"], "head": heads, **origin}, "Provenance") + note
