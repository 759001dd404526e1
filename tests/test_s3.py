"""What s3:// answers when something is wrong with it is one sentence; nothing is made that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from heads.artifact import UserError
from scripts import store
from tests import e2e, s3_server
from tests.s3_server import BUCKET, S3Server
from tests.test_store_tools import make
from training import remote
from training.remote import download, open_store, upload


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server.running() as one:
        yield one


@pytest.fixture(autouse=True)
def as_before(server: S3Server) -> Iterator[None]:
    """No connection of a test outlives it."""
    yield
    s3_server.forget()


def said(url: str, folder: Path) -> set[str]:
    """What sending, fetching and reading say, each in one sentence."""
    sentences = set()
    for work in (
        lambda: upload(folder / "a", url),
        lambda: download(url, folder / "b"),
        lambda: open_store(url, folder / "cache"),
    ):
        with pytest.raises(UserError) as error:
            work()
        assert str(error.value).endswith(".") and "\n" not in str(error.value)
        sentences.add(str(error.value))
    return sentences


def test_a_missing_bucket_is_named_and_not_made(server: S3Server, tmp_path: Path) -> None:
    make(tmp_path / "a", 0)
    for _ in range(2):
        sentences = said("s3://mispelt/x", tmp_path)
        assert any("Cannot write to s3://mispelt/x (The specified bucket does not exist)" in one for one in sentences)
        assert any("There is no bucket mispelt for s3://mispelt/x" in one for one in sentences)
    assert any("holds no finished features" in one for one in _reads(f"s3://{BUCKET}/nothing", tmp_path))
    assert all("names no bucket; give s3://bucket/folder" in one for one in said("s3://", tmp_path))
    assert all('Invalid bucket name "no bucket"' in one for one in said("s3://no bucket/x", tmp_path))


def _reads(url: str, folder: Path) -> Iterator[str]:
    for work in (lambda: download(url, folder / "b"), lambda: open_store(url, folder / "cache")):
        with pytest.raises(UserError) as error:
            work()
        yield str(error.value)


def test_unknown_keys_and_no_keys(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", 0)
    server.check_keys(True)
    try:
        sentences = said(f"s3://{BUCKET}/x", tmp_path)
        assert all("Forbidden" in one and "look at the address, the credentials" in one for one in sentences)
    finally:
        server.check_keys(False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3_server.forget()
    assert all("Unable to locate credentials" in one for one in said(f"s3://{BUCKET}/x", tmp_path))


def test_no_server(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3_server.forget()
    assert all("Could not connect to the endpoint URL" in one for one in said(f"s3://{BUCKET}/x", tmp_path))


def test_a_fault_of_ours_stays_one(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the storage says becomes a sentence."""
    there = remote._Remote(f"s3://{BUCKET}/x")
    with pytest.raises(ZeroDivisionError), there._telling("read"):
        raise ZeroDivisionError


def test_a_large_file_goes_in_parts(server: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(range(256)) * (60 << 12))  # s3fs sends 50 MiB at a time
    there = remote._Remote(f"s3://{BUCKET}/large")
    there.send(path)
    assert there.size_of("large.bin") == path.stat().st_size
    (tmp_path / "back").mkdir()
    there.fetch("large.bin", tmp_path / "back", remote.sha256_file(path))


def test_the_command_says_it(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a", 0)
    words = ["features_dir=a", "upload=s3://mispelt/x"]
    assert "Cannot write to s3://mispelt/x" in e2e.sentence(store.run, e2e.config(*words, name="store"), capsys)
