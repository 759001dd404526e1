"""Sources: where rows of traffic come from. Files, folders and globs of them, data sets on the Hub.

A row is a non-blank line of a JSONL or text file, a value of a JSON file (an element of its list, or one of the
values that stand one after another), a row of a Parquet file or of a data set. What cannot be read any further,
because a file is cut off or damaged, is one row more, and the last of its file.

The module knows containers and packing; it does not know what a row means.
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from heads.artifact import UserError
from training.json_stream import split_values

HUB = "hf://datasets/"
_LINES, _JSON, _PARQUET, _TEXT = (".jsonl", ".ndjson"), (".json",), (".parquet",), (".txt",)
_PACKED = (".gz", ".zst")
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
_PATIENCE = 30.0  # seconds
DAMAGED = "the compressed file is damaged from here on"


@dataclass(frozen=True)
class RawRow:
    """A row as it was found: the source, its number there (of the line, else of the row; the first is 1), its text for
    the quarantine, and its value or the problem that it has none for. `warning` is for the user to see."""

    source: str
    line: int
    text: str
    value: Any = None
    problem: str | None = None
    warning: str | None = None


def find_files(path: str, *, text: bool = False) -> list[Path]:
    """The files that a path names: itself, those in a folder at any depth, or those that a glob finds; sorted.

    text: whether the text files of a folder hold prompts, too (they may be its licence). Raises UserError when there
    are none.
    """
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        known = (*_LINES, *_JSON, *_PARQUET, *(_TEXT if text else ()))
        inside = sorted(file for file in place.rglob("*") if file.is_file() and _kind(file) in known)
        files = [file for file in inside if not any(part[0] == "." for part in file.relative_to(place).parts)]
        missing = f"is a folder that holds no file ending in {', '.join(known)} (or these and {' or '.join(_PACKED)})"
    else:
        files = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if Path(name).is_file()]
        missing = "does not exist"
    if not files:
        raise UserError(f"The traffic {path} {missing}; set traffic.path= to a file, a folder, a glob or {HUB}<name>.")
    return files


def read_file(path: Path) -> Iterator[RawRow]:
    """The rows of a file, by its name, or by its first bytes where the name does not say what it holds."""
    kind = _kind(path)
    if kind in _PARQUET:
        return _parquet(path)
    if kind in _TEXT:
        return _lines(path, lambda line: line.strip())
    if kind in _LINES or _first_line_is_json(path):
        return _lines(path, json.loads)
    return _values(path)


def read_hub(name: str, *, config: str | None, split: str) -> Iterator[RawRow]:
    """The rows of a data set on the Hub, one by one as they come over the wire; nothing is kept on the disk.

    Raises UserError when it cannot be reached, whenever that is.
    """
    _check_reachable(name)
    import datasets  # slow to import and seldom needed

    number = 0
    try:
        stream = datasets.load_dataset(name.removeprefix(HUB), config, split=split, streaming=True)
        for number, row in enumerate(stream, start=1):
            yield _decoded(name, number, row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"The data set {name} cannot be read after {number} rows ({_first_line(error)}); correct traffic.path=, "
            f"traffic.hub_config= or traffic.hub_split=, or mend the connection."
        ) from error


def _check_reachable(name: str) -> None:
    """One question without retries, where the library would ask again and again for half a minute. Raises UserError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    from heads.target_files import HUB_FAULTS

    try:
        HfApi().dataset_info(name.removeprefix(HUB), timeout=_PATIENCE)
    except HUB_FAULTS as error:
        offline = isinstance(error, OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE=1 is set, and it is read over the wire" if offline else _first_line(error)
        remedy = "unset HF_HUB_OFFLINE" if offline else "correct traffic.path=, log in with `hf auth login`, or connect"
        raise UserError(
            f"The data set {name} cannot be reached ({reason.removesuffix('.')}); {remedy}, or give files of it as "
            f"traffic.path=."
        ) from error


def _parquet(path: Path) -> Iterator[RawRow]:
    import datasets  # slow to import and seldom needed

    number = 0
    try:
        stream = datasets.load_dataset("parquet", data_files=[glob.escape(str(path))], split="train", streaming=True)
        for number, row in enumerate(stream, start=1):
            yield _decoded(str(path), number, row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        problem = "the Parquet file is damaged from here on"
        yield RawRow(str(path), number + 1, "", problem=problem, warning=f"{path}: {_first_line(error)}")


def _decoded(source: str, number: int, row: Any) -> RawRow:
    value = _without_nulls(row)
    return RawRow(source, number, json.dumps(value, default=str), value)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every row the fields of all others, filled up with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _lines(path: Path, decode: Callable[[str], Any]) -> Iterator[RawRow]:
    number = 0
    with _opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    end = "" if line.endswith(b"\n") else " (cut off in the last line)"
                    yield _row(str(path), number, line, decode, end)
        except _DAMAGE:
            yield RawRow(str(path), number + 1, "", problem=DAMAGED, warning=f"{path}: {DAMAGED}, line {number + 1}")


def _values(path: Path) -> Iterator[RawRow]:
    """The values of a JSON file. Where the file is cut off or damaged, the warning gives the place in bytes."""
    damaged, number, cut = False, 0, False

    def read(size: int) -> bytes:
        nonlocal damaged
        try:
            return file.read(size)
        except _DAMAGE:
            damaged = True
            return b""

    with _opened(path) as file:
        for number, piece in enumerate(split_values(read), start=1):
            if piece.broken is None:
                yield _row(str(path), number, piece.raw, json.loads)
                continue
            cut, reason = True, DAMAGED if damaged else piece.broken
            warning = (
                f"{path}: {reason}, in row {number}, which begins at byte {piece.start}; the rows before it are read"
            )
            text = piece.raw.decode(errors="replace")
            problem = DAMAGED if damaged else piece.broken.partition(" at byte ")[0].partition(" (")[0]
            yield RawRow(str(path), number, text, problem=problem, warning=warning)
    if damaged and not cut:
        yield RawRow(str(path), number + 1, "", problem=DAMAGED, warning=f"{path}: {DAMAGED}, after row {number}")


def _row(source: str, number: int, raw: bytes, decode: Callable[[str], Any], end: str = "") -> RawRow:
    """One row out of its bytes; a byte order mark may stand before the first. `end`: said of what is not JSON."""
    coding = "utf-8-sig" if number == 1 else "utf-8"
    text = raw.decode(coding, errors="replace").rstrip("\r\n")
    try:
        return RawRow(source, number, text, decode(raw.decode(coding)))
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # json.JSONDecodeError, and a number with more digits than Python converts
        problem = f"not JSON{end}"
    return RawRow(source, number, text, problem=problem)


def _kind(path: Path) -> str:
    """The suffix that says what a file holds, without the one that says how it is packed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _opened(path: Path) -> BinaryIO:
    """A file's bytes, unpacked."""
    packing = path.suffix.lower()
    if packing == ".gz":
        with open(path, "rb") as file:
            start = file.read(2)
        if start not in (b"", b"\x1f\x8b"):
            raise UserError(f"{path} is not gzip, though its name ends in .gz; rename it, or pack it with gzip.")
        return cast(BinaryIO, gzip.open(path, "rb"))
    if packing == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zst(path)))
    return open(path, "rb")


class _Zst(io.RawIOBase):
    """A .zst file unpacked. The library's own reader takes a file that is cut off for one that ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._packed, self._ready = b"", b""
        self._begun = False  # whether bytes of the frame have been read

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(1 << 17)
            if not self._packed:
                if self._begun:
                    raise EOFError("the last frame is not complete")
                return 0
            self._begun = True
            self._ready = self._frame.decompress(self._packed)
            self._packed = b""
            if self._frame.eof:  # another frame may follow
                self._packed, self._begun = self._frame.unused_data, False
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)], self._ready = taken, self._ready[len(taken) :]
        return len(taken)


def _first_line_is_json(path: Path) -> bool:
    """Whether a file of values is one of lines: its first line is an object, whole, and another line follows."""
    try:
        with _opened(path) as file:
            lines = (line for line in iter(lambda: file.readline(1 << 20), b"") if line.strip())
            first, second = itertools.islice(itertools.chain(lines, (b"", b"")), 2)
            return second != b"" and isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (*_DAMAGE, ValueError, RecursionError):
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
