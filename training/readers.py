"""Readers: files of traffic, row by row. A row that cannot be used is set aside with its reason and counted.

Rows: `{"messages": [{"role", "content"}, …]}`, or `{"turns": […]}` where a turn is a user's text or a list of
messages; `id` and `slice` are optional. Roles are system, user, assistant and tool; developer is read as
system.
* An assistant message only marks where an answer belongs; several in a row mark one place, and their content
  is not
  looked at. One before the first user message is a greeting that nobody asked for: it stays as written.
* Tool results are replayed as written, whatever the target answered before them.
* A row that offers tools is set aside: this reader cannot show them to the target as a server would.
* A row without an id gets one from its content, so a second, equal row is a duplicate.

The module does not know the split, tokenizers or models. The demonstration prompts are read in
`training.demo`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from heads.artifact import UserError
from training.traffic import Conversation, Message, Reading, Rejected, hash_of, summary

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RowError(ValueError):
    """A row that cannot be used; the message is the reason it is counted under."""


def read_jsonl(
    path: str | None,
    *,
    held_out: float = 0.1,
    limit: int | None = None,
    slice_field: str = "slice",
    default_slice: str = "traffic",
) -> Reading:
    """Read conversations from a JSONL file (also .gz); the module's docstring says what a row may look like.

    limit: how many conversations to keep per slice, chosen by a hash of their ids. slice_field: the row's
    field that names its slice; rows without it go to `default_slice`. Raises UserError when no row can be
    used.
    """
    if path is None:
        raise UserError("traffic=jsonl needs a file: set traffic.path=<file>.jsonl.")
    if not Path(path).is_file():
        found = "is a folder" if Path(path).is_dir() else "does not exist"
        raise UserError(f"The traffic file {path} {found}; set traffic.path= to a JSONL file.")
    read = Rows(slice_field=slice_field, default_slice=default_slice)
    read.add_file(Path(path))
    arguments = {
        "path": str(path),
        "limit": limit,
        "slice_field": slice_field,
        "default_slice": default_slice,
    }
    return read.finish(held_out=held_out, limits=limit, arguments={"reader": "jsonl", **arguments})


class Rows:
    """Takes rows in, one by one, and sorts them into conversations and rejected rows."""

    def __init__(self, *, slice_field: str = "slice", default_slice: str = "traffic") -> None:
        self._slice_field, self._default_slice = slice_field, default_slice
        self._kept: dict[str, Conversation] = {}
        self._rejected: list[Rejected] = []
        self._sources: list[str] = []

    def add_file(self, path: Path) -> None:
        """Every row of a JSONL file; blank lines are not rows."""
        self._sources.append(str(path))
        for number, line in _lines(path):
            if line is None:
                self._rejected.append(Rejected(str(path), number, "the compressed file is damaged from here on", ""))
            elif line.strip():
                self._add_line(str(path), number, line)

    def add(self, row: Any, *, source: str, line: int, text: str) -> None:
        """One decoded row; `text` is what the quarantine shows of it."""
        try:
            conversation = parse_row(row, slice_field=self._slice_field, default_slice=self._default_slice)
            if conversation.id in self._kept:
                raise RowError("duplicate of an earlier row" if row.get("id") is None else "duplicate id")
        except RowError as error:
            self._rejected.append(Rejected(source, line, str(error), text))
        else:
            self._kept[conversation.id] = conversation

    def _add_line(self, source: str, number: int, line: bytes) -> None:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace").rstrip("\r\n")
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            self._rejected.append(Rejected(source, number, "not UTF-8 text", text))
        except RecursionError:
            self._rejected.append(Rejected(source, number, "nested too deeply", text))
        except ValueError:  # json.JSONDecodeError, and a number with more digits than Python converts
            reason = "not JSON" if line.endswith(b"\n") else "not JSON (cut off in the last line)"
            self._rejected.append(Rejected(source, number, reason, text))
        else:
            self.add(row, source=source, line=number, text=text)

    def finish(
        self,
        *,
        held_out: float,
        limits: int | Mapping[str, int | None] | None = None,
        longest: int | None = None,
        arguments: dict[str, Any],
    ) -> Reading:
        """The reading, with at most `limits` conversations per slice, none of more than `longest` characters.

        Raises UserError when there is no usable row at all.
        """
        if not 0 <= held_out < 1:
            raise UserError(f"traffic.held_out={held_out} is not a share; choose 0 ≤ held_out < 1.")
        where = " and ".join(self._sources) or "the traffic"
        if not self._kept and not self._rejected:
            raise UserError(f"{where} is empty; give a file with one conversation per line.")
        if not self._kept:
            raise UserError(f"None of the rows of {where} can be used ({summary(self._rejected)}); mend the file.")
        short = [item for item in self._kept.values() if longest is None or item.characters() <= longest]
        chosen = _choose(short, limits)
        return Reading(tuple(chosen), tuple(self._rejected), len(self._kept) - len(chosen), held_out, arguments)


def parse_row(row: Any, *, slice_field: str = "slice", default_slice: str = "traffic") -> Conversation:
    """One row as a conversation; raises RowError with the reason when it is malformed."""
    if not isinstance(row, dict):
        raise RowError("not an object")
    if row.get("tools") or row.get("functions"):
        raise RowError("offers tools, which this reader cannot render")
    if "messages" in row:
        turns = _turns_of(row["messages"])
    elif "turns" in row:
        turns = _turns_of(_flatten(row["turns"]))
    else:
        raise RowError("no messages")
    if not turns or not any(message["role"] == "user" for message in turns[0]):
        raise RowError("no user message")
    label = row.get(slice_field, default_slice)
    name = row.get("id")
    if name is None:
        name = "sha256-" + hash_of("id", json.dumps(turns))[:24]
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        raise RowError("id is neither text nor a whole number")
    if not isinstance(label, str) or not label:
        raise RowError("slice is not text")
    return Conversation(_text(name), _text(label), tuple(tuple(turn) for turn in turns))


def _flatten(turns: Any) -> list[Any]:
    """A list of turns as messages, with an assistant's place after each."""
    if not isinstance(turns, list):
        raise RowError("turns is not a list")
    messages: list[Any] = []
    for turn in turns:
        messages += turn if isinstance(turn, list) else [{"role": "user", "content": turn}]
        messages.append({"role": "assistant"})
    return messages


def _turns_of(messages: Any) -> list[list[Message]]:
    """Cut a list of messages at the places where the assistant answers."""
    if not isinstance(messages, list):
        raise RowError("messages is not a list")
    turns: list[list[Message]] = []
    current: list[Message] = []
    for message in messages:
        if not isinstance(message, dict):
            raise RowError("a message is not an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RowError("unknown role")
        role = _ROLES[role]
        if role != "assistant":
            current.append({"role": role, "content": _content(message, may_be_empty=role != "user")})
        elif _is_asked(current):
            turns.append(current)
            current = []
        elif not turns:
            current.append({"role": role, "content": _content(message, may_be_empty=False)})
    return [*turns, current] if _is_asked(current) else turns


def _is_asked(messages: Iterable[Message]) -> bool:
    return any(message["role"] in ("user", "tool") for message in messages)


def _content(message: Mapping[str, Any], *, may_be_empty: bool) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RowError("content is not text")
    if not may_be_empty and not content.strip():
        raise RowError("content is empty")
    return _text(content)


def _text(value: str) -> str:
    """The text itself, if it can be written at all (JSON may smuggle in half of a surrogate pair)."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError("text is not valid Unicode") from error
    return value


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines of a file, packed or not; None in place of what a damaged archive does not give."""
    number = 0
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield number + 1, None


def _choose(conversations: Iterable[Conversation], limits: int | Mapping[str, int | None] | None) -> list[Conversation]:
    """The `limits` conversations of each slice whose ids hash lowest, in the order they came; a larger limit
    only adds."""
    kept = list(conversations)
    chosen: set[str] = set()
    for name in {conversation.slice for conversation in kept}:
        limit = limits.get(name) if isinstance(limits, Mapping) else limits
        if limit is not None and limit < 0:
            raise UserError(f"The limit of {limit} conversations for slice {name} is below 0; give a count or null.")
        ids = sorted((c.id for c in kept if c.slice == name), key=lambda key: (hash_of("limit", key), key))
        chosen.update(ids[:limit])
    return [conversation for conversation in kept if conversation.id in chosen]
