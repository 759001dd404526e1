"""The runs behind a report, read back from its folder, for what needs more than the report's numbers.

Traces of earlier evaluations may lie there too: only those whose counts are the report's are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.report import Run, find_rows
from eval.suite import Task
from eval.trace import RequestTrace, read_traces

_COUNTED = ("requests", "rounds", "accepted", "tokens")


def kept_runs(folder: str | Path, report: Mapping[str, Any], **wanted: Any) -> list[Run]:
    """The runs of `report.json`, out of the traces beside it in `folder`; without those that are gone or of another
    evaluation or version. wanted: only rows with these values."""
    runs = []
    for row in find_rows(report, slice="all", **wanted):
        task = Task(row["proposer"], row["dtype"], row["temperature"], row["gamma"])
        path = Path(folder) / "traces" / f"{task.name}.jsonl"
        if path.is_file() and (run := _read(path, row)) is not None:
            runs.append(run)
    return runs


def _read(path: Path, row: Mapping[str, Any]) -> Run | None:
    if (kept := read_traces(path)) is None or "timed" not in kept[0]:
        return None
    head, traces = kept
    if _counts(list(traces)) != {name: row[name] for name in _COUNTED}:
        return None
    timed = [trace for trace in traces if trace.request_id in head["timed"]]
    return Run(row["proposer"], row["dtype"], row["temperature"], row["gamma"], traces, None, timed)


def _counts(traces: list[RequestTrace]) -> dict[str, int]:
    rounds = [one for trace in traces for one in trace.rounds]
    return {
        "requests": len(traces),
        "rounds": len(rounds),
        "accepted": sum(one.accepted for one in rounds),
        "tokens": sum(len(trace.tokens) for trace in traces),
    }
