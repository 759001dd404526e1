"""Being asked to stop: SIGTERM of a spot machine or a scheduler, SIGINT of a terminal.

The exit codes are those of a shell: 143 after SIGTERM, 130 after SIGINT. It does not know what is saved before.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """Training was asked to stop by a signal, and has saved its state; the exit code is the signal's."""


class StopRequest:
    """Within the context SIGTERM and SIGINT are noted instead of ending the process.

    A launcher passes on what the terminal has already sent, so only a signal that comes a second later ends
    the process.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._noted = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def noted(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted = number, time.monotonic()
        elif time.monotonic() - self._noted > 1:
            self.__exit__()
            signal.raise_signal(number)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
