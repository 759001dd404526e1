"""Progress of steps that decode requests: a bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Steps:
    """`begin` names a step and its number of requests, `advance` counts one request and its tokens."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("          {task.description}"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
        self.task: TaskID | None = None
        self.title, self.requests, self.tokens, self.started = "", 0, 0, time.monotonic()

    def __enter__(self) -> Steps:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if self.bar is not None:
            self.bar.stop()

    def begin(self, title: str, requests: int) -> None:
        """Close the step before and open the next one."""
        self._end()
        self.title, self.requests, self.tokens, self.started = title, requests, 0, time.monotonic()
        if self.bar is not None:
            self.task = self.bar.add_task(title, total=requests, rate="")

    def advance(self, tokens: int) -> None:
        """One more request, `tokens` long."""
        self.tokens += tokens
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=1, rate=self._rate())

    def _rate(self) -> str:
        return f"{self.tokens / max(1e-9, time.monotonic() - self.started):.0f} tokens/s"

    def _end(self) -> None:
        if not self.title:
            return
        if self.bar is not None and self.task is not None:
            self.bar.remove_task(self.task)
        seconds = time.monotonic() - self.started
        print(f"          {self.title}: {self.requests} requests, {seconds:.0f} s", file=sys.stderr, flush=True)
        self.title = ""
