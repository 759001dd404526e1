"""The report as one self-contained HTML page: no script, no link, no file beside it.

Reads the dictionary of `eval.report` and nothing else; computes no number. Everything that comes from data is
escaped. Written for a reader who has never heard of α: the verdict first, then pictures, then every number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from eval.elsewhere import CAPTION, HEAD, NAMES
from eval.findings import findings
from eval.page_parts import definitions, document, facts, row, section, table, tile
from eval.report import WIDEST, headline_rows, proof_rows
from eval.report_depths import depth_tables
from eval.report_differences import COLUMNS as DIFFERENCE
from eval.report_differences import MEANING, differences
from eval.report_figures import figures
from eval.report_samples import samples
from eval.report_table import (
    blocks,
    gap_text,
    identical,
    number,
    speedup,
    with_interval,
)

Row = Mapping[str, Any]


def render_page(report: Row) -> str:
    """The whole page."""
    title = f"Draftsmith report: {_name(report, 'head', report['headline']['proposer'])}"
    sections = [
        _head(report),
        section("In pictures", figures(report)),
        section("Texts, token by token", shown) if (shown := samples(report)) else "",
        section("All numbers", _numbers(report)),
        section("Is the text the same?", _identity(report)),
        section("What the words mean", definitions(report["definitions"]) + _elsewhere()),
        section("Where this comes from", _provenance(report)),
    ]
    return document(title, "".join(sections))


# The verdict


def _name(report: Row, part: str, otherwise: str) -> str:
    return str((report[part] or {}).get("name", otherwise))


def _head(report: Row) -> str:
    over = (
        f"Draftsmith report · {_name(report, 'head', report['headline']['proposer'])} for "
        f"{_name(report, 'target', 'the target')} · traffic: {_name(report, 'traffic', 'unnamed')}"
    )
    lead = (
        "A language model writes one token per pass. Here a small draft guesses the next γ tokens, and the "
        "model, called the target, checks all of them in a single pass: it keeps the guesses it agrees with "
        "and adds one token of its own. What is saved is passes; what is written stays the target’s."
    )
    found = "".join(f"<li>{escape(text)}</li>" for text in findings(report))
    return (
        f'<header><p class="over">{escape(over)}</p><h1>{escape(report["verdict"])}</h1>'
        f'<p class="lead">{escape(lead)}</p>{_tiles(report)}<ul class="findings">{found}</ul></header>\n'
    )


def _tiles(report: Row) -> str:
    rows = headline_rows(report)
    first = rows[0]
    tiles = [tile(first["tokens_per_round"], "tokens per pass of the target")]
    timed = [row for row in rows if row["speedup"] and row["speedup"]["value"]]
    if timed:
        others = [f"{speedup(row)} in {row['dtype']}" for row in timed[1:]]
        words = f"the speed of plain decoding, in {timed[0]['dtype']}"
        tiles.append(tile(timed[0]["speedup"], words, others, unit="×"))
    compared = proof_rows(report)
    if compared:
        others = [f"{identical(row)} in {row['dtype']}" for row in compared[1:]]
        figure = identical(compared[0]).replace("/", " / ")
        words = f"texts identical to the target’s own, in {compared[0]['dtype']}"
        good = compared[0]["identical_requests"] == compared[0]["requests"]
        tiles.append(tile(figure, words, others, css="" if good else "off"))
    tiles.append(tile(first["alpha"], "of the judged draft tokens accepted: this is α"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


# The tables

COLUMNS: dict[str, Callable[[Row], str]] = {
    "γ": lambda row: str(row["gamma"]),
    "α": lambda row: with_interval(row["alpha"]),
    "tokens/round": lambda row: with_interval(row["tokens_per_round"]),
    "formula": lambda row: number(row["expected_tokens_per_round"]),
    "gap": lambda row: gap_text(row["formula_gap"]),
    "identical": identical,
    "speed-up": lambda row: with_interval(row["speedup"]),
    "loops": lambda row: str(row["looping_requests"]),
    "requests": lambda row: str(row["requests"]),
    "rounds": lambda row: str(row["rounds"]),
    "cut": lambda row: str(row["rounds_cut"]),
}


def _numbers(report: Row) -> str:
    tables = []
    for title, rows in blocks(report).items():
        lines = []
        for one in rows:
            overall = one["slice"] == "all"
            name = one["proposer"] if overall else one["slice"]
            lines.append(row([name, *(show(one) for show in COLUMNS.values())], "all" if overall else "part"))
        tables.append(table(["draft", *COLUMNS], lines, title))
    note = (
        "One round is one pass of the target. Square brackets: 95 % intervals. More (means per request, "
        "intervals per depth, counts as vLLM shows them, everything without the looping requests) is in "
        "report.json, under the names explained below."
    )
    deep = [table(one.head, map(row, one.rows), one.caption) for one in depth_tables(report)]
    return "".join([*tables, *deep]) + f'<p class="note">{note}</p>'


def _elsewhere() -> str:
    return table(HEAD, map(row, NAMES), CAPTION)


def _identity(report: Row) -> str:
    if not report["identity"]:
        return "<p>The texts of this evaluation were not compared with the target’s own.</p>"
    parts = [f"<p>{escape(MEANING)}</p>"]
    for dtype, proof in report["identity"].items():
        parts.append(
            f'<p class="{_grade(dtype, proof)}"><b>{escape(dtype)}</b>: {proof["identical"]} of '
            f"{proof['requests']} requests identical in every run.</p>"
        )
        if (found := differences(report, dtype)) is not None:
            parts.append(table(list(DIFFERENCE), map(row, found.rows), found.caption))
    return "".join(parts)


def _grade(dtype: str, proof: Row) -> str:
    """A difference in a wide dtype is a failed proof; in a narrow one it is to be looked at."""
    if proof["identical"] == proof["requests"]:
        return "good"
    return "bad" if dtype in WIDEST else "near"


def _provenance(report: Row) -> str:
    parts = {key: report[key] for key in ("target", "head", "traffic") if report[key]}
    origin = dict(report["provenance"])
    config = origin.pop("config", None)
    shown = facts({**parts, **origin}, "Provenance")
    if not config:
        return shown
    text = escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
    return f"{shown}<details><summary>The resolved configuration</summary><pre>{text}</pre></details>"
