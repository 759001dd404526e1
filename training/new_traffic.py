"""Traffic that came after a run: what of it is new to the lineage of heads, and what both the last and the next head
are measured on.

Both sides of the split are hashed alike in all runs, so with one held-out share nothing that any head of the lineage
learned from is ever held out, and nothing held out is ever learned from. The module knows no head and no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.artifact import UserError, write_atomic
from training.traffic import Conversation, Reading, Traffic, hash_of, load_traffic, position

SEEN = "seen.txt"  # beside the folders of a refreshed run: hashes of what earlier heads of the lineage learned from


@dataclass(frozen=True)
class NewTraffic:
    """The new conversations beside the old held-out ones, as a reading that splits into the two sides; and of what was
    read: how many had been learned from, or held out, before."""

    reading: Reading
    seen: frozenset[str]
    old_held_out: frozenset[str]
    learned_before: int
    held_out_before: int


def since(run: str | Path, reading: Reading) -> NewTraffic:
    """What a reading holds beyond the traffic of the finished `run` (its folder) and of the runs before that one.

    A conversation is known by its messages and tools, whatever its id; one that has grown by a turn is new, and lies on
    the side on which it lay. Raises UserError where the split would differ from that of `run`, and where nothing to
    train on is new.
    """
    old = load_traffic(Path(run) / "traffic")
    _check_split(old.manifest, reading, run)
    seen = _seen(Path(run)) | {content_hash(one) for one in old.train}
    held = {content_hash(one) for one in old.held_out}
    taken = {one.id for one in old.held_out}
    fresh = []
    for one in reading.conversations:
        if (name := content_hash(one)) not in seen | held:
            fresh.append(replace(one, id=f"{one.id} {name[:12]}") if one.id in taken else one)
    if not any(position(one) >= reading.held_out for one in fresh):
        raise UserError(
            f"None of the {len(reading.conversations)} conversations that were read is new to train on since {run}; "
            f"give the traffic that came after it."
        )
    known = [content_hash(one) for one in reading.conversations]
    counts = {"learned_before": sum(one in seen for one in known), "held_out_before": sum(one in held for one in known)}
    arguments = {**reading.arguments, "since": str(run), **counts}
    both = replace(reading, conversations=(*old.held_out, *fresh), arguments=arguments)
    return NewTraffic(both, frozenset(seen), frozenset(taken), **counts)


def content_hash(conversation: Conversation) -> str:
    """Of what a conversation says, so of everything but its id and slice."""
    row = {key: value for key, value in conversation.to_row().items() if key not in ("id", "slice")}
    return hash_of("conversation", json.dumps(row, sort_keys=True))


def keep_seen(run: str | Path, hashes: Iterable[str]) -> None:
    """Write what the heads before this run's learned from, for the run that comes after it."""
    write_atomic(Path(run) / SEEN, "".join(f"{one}\n" for one in sorted(hashes)))


def _seen(run: Path) -> set[str]:
    path = run / SEEN
    return set(path.read_text().split()) if path.is_file() else set()


def _check_split(manifest: Mapping[str, Any], reading: Reading, run: str | Path) -> None:
    """Raises UserError unless the sides are chosen as they were: the same share, of texts blacked out alike."""
    if manifest["held_out"] != reading.held_out:
        raise UserError(
            f"traffic.held_out={reading.held_out} differs from the {manifest['held_out']} of {run}, so one head would "
            f"be measured on what it learned from; set traffic.held_out={manifest['held_out']}."
        )
    for name in ("redact", "phone_region"):
        was, now = (source.get(name) or None for source in (manifest["reader"], reading.arguments))
        if was != now:
            raise UserError(
                f"traffic.{name}={now} differs from the {was} of {run}, so a text could change its side of the split; "
                f"set it as it was."
            )


def is_new(traffic: Traffic, old_held_out: frozenset[str]) -> frozenset[str]:
    """The ids of the held-out conversations that the old run did not have."""
    return frozenset(one.id for one in traffic.held_out) - old_held_out
