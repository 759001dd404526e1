"""The report as one self-contained HTML page: no script, no link, no file beside it.

Reads the dictionary of `eval.report` and nothing else; computes no number. Everything that comes from data is
escaped. Written for a reader who has never heard of α: the verdict first, then pictures, then every number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eval.report import WIDEST, find_rows, headline_rows, proof_rows
from eval.report_figures import figures
from eval.report_style import STYLE
from eval.report_table import (
    NOTHING,
    blocks,
    gap_text,
    identical,
    loops,
    number,
    speedup,
    with_interval,
)

MAX_DIVERGENCES = 50  # shown; all are in report.json
Row = Mapping[str, Any]


def render_page(report: Row) -> str:
    """The whole page."""
    title = f"Draftsmith report: {_name(report, 'head', report['headline']['proposer'])}"
    sections = [
        _head(report),
        _section("In pictures", figures(report)),
        _section("All numbers", _numbers(report)),
        _section("Is the text the same?", _identity(report)),
        _section("What the words mean", _definitions(report)),
        _section("Where this comes from", _provenance(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


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
    findings = "".join(f"<li>{escape(text)}</li>" for text in _findings(report))
    return (
        f'<header><p class="over">{escape(over)}</p><h1>{escape(report["verdict"])}</h1>'
        f'<p class="lead">{escape(lead)}</p>{_tiles(report)}<ul class="findings">{findings}</ul></header>\n'
    )


def _tiles(report: Row) -> str:
    rows = headline_rows(report)
    first = rows[0]
    tiles = [_tile(first["tokens_per_round"], "tokens per pass of the target")]
    timed = [row for row in rows if row["speedup"] and row["speedup"]["value"]]
    if timed:
        others = [f"{speedup(row)} in {row['dtype']}" for row in timed[1:]]
        words = f"the speed of plain decoding, in {timed[0]['dtype']}"
        tiles.append(_tile(timed[0]["speedup"], words, others, unit="×"))
    compared = proof_rows(report)
    if compared:
        others = [f"{identical(row)} in {row['dtype']}" for row in compared[1:]]
        figure = identical(compared[0]).replace("/", " / ")
        words = f"texts identical to the target’s own, in {compared[0]['dtype']}"
        good = compared[0]["identical_requests"] == compared[0]["requests"]
        tiles.append(_tile(figure, words, others, css="" if good else "off"))
    tiles.append(_tile(first["alpha"], "of the judged draft tokens accepted: this is α"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(figure: Row | str, words: str, more: Sequence[str] = (), *, unit: str = "", css: str = "") -> str:
    notes = list(more)
    if not isinstance(figure, str):
        if figure["low"] is not None:
            notes.insert(0, f"95 %: {number(figure['low'])} to {number(figure['high'])}")
        figure = number(figure["value"]) + unit
    small = f"<small>{escape(' · '.join(notes))}</small>" if notes else ""
    return f'<div class="{css}"><b>{escape(figure)}</b><span>{escape(words)}</span>{small}</div>'


def _findings(report: Row) -> Iterable[str]:
    """Sentences under the verdict: what qualifies it."""
    first = headline_rows(report)[0]
    run = {key: first[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    slices = [r for r in find_rows(report, **run) if r["slice"] != "all" and r["tokens_per_round"]["value"]]
    if len(slices) > 1:
        worst = min(slices, key=lambda r: r["tokens_per_round"]["value"])
        yield f"Weakest slice: {worst['slice']}, {with_interval(worst['tokens_per_round'])} tokens per pass."
    rival = find_rows(report, **{**run, "proposer": "prompt_lookup", "slice": "all"})
    if rival and first["proposer"] != "prompt_lookup":
        yield (
            "For comparison, prompt lookup (copying from the text so far, nothing trained) yields "
            f"{with_interval(rival[0]['tokens_per_round'])} tokens per pass on the same requests."
        )
    if first["formula_gap"]["value"] is not None:
        yield _formula_finding(first)
    if first["looping_requests"]:
        yield f"Loops make a text easy to guess: {loops(first)}"
    if first["alpha"]["low"] is None and first["alpha"]["value"] is not None:
        yield f"Measured on {first['requests']} request(s): too few for intervals."


def _formula_finding(row: Row) -> str:
    gap = row["formula_gap"]
    start = (
        f"The usual formula at this α promises {number(row['expected_tokens_per_round'])} tokens per pass, "
        f"{gap_text(gap)} against the measured {number(row['tokens_per_round']['value'])}"
    )
    if gap["low"] is None:
        return start + "."
    holds = "agrees with these data" if gap["low"] <= 0 <= gap["high"] else "does not hold here"
    return f"{start}: its assumption, that acceptances are independent of each other, {holds}."


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

DIVERGENCE: dict[str, Callable[[Row], str]] = {
    "draft": lambda d: d["proposer"],
    "γ": lambda d: str(d["gamma"]),
    "position": lambda d: str(d["position"]),
    "logit distance": lambda d: NOTHING if d["gap"] is None else f"{d['gap']:.4g}",
    "token": lambda d: NOTHING if d["token"] is None else str(d["token"]),
    "instead of": lambda d: NOTHING if d["other"] is None else str(d["other"]),
}


def _table(head: Iterable[str], rows: Iterable[str], caption: str) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Iterable[str], css: str = "") -> str:
    mark = f' class="{css}"' if css else ""
    return f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _numbers(report: Row) -> str:
    tables = []
    for title, rows in blocks(report).items():
        lines = []
        for row in rows:
            overall = row["slice"] == "all"
            name = row["proposer"] if overall else row["slice"]
            lines.append(_row([name, *(show(row) for show in COLUMNS.values())], "all" if overall else "part"))
        tables.append(_table(["draft", *COLUMNS], lines, title))
    note = (
        "One round is one pass of the target. Square brackets: 95 % intervals. More (means per request, "
        "intervals per depth, counts as vLLM shows them, everything without the looping requests) is in "
        "report.json, under the names explained below."
    )
    return "".join(tables) + f'<p class="note">{note}</p>'


def _identity(report: Row) -> str:
    if not report["identity"]:
        return "<p>The texts of this evaluation were not compared with the target’s own.</p>"
    parts = [
        "<p>Every greedy text was compared, token by token, with the text that the target writes on its own. "
        "Where one differs, its first differing token is listed with the distance between the logits of the "
        "two candidates: a distance near zero is a tie that kernels of different shape round differently, a "
        "large one is a bug.</p>"
    ]
    for dtype, proof in report["identity"].items():
        parts.append(
            f'<p class="{_grade(dtype, proof)}"><b>{escape(dtype)}</b>: {proof["identical"]} of '
            f"{proof['requests']} requests identical in every run.</p>"
        )
        found = sorted(proof["divergences"], key=lambda d: -math.inf if d["gap"] is None else -d["gap"])
        shown = found[:MAX_DIVERGENCES]
        lines = [_row([d["request"], *(show(d) for show in DIVERGENCE.values())]) for d in shown]
        if lines:
            caption = f"First differences in {dtype}, largest distance first ({len(shown)} of {len(found)})"
            parts.append(_table(["request", *DIVERGENCE], lines, caption))
    return "".join(parts)


def _grade(dtype: str, proof: Row) -> str:
    """A difference in a wide dtype is a failed proof; in a narrow one it is to be looked at."""
    if proof["identical"] == proof["requests"]:
        return "good"
    return "bad" if dtype in WIDEST else "near"


def _definitions(report: Row) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report["definitions"].items())
    return f"<dl>{items}</dl>"


def _provenance(report: Row) -> str:
    facts = {key: report[key] for key in ("target", "head", "traffic") if report[key]}
    origin = dict(report["provenance"])
    config = origin.pop("config", None)
    rows = [_row([key, text]) for key, text in _flat({**facts, **origin})]
    table = f'<div class="scroll"><table class="facts"><tbody>{"".join(rows)}</tbody></table></div>'
    if not config:
        return table
    text = escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
    return f"{table}<details><summary>The resolved configuration</summary><pre>{text}</pre></details>"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        elif isinstance(item, (list, tuple)):
            yield f"{prefix}{key}", " ".join(str(i) for i in item)
        else:
            yield f"{prefix}{key}", NOTHING if item is None else str(item)
