"""Training processes that take turns, so that each has its own memory and all see the same machine.

A worker is a process that trains a few steps whenever it is told to. It reads lines from stdin, each a number of steps,
until that ends; it answers on stdout in lines of JSON. The first, after steps of its own to warm up, says what it is:
at least `loaded`, the bytes it held before it trained. Every further one answers a line: `seconds`, `positions` and
`memory`, the most bytes held while training. A worker that cannot start for a reason of the user's ends with code 2
and that sentence as its last line on stderr. `training/peer_driver.py` is one in another interpreter; `serve` makes
one of a function. This module knows neither heads nor what is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from heads.artifact import UserError, write_json

REFUSED = 2
TAIL = 15  # lines of what a failed worker has printed that are shown


@dataclass(frozen=True)
class Turn:
    """Some steps of a worker. memory: the most bytes that it has held while training, up to now; told: what else it
    said."""

    seconds: float
    positions: int
    memory: int
    told: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """Positions per second."""
        return self.positions / self.seconds


class Worker:
    """A training process under our control; use it in a `with`.

    command: what starts it, to which the path of the request is added; name: what a message calls it; environment: all
    variables that it sees. Raises UserError when it cannot be started, and wherever it ends before its time.
    """

    def __init__(
        self, name: str, command: Sequence[str], request: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="draftsmith-")
        folder = Path(self._folder.name)
        self._log = folder / "stderr.txt"
        write_json(folder / "request.json", dict(request))
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, str(folder / "request.json")],
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                )
        except OSError as error:
            self._folder.cleanup()
            raise UserError(f"{name} cannot be started: {command[0]} ({error.strerror}).") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()  # it keeps nothing that would need an orderly end
        self._process.communicate()
        self._folder.cleanup()

    def ready(self) -> dict[str, Any]:
        """What the worker is, once it has warmed up."""
        return self._answer(("loaded",))

    def turn(self, steps: int) -> Turn:
        """Let it train so many steps while we wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # why it has ended is told by its answer that does not come
            print(steps, file=self._process.stdin, flush=True)
        told = self._answer(("seconds", "positions", "memory"))
        return Turn(float(told.pop("seconds")), int(told.pop("positions")), int(told.pop("memory")), told)

    def _answer(self, keys: Sequence[str]) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise UserError(self._why_it_ended())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not set(keys) <= set(answer):
            raise UserError(f"{self.name} answered {line.strip()!r}, which lacks {', '.join(keys)}.")
        return answer

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines()
        if code == REFUSED and lines:
            return lines[-1]
        end = "".join(f"\n    {line}" for line in lines[-TAIL:])
        return f"{self.name} ended with code {code}; what it printed ends with:{end}"


def in_turn(workers: Sequence[Worker], steps: int, repeats: int) -> Iterator[list[Turn]]:
    """One turn of every worker, one after the other, as often as `repeats` says."""
    for _ in range(repeats):
        yield [worker.turn(steps) for worker in workers]


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))


def isolated() -> dict[str, str]:
    """The environment of a worker in another interpreter: no way to our modules, and no network."""
    seen = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONSAFEPATH": "1"}
    seen.pop("PYTHONPATH", None)
    return seen


# ---- inside a worker of our own ---------------------------------------------------------------------------------


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[int], dict[str, Any]]]]) -> None:
    """Be a worker. prepare: from the request to what `ready` tells and to what answers a turn of so many steps.

    A UserError ends the process as the protocol says.
    """
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    try:
        told, turn = prepare(request)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(int(line))), file=answers, flush=True)


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process holds now, and the most it has held since `forget_peak`; on CUDA the device's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(told["VmRSS"].split()[0]) * 1024, int(told["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak, peak


def forget_peak(device: torch.device) -> None:
    """Let the peak begin anew where the system can: what loading took is not what training takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # elsewhere the peak includes the loading
        Path("/proc/self/clear_refs").write_text("5")
