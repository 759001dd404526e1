"""The report as a table: for the terminal (80 columns) and as Markdown.

Reads the dictionary of `eval.report` and nothing else; computes no number.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from eval.report import PLAIN, SHORT_DTYPE, headline_rows, shown_rows

WIDTH = 80
NOTHING = "–"
LEGEND = (
    "[ ] 95 % interval, resampled by request. formula: (1-α^(γ+1))/(1-α) at the pooled α; gap: formula over "
    "measured. same: texts identical to the target's own. speed: tokens/s of decoding against plain decoding."
)


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def with_interval(estimate: Mapping[str, Any] | None, digits: int = 2) -> str:
    """`2.11 [2.02, 2.20]`, without brackets where there is no interval."""
    if estimate is None or estimate["value"] is None:
        return NOTHING
    text = number(estimate["value"], digits)
    if estimate["low"] is None:
        return text
    return f"{text} [{number(estimate['low'], digits)}, {number(estimate['high'], digits)}]"


def percent(value: float | None) -> str:
    """Signed, and never `-0.0%`."""
    if value is None:
        return NOTHING
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}%" if rounded else "0.0%"


def gap_text(gap: Mapping[str, Any]) -> str:
    """`+1.8% [+1.2%, +2.3%]`, without brackets where there is no interval."""
    if gap["low"] is None:
        return percent(gap["value"])
    return f"{percent(gap['value'])} [{percent(gap['low'])}, {percent(gap['high'])}]"


def identical(row: Mapping[str, Any]) -> str:
    same = row["identical_requests"]
    return NOTHING if same is None else f"{same}/{row['requests']}"


def speedup(row: Mapping[str, Any]) -> str:
    ratio = row["speedup"]
    return NOTHING if ratio is None or ratio["value"] is None else f"{ratio['value']:.2f}×"


def setting(row: Mapping[str, Any]) -> str:
    """`greedy, bf16` or `temperature 0.7, bf16`: what a block of rows has in common."""
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
    return f"{how}, {SHORT_DTYPE.get(row['dtype'], row['dtype'])}"


def blocks(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by setting, in the report's order; plain decoding only as a whole: its slices say nothing more."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in shown_rows(report):
        if row["proposer"] != PLAIN or row["slice"] == "all":
            grouped.setdefault(setting(row), []).append(row)
    return grouped


def loops(row: Mapping[str, Any]) -> str:
    """What is left of a row's numbers without its looping requests."""
    rest = row["without_looping"]
    return (
        f"{row['looping_requests']} of {row['requests']} texts end in a loop; without them α is "
        f"{with_interval(rest['alpha'])}, tokens per round {with_interval(rest['tokens_per_round'])}."
    )


def headline_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """The few numbers of the run that the verdict speaks of, as far as they are known."""
    row = headline_rows(report)[0]
    known = {name: row[name]["value"] for name in _TRACKED if row[name] is not None}
    if row["identical_requests"] is not None and row["requests"]:
        known["identical_share"] = row["identical_requests"] / row["requests"]
    return {name: value for name, value in known.items() if value is not None}


def flat_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All results as rows of plain values under the same keys."""
    facts = ("proposer", "dtype", "temperature", "gamma", "slice", "requests", "rounds", "tokens")
    return [
        {name: row[name] for name in facts}
        | {
            f"{name}{end}": None if row[name] is None else row[name][key]
            for name in _TRACKED
            for end, key in (("", "value"), ("_low", "low"), ("_high", "high"))
        }
        | {"identical_requests": row["identical_requests"]}
        for row in report["results"]
    ]


_TRACKED = ("alpha", "tokens_per_round", "formula_gap", "speedup", "draft_cost")


def _compact(estimate: Mapping[str, Any]) -> str:
    """As `with_interval`, without the zeros before the point and the comma: it has to fit."""
    text = with_interval(estimate).replace(",", "")
    return text.replace("0.", ".") if estimate["value"] is None or estimate["value"] < 1 else text


def render_table(report: Mapping[str, Any]) -> Group:
    """The final table for a console of 80 columns; print it with `rich`."""
    parts: list[Any] = []
    for title, rows in blocks(report).items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column("draft", no_wrap=True, overflow="ellipsis", max_width=14)
        for name in ("γ", "α", "tokens/round", "formula", "gap", "same", "speed"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            overall = row["slice"] == "all"
            table.add_row(
                Text(row["proposer"] if overall else f"  {row['slice']}"),
                str(row["gamma"]) if overall else "",
                _compact(row["alpha"]),
                _compact(row["tokens_per_round"]),
                number(row["expected_tokens_per_round"]),
                percent(row["formula_gap"]["value"]),
                identical(row),
                speedup(row),
                style="bold" if overall else None,
            )
        parts += [table, Text()]
    parts.append(Text(LEGEND, style="dim"))
    headline = headline_rows(report)[0]
    if headline["looping_requests"]:
        parts.append(Text(loops(headline), style="dim"))
    return Group(*parts, Text(), Text(report["verdict"], style="bold"))


def as_text(report: Mapping[str, Any], width: int = WIDTH) -> str:
    """The terminal's table as plain text, for logs and tests."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(render_table(report))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def to_markdown(report: Mapping[str, Any]) -> str:
    """The same numbers for a README or a model card."""
    lines = [
        report["verdict"],
        "",
        "| setting | draft | γ | slice | α | tokens/round | formula | gap | identical | speed-up |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, rows in blocks(report).items():
        for row in rows:
            cells = [
                title,
                row["proposer"],
                str(row["gamma"]),
                row["slice"],
                with_interval(row["alpha"]),
                with_interval(row["tokens_per_round"]),
                number(row["expected_tokens_per_round"]),
                percent(row["formula_gap"]["value"]),
                identical(row),
                with_interval(row["speedup"]),
            ]
            lines.append("| " + " | ".join(cell(one) for one in cells) + " |")
    return "\n".join([*lines, "", "Square brackets: 95 % intervals, resampled by request."]) + "\n"


def cell(text: str) -> str:
    """Text that cannot break out of a Markdown table's cell."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
