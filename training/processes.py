"""The processes that a launcher promised but did not start.

`accelerate launch --cpu --num_processes 2` starts one process only (several CPU processes need mpirun
there), and says nothing about it. The process can tell: it has the address of a rendezvous, but no rank. The
first of the ranks then starts the others itself.

It does not know what the processes do.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from heads.artifact import UserError

_RANKS = ("RANK", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_DEFAULT_PORT = "29500"


def processes_missing() -> bool:
    """Whether this process was started as one of several without being told which."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_ADDR" in os.environ and not any(name in os.environ for name in _RANKS)


def start_missing_processes() -> None:
    """Become rank 0 of the promised processes and start the others with the same command.

    To be called before anything else, and without effect where all processes are there. Raises UserError
    when the number cannot be told.
    """
    if not processes_missing():
        return
    count = requested_processes(_command_of_parent())
    if count is None:
        raise_missing()
    if os.environ.get("MASTER_PORT", _DEFAULT_PORT) == _DEFAULT_PORT:
        os.environ["MASTER_PORT"] = str(_free_port())
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for rank in range(1, count):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
        child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, **ranks})
        atexit.register(child.wait)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", **common})


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
