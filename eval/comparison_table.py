"""A comparison as a table: for the terminal and as Markdown. Reads the dictionary of `eval.comparison` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.comparison import MEASURES, Row, label, tables
from eval.report_table import NOTHING, cell, number, with_interval


class Column(NamedTuple):
    """What a column is called, what stands in it (an estimate or text), and whether a console has no room for it."""

    title: str
    value: Callable[[Row], Any]
    wide: bool = False


COLUMNS = (
    Column("predicted", lambda row: row["predicted"], wide=True),
    Column("α", lambda row: row["alpha"]),
    Column("tokens a round", lambda row: row["tokens_per_round"]),
    Column("to the first", lambda row: behind_best(row)),
    Column("worst slice", lambda row: worst(row), wide=True),
    Column("with a tree", lambda row: row["tree"] and row["tree"]["tokens_per_round"]),
    Column("draft cost", lambda row: row["draft_cost"] and number(row["draft_cost"]["value"])),
    Column("speed", lambda row: row["speedup"]),
    Column("speed with a tree", lambda row: row["tree"] and row["tree"]["speedup"], wide=True),
    Column("params", lambda row: _count(row["parameters"])),
    Column("training", lambda row: None if row["seconds"] is None else f"{row['seconds']:.0f} s", wide=True),
    Column("tokens seen", lambda row: _count(row["tokens"]), wide=True),
)
LEGEND = (
    "Intervals: 95 %, resampled by request. α: accepted of the examined drafts, chain. tokens a round: the target's "
    "own included. draft cost: seconds of drafting, settling what was accepted included, per drafted token over "
    "seconds of plain decoding per token, measured in one timed run (not the c of costs.json, which is what one more "
    "draft adds). speed: tokens/s of decoding against plain decoding. to the first: tokens a round less those of the "
    "table's first draft, over the same requests, resampled in pairs. worst slice: the kind of traffic with the fewest "
    "tokens a round. predicted: speed at the load that was asked about, from measured costs."
)


def title(comparison: Mapping[str, Any], ranking: Row) -> str:
    """What a table holds and how it is ordered."""
    how = "greedy" if ranking["temperature"] == 0 else f"temperature {ranking['temperature']:g}"
    load = ranking["load"]
    where = f" (batch {load['batch']:g}, context {load['context']:g})" if load and ranking["by"] == "predicted" else ""
    return (
        f"{ranking['dtype']}, {how}, γ {comparison['gamma']}, {comparison['requests']} held-out requests, "
        f"by {MEASURES[ranking['by']]}{where}"
    )


def behind_best(row: Row) -> Any:
    """This draft minus the first of its table, in tokens a round."""
    return row["difference"] and row["difference"]["tokens_per_round"]


def worst(row: Row) -> str | None:
    """The slice with the fewest tokens a round, in words, where there are several."""
    if len(row["slices"]) < 2:
        return None
    found = [one for one in row["slices"] if one["slice"] == row["worst_slice"]]
    return f"{found[0]['slice']} {number(found[0]['tokens_per_round']['value'])}" if found else None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}" if value < 100_000 else f"{value / 1e6:.2f} M"


def shown(value: Any) -> str:
    """An estimate with its interval, or text."""
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else with_interval(value)


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """The content of `comparison.md`."""
    lines = ["# Drafts compared", "", cell(comparison["verdict"]), ""]
    for ranking, rows in tables(comparison):
        columns = shown_columns(rows)
        lines += [f"## {title(comparison, ranking)}", "", _line(["", "draft", *(one.title for one in columns)])]
        lines += [f"|--:|---|{'--:|' * len(columns)}"]
        lines += [_line([place(row), label(row), *(shown(one.value(row)) for one in columns)]) for row in rows]
        if names := slices_of(rows):
            lines += ["", "Tokens a round by slice:", "", _line(["draft", *names]), f"|---|{'--:|' * len(names)}"]
            lines += [_line([label(row), *(by_slice(row, name) for name in names)]) for row in rows]
        lines += [""]
    return "\n".join([*lines, *_notes(comparison)]) + "\n"


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    """What stands below the tables."""
    modified = comparison["target"].get("modified")
    notes = [LEGEND, *map(cell, comparison["machines"]), *([] if modified is None else [f"{modified.capitalize()}."])]
    return [line for note in notes for line in ("", note)][1:]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell(one) for one in cells) + " |"


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that have anything in them."""
    return [one for one in COLUMNS if any(one.value(row) is not None for row in rows)]


def slices_of(rows: Sequence[Row]) -> list[str]:
    """Of the traffic; none where there is one only, which would repeat the numbers over all requests."""
    names = list(dict.fromkeys(one["slice"] for row in rows for one in row["slices"]))
    return names if len(names) > 1 else []


def by_slice(row: Row, name: str) -> str:
    """A draft's tokens a round on one slice; its worst is marked."""
    found = [one for one in row["slices"] if one["slice"] == name]
    mark = " (worst)" if name == row["worst_slice"] and len(row["slices"]) > 1 else ""
    return with_interval(found[0]["tokens_per_round"]) + mark if found else NOTHING


def place(row: Row) -> str:
    return NOTHING if row["rank"] is None else str(row["rank"])


def render_table(comparison: Mapping[str, Any]) -> Group:
    """The same for a console of 80 columns: the interval stands below its number."""
    parts: list[Any] = []
    for ranking, rows in tables(comparison):
        columns = [column for column in shown_columns(rows) if not column.wide]
        table = Table(
            title=title(comparison, ranking), title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
        )
        table.add_column("draft", no_wrap=True, overflow="ellipsis")
        for column in columns:
            table.add_column(column.title, justify="right")
        for row in rows:
            cells = [shown(column.value(row)) for column in columns]
            name = f"{label(row)}\n  worst: {worst(row)}" if worst(row) else label(row)
            table.add_row(name, *(one.replace(" [", "\n").replace(", ", "…").rstrip("]") for one in cells))
        parts += [table, Text()]
    notes = [Text(note, style="dim") for note in _notes(comparison)]
    return Group(*parts, *notes, Text(), Text(comparison["verdict"], style="bold"))
