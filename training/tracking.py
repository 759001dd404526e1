"""Where the numbers of a run go: a JSONL file always, Weights & Biases on request, and the screen.

A tracker never stops a run: whatever W&B does, training goes on and the JSONL file has the same numbers.
It does not know what the numbers mean, nor how a run is resumed; it is told the step to continue from.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.artifact import UserError
from training.progress import fitting

METRICS = "metrics.jsonl"
_BESIDE = 30  # columns that a bar, its counters and the time left take
_WANDB_SECONDS = 30.0  # how long W&B may take to begin; ten times that to finish sending

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What is shown of an evaluation: a few numbers, a table (rows with the same keys), a page of HTML."""

    numbers: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    page: str


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
    """One JSON object a line in `folder/metrics.jsonl`, flushed at once.

    What is not a number (a depth that nothing reached) is null. Continuing after a step removes the lines of later
    ones, so that no step stands there twice.
    """

    run_id: str | None = None

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / METRICS
        self._file: TextIO | None = None

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
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


MODES = ("online", "offline", "disabled")


class WandbTracker:
    """Weights & Biases, with the JSONL twin.

    mode: online, offline or disabled; None asks WANDB_MODE, and without it records online when there is a
    login and offline otherwise. It never asks for one. The first failure of W&B is warned about and ends its
    part.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str = "draftsmith",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        if mode not in (None, *MODES):
            raise UserError(f"tracking.mode={mode} is unknown; choose {', '.join(MODES)}, or null.")
        self.folder = Path(folder)
        self.twin = JsonlTracker(folder)
        self._kept = self.twin.path  # where the numbers are in any case
        self.options: dict[str, Any] = {
            "project": project,
            "name": name,
            "entity": entity,
            "group": group,
            "tags": list(tags),
        }
        self.mode = mode
        self.run_id: str | None = None
        self._run: Any = None
        self._first_step = 0

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        self.twin.open(step=step, run_id=run_id, config=config)
        self._start(run_id, config)

    def _start(self, run_id: str | None, config: Mapping[str, Any]) -> None:
        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        if mode == "online" and self._begin("online", run_id, config):
            return
        self._begin("offline" if mode == "online" else mode, run_id, config)

    def _begin(self, mode: str, run_id: str | None, config: Mapping[str, Any]) -> bool:
        """Start or continue the W&B run; says whether that went well."""

        settings = {
            "silent": True,
            "console": "off",
            "mode": mode,
            "reinit": "create_new",
            "init_timeout": _WANDB_SECONDS,
            "finish_timeout": 10 * _WANDB_SECONDS,
        }

        def begin() -> None:
            import wandb  # slow, and optional at run time

            self._run = wandb.init(
                **self.options,
                dir=self.folder,
                id=run_id,
                resume="allow",
                config=dict(config),
                settings=settings,
            )
            self.run_id = self._run.id
            # A continued online run already has the steps between the checkpoint and the crash.
            self._first_step = self._run.step

        if not self._try(begin, "could not begin" if mode != "online" else "could not begin online, trying offline"):
            return False
        where = self._run.url if mode == "online" else f"{self._run.dir}; `wandb sync` sends it later"
        logger.info("W&B records %s: %s", mode, where)
        return True

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.twin.log(step, numbers)
        if self._run is not None and step >= self._first_step:
            self._try(lambda: self._run.log(dict(numbers), step=step), "failed")

    def sync(self) -> None:
        self.twin.sync()

    def close(self, *, finished: bool) -> None:
        self.twin.close(finished=finished)
        if self._run is not None:
            self._try(lambda: self._run.finish(exit_code=0 if finished else 1), "could not finish")
            self._run = None

    def publish(self, evaluation: Evaluation, *, run_id: str | None, config: Mapping[str, Any]) -> None:
        self._kept = self.folder
        self._start(run_id, config)
        if self._run is not None and self._try(lambda: self._send(evaluation), "failed"):
            self._try(lambda: self._run.finish(exit_code=0), "could not finish")
            self._run = None

    def _send(self, evaluation: Evaluation) -> None:
        import wandb

        rows = evaluation.rows
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"report/results": table, "report/page": wandb.Html(evaluation.page, inject=False)})
        self._run.summary.update({f"report/{name}": value for name, value in evaluation.numbers.items()})

    def _try(self, action: Callable[[], object], what: str) -> bool:
        """Do something with W&B; a failure is warned about and drops the run."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever an optional service raises must not stop a run
            logger.warning("W&B %s (%s: %s); the numbers are in %s.", what, type(error).__name__, error, self._kept)
            self._run = None
            return False
        return True


def _logged_in() -> bool:
    """Whether W&B will find credentials without asking: an environment variable or a line in the netrc
    file.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    candidates = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in candidates if name):
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


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
