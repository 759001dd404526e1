"""Traffic: conversations, split for ever into train and held-out, and the folder that keeps them.

A conversation is a list of turns. A turn holds the messages that stand before one answer of the assistant (system, user
and tool messages); the answers are kept only where they are to be learnt from as they were logged, since otherwise the
target writes every one of them anew, in order, each after its own earlier answers. The module knows neither file
formats (`training.readers`) nor tokenizers: limits in tokens come later, when the target's template is known.
A conversation may also be token ids, with the stretches of them that are answers, in place of turns.

The split hashes the text of the first user message with SHA-256, or the ids before the first answer, so copies of a
conversation, and logs that repeat it with one more turn each time, stay on one side. The hash must never change:
`tests/test_traffic.py` pins it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.artifact import MANIFEST, UserError, read_manifest, sha256_file, write_atomic, write_manifest

Message = dict[str, Any]
REGENERATE, LOGGED = "regenerate", "logged"  # where answers come from
_TRAIN, _HELD_OUT, _QUARANTINE = "train.jsonl", "held_out.jsonl", "quarantine.jsonl"


@dataclass(frozen=True)
class Conversation:
    """One conversation: turns[w] are the messages that come before the assistant's answer number w; tools are the JSON
    schemas of what the assistant may call. A turn that brings the results of logged calls begins with the logged
    answer that called. logged: all messages with the logged answers, where these are wanted.

    Of token ids: ids are all of them, answers the (begin, end) of each supervised stretch, ascending, the first after
    position 0; it has no turns."""

    id: str
    slice: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()
    logged: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    answers: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many answers the assistant gives in it."""
        return len(self.answers) if self.ids else len(self.turns)

    def prompt_ids(self, answer: int = 0) -> tuple[int, ...]:
        """The ids before one of the answers, where it is token ids."""
        return self.ids[: self.answers[answer][0]]

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The prompt of the next answer, given all answers so far; where a turn brings a logged answer of its own, that
        stands there instead."""
        assert len(answers) < len(self.turns), f"{self.id} has only {len(self.turns)} turns"
        prompt = list(self.turns[0])
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            if not any("tool_calls" in message for message in turn):
                prompt.append({"role": "assistant", "content": answer})
            prompt += turn
        return prompt

    def first_text(self) -> str:
        """What the user said first, with white space made uniform, or the ids before the first answer: the text that
        the split hashes."""
        if self.ids:
            return " ".join(map(str, self.prompt_ids()))
        said = [message["content"] for message in self.turns[0] if message["role"] == "user"]
        return " ".join(" ".join(said).split())

    def characters(self) -> int:
        """Length of all its messages together."""
        return sum(len(message["content"]) for turn in self.turns for message in turn)

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Conversation:
        """What `to_row` wrote."""
        if "input_ids" in row:
            answers = stretches(row["loss_mask"])
            return Conversation(row["id"], row["slice"], (), ids=tuple(row["input_ids"]), answers=answers)
        turns = tuple(tuple(turn) for turn in row["turns"])
        more = (tuple(row.get(name, ())) for name in ("tools", "messages"))
        return Conversation(row["id"], row["slice"], turns, *more)

    def to_row(self) -> dict[str, Any]:
        """The row that `train.jsonl` and `held_out.jsonl` hold; the JSONL reader takes it too."""
        row = {"id": self.id, "slice": self.slice}
        if self.ids:
            mask = [0] * len(self.ids)
            for begin, end in self.answers:
                mask[begin:end] = [1] * (end - begin)
            return row | {"input_ids": list(self.ids), "loss_mask": mask}
        row["turns"] = [list(turn) for turn in self.turns]
        more = {"tools": list(self.tools), "messages": list(self.logged)}
        return row | {name: value for name, value in more.items() if value}


def stretches(mask: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """(begin, end) of each run of true values."""
    flags = [False, *map(bool, mask), False]
    edges = [place for place in range(len(flags) - 1) if flags[place] != flags[place + 1]]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Rejected:
    """A row set aside: the file it came from, the number of its line there (of the row, where rows are not lines; the
    first is 1), why, its text as it stood there, and for a near duplicate of which conversation it is one."""

    source: str
    line: int
    reason: str
    row: str
    of: str | None = None

    def to_row(self) -> dict[str, Any]:
        """The row that `quarantine.jsonl` holds."""
        return {key: value for key, value in self.__dict__.items() if value is not None}


@dataclass(frozen=True)
class Reading:
    """What a reader found. rows read = conversations + rejected + over_limit."""

    conversations: tuple[Conversation, ...]
    rejected: tuple[Rejected, ...]
    over_limit: int
    held_out: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """A finished traffic folder."""

    train: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]
    manifest: dict[str, Any]


def hash_of(purpose: str, text: str) -> str:
    """A hexadecimal SHA-256 that differs between purposes, so that one choice says nothing about another."""
    return hashlib.sha256(f"draftsmith {purpose} 1\n{text}".encode()).hexdigest()


def position(conversation: Conversation) -> float:
    """Where the conversation lies in [0, 1): below the held-out share means held-out. Never change this."""
    return int(hash_of("split", conversation.first_text())[:13], 16) / 16**13


def split(conversations: Iterable[Conversation], held_out: float) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held-out). A larger share moves conversations from train to held-out only, never back."""
    train: list[Conversation] = []
    held: list[Conversation] = []
    for conversation in conversations:
        (held if position(conversation) < held_out else train).append(conversation)
    return train, held


def fingerprint(conversations: Iterable[Conversation]) -> str:
    """SHA-256 over conversations in order: what a features folder remembers of its traffic."""
    result = hashlib.sha256()
    for conversation in conversations:
        result.update(json.dumps(conversation.to_row()).encode() + b"\n")
    return result.hexdigest()


def summary(rejected: Iterable[Rejected]) -> str:
    """Reasons with counts and the first line of each."""
    counts: Counter[str] = Counter()
    first: dict[str, int] = {}
    for item in rejected:
        counts[item.reason] += 1
        first.setdefault(item.reason, item.line)
    return "; ".join(f"{reason}: {count}, first in line {first[reason]}" for reason, count in counts.most_common())


def write_traffic(folder: str | Path, reading: Reading, *, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Split a reading and write the traffic folder; returns its manifest.

    Raises UserError when one side of the split would be empty or the folder holds other traffic.
    """
    folder = Path(folder)
    train, held = split(reading.conversations, reading.held_out)
    if not train or (reading.held_out > 0 and not held):
        empty = "held-out" if train else "train"
        raise UserError(
            f"With {len(reading.conversations)} conversations and traffic.held_out={reading.held_out} the "
            f"{empty} side is empty; give more traffic or another traffic.held_out."
        )
    print_of = {"train": fingerprint(train), "held_out": fingerprint(held)}
    if (folder / MANIFEST).is_file() and read_manifest(folder, "traffic")["fingerprints"] != print_of:
        raise UserError(f"{folder} holds other traffic than asked for now; choose another name= or delete {folder}.")
    rejected = [item.to_row() for item in reading.rejected]
    for name, rows in (
        (_TRAIN, map(Conversation.to_row, train)),
        (_HELD_OUT, map(Conversation.to_row, held)),
        (_QUARANTINE, rejected),
    ):
        write_atomic(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    counts = {
        "kept": len(reading.conversations),
        "quarantined": len(rejected),
        "over_limit": reading.over_limit,
    }
    body = {
        "rows": {"read": sum(counts.values()), **counts},
        "quarantined": dict(Counter(item.reason for item in reading.rejected).most_common()),
        "conversations": {"train": _per_slice(train), "held_out": _per_slice(held)},
        "held_out": reading.held_out,
        "fingerprints": print_of,
        "files": {name: sha256_file(folder / name) for name in (_TRAIN, _HELD_OUT, _QUARANTINE)},
        "reader": reading.arguments,
    }
    return write_manifest(folder, "traffic", body, config)


def _per_slice(conversations: Iterable[Conversation]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for conversation in sorted(conversations, key=lambda item: item.slice):
        entry = counts.setdefault(conversation.slice, {"conversations": 0, "turns": 0})
        entry["conversations"] += 1
        entry["turns"] += conversation.count
    return counts


def load_traffic(folder: str | Path) -> Traffic:
    """A traffic folder written by `write_traffic`; raises UserError when a file no longer has its
    checksum."""
    folder = Path(folder)
    manifest = read_manifest(folder, "traffic")
    sides: list[tuple[Conversation, ...]] = []
    for name in (_TRAIN, _HELD_OUT):
        path = folder / name
        if not path.is_file() or sha256_file(path) != manifest["files"][name]:
            raise UserError(
                f"{path} is missing or was changed after it was written; delete {folder} and read the traffic again."
            )
        with open(path, encoding="utf-8") as file:
            sides.append(tuple(Conversation.from_row(json.loads(line)) for line in file))
    return Traffic(sides[0], sides[1], manifest)
