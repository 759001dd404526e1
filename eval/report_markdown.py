"""The page as Markdown, without its pictures: `report.md`, for a review or a repository.

Reads the dictionary of `eval.report` and nothing else; computes no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.elsewhere import CAPTION, HEAD, NAMES
from eval.findings import findings
from eval.page_parts import flat
from eval.report_depths import depth_tables
from eval.report_differences import COLUMNS, MEANING, differences
from eval.report_table import cell, to_markdown


def whole_markdown(report: Mapping[str, Any]) -> str:
    """Verdict and every number, what qualifies them, what the words mean, where it comes from."""
    lines = [
        "# Draftsmith report",
        "",
        to_markdown(report),
        *(f"* {cell(sentence)}" for sentence in findings(report)),
        "",
        *_depths(report),
        "## Is the text the same?",
        "",
        *_identity(report),
        "",
        "## What the words mean",
        "",
        *(f"* `{name}`: {cell(meaning)}" for name, meaning in report["definitions"].items()),
        "",
        f"{CAPTION}:",
        "",
        *_table(HEAD, NAMES),
        "",
        "## Where this comes from",
        "",
        *_provenance(report),
    ]
    return "\n".join(lines) + "\n"


def _depths(report: Mapping[str, Any]) -> Iterable[str]:
    tables = depth_tables(report)
    yield from ("## Acceptance by depth", "") if tables else ()
    for one in tables:
        yield from (cell(one.caption), "", *_table(one.head, one.rows), "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rows)


def _identity(report: Mapping[str, Any]) -> Iterable[str]:
    if not report["identity"]:
        yield "The texts of this evaluation were not compared with the target's own."
        return
    yield from (MEANING, "")
    for dtype, proof in report["identity"].items():
        yield f"* {cell(dtype)}: {proof['identical']} of {proof['requests']} requests identical in every greedy run."
    for dtype in report["identity"]:
        if (found := differences(report, dtype)) is not None:
            yield from ("", f"{cell(found.caption)}:", "", *_table(list(COLUMNS), found.rows))


def _provenance(report: Mapping[str, Any]) -> Iterable[str]:
    parts = {key: report[key] for key in ("target", "head", "traffic") if report[key]}
    origin = {key: value for key, value in report["provenance"].items() if key != "config"}
    return [f"* {cell(key)}: {cell(value)}" for key, value in flat({**parts, **origin})]
