"""The processes of one launch: those that a launcher promised but did not start, and how they wait for each other.

`accelerate launch --cpu --num_processes 2` starts one process only (several CPU processes need mpirun
there), and says nothing about it. The process can tell: it has the address of a rendezvous, but no rank. The
first of the ranks then starts the others itself, and they end with it.

It does not know what the processes do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from heads.artifact import UserError

_RANKS = ("RANK", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_GRACE = 30.0  # seconds that the others may go on after the first process
_DEFAULT_PORT = "29500"
_FIRST_ENDS = "DRAFTSMITH_FIRST_ENDS"  # the end of a pipe that closes when the process that started this one ends
_WAIT = timedelta(days=30)  # for the slowest process; one that has ended is noticed at once


def processes_missing() -> bool:
    """Whether this process was started as one of several without being told which."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_ADDR" in os.environ and not any(name in os.environ for name in _RANKS)


def start_missing_processes() -> None:
    """Become rank 0 of the promised processes and start the others with the same command.

    To be called before anything else, and without effect where all processes are there. Raises UserError
    when the number cannot be told.
    """
    if _FIRST_ENDS in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[_FIRST_ENDS]),), daemon=True).start()
    if not processes_missing():
        return
    count = requested_processes(_command_of_parent())
    if count is None:
        raise_missing()
    if os.environ.get("MASTER_PORT", _DEFAULT_PORT) == _DEFAULT_PORT:
        os.environ["MASTER_PORT"] = str(_free_port())
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    told, _held = os.pipe()  # the other end closes with this process, however it ends
    for rank in range(1, count):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
        environment = {**os.environ, **ranks, _FIRST_ENDS: str(told)}
        child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment, pass_fds=(told,))
        atexit.register(wait_or_end, child)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", **common})


@atexit.register
def _leave() -> None:
    """End the process group while the interpreter is whole; else a thread of Gloo that holds a tensor aborts it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def wait_or_end(child: subprocess.Popen[bytes], grace: float = _GRACE) -> None:
    """Let a process of the launch finish; one that still waits for this process, which has failed, is ended."""
    try:
        child.wait(timeout=grace)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


def raise_missing() -> NoReturn:
    """Refuse to train alone what was meant for several processes."""
    raise UserError(
        "accelerate launch started one CPU process although several were asked for; give --num_processes or "
        "--config_file on its command line, or use torchrun --nproc_per_node instead."
    )


def requested_processes(command: Sequence[str]) -> int | None:
    """N of `--num_processes N` in a launcher's command line, or of the file that its `--config_file` names."""
    words = [word for argument in command for word in argument.split("=", 1)]
    options = {option.replace("-", "_"): value for option, value in zip(words, words[1:], strict=False)}
    value, path = options.get("__num_processes", ""), Path(options.get("__config_file", ""))
    if value.isdigit():
        return int(value)
    if not path.is_file():
        return None
    from accelerate.commands.config.config_args import load_config_from_file  # slow to import, and seldom needed

    return int(load_config_from_file(str(path)).num_processes)


def _command_of_parent() -> list[str]:
    """The launcher's command line, empty where the system does not show it."""
    path = Path(f"/proc/{os.getppid()}/cmdline")
    return path.read_text().split("\0") if path.is_file() else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PeerFailed(UserError):
    """Another process of the launch has failed and says why."""


class Peers:
    """The processes of one launch at one piece of work: this one's rank, and how many there are."""

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None) -> None:
        self.rank, self.count, self._group = rank, count, group

    @classmethod
    def of_launch(cls, *, cpu: bool) -> Peers:
        """Those that a launcher started, or this process alone; cpu: whether they compute without an accelerator."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        import torch.distributed as dist
        from accelerate import PartialState

        state = PartialState(cpu=cpu)  # the one that training goes on with
        # NCCL would keep the devices busy with waiting, and give up after minutes.
        return cls(state.process_index, state.num_processes, dist.new_group(backend="gloo", timeout=_WAIT))

    @property
    def main(self) -> bool:
        """Whether this is the process that speaks for all."""
        return self.rank == 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Work after which all wait for all; steps are not nested.

        Where it fails in some of them the error goes on in the first of these and PeerFailed is raised in all others.
        Raises UserError when another process has ended.
        """
        try:
            yield
        except Exception as error:
            failed: list[bool] = []
            with contextlib.suppress(UserError):  # what has happened here is the news, not who is gone
                failed = self._gather(True)
            if any(failed[: self.rank]):
                raise PeerFailed from error
            raise
        if any(self._gather(False)):
            raise PeerFailed

    def first(self, value: Any) -> Any:
        """The value that the first process has."""
        return self._gather(value)[0]

    def _gather(self, value: Any) -> list[Any]:
        """The values of all processes, once all are here."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        everywhere: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(everywhere, value, group=self._group)
        except RuntimeError as error:
            raise UserError(
                "Another process of this launch has ended before its work was done; the same command goes on from here."
            ) from error
        return everywhere
