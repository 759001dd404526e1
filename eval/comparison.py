"""Several evaluated heads side by side: one row for each, out of the reports of their runs.

Every number is taken as it stands in a report (see `eval.acceptance` for the definitions); nothing is computed here.
What must be equal for a comparison to mean anything is checked, and refused where it differs. This module knows no
file: it is given the content of each run's `report.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.report import PLAIN, find_rows
from eval.report_table import NOTHING, number, with_interval
from eval.suite import tree_name
from heads.artifact import UserError

FORMAT = 1
DEFINED = ("alpha", "tokens_per_round", "draft_cost", "speedup", "interval")
ESTIMATES = ("alpha", "tokens_per_round", "draft_cost", "speedup")
Row = Mapping[str, Any]


def compare(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of `comparison.json` out of `report.json` of each run by its name, rows in the order of the runs.

    rows[] has for each number format one row per head (proposer, run, dtype, gamma, alpha, tokens_per_round,
    draft_cost, speedup, each {value, low, high}; tree: tokens_per_round and speedup of its tree, or null; parameters,
    seconds and tokens of its training), then one for each rival, taken from the first run that measured it.
    Raises UserError when there is no report or two of them cannot be compared.
    """
    if not reports:
        raise UserError("There is no evaluated run to compare; name folders that hold a report: 'runs=[runs/mine]'.")
    _check(reports)
    first = next(iter(reports.values()))
    dtypes = dict.fromkeys(row["dtype"] for report in reports.values() for row in _greedy(report))
    rows = [row for dtype in dtypes for row in _block(reports, dtype)]
    return {
        "format": FORMAT,
        "requests": max(row["requests"] for row in _greedy(first)),
        "gamma": first["headline"]["gamma"],
        "target": first["target"],
        "rows": rows,
        "definitions": {name: first["definitions"][name] for name in DEFINED if name in first["definitions"]},
    }


def _check(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError naming the first run that differs from the first in what must be equal."""
    (base_name, base), *others = ((name, _basis(report)) for name, report in reports.items())
    for name, basis in others:
        for what, value in basis.items():
            if value != base[what]:
                raise UserError(
                    f"{name} and {base_name} cannot be compared: they differ in {what} ({_short(value)} against "
                    f"{_short(base[what])}); evaluate both on the same, or leave one out of runs=."
                )


def _basis(report: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all runs."""
    return {
        "the held-out requests": report["traffic"]["fingerprints"]["held_out"],
        "the number of requests": max(row["requests"] for row in _greedy(report)),
        "the target": report["target"]["weights"],
        "eval.gamma": report["headline"]["gamma"],
        "eval.max_new_tokens": report["provenance"]["config"]["eval"]["max_new_tokens"],
    }


def _short(value: object) -> str:
    return str(value)[:12]


def _greedy(report: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows of the main comparison over all requests."""
    rows = find_rows(report, slice="all", temperature=0.0, **wanted)
    return [row for row in rows if row["gamma"] in (0, report["headline"]["gamma"])]


def _block(reports: Mapping[str, Mapping[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """The heads in one number format, then the rivals."""
    heads, rivals = [], {}
    for run, report in reports.items():
        head = report["head"]
        own = {row["proposer"]: row for row in _greedy(report, dtype=dtype)}
        tree = own.pop(tree_name(head["name"]), None)
        if (chain := own.pop(head["name"], None)) is not None:
            training = {key: head[key] for key in ("sha256", "parameters", "seconds", "tokens")}
            heads.append({**_numbers(chain, run), "tree": tree and _of_tree(tree), **training})
        for name, row in own.items():
            if name != PLAIN and name not in rivals:
                rivals[name] = _numbers(row, run) | {"tree": None, "parameters": None, "seconds": None, "tokens": None}
    return [*heads, *rivals.values()]


def _numbers(row: Row, run: str) -> dict[str, Any]:
    facts = {key: row[key] for key in ("proposer", "dtype", "gamma")}
    return {"run": run, **facts, **{name: row[name] for name in ESTIMATES}}


def _of_tree(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("tokens_per_round", "speedup")}


# ---- the table ------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """What a column is called, what stands in it (an estimate or text), and whether a console has no room for it."""

    title: str
    value: Callable[[Row], Any]
    wide: bool = False


COLUMNS = (
    Column("α", lambda row: row["alpha"]),
    Column("tokens a round", lambda row: row["tokens_per_round"]),
    Column("with a tree", lambda row: row["tree"] and row["tree"]["tokens_per_round"]),
    Column("c", lambda row: row["draft_cost"] and number(row["draft_cost"]["value"])),
    Column("speed", lambda row: row["speedup"]),
    Column("speed with a tree", lambda row: row["tree"] and row["tree"]["speedup"], wide=True),
    Column("params", lambda row: _count(row["parameters"])),
    Column("training", lambda row: None if row["seconds"] is None else f"{row['seconds']:.0f} s"),
    Column("tokens seen", lambda row: _count(row["tokens"])),
)
LEGEND = (
    "Intervals: 95 %, resampled by request. α: accepted of the examined drafts, chain. tokens a round: the target's "
    "own included. c: seconds of drafting per drafted token over seconds of plain decoding per token, measured in one "
    "timed run. speed: tokens/s of decoding against plain decoding."
)


def label(row: Row) -> str:
    """The head or rival, with its run where that is called otherwise."""
    rival = row["tokens"] is None
    return row["proposer"] if rival or row["proposer"] == row["run"] else f"{row['proposer']} ({row['run']})"


def title(comparison: Mapping[str, Any], dtype: str) -> str:
    return f"{dtype}, greedy, γ {comparison['gamma']}, {comparison['requests']} held-out requests"


def blocks(comparison: Mapping[str, Any]) -> dict[str, Sequence[Row]]:
    """Rows by the title of their table."""
    dtypes = dict.fromkeys(row["dtype"] for row in comparison["rows"])
    return {title(comparison, one): [row for row in comparison["rows"] if row["dtype"] == one] for one in dtypes}


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}" if value < 100_000 else f"{value / 1e6:.2f} M"


def _cell(value: Any) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else with_interval(value)


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    """What stands below the tables."""
    modified = comparison["target"].get("modified")
    return [LEGEND] if modified is None else [LEGEND, "", f"{modified.capitalize()}."]


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """The content of `comparison.md`."""
    lines = ["# Heads compared", ""]
    for name, rows in blocks(comparison).items():
        lines += [f"## {name}", "", f"| head | {' | '.join(column.title for column in COLUMNS)} |"]
        lines += [f"|---|{'--:|' * len(COLUMNS)}"]
        lines += [f"| {label(row)} | {' | '.join(_cell(column.value(row)) for column in COLUMNS)} |" for row in rows]
        lines += [""]
    return "\n".join([*lines, *_notes(comparison)]) + "\n"


def render_table(comparison: Mapping[str, Any]) -> Group:
    """The same for a console of 80 columns: the interval stands below its number."""
    columns = [column for column in COLUMNS if not column.wide]
    parts: list[Any] = []
    for name, rows in blocks(comparison).items():
        table = Table(title=name, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column("head", no_wrap=True)
        for column in columns:
            table.add_column(column.title, justify="right")
        for row in rows:
            cells = [_cell(column.value(row)) for column in columns]
            table.add_row(label(row), *(cell.replace(" [", "\n").replace(", ", "–").rstrip("]") for cell in cells))
        parts += [table, Text()]
    return Group(*parts, *(Text(note, style="dim") for note in _notes(comparison)))
