"""The part of an evaluation that runs the head over finished texts: teacher-forced acceptance and coverage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target
from scripts.drafters import ready_head

if TYPE_CHECKING:
    from eval.decode import Request
    from eval.report import Run
    from scripts.show import Steps


def teacher_forced(
    cfg: DictConfig, runs: Sequence[Run], requests: Sequence[Request], file: Path, key: str, steps: Steps
) -> dict[str, Any] | None:
    """Of the first greedy run, which must be the head's chain, in its number format; None where there is none.

    file: where it is kept under the key of the evaluation, so that it is not repeated. Returns dtype, gamma and what
    `eval.teacher.TeacherGap` holds.
    """
    from eval.teacher import count_teacher_forced, teacher_gap
    from heads.artifact import write_json

    greedy = [run for run in runs if run.temperature == 0 and run.gamma > 0]
    if not greedy:
        return None
    if (kept := _kept(file)) is not None and kept["key"] == key:
        return dict(kept["found"])
    run = greedy[0]
    steps.begin(f"{run.dtype}: {run.proposer} over the finished texts, as in training", len(requests))
    target = load_target(cfg, run.dtype)
    head = ready_head(Path(cfg.head_dir), target)
    counts = count_teacher_forced(
        target, head, requests, run.traces, on_done=lambda trace: steps.advance(len(trace.tokens))
    )
    gap = teacher_gap(counts, run.traces, gamma=run.gamma)
    found = {"dtype": run.dtype, "gamma": run.gamma, **gap.to_json()}
    write_json(file, {"key": key, "found": found})
    return found


def _kept(file: Path) -> dict[str, Any] | None:
    """What an earlier evaluation kept; what is damaged is made anew."""
    from heads.artifact import UserError, read_json

    try:
        return read_json(file, "kept numbers", "evaluate again", needed=("key", "found"))
    except UserError:
        return None
