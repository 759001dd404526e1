"""Whole-file JSON as a stream: the values of a list, or values one after another, cut out of the bytes one by one.

Only brackets, strings and commas are looked at here; what a value means is for `json.loads` to say. So each value
is known by its place in the file and by its bytes, a value that is not JSON costs itself and not the rest, and
memory holds one value at a time, however large the file is. A file that ends in mid-value gives all values before.

The module knows neither files nor rows.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{},]', re.DOTALL)
_CLOSES = {b"]": b"[", b"}": b"{"}
_BETWEEN = b" \t\r\n,"
_BLANK = b" \t\r\n"
_CHUNK = 1 << 20
LONGEST = 1 << 26  # bytes of one value: a bracket that is lost must not pull a whole dump into memory
SHOWN = 10_000  # bytes that are kept of what cannot be read


@dataclass(frozen=True)
class Piece:
    """The bytes of one value from `start` on. `broken`: why it is none and nothing can be read after it."""

    start: int
    raw: bytes
    broken: str | None = None


class _Broken(Exception):
    """The file cannot be cut into values any more."""


class _Cutter:
    """Takes bytes in, gives values out; keeps only the bytes of the value that is not complete yet."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.base = 0  # where data begins in the file
        self._begin = 0  # where the value begins that is being read, within data, as is the next
        self._seen = 0  # everything before has been looked at
        self._open: list[bytes] = []
        self._in_list = False

    @property
    def inside(self) -> bool:
        """Whether a list or a value is open."""
        return bool(self._open)

    @property
    def pending(self) -> int:
        """How many bytes wait for the end of their value."""
        return len(self.data) - self._begin

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        """The values that are complete with this chunk. Raises _Broken at a bracket that closes another one."""
        del self.data[: self._begin]
        self.base, self._seen, self._begin = self.base + self._begin, self._seen - self._begin, 0
        self.data += chunk
        for token in _TOKEN.finditer(self.data, self._seen):
            mark = token.group()
            if mark[:1] == b'"' and not token[1]:
                break  # the string goes on in the next chunk
            self._seen = token.end()
            if mark in (b"[", b"{"):
                yield from self._opened(mark, token.start())
            elif mark in _CLOSES:
                yield from self._closed(mark, token.start())
            elif mark == b"," and self._in_list and len(self._open) == 1:
                yield self._cut(token.start())
                self._begin = self._seen

    def _opened(self, mark: bytes, place: int) -> Iterator[Piece]:
        if not self._open:
            stray = self._cut(place)
            if stray.raw:
                yield stray
            self._in_list = mark == b"["
            self._begin = self._seen if self._in_list else place
        self._open.append(mark)

    def _closed(self, mark: bytes, place: int) -> Iterator[Piece]:
        if not self._open or self._open.pop() != _CLOSES[mark]:
            raise _Broken(f"a bracket closes nothing at byte {self.base + place}")
        if not self._open:
            piece = self._cut(place if self._in_list else self._seen)
            if piece.raw:  # nothing stands between the last comma, or the opening bracket, and the closing one
                yield piece
            self._in_list, self._begin = False, self._seen

    def _cut(self, end: int) -> Piece:
        raw = bytes(self.data[self._begin : end])
        within = raw.strip(_BLANK if self._open or self._in_list else _BETWEEN)
        return Piece(self.base + self._begin + (raw.find(within) if within else 0), within)

    def rest(self) -> Piece:
        """What has been taken in and not given out."""
        piece = self._cut(len(self.data))
        return Piece(piece.start, piece.raw[:SHOWN])


def split_values(read: Callable[[int], bytes]) -> Iterator[Piece]:
    """The values of a JSON file: the elements of its list, or of each of its lists, and whatever stands outside.

    read: gives so many bytes at most, none at the end of the file. Where the file ends inside a list or a value, or
    cannot be cut into values any more, the last piece says so; it is one row, however much it holds.
    """
    cutter, size = _Cutter(), 0
    try:
        while chunk := read(max(_CHUNK, cutter.pending)):
            if size == 0 and chunk.startswith(codecs.BOM_UTF8):
                cutter.base, size = len(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
                chunk = chunk[size:]
            size += len(chunk)
            yield from cutter.feed(chunk)
            if cutter.pending > LONGEST:
                raise _Broken(f"a value has more than {LONGEST} bytes")
    except _Broken as error:
        rest = cutter.rest()
        yield Piece(rest.start, rest.raw, f"not JSON from here on ({error})")
        return
    rest = cutter.rest()
    if cutter.inside:
        yield Piece(rest.start, rest.raw, f"the file is cut off at byte {size}")
    elif rest.raw:
        yield rest
