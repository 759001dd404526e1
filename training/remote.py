"""Feature stores in object storage (s3://, gs://, hf://, … by fsspec): sent, fetched, and read shard by shard.

A shard goes before its index and the manifest last, as on a disk; what is there with its checksum is not sent or
fetched again. What is read lies in a local folder, mapped into memory like any store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from heads.artifact import MANIFEST, UserError, digest, read_manifest, sha256_file, write_atomic
from training.store import FeatureStore
from training.store_writer import SETTINGS

# Object storage whose addresses begin with a bucket, and the package that fsspec reads it with. A bucket is the user's
# to make: fsspec would make one out of a misspelt name.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), f"s3fs=={fsspec.__version__}"),  # these two are released together with fsspec
    **dict.fromkeys(("gs", "gcs"), f"gcsfs=={fsspec.__version__}"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
# Whose errors are about the storage although they are no OSError: no credentials, no server, no such name.
_LIBRARIES = {
    *("botocore", "aiobotocore", "aiohttp", "google", "gcsfs", "azure", "adlfs"),
    *("huggingface_hub", "httpx", "httpx2"),
}


def is_remote(place: str | Path) -> bool:
    """Whether this is an address rather than a folder."""
    return "://" in str(place)


def open_store(place: str | Path, cache: str | Path) -> FeatureStore:
    """The store in a folder, or at an address: then its shards come into a folder under `cache` as they are read, each
    compared with its checksum. Raises UserError when there is none, or it cannot be reached."""
    if not is_remote(place):
        return FeatureStore.open(place)
    remote = _Remote(str(place))
    manifest = remote.bytes_of(MANIFEST)
    if manifest is None:
        raise remote.unfinished()
    # Other contents at the same address have another folder.
    folder = Path(cache) / digest([str(place), manifest.decode(errors="replace")])[:16]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).is_file():
        write_atomic(folder / MANIFEST, manifest)
    stored = read_manifest(folder, "features")
    sums = {f"{one['name']}.safetensors": one["sha256"] for one in stored["shards"]} | stored["files"]

    def fetch(name: str) -> None:
        remote.fetch(name, folder, sums[name])

    for name in stored["files"]:
        if not (folder / name).is_file():
            fetch(name)
    return FeatureStore.open(folder, fetch)


def upload(folder: str | Path, url: str) -> tuple[int, int]:
    """Send a finished store; returns how many shards were sent, and how many were there already.

    Raises UserError when another store is at the address, or a file here is not what was written.
    """
    store, remote = FeatureStore.open(folder), _Remote(url)
    there = remote.bytes_of(SETTINGS)
    if there is not None and there != (store.folder / SETTINGS).read_bytes():
        raise UserError(f"{url} holds other features than {folder}; choose another address.")
    remote.send(store.folder / SETTINGS)
    sent = 0
    for shard in store.manifest["shards"]:
        path = store.folder / f"{shard['name']}.safetensors"
        index = path.with_suffix(".json")
        if remote.bytes_of(index.name) == index.read_bytes() and remote.size_of(path.name) == shard["bytes"]:
            continue
        if sha256_file(path) != shard["sha256"]:
            raise UserError(f"{path} changed after it was written; delete it and collect again before you upload.")
        remote.send(path)
        remote.send(index)
        sent += 1
    for name in store.manifest["files"]:
        remote.send(store.folder / name)
    remote.send(store.folder / MANIFEST)
    return sent, len(store.manifest["shards"]) - sent


def download(url: str, folder: str | Path) -> tuple[int, int]:
    """Fetch a finished store; returns how many shards were fetched, and how many were here already.

    Raises UserError when there is none, when the folder holds another one, or when what arrives is damaged.
    """
    folder, remote = Path(folder), _Remote(url)
    manifest, settings = remote.bytes_of(MANIFEST), remote.bytes_of(SETTINGS)
    if manifest is None or settings is None:
        raise remote.unfinished()
    own = folder / SETTINGS
    if (own.read_bytes() != settings) if own.is_file() else (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} holds something else than {url}; choose another name= or delete it.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(own, settings)
    with tempfile.TemporaryDirectory() as aside:
        write_atomic(Path(aside) / MANIFEST, manifest)
        stored = read_manifest(aside, "features")
    fetched = 0
    for shard in stored["shards"]:
        path, index = folder / f"{shard['name']}.safetensors", f"{shard['name']}.json"
        if not path.is_file() or sha256_file(path) != shard["sha256"]:
            remote.fetch(path.name, folder, shard["sha256"])
            fetched += 1
        remote.fetch(index, folder)
    for name, sha256 in stored["files"].items():
        remote.fetch(name, folder, sha256)
    write_atomic(folder / MANIFEST, manifest)
    return fetched, len(stored["shards"]) - fetched


class _Remote:
    """The files at one address. Whatever goes wrong there is one sentence."""

    def __init__(self, url: str) -> None:
        self.url = url
        kind = url.partition("://")[0]
        try:
            self.files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            remedy = f"`pip install {_PACKAGES[kind]}`" if kind in _PACKAGES else "install it"
            raise UserError(f"{url} needs a package that is not here ({error}); {remedy}.") from error
        except ValueError as error:
            raise UserError(
                f"{url} is no address that fsspec knows ({error}); give s3://bucket/folder, say."
            ) from error
        self.root = root.rstrip("/")
        self._bucket = self.root.partition("/")[0] if kind in _PACKAGES else None
        if self._bucket == "":
            raise UserError(f"{url} names no bucket; give {kind}://bucket/folder.")

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            what = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"Cannot {doing} {self.url} ({what}); look at the address, the credentials and the network, then "
                f"repeat the command, which goes on from there."
            ) from error

    def unfinished(self) -> UserError:
        """What is to be said where no manifest was found."""
        with self._telling("read"):
            if self._bucket is not None and not self.files.exists(self._bucket):
                return UserError(f"There is no bucket {self._bucket} for {self.url}; look at the address, or make it.")
        return UserError(
            f"{self.url} holds no finished features (no {MANIFEST}); upload them with scripts.store first."
        )

    def bytes_of(self, name: str) -> bytes | None:
        """A small file's content; None when it is not there."""
        with self._telling("read"):
            try:
                content: bytes = self.files.cat_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return None
            return content

    def size_of(self, name: str) -> int | None:
        """Bytes of a file; None when it is not there."""
        with self._telling("read"):
            try:
                facts: dict[str, Any] = self.files.info(f"{self.root}/{name}")
            except FileNotFoundError:
                return None
            return facts["size"]

    def send(self, path: Path) -> None:
        """Put a file there under its own name."""
        with self._telling("write to"):
            if self._bucket is None:
                self.files.makedirs(self.root, exist_ok=True)
            self.files.put_file(str(path), f"{self.root}/{path.name}")

    def fetch(self, name: str, folder: Path, sha256: str | None = None) -> None:
        """Bring a file into a folder, whole or not at all. Raises UserError when its checksum is another one."""
        handle, partial = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".tmp")
        os.close(handle)
        try:
            with self._telling("read"):
                self.files.get_file(f"{self.root}/{name}", partial)
            if sha256 is not None and sha256_file(partial) != sha256:
                raise UserError(f"{name} at {self.url} is damaged: it is not what was uploaded; upload it again.")
            os.chmod(partial, 0o644)
            os.replace(partial, folder / name)
        finally:
            Path(partial).unlink(missing_ok=True)
