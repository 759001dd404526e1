"""From an evaluation to advice on it: the acceptance behind a report, whether costs belong to it, the advice in words.

`eval.speedup` reckons; this module reads what it reckons with out of a report and the traces beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.kept import kept_runs
from eval.report import find_rows
from eval.report_table import NOTHING
from eval.speedup import Advice, Yield
from eval.tally import Estimate
from heads.artifact import UserError

LOOKUP = "prompt_lookup"
HARDLY = 0.15  # of the first drafts accepted; trained heads, weak ones too, have twice that


@dataclass(frozen=True)
class Acceptance:
    """Tokens per round by γ of one draft in one number format at one temperature."""

    taus: Yield
    dtype: str
    temperature: float


def acceptance(
    report: Mapping[str, Any],
    folder: Path,
    *,
    dtype: str | None,
    temperature: float,
    proposer: str | None = None,
    max_gamma: int | None = None,
    longest: int | None = None,
) -> Acceptance:
    """From the traces in the report's folder where those of every γ are there, else from the report.

    dtype and proposer None: the headline's. max_gamma None: as long as measured, and no longer than `longest`. Raises
    UserError where there is no such run, or where it drafts trees.
    """
    proposer = proposer or report["headline"]["proposer"]
    dtype = dtype or report["headline"]["dtype"]
    wanted = {"proposer": proposer, "dtype": dtype, "temperature": temperature}
    rows = [row for row in find_rows(report, slice="all", **wanted) if row["gamma"] > 0]
    if not rows:
        there = sorted({row["proposer"] for row in report["results"]} - {"none"})
        heats = sorted({row["temperature"] for row in report["results"]})
        raise UserError(
            f"The report in {folder} has no run of {proposer} in {dtype} at temperature {temperature:g}; it has "
            f"proposer={' | '.join(there)} and load.temperature={' | '.join(f'{heat:g}' for heat in heats)}."
        )
    if rows[0]["formula_gap"]["value"] is None and rows[0]["alpha"]["value"] is not None:
        raise UserError(f"{proposer} drafts trees, for which no costs are measured; choose the chain of the head.")
    deepest = max(row["gamma"] for row in rows)
    reach = max_gamma or min(deepest, longest or deepest)
    runs = {run.gamma: run.traces for run in kept_runs(folder, report, **wanted) if run.gamma > 0}
    whole = set(runs) == {row["gamma"] for row in rows}
    return Acceptance(Yield.of_traces(runs, reach) if whole else Yield.of_report(rows, reach), dtype, temperature)


def check_same_head(report: Mapping[str, Any], *, costs_head: str, proposer: str | None) -> None:
    """Raises UserError when the costs are not those of the draft that is advised on."""
    head = report["head"] or {}
    if proposer not in (None, head.get("name")):
        raise UserError(f"The costs are those of the head {head.get('name')}, not of proposer={proposer}; give gpu=….")
    if head.get("sha256") != costs_head:
        raise UserError("The costs were measured with another head than the report's; measure again with bench=cost.")


def weaknesses(report: Mapping[str, Any], measured: Acceptance, *, proposer: str | None = None) -> list[str]:
    """What is wrong with the draft itself at any load: it has hardly learned, or gives what is there for nothing."""
    name = proposer or report["headline"]["proposer"]
    same = {"dtype": measured.dtype, "temperature": measured.temperature, "slice": "all"}
    row = max(find_rows(report, proposer=name, **same), key=lambda one: one["gamma"] == report["headline"]["gamma"])
    found = []
    first = row["alpha_by_position"][0]
    if name == (report["head"] or {}).get("name") and first is not None and first < HARDLY:
        found.append(
            f"the target accepts {first:.0%} of the first drafts: this head has hardly learned; train it longer or on "
            f"more traffic before any γ is worth choosing"
        )
    free = find_rows(report, proposer=LOOKUP, gamma=row["gamma"], **same)
    own = row["tokens_per_round"]["value"]
    if free and name != LOOKUP and own is not None and own <= (free[0]["tokens_per_round"]["value"] or 0):
        found.append(
            f"prompt lookup, which needs no training and costs nothing to draft, yields as much: "
            f"{free[0]['tokens_per_round']['value']:.2f} tokens a round against {own:.2f}"
        )
    return found


def headline(found: Advice) -> str:
    """The advice as a sentence."""
    where = f"at batch {found.batch:g} and context {found.context:g}"
    end = (
        f"From batch {found.stops_paying} on, up to {found.largest}, speculation does not pay there."
        if found.stops_paying is not None
        else f"At batch {found.largest}, the largest looked at, it pays."
    )
    if found.gamma == 0:
        return f"Do not speculate {where}: no draft length is faster than plain decoding. {end}"
    return f"γ = {found.gamma} {where}: {times(found.speedup)} as fast as plain decoding. {end}"


def times(one: Estimate) -> str:
    """`1.50× [1.40, 1.60]`."""
    span = "" if one.low is None else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"{NOTHING if one.value is None else f'{one.value:.2f}'}×{span}"
