"""Pushing an export, against a stand-in of the Hub's API on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from heads.artifact import UserError
from heads.export.folder import check_export, export_head
from heads.export.hub import push
from tests.test_head_checkpoint import FINGERPRINT, tiny_head


class Hub(BaseHTTPRequestHandler):
    """Takes files into `stored` by (repository, path); made: the repositories that were asked for."""

    made: list[dict[str, Any]]
    stored: dict[tuple[str, str], bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        repository = "/".join(self.path.split("/")[3:5])
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            if asked.get("organization") == "others":
                return self.answer(403, {"error": "Forbidden"})
            self.made.append(asked)
            return self.answer(200, {"url": f"{constants.ENDPOINT}/{asked['organization']}/{asked['name']}"})
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return self.answer(200, {"files": [{**one, "shouldIgnore": False, "oid": None} for one in files]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.stored[repository, line["value"]["path"]] = content
            url = f"{constants.ENDPOINT}/{repository}/commit/1"
            return self.answer(200, {"commitUrl": url, "commitOid": "1", "hookOutput": "", "success": True})
        return self.answer(200, {"errors": [], "warnings": []})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name that http.server has
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    served = type("Served", (Hub,), {"made": [], "stored": {}})
    server = HTTPServer(("127.0.0.1", 0), served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    server.shutdown()
    server.server_close()


def test_what_is_pushed_is_the_export_and_nothing_else(tmp_path: Path, hub: type[Hub]) -> None:
    folder = tmp_path / "export"
    manifest = export_head(tiny_head(), folder, target_fingerprint=FINGERPRINT, target_path="t")
    (folder / "notes.txt").write_text("mine")
    assert push(folder, "org/name", manifest).endswith("/org/name/commit/1")
    (made,) = hub.made
    assert (made["organization"], made["name"], made["visibility"]) == ("org", "name", "private")
    copy = tmp_path / "copy"
    copy.mkdir()
    for (repository, path), content in hub.stored.items():
        assert repository == "org/name"
        (copy / path).write_bytes(content)
    assert {path.name for path in copy.iterdir()} == {*manifest["files"], "manifest.json"}
    assert check_export(copy, head=tiny_head()) == manifest


@pytest.mark.parametrize("repository", ["others/name", "no such name"])
def test_what_the_hub_refuses_is_one_sentence(tmp_path: Path, hub: type[Hub], repository: str) -> None:
    manifest = export_head(tiny_head(), tmp_path / "export", target_fingerprint=FINGERPRINT, target_path="t")
    with pytest.raises(UserError, match=rf"push={repository} failed .* give org/name of a repository"):
        push(tmp_path / "export", repository, manifest)
    assert not hub.stored


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are those of whatever library asks."""
    manifest = export_head(tiny_head(), tmp_path / "export", target_fingerprint=FINGERPRINT, target_path="t")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"push=org/name failed .* give org/name of a repository"):
        push(tmp_path / "export", "org/name", manifest)
