"""The report's three twins in one folder: JSON, Markdown and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = ("report.json", "report.md", "report.html")


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write all three, the JSON first: the others show it."""
    from eval.report_markdown import whole_markdown
    from eval.report_page import render_page
    from heads.artifact import write_atomic, write_json

    json_file, markdown, page = (folder / name for name in FILES)
    write_json(json_file, report)
    write_atomic(markdown, whole_markdown(report))
    write_atomic(page, render_page(report))
