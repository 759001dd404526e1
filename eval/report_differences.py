"""The report's tables of first differences: where a text leaves the target's own, and how near a tie that was.

Reads the section `identity` of the report (see `eval.exactness`) and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eval.report_table import NOTHING

SHOWN = 50  # all are in report.json
MEANING = (
    "Every greedy text was compared, token by token, with the text that the target writes on its own. Where one "
    "differs, its first differing token is listed with the distance between the logits of the two candidates: a "
    "distance near zero is a tie that kernels of different shape round differently, a large one is a bug."
)
COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "request": lambda d: d["request"],
    "draft": lambda d: d["proposer"],
    "γ": lambda d: str(d["gamma"]),
    "position": lambda d: str(d["position"]),
    "logit distance": lambda d: NOTHING if d["gap"] is None else f"{d['gap']:.4g}",
    "token": lambda d: NOTHING if d["token"] is None else str(d["token"]),
    "instead of": lambda d: NOTHING if d["other"] is None else str(d["other"]),
}


class Differences(NamedTuple):
    """A caption, and a row of texts for each difference, under COLUMNS."""

    caption: str
    rows: list[list[str]]


def differences(report: Mapping[str, Any], dtype: str) -> Differences | None:
    """Those of a number format, the largest distance first; None where all texts are the same."""
    all_of_them = report["identity"][dtype]["divergences"]
    if not all_of_them:
        return None
    found = sorted(all_of_them, key=lambda d: -math.inf if d["gap"] is None else -d["gap"])[:SHOWN]
    caption = f"First differences in {dtype}, largest distance first ({len(found)} of {len(all_of_them)})"
    return Differences(caption, [[show(one) for show in COLUMNS.values()] for one in found])
