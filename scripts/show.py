"""Progress of an evaluation: one bar, or one line now and then, for each step that decodes requests."""

from __future__ import annotations

import time
from types import TracebackType

from training.progress import Progress


class Steps:
    """`begin` names a step and its number of requests, `advance` counts one request and its tokens."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.before = time.monotonic()

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind, error, trace)

    def begin(self, title: str, requests: int) -> None:
        """Close the step before and open the next one."""
        self._close(None, None, None)
        self.bar = Progress(total=requests, label=f"          {title}").__enter__()
        self.before = time.monotonic()

    def advance(self, tokens: int) -> None:
        """One more request, `tokens` long."""
        assert self.bar is not None, "begin comes before advance"
        now = time.monotonic()
        self.bar.advance(1, tokens=tokens, seconds=now - self.before)
        self.before = now

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.__exit__(kind, error, trace)
            self.bar = None
