"""A headless Chromium over its DevTools protocol, spoken through a pipe: no library, no port, no network.

`Browser.open` lays a page out as a device of a given width would, and gives what a test needs: what a script in the
page finds, what the console complained of, a picture.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium on this machine; get one with `apt-get install -y chromium`, then this test runs"
SECONDS = 60.0  # for one answer; the machine may be busy


class Browser:
    """One page of one browser process, which ends with `running`."""

    def __init__(self, process: subprocess.Popen[bytes], into: int, out_of: int) -> None:
        self.process, self.into, self.out_of = process, into, out_of
        self.complaints: list[str] = []
        self._left, self._number, self._events = b"", 0, [""]
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, *, width: int, dark: bool = False, height: int = 900, media: str = "") -> None:
        """Load a page afresh. Complaints begin anew. `media`: "print" for the layout on paper."""
        self.complaints.clear()
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=file.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._take(self._read())

    def find(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        answer = self._call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._take(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select([self.out_of], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self.out_of, 1 << 20) if ready else b""
            assert part, f"the browser says nothing: {self.process.poll()}"
            self._left += part
        line, _, self._left = self._left.partition(b"\0")
        return json.loads(line)

    def _take(self, message: dict[str, Any]) -> None:
        """Keep of an event what a test may ask for."""
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(f"fetches {params['request']['url']}")


def _pipe() -> list[int]:
    """A pipe at numbers that do not lie where a child wants its own."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@contextmanager
def running(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in `folder`. Skips the test where no browser is installed."""
    name = next((found for name in NAMES if (found := shutil.which(name))), None)
    if name is None:
        pytest.skip(MISSING)
    (from_us, into), (out_of, from_it) = _pipe(), _pipe()
    # The protocol wants its pipe at 3 and 4; the shell puts it there.
    shell = f'exec 3<&{from_us} 4>&{from_it}; exec "$@"'
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [name, *options, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", *command],
        pass_fds=(from_us, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(from_it)
    try:
        yield Browser(process, into, out_of)
    finally:
        os.close(into)  # with its pipe closed the browser ends by itself
        os.close(out_of)
        process.terminate()
        process.wait(timeout=SECONDS)
