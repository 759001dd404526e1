"""Where the numbers of a run go: a JSONL file always, another service on request (training.wandb_tracker), the screen.

A tracker does not know what the numbers mean, nor how a run is resumed; it is told the step to continue from.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.artifact import UserError, write_json
from training.progress import fitting

METRICS, ABOUT = "metrics.jsonl", "run.json"
_BESIDE = 30  # columns that a bar, its counters and the time left take


@dataclass(frozen=True)
class Evaluation:
    """What is shown of an evaluation: a few numbers, a table (rows with the same keys), the report and its sample texts
    as pages of HTML; the head's kind, its files, and facts about it that go with them."""

    numbers: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    page: str
    samples: str
    head: str
    files: Sequence[Path]
    facts: Mapping[str, Any]


class Tracker(Protocol):
    """Takes the numbers of one run. Only the main process opens one."""

    @property
    def run_id(self) -> str | None:
        """The name under which another process can continue this run."""

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        """Begin, or continue after `step` the run that was called `run_id`."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def sync(self) -> None:
        """Make sure that what was logged survives a power cut."""

    def close(self, *, finished: bool) -> None: ...

    def publish(self, evaluation: Evaluation, *, run_id: str | None, config: Mapping[str, Any]) -> None:
        """Add an evaluation to the run that was called `run_id`, outside open and close. None: a run of its own."""


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has needed at most so far: of the GPU's memory where it computes there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class NullTracker:
    """Takes nothing: for processes other than the main one."""

    run_id: str | None = None

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        pass

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self, *, finished: bool) -> None:
        pass

    def publish(self, evaluation: Evaluation, *, run_id: str | None, config: Mapping[str, Any]) -> None:
        pass


class JsonlTracker:
    """One JSON object a line in `folder/metrics.jsonl`, flushed at once; `folder/run.json` says what of.

    about: whatever else is known of the run (its config, command, commit and versions), as JSON values.

    What is not a number (a depth that nothing reached) is null. Continuing after a step removes the lines of later
    ones, so that no step stands there twice.
    """

    run_id: str | None = None

    def __init__(self, folder: str | Path, *, about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(folder) / METRICS
        self.about = about
        self._file: TextIO | None = None

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.about is not None:
            write_json(self.path.parent / ABOUT, {**self.about, "identity": dict(config)})
        self.path.touch()
        os.truncate(self.path, _bytes_up_to(self.path, step))
        self._file = open(self.path, "a")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._file is not None, "open comes before log"
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        try:
            self._file.write(json.dumps({"step": step, **known}) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}; free some space there.") from error

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self, *, finished: bool) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def publish(self, evaluation: Evaluation, *, run_id: str | None, config: Mapping[str, Any]) -> None:
        """Nothing: the report lies beside it already."""


def _bytes_up_to(path: Path, step: int) -> int:
    """Length of the file's beginning that holds whole lines of steps up to `step`."""
    length = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # a line that a crash cut off
                break
            if not line.endswith(b"\n") or record["step"] > step:
                break
            length += len(line)
    return length


class Display(Protocol):
    """Shows how far a run is."""

    def update(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NullDisplay:
    """Shows nothing."""

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class BarDisplay:
    """A progress bar for a terminal."""

    def __init__(self, stream: TextIO, total: int, start: int) -> None:
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=(console := Console(file=stream)),
        )
        self._room = console.width - _BESIDE
        self._task = self._bar.add_task("train", total=total, completed=start, numbers="")
        self._bar.start()

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=step, numbers=fitting(_parts(numbers), self._room))

    def close(self) -> None:
        self._bar.stop()


class LineDisplay:
    """A line every few steps, for a log file."""

    def __init__(self, stream: TextIO, total: int, start: int, every: int) -> None:
        self._stream, self._total, self._start, self._every = stream, total, start, every
        self._begin = time.monotonic()

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        if step % self._every and step != self._total:
            return
        rate = (time.monotonic() - self._begin) / max(1, step - self._start)
        left = round(rate * (self._total - step))
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        self._stream.write(f"train {step}/{self._total}  {_phrase(numbers)}  {clock} left\n")
        self._stream.flush()

    def close(self) -> None:
        pass


def open_display(stream: TextIO, total: int, start: int, every: int) -> Display:
    """A bar on a terminal, otherwise a line every `every` steps."""
    return BarDisplay(stream, total, start) if stream.isatty() else LineDisplay(stream, total, start, every)


def _phrase(numbers: Mapping[str, float]) -> str:
    return "  ".join(_parts(numbers))


def _parts(numbers: Mapping[str, float]) -> list[str]:
    """Loss, acceptance by depth and speed, as far as they are known."""
    parts = [f"loss {numbers['loss']:.4f}"] if "loss" in numbers else []
    by_depth = [value for name, value in numbers.items() if name.startswith("acceptance/")]
    acceptance = [value for value in by_depth if math.isfinite(value)]
    if acceptance:
        parts.append("acceptance " + " ".join(f"{value:.2f}" for value in acceptance))
    if "tokens_per_second" in numbers:
        parts.append(f"{numbers['tokens_per_second']:.0f} tokens/s")
    return parts
