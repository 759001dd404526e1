"""The report's tables by depth: training's acceptance against the decoder's, and how far acceptance drifts from α.

Reads the sections `teacher_forced` and `formula` of the report (see `eval.teacher`, `eval.formula`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eval.report import SHORT_DTYPE
from eval.report_table import with_interval


class DepthTable(NamedTuple):
    """A caption, the names of the columns, and one row of texts for each depth."""

    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def depth_tables(report: Mapping[str, Any]) -> list[DepthTable]:
    """Those that the report holds."""
    return [table for table in (_teacher(report), _drift(report)) if table is not None]


def _teacher(report: Mapping[str, Any]) -> DepthTable | None:
    taught = report["teacher_forced"]
    if not taught:
        return None
    caption = (
        f"Teacher-forced against the decoder, greedy, {_short(taught)}, γ {taught['gamma']}. Coverage, the target's "
        f"probability on what the draft can propose: {with_interval(taught['coverage'])}; of the texts' own tokens: "
        f"{with_interval(taught['coverage_of_text'])}."
    )
    columns = (taught["teacher"], taught["decoder"], taught["gap"])
    return DepthTable(caption, ("depth", "teacher-forced", "decoder: α_k", "gap"), _by_depth(*columns))


def _drift(report: Mapping[str, Any]) -> DepthTable | None:
    check = report["formula"]
    if not check:
        return None
    caption = (
        f"Drift: acceptance at depth k, given that all before were accepted, minus the pooled α = "
        f"{with_interval(check['alpha'])}; {_short(check)}, γ {check['gamma']}. The formula assumes 0 everywhere."
    )
    return DepthTable(caption, ("depth", "drift: α_k − α"), _by_depth(check["drift"]))


def _by_depth(*columns: Any) -> list[tuple[str, ...]]:
    rows = enumerate(zip(*columns, strict=True), start=1)
    return [(str(depth), *(with_interval(one) for one in found)) for depth, found in rows]


def _short(section: Mapping[str, Any]) -> str:
    return SHORT_DTYPE.get(section["dtype"], section["dtype"])
