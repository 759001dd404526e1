"""What all pages are made of: the document, sections, tables that scroll in their own box, tiles. Escapes what it gets.

Knows no number and no key of a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eval.report_style import STYLE
from eval.report_table import NOTHING, number


def document(title: str, body: str) -> str:
    """One self-contained file: no script, no link, no file beside it."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def table(head: Sequence[str], rows: Iterable[str], caption: str, css: str = "") -> str:
    """Rows made by `row` under a caption, in a box that scrolls sideways and can be reached by keyboard."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{cells}</tr></thead>" if head else ""
    mark = f' class="{css}"' if css else ""
    words = escape(caption, quote=True)
    title = f"<caption>{words}</caption>" if head else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{words}"><table{mark}>{title}{top}'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(cells: Iterable[str], css: str = "") -> str:
    mark = f' class="{css}"' if css else ""
    return f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def tile(
    figure: Mapping[str, Any] | str, words: str, more: Sequence[str] = (), *, unit: str = "", css: str = ""
) -> str:
    """A number in large figures, what it is, and its interval."""
    notes = list(more)
    if not isinstance(figure, str):
        if figure["low"] is not None:
            notes.insert(0, f"95 %: {number(figure['low'])} to {number(figure['high'])}")
        figure = number(figure["value"]) + unit
    small = f"<small>{escape(' · '.join(notes))}</small>" if notes else ""
    return f'<div class="{css}"><b>{escape(figure)}</b><span>{escape(words)}</span>{small}</div>'


def definitions(meaning: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in meaning.items())
    return f"<dl>{items}</dl>"


def facts(value: Mapping[str, Any], caption: str) -> str:
    """Nested plain values as a table of two columns."""
    return table([], [row([key, text]) for key, text in flat(value)], caption, "facts")


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values under dotted names, lists in one line."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from flat(item, f"{prefix}{key}.")
        elif isinstance(item, (list, tuple)):
            yield f"{prefix}{key}", " ".join(str(i) for i in item)
        else:
            yield f"{prefix}{key}", NOTHING if item is None else str(item)
