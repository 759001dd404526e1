"""Finished feature stores to other ones: several as one, or some of the documents of one.

What comes out is a store like any other, with its own manifest, counts and checksums, and goes on where it was stopped.
The module knows the layout of `training.store` and nothing of targets or heads.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from heads.artifact import UserError, digest
from training.store import STORED, FeatureStore
from training.store_writer import QUARANTINE, SETTINGS, StoreWriter, begun_with, flat, read_index

# May differ between stores that are merged: what says which answers there are, not what an answer or its states are.
_FREE = ("traffic.", "subset.", "merged", "target.name") + tuple(
    f"generation.{name}" for name in ("seed", "answers", "batch_size", "max_")
)


def merge(
    folders: Sequence[str | Path], into: str | Path, *, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All documents of several stores in one; shards are linked where the disk allows. Returns its manifest.

    Raises UserError when they are of other targets, other taps or other settings of an answer, or share a document.
    """
    if len(folders) < 2:
        raise UserError(f"merge={list(map(str, folders))} needs at least two folders of features.")
    stores = [FeatureStore.open(folder) for folder in folders]
    settings = [begun_with(store.folder / SETTINGS) for store in stores]
    for store, own in zip(stores[1:], settings[1:], strict=True):
        _check_alike(stores[0].folder, settings[0], store.folder, own)
    ids = Counter(ref.id for store in stores for ref in store.documents)
    if twice := [name for name, count in ids.items() if count > 1]:
        raise UserError(
            f"{len(twice)} documents are in more than one of the stores, such as {min(twice)}; leave one store out, or "
            f"merge subsets of other slices."
        )
    traffic = {
        "fingerprint": digest([one["traffic"]["fingerprint"] for one in settings]),
        "conversations": sum(one["traffic"]["conversations"] for one in settings),
    }
    merged = [digest(store.identity) for store in stores]
    writer = StoreWriter(into, {**settings[0], "traffic": traffic, "merged": merged})
    if (manifest := writer.finished()) is not None:
        return manifest
    names: list[str] = []
    for store in stores:
        for shard in store.manifest["shards"]:
            name, path = f"shard-{len(names):05d}", store.folder / f"{shard['name']}.safetensors"
            if writer.shard(name, [shard["sha256"]]) is None:
                writer.adopt(name, [shard["sha256"]], path, read_index(path.with_suffix(".json")))
            names.append(name)
    refused = [row for store in stores for row in _lines(store.folder / QUARANTINE)]
    return writer.finish(names, refused=refused, vocab_size=stores[0].manifest["vocab_size"], body={}, config=config)


def _lines(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _check_alike(folder: Path, settings: dict[str, Any], other: Path, others: dict[str, Any]) -> None:
    usual = {"collect": asdict(STORED)}  # of a store from before there was a choice
    one, two = flat(usual | settings), flat(usual | others)
    for name in dict.fromkeys([*one, *two]):
        if not name.startswith(_FREE) and one.get(name) != two.get(name):
            raise UserError(
                f"{folder} and {other} cannot be merged, as {name} is {one.get(name)} in one and {two.get(name)} in "
                f"the other; give stores of the same target, taps and settings."
            )


def subset(
    folder: str | Path,
    into: str | Path,
    *,
    slices: Sequence[str] = (),
    count: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A store of the conversations of some slices (none named: of all), at most `count` of them, taken by a hash of
    their ids: fewer are always among more. Returns its manifest.

    Raises UserError when a slice is unknown or there are fewer conversations.
    """
    store = FeatureStore.open(folder)
    known = sorted({ref.slice for ref in store.documents})
    if unknown := sorted(set(slices) - set(known)):
        raise UserError(f"{folder} has no slice {unknown[0]}; choose among {', '.join(known)}.")
    there = {ref.conversation for ref in store.documents if not slices or ref.slice in slices}
    ordered = sorted(there, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    if count is not None and not 1 <= count <= len(ordered):
        raise UserError(f"count={count} is not between 1 and the {len(ordered)} conversations there are in {folder}.")
    chosen = set(ordered[:count])
    settings = begun_with(store.folder / SETTINGS)
    own = {"of": digest(store.identity), "slices": sorted(slices), "count": count}
    writer = StoreWriter(into, {**settings, "subset": own})
    if (manifest := writer.finished()) is not None:
        return manifest
    names: list[str] = []
    for shard in store.manifest["shards"]:
        index = read_index(store.folder / f"{shard['name']}.json")
        rows = [row for row in index["documents"] if row["conversation"] in chosen]
        if not rows:
            continue
        name, key = f"shard-{len(names):05d}", [row["id"] for row in rows]
        if writer.shard(name, key) is None:
            path = store.folder / f"{shard['name']}.safetensors"
            if len(rows) == len(index["documents"]):
                writer.adopt(name, key, path, index)
            else:
                writer.add_tensors(name, key, *_cut(path, name, rows), {})
        names.append(name)
    return writer.finish(names, refused=[], vocab_size=store.manifest["vocab_size"], body={}, config=config)


def _cut(path: Path, name: str, rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of some documents of a shard, bit by bit, and their rows for the shard `name` that they become."""
    spans = [(row["offset"], row["offset"] + row["length"]) for row in rows]
    with safe_open(path, framework="pt") as file:
        tensors = {
            key: torch.cat([file.get_slice(key)[begin:end] for begin, end in spans])
            for key in file.keys()  # noqa: SIM118  it is no mapping
        }
    moved, offset = [], 0
    for row in rows:
        moved.append({**row, "shard": name, "offset": offset})
        offset += row["length"]
    return tensors, moved
