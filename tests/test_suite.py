"""What an evaluation kept is used only where it is whole and of the same requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.decode import Request
from eval.kept import kept_runs
from eval.report import Run
from eval.suite import Plan, Suite, Task
from eval.trace import Round
from heads.target import FrozenTarget
from tests.simulated_traces import trace_of

REQUESTS = [Request(f"r{index}", "all", (1, 2, 3)) for index in range(4)]
TASK = Task("mine", "float32", 0.0, 4)


def suite(folder: Path) -> Suite:
    def none(*_: Any) -> FrozenTarget:
        raise AssertionError("nothing is decoded here")

    return Suite(
        requests=REQUESTS,
        plan=Plan(),
        folder=folder,
        identity={},
        load_target=none,
        make_proposers=lambda target: {},
    )


def kept(folder: Path) -> Path:
    traces = [trace_of([Round(4, 2)], request_id=request.request_id) for request in REQUESTS]
    suite(folder)._write(TASK, Run(TASK.proposer, TASK.dtype, 0.0, TASK.gamma, traces, [], traces[:1]))
    return folder / f"{TASK.name}.jsonl"


def lines(count: int) -> Callable[[str], str]:
    return lambda text: "".join(text.splitlines(keepends=True)[:count])


@pytest.mark.parametrize(
    "damage",
    [
        lines(3),
        lines(1),
        lambda text: text[:-20],
        lambda text: text[:20],
        lambda text: "",
        lambda text: "[]\n",
        lambda text: text.replace('"r3"', '"r9"'),
        lambda text: text.replace('"accepted": 2', '"accepted": 9'),
    ],
    ids=["three of four", "facts only", "cut line", "cut facts", "empty", "a list", "another request", "impossible"],
)
def test_damaged_traces_are_made_anew(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = kept(tmp_path)
    found = suite(tmp_path)._read(TASK)
    assert found is not None and [trace.request_id for trace in found.traces] == ["r0", "r1", "r2", "r3"]
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    assert suite(tmp_path)._read(TASK) is None


def test_damaged_facts_of_traces_are_no_runs_behind_a_report(tmp_path: Path) -> None:
    row = {"proposer": "mine", "dtype": "float32", "temperature": 0.0, "gamma": 4, "slice": "all"}
    report = {"results": [{**row, "requests": 4, "rounds": 4, "accepted": 8, "tokens": 16}]}
    path = kept(tmp_path / "traces")
    assert len(kept_runs(tmp_path, report)) == 1
    first, _, rest = path.read_text().partition("\n")
    for facts in ("[]", first[:10], json.dumps({"key": "x"})):
        path.write_text(f"{facts}\n{rest}")
        assert kept_runs(tmp_path, report) == []
