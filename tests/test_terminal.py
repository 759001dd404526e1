"""What a person sees: bars that fit into 80 columns on a terminal, a log file without escape codes."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading

import pytest

from tests import e2e
from training.progress import Progress, fitting
from training.tracking import open_display

COLUMNS = 80
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """One of 80 columns as standard error, within the context; `lines` has each state of each line after it."""

    def __enter__(self) -> Terminal:
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.before, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
        self.parts: list[bytes] = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.close()
        sys.stderr = self.before
        self.reader.join()
        os.close(self.ours)
        text = ESCAPES.sub("", b"".join(self.parts).decode())
        self.lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]

    def read(self) -> None:
        while True:
            try:
                self.parts.append(os.read(self.ours, 4096))
            except OSError:  # the other end is closed
                return


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_a_bar_with_a_long_title_keeps_its_counters(terminal: Terminal) -> None:
    title = "          float32: eagle3 · eagle3_tree · prompt_lookup · none in turn, timed"
    with terminal, Progress(total=345, label=title) as bar:
        bar.advance(12, tokens=60_000, seconds=5.0)
    assert any("12/345" in line and "12000 tokens/s" in line for line in terminal.lines), terminal.lines
    assert all(len(line) <= COLUMNS for line in terminal.lines)


def test_the_bar_of_training_keeps_its_counters(terminal: Terminal) -> None:
    depths = {f"acceptance/{depth}": 0.5 for depth in range(1, 8)}
    with terminal:
        display = open_display(sys.stderr, 5678, 0, 1)
        display.update(1234, {"loss": 12.3456, **depths, "tokens_per_second": 123456.0})
        display.close()
    assert any("1234/5678" in line and "loss 12.3456" in line for line in terminal.lines), terminal.lines
    assert all(len(line) <= COLUMNS for line in terminal.lines)


def test_control_a_line_that_is_too_long_would_be_seen(terminal: Terminal) -> None:
    with terminal:
        print("x" * (COLUMNS + 1), file=sys.stderr)
    assert [len(line) for line in terminal.lines] == [COLUMNS + 1]


@pytest.mark.parametrize(
    ("parts", "room", "text"),
    [
        (["loss 1", "speed 2"], 20, "loss 1  speed 2"),
        (["loss 1", "speed 2"], 14, "loss 1"),
        (["loss 1", "speed 2"], 4, "los…"),
        ([], 4, ""),
    ],
)
def test_the_first_parts_stay(parts: list[str], room: int, text: str) -> None:
    assert fitting(parts, room) == text


def test_a_log_file_has_no_escape_codes(finished: e2e.Finished) -> None:
    """Nor lines that a terminal would overwrite."""
    for text in (finished.output.stdout, finished.output.stderr):
        assert text.strip() and "\x1b" not in text
    assert "\r" not in finished.output.stdout
    assert all("\r" not in line or "Loading" in line for line in finished.output.stderr.splitlines())
