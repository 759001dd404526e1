"""A local S3 server for the tests, and a way to it for whoever asks s3fs. Not a test."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

BUCKET = "mine"


class S3Server:
    """moto's server on a free port, with one bucket."""

    def __init__(self) -> None:
        self._server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self._send("PUT", BUCKET)

    def check_keys(self, wanted: bool) -> None:
        """From now on let in only whom it knows, which is nobody; or everybody."""
        self._send("POST", "moto-api/reset-auth", b"0" if wanted else b"inf")

    def _send(self, method: str, place: str, body: bytes | None = None) -> None:
        kind = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{place}", body, kind, method=method)).close()

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def running() -> Iterator[S3Server]:
    """A server, asked by s3fs as long as the context lasts. Skips where s3fs or moto is not installed."""
    pytest.importorskip("s3fs")
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        forget()
        try:
            yield server
        finally:
            forget()
            server.stop()


def forget() -> None:
    """s3fs keeps its connections; a changed environment is for new ones."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
