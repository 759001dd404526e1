"""How far a long stage is: a bar on a terminal, else a line now and then. It knows nothing of the work."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_EVERY = 15.0  # seconds between two lines where there is no terminal
_BESIDE = 40  # columns that a bar, its counters, the time left and the speed take


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of the parts as there is room for, the first ones first; the first is cut where it is too long itself."""
    text = parts[0] if parts else ""
    for part in parts[1:]:
        if len(text) + 2 + len(part) > room:
            break
        text += f"  {part}"
    return text if len(text) <= room else f"{text[: max(room, 1) - 1]}…"


class Progress:
    """Counts units done out of `total` and tokens per second, on standard error unless not `shown`; a context
    manager."""

    def __init__(self, *, total: int, label: str, shown: bool = True) -> None:
        self._total, self._label = total, label
        self._done, self._worked, self._tokens, self._seconds = 0, 0, 0, 0.0
        self._next_line = time.monotonic() + _EVERY
        self._bar: Bar | None = None
        self._shown = shown
        if shown and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            console = Console(stderr=True)
            self._bar = Bar(*columns, TextColumn("{task.fields[rate]}"), console=console)
            # Rich would cut the counters too: the label is what can be shorter.
            label = fitting([label.strip()], console.width - _BESIDE)
            self._task = self._bar.add_task(label, total=total, rate="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line("done")

    def advance(self, units: int, *, tokens: int, seconds: float) -> None:
        """`units` more are done, in which `tokens` were made (0: they were there already) within
        `seconds`."""
        self._done += units
        if tokens:
            self._worked, self._tokens, self._seconds = (
                self._worked + units,
                self._tokens + tokens,
                self._seconds + seconds,
            )
        self._show()

    def advance_to(self, units: int) -> None:
        """`units` are done in all, some of them by being left out."""
        self._done = units
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{self._rate():.0f} tokens/s")
        elif time.monotonic() >= self._next_line:
            self._line(self._left())
            self._next_line = time.monotonic() + _EVERY

    def _line(self, ending: str) -> None:
        if not self._shown:
            return
        sys.stderr.write(f"{self._label} {self._done}/{self._total}  {self._rate():.0f} tokens/s  {ending}\n")
        sys.stderr.flush()

    def _left(self) -> str:
        if not self._worked:
            return "taking over what is there"
        left = round((self._total - self._done) * self._seconds / self._worked)
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def _rate(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0
