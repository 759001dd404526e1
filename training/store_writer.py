"""Fills a feature store shard by shard, so that a killed run goes on where it stopped.

Each file is written whole or not at all, a shard's index after its tensors, the manifest last: whatever is
there after a crash is either complete or is made again. The module does not know where documents come from;
the layout is that of `training.store`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from heads.artifact import (
    MANIFEST,
    UserError,
    read_json,
    read_manifest,
    seal_holds,
    sealed,
    sha256_file,
    write_atomic,
    write_json,
    write_manifest,
)
from heads.base import FeatureNeeds
from training.fp8 import to_fp8
from training.store import (
    COUNTS,
    DOCUMENTS,
    DamagedStore,
    DocumentRef,
    Storage,
    TokenCounts,
    document_id,
    missing_files,
    stored_needs,
    verify,
)

logger = logging.getLogger(__name__)

SETTINGS, ANSWERS, QUARANTINE = "settings.json", "answers.jsonl", "quarantine.jsonl"


@dataclass(frozen=True)
class Document:
    """One document on its way into the store. Tokens from `answer_start` on were generated.

    taps_TE, last_TD and lse_T are None where the store does not need them; answer where it is the turn's only one.
    """

    conversation: str
    slice: str
    turn: int
    ids_T: Tensor
    answer_start: int
    finish_reason: str
    text: str
    taps_TE: Tensor | None
    last_TD: Tensor | None
    lse_T: Tensor | None
    answer: int | None = None


def wider_needs(folder: str | Path, needs: FeatureNeeds) -> FeatureNeeds:
    """What a folder is filled with: what it was begun with where that holds all of `needs`, else `needs`.

    Raises UserError when it was begun without some of the taps.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        return needs
    settings = begun_with(path)
    begun = stored_needs(settings)
    if Storage.of(settings).states == "online":  # to be refused as what it is, not for its taps
        return needs
    if missing := sorted(set(needs.taps) - set(begun.taps)):
        raise UserError(
            f"{folder} holds features with the taps {list(begun.taps)}, but {missing} are asked for too; choose "
            f"another name= or delete {folder}, and set collect.taps= to the taps of all heads that are to share it."
        )
    return begun if needs.within(begun) else needs


def begun_with(path: Path) -> dict[str, Any]:
    """The settings a folder was begun with. Raises UserError when they are damaged."""
    again = f"delete {path.parent} and collect again"
    settings = read_json(path, "what the features were begun with", again, needed=("needs", "target"))
    try:
        stored_needs(settings)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: its needs cannot be read; {again}.") from error
    return settings


def read_index(path: Path) -> dict[str, Any]:
    """The index of a shard. Raises UserError when it is damaged."""
    again = "delete it and collect again, which makes only that part again"
    index = read_json(path, "the index of a shard", again, needed=("key", "failed", "sha256", "bytes", "documents"))
    if not seal_holds(index):
        raise UserError(f"{path}, the index of a shard, is damaged: it changed after it was written; {again}.")
    return index


class StoreWriter:
    """Fills a store folder shard by shard. The same settings on the same folder go on where it stopped."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        """Raises UserError when the folder was begun with other settings, and names what differs."""
        self.folder = Path(folder)
        self.settings = json.loads(json.dumps(settings))
        path = self.folder / SETTINGS
        found = {item.name for item in self.folder.iterdir()} if self.folder.is_dir() else set()
        found = {name for name in found if not name.endswith(".tmp")}
        if found - {SETTINGS}:
            if SETTINGS not in found:
                raise UserError(f"{self.folder} is not empty and holds no features; choose another name= or delete it.")
            self._compare(begun_with(path))
        else:
            write_json(path, self.settings)

    def _compare(self, found: dict[str, Any]) -> None:
        # Of a folder that was begun before there was a choice.
        usual = flat({"collect": asdict(Storage()), "generation": {"answers": 1}})
        before, now = usual | flat(found), usual | flat(self.settings)
        for key in [*now, *before]:
            if key != "target.name" and before.get(key) != now.get(key):
                same = f"set target.dtype={before.get(key)}, " if key == "dtype" else ""  # another machine's `auto`
                raise UserError(
                    f"{self.folder} holds features with {key}={before.get(key)}, but {key}={now.get(key)} is "
                    f"asked for now; {same}choose another name= or delete {self.folder}."
                )

    def finished(self, *, verified: bool = False) -> dict[str, Any] | None:
        """The manifest when the store is complete (files there, with their sizes), else None; verified: whether their
        checksums are compared too, and a store that does not have them is none."""
        if not (self.folder / MANIFEST).is_file():
            return None
        manifest = read_manifest(self.folder, "features")
        if missing_files(self.folder, manifest):
            return None
        try:
            return verify(self.folder) if verified else manifest
        except DamagedStore as error:
            logger.warning("%s: damaged and made again: %s", self.folder, ", ".join(error.files))
            return None

    def shard(self, name: str, key: Sequence[str]) -> dict[str, Any] | None:
        """The index of a shard that is there, whole and made from `key`; None when it must be made."""
        index_path, path = self.folder / f"{name}.json", self.folder / f"{name}.safetensors"
        if not index_path.is_file():
            return None
        try:
            index = read_index(index_path)
        except UserError:  # cut off or damaged: made again
            return None
        if index["key"] != list(key):
            return None
        whole = not index["documents"] or (path.is_file() and sha256_file(path) == index["sha256"])
        return index if whole else None

    def add(
        self, name: str, key: Sequence[str], documents: Sequence[Document], failed: Mapping[str, str]
    ) -> dict[str, Any]:
        """Write one shard and return its index.

        key: the requests it answers; failed: those that gave no document, with the reason.
        Raises UserError when the disk is full; the store can be continued all the same.
        """
        if not documents:
            return self._write_index(name, key, failed=failed)
        return self.add_tensors(name, key, _tensors(documents, self.settings), _rows(name, documents), failed)

    def add_tensors(
        self,
        name: str,
        key: Sequence[str],
        tensors: Mapping[str, Tensor],
        rows: Sequence[Mapping[str, Any]],
        failed: Mapping[str, str],
    ) -> dict[str, Any]:
        """`add` for documents that are rows of an index and tensors already."""
        data = save(dict(tensors))
        write_atomic(self.folder / f"{name}.safetensors", data)
        sha256 = hashlib.sha256(data).hexdigest()
        return self._write_index(name, key, sha256=sha256, size=len(data), rows=rows, failed=failed)

    def adopt(self, name: str, key: Sequence[str], path: Path, index: Mapping[str, Any]) -> dict[str, Any]:
        """Take over the shard at `path` of another store, with its index: linked where the disk allows, else copied."""
        own = self.folder / f"{name}.safetensors"
        own.unlink(missing_ok=True)
        try:
            os.link(path, own)
        except OSError:
            shutil.copyfile(path, own)
        rows = [{**row, "shard": name} for row in index["documents"]]
        return self._write_index(name, key, sha256=index["sha256"], size=index["bytes"], rows=rows)

    def _write_index(
        self,
        name: str,
        key: Sequence[str],
        *,
        sha256: str = "",
        size: int = 0,
        rows: Sequence[Mapping[str, Any]] = (),
        failed: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        own = {"key": list(key), "failed": dict(failed or {})}
        index = sealed({**own, "sha256": sha256, "bytes": size, "documents": list(rows)})
        write_json(self.folder / f"{name}.json", index)
        return index

    def index(self, name: str) -> dict[str, Any]:
        """The index of a shard that is there. Raises UserError when it is damaged."""
        return read_index(self.folder / f"{name}.json")

    def has(self, name: str) -> bool:
        """Whether a shard of this name is there, whole or not."""
        return (self.folder / f"{name}.json").is_file()

    def finish(
        self,
        names: Sequence[str],
        *,
        refused: Sequence[Mapping[str, Any]],
        vocab_size: int,
        body: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Join the indexes of all shards, count tokens and write the manifest, which is returned."""
        indexes = {name: self.index(name) for name in names}
        rows = sorted((row for index in indexes.values() for row in index["documents"]), key=lambda row: row["id"])
        answers = [
            {key: row[key] for key in ("id", "conversation", "turn", "text", "finish_reason", "tokens")} for row in rows
        ]
        refs = [{key: row[key] for key in DocumentRef.__dataclass_fields__} for row in rows]
        for name, lines in ((DOCUMENTS, refs), (ANSWERS, answers), (QUARANTINE, refused)):
            write_atomic(self.folder / name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        stored = [name for name in names if indexes[name]["documents"]]
        counts = _count(self.folder, stored, vocab_size)
        write_atomic(self.folder / COUNTS, save(counts._asdict()))
        files = (DOCUMENTS, ANSWERS, QUARANTINE, COUNTS)
        supervised = int(counts.supervised_V.sum())
        for leftover in self.folder.glob(".*.tmp"):  # of writes that a crash cut short
            leftover.unlink()
        manifest = {
            **self.settings,
            "vocab_size": vocab_size,
            "documents": len(rows),
            "tokens": supervised + int(counts.prompt_V.sum()),
            "supervised_tokens": supervised,
            "cut_off": sum(row["finish_reason"] == "length" for row in rows),
            **body,
            "token_counts": COUNTS,
            "files": {name: sha256_file(self.folder / name) for name in files},
            "shards": [
                {
                    "name": name,
                    "sha256": indexes[name]["sha256"],
                    "bytes": indexes[name]["bytes"],
                    "tokens": sum(row["length"] for row in indexes[name]["documents"]),
                }
                for name in stored
            ],
        }
        return write_manifest(self.folder, "features", manifest, config)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def _tensors(documents: Sequence[Document], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a shard holds, as `training.store` says."""
    supervised = [torch.arange(len(document.ids_T)) >= document.answer_start for document in documents]
    tensors = {
        "ids": torch.cat([document.ids_T for document in documents]).to(torch.int32),
        "supervised": torch.cat(supervised).to(torch.uint8),
    }
    lse = [document.lse_T for document in documents if document.lse_T is not None]
    if lse:
        tensors["lse"] = torch.cat(lse).to(torch.float32)
    taps = [document.taps_TE for document in documents if document.taps_TE is not None]
    last = [document.last_TD for document in documents if document.last_TD is not None]
    for name, states in (("taps", taps), ("last", last)):
        if states:
            tensors[name] = torch.cat(states).contiguous()
    if "taps" in tensors and Storage.of(settings).dtype == "fp8":
        tensors["taps"], tensors["taps_scale"] = to_fp8(tensors["taps"], len(stored_needs(settings).taps))
    return tensors


def _rows(name: str, documents: Sequence[Document]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    offset = 0
    for document in documents:
        length = len(document.ids_T)
        ref = DocumentRef(
            id=document_id(document.conversation, document.turn, document.answer),
            conversation=document.conversation,
            slice=document.slice,
            turn=document.turn,
            shard=name,
            offset=offset,
            length=length,
            answer_start=document.answer_start,
            finish_reason=document.finish_reason,
        )
        rows.append({**asdict(ref), "tokens": length - document.answer_start, "text": document.text})
        offset += length
    return rows


def _count(folder: Path, names: Iterable[str], vocab_size: int) -> TokenCounts:
    counts = TokenCounts(torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long))
    for name in names:
        with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
            ids, supervised = file.get_tensor("ids").long(), file.get_tensor("supervised").bool()
        counts.supervised_V.add_(torch.bincount(ids[supervised], minlength=vocab_size))
        counts.prompt_V.add_(torch.bincount(ids[~supervised], minlength=vocab_size))
    return counts
