"""The journal of a server's answers: one line each, appended as they come, so that none is asked for twice.

A line is handed to the operating system before the answer is used: killing the process loses nothing. A last line that
was cut off (the machine itself went down) is dropped. Answers are found by the document's id and its prompt together,
so an answer never stands behind another prompt than the one it was given to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heads.artifact import UserError

JOURNALS = "replies-*.jsonl"  # their names within a folder


@dataclass(frozen=True)
class Reply:
    """What a server answered: the generated ids, an end token included, and "stop" or "length"."""

    ids: tuple[int, ...]
    finish_reason: str


class Journal:
    """The answers in a file, and those that are added to it. Those of the journals beside it, which other processes
    write, are found too. Raises UserError when a line inside one of them is damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replies: dict[tuple[str, str], Reply] = {}
        for other in sorted(self.path.parent.glob(JOURNALS)):
            if other != self.path:
                self._read(other)
        whole = self._read(self.path) if self.path.is_file() else 0
        self._file = open(self.path, "ab")  # noqa: SIM115  closed by `close`
        self._file.truncate(whole)

    def __len__(self) -> int:
        return len(self._replies)

    def find(self, name: str, prompt: Sequence[int]) -> Reply | None:
        """The reply to this prompt of this document, if there is one."""
        return self._replies.get((name, _digest(prompt)))

    def add(self, name: str, prompt: Sequence[int], reply: Reply) -> None:
        """Keep a reply. Raises UserError when the disk is full."""
        key = (name, _digest(prompt))
        row = {"id": name, "prompt": key[1], "ids": list(reply.ids), "finish_reason": reply.finish_reason}
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}; free some space and run again.") from error
        self._replies[key] = reply

    def close(self) -> None:
        """Flush everything to the disk; a disk that is full has been told of by `add`."""
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
            self._file.close()

    def _read(self, path: Path) -> int:
        """Take over the whole lines; returns how many bytes they are."""
        whole = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    reply = Reply(tuple(row["ids"]), row["finish_reason"])
                    self._replies[row["id"], row["prompt"]] = reply
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{path} is damaged in line {number}; delete that line and repeat the command, which asks "
                        f"for that answer again."
                    ) from error
                whole += len(line)
        return whole


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:32]
