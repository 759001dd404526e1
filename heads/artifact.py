"""Artifacts on disk: atomic writes, manifests, provenance and the one-sentence error.

Every stage of the pipeline leaves a folder with a `manifest.json`. This module writes and reads those manifests
and makes sure that a crash never leaves half a file under its final name. It does not know what any artifact
contains.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "hydra-core")


class UserError(ValueError):
    """A mistake that the user can mend: one sentence saying what was given, what is allowed, what to do."""


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write `data` under a temporary name, flush it to the disk, then rename it to `path`.

    Raises UserError when the disk is full; the file that stood at `path` before is then untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        sync_folder(path.parent)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UserError(
            f"Cannot write {path}: {error.strerror}; free some space there or choose another folder."
        ) from error


@contextlib.contextmanager
def locked(folder: str | Path, doing: str) -> Iterator[None]:
    """Keep other processes from filling `folder` within the context; the lock lies beside it and ends with the process.

    doing: what they would do, such as "trains into". Raises UserError when another one has the lock. Where there can be
    no lock (a folder that is only read, some network disks) it goes without.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder.parent / f".{folder.name}.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process {doing} {folder}; wait until it has ended, or choose another name=."
            ) from error
        except OSError:
            pass
        yield


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename inside it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; keys keep their order."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path, what: str, remedy: str, needed: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON object in a file, such as the ones this program writes.

    what: the file in words; remedy: what to do when it is damaged, as the end of a sentence. Raises UserError when it
    cannot be read, is no JSON object (cut off, say) or lacks one of the `needed` keys.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}, {what}, is not there; {remedy}.") from error
    except ValueError as error:
        raise UserError(f"{path}, {what}, is damaged: it is not valid JSON ({error}); {remedy}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}, {what}, is damaged: it holds no JSON object; {remedy}.")
    if missing := [key for key in needed if key not in value]:
        raise UserError(f"{path}, {what}, is damaged: it lacks {', '.join(missing)}; {remedy}.")
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same with its own checksum under `digest`, for a JSON file that tells whether it is as it was written."""
    plain = json.loads(json.dumps(value))
    return {**plain, "digest": digest(plain)}


def seal_holds(value: Mapping[str, Any]) -> bool:
    """Whether a value is as `sealed` left it; what was written without a checksum is taken as it is."""
    bare = {key: one for key, one in value.items() if key != "digest"}
    return "digest" not in value or value["digest"] == digest(bare)


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value with sorted keys: the fingerprint of settings and of lists of strings."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def provenance(config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What made an artifact: command, commit, versions, machine, time and the resolved config."""
    commit, dirty = _commit()
    return {
        "argv": sys.argv,
        "commit": commit,
        "dirty": dirty,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": dict(config) if config is not None else None,
    }


def _commit() -> tuple[str | None, bool | None]:
    """The source tree's commit and whether it has uncommitted changes; (None, None) outside a repository."""
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(state.stdout.strip())


def write_manifest(
    folder: str | Path, kind: str, body: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `folder/manifest.json` last, when everything it speaks of is in place; returns what was written."""
    manifest = {"kind": kind, "format": FORMAT, **body, "provenance": provenance(config)}
    write_json(Path(folder) / MANIFEST, manifest)
    return manifest


def read_manifest(folder: str | Path, kind: str) -> dict[str, Any]:
    """The manifest of a finished artifact of this kind.

    Raises UserError when there is none, when it is of another kind or of an unknown format.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} holds no finished {kind} artifact (no {MANIFEST}); run the stage that makes it first."
        )
    manifest = read_json(path, f"the manifest of {folder}", f"delete {folder} and run its stage again")
    if manifest.get("kind") != kind or manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder} is a {manifest.get('kind')!r} artifact of format {manifest.get('format')!r}, "
            f"but {kind!r} of format {FORMAT} is needed; give the folder of that stage."
        )
    return manifest
