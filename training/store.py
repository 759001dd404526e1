"""The feature store: documents with the target's states at every position, in checksummed safetensors shards.

A document is one assistant turn as a server would see it: the rendered prompt and the generated tokens; its id is
conversation#turn, with .answer behind it where the turn has several. A shard is `shard-00000.safetensors` (tensors of
all its documents one after the other) with `shard-00000.json` (what lies where, the answers' texts, the checksum). Each
file is written whole or not at all, the index after its tensors, so whatever is there after a crash is either complete
or is made again. `manifest.json` comes last. Per position a shard holds
    ids int32, supervised uint8, taps [T, E], last [T, D] (the target's dtype), lse float32,
where the last position of a document has zeros for states: nothing is predicted from it. With `Storage.dtype="fp8"`
the taps are FP8, with scales taps_scale [T, taps]; the last state never is, as the target's distribution is made of it.
With `Storage.states="online"` a shard holds ids and supervised only.

The module does not know where documents come from or what the states mean.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from heads.artifact import UserError, read_manifest, sha256_file
from heads.base import FeatureNeeds, TargetFeatures
from training.features import truncate
from training.fp8 import from_fp8

DOCUMENTS, COUNTS = "documents.jsonl", "token_counts.safetensors"
_IDS, _LSE, _SCALE = 4 + 1, 4, 4  # bytes of a position's id and mask, of its log-sum-exp, of an FP8 tap's scale
_LARGE = 1_000_000_000  # bytes whose reading takes a user's notice
_OPEN_SHARDS = 64  # mapped at the same time; the operating system's limit on open files is often 1,024


@dataclass(frozen=True)
class Storage:
    """What of the target's states a store keeps: `stored`, or `online`, none of them; the taps in the dtype that the
    `target` computes them in, or as `fp8`; the last state always in the target's."""

    states: str = "stored"
    dtype: str = "target"

    def __post_init__(self) -> None:
        for name, choices in (("states", ("stored", "online")), ("dtype", ("target", "fp8"))):
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"collect.{name}={value} is unknown; choose {' or '.join(choices)}.")
        if self.states == "online" and self.dtype != "target":
            raise UserError(
                f"collect.dtype={self.dtype} says how taps are stored, but collect.states=online stores none; leave "
                f"one of them out."
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Storage:
        """That of a store, out of its manifest or of the settings it was begun with."""
        return cls(**settings.get("collect", {}))

    def check(self, needs: FeatureNeeds) -> None:
        """Raises UserError when there is nothing that the dtype could apply to."""
        if self.dtype == "fp8" and not needs.taps:
            raise UserError(
                "collect.dtype=fp8 stores taps in 8 bits, but this head stores no taps, only the last state, which "
                "stays as the target computes it; leave collect.dtype= out."
            )

    def position_bytes(self, needs: FeatureNeeds, hidden_size: int, itemsize: int) -> int:
        """Bytes of one position; itemsize: of the target's dtype."""
        if self.states == "online":
            return _IDS
        state = hidden_size * itemsize
        tap = hidden_size + _SCALE if self.dtype == "fp8" else state
        return len(needs.taps) * tap + needs.last * state + _IDS + _LSE


STORED = Storage()


@dataclass(frozen=True)
class DocumentRef:
    """Where a stored document lies: `length` positions from `offset` of its shard."""

    id: str
    conversation: str
    slice: str
    turn: int
    shard: str
    offset: int
    length: int
    answer_start: int
    finish_reason: str


class TokenCounts(NamedTuple):
    """How often each token of the vocabulary was generated, and how often it stood in a prompt (int64)."""

    supervised_V: Tensor
    prompt_V: Tensor

    def ranks(self) -> Tensor:
        """What a draft vocabulary is chosen by [V]: a token seen only in prompts ranks behind every token of an
        answer."""
        return self.supervised_V.double() + self.prompt_V.double() / (1 + self.prompt_V.sum())


def document_id(conversation: str, turn: int, answer: int | None) -> str:
    """The id of a turn's document, or of one of them where the turn has several answers."""
    return f"{conversation}#{turn}" + ("" if answer is None else f".{answer}")


def estimate_bytes(
    needs: FeatureNeeds, tokens: int, *, hidden_size: int, dtype: torch.dtype, storage: Storage = STORED
) -> int:
    """Size on disk of a store of `tokens` positions, indexes not counted."""
    return tokens * storage.position_bytes(needs, hidden_size, dtype.itemsize)


def stored_needs(settings: Mapping[str, Any]) -> FeatureNeeds:
    """What a store holds, out of its manifest or of the settings it was begun with."""
    return FeatureNeeds(tuple(settings["needs"]["taps"]), settings["needs"]["last"])


def check_disk(folder: str | Path, needed: int) -> None:
    """Raises UserError with both figures when the disk under `folder` has less than `needed` bytes free."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"The features need up to {_size(needed)}, but only {_size(free)} are free under {place}; choose "
            f"another folder, fewer conversations, or shorter prompts and answers."
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def missing_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files that the manifest speaks of and that are not there in full size; contents are not looked at."""
    sizes = {f"{shard['name']}.safetensors": shard["bytes"] for shard in manifest["shards"]}
    names = [
        name for name, size in sizes.items() if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
    return names + [name for name in manifest["files"] if not (folder / name).is_file()]


class FeatureStore:
    """A finished store, read by mapping its shards into memory. Open it with `FeatureStore.open`."""

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        documents: list[DocumentRef],
        fetch: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.fetch = fetch  # brings a shard's file, which is not here yet, and compares it with its checksum
        self.manifest = manifest
        self.documents = documents
        self.needs = stored_needs(manifest)  # what `read` gives; `select` narrows it
        self.storage = Storage.of(manifest)
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    @classmethod
    def open(cls, folder: str | Path, fetch: Callable[[str], None] | None = None) -> FeatureStore:
        """fetch: brings the file of a shard that is not here; without it all are here.

        Raises UserError when the store is unfinished, a file is missing, or one of those beside the shards is not the
        one that was written; for the shards themselves see `verify`.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, "features")
        if fetch is None and (missing := missing_files(folder, manifest)):
            raise DamagedStore(f"{folder} lacks {', '.join(missing)}; {_REPEAT}", missing)
        _compare(folder, manifest["files"])
        with open(folder / DOCUMENTS, encoding="utf-8") as file:
            documents = [DocumentRef(**json.loads(line)) for line in file]
        return cls(folder, manifest, documents, fetch)

    @property
    def online(self) -> bool:
        """Whether it holds no states, so that the target must compute them."""
        return self.storage.states == "online"

    @property
    def identity(self) -> Any:
        """What decides the features: checksums of all shards."""
        return self.manifest["shards"]

    def select(self, needs: FeatureNeeds) -> FeatureStore:
        """The same documents with the states that one head needs, nothing else of them being read.

        Raises UserError, naming what is missing, when the store was not collected for such a head.
        """
        there = stored_needs(self.manifest)
        if self.online:
            raise UserError(
                f"{self.folder} holds no states (collect.states=online), and they are needed here; collect again under "
                f"another name= with collect.states=stored."
            )
        if not needs.within(there):
            missing = sorted(set(needs.taps) - set(there.taps))
            what = f"the taps {missing}" if missing else "the state after the final norm"
            raise UserError(
                f"{self.folder} lacks {what} of what the head needs (it holds the taps {list(there.taps)}); set "
                f"head.taps= to some of these, or collect again under another name= with collect.taps={missing}."
            )
        selected = FeatureStore(self.folder, self.manifest, self.documents, self.fetch)
        selected.needs = needs
        return selected

    def read(self, ref: DocumentRef) -> TargetFeatures:
        """One document; only its own positions and the needed states are read from the disk. States that are not
        needed have width 0; a store without states gives none, and zeros for the log-sum-exp."""
        shard, rows = self._shard(ref.shard), slice(ref.offset, ref.offset + ref.length)
        stored = stored_needs(self.manifest).taps
        chosen = [stored.index(tap) for tap in self.needs.taps]
        lse_T = torch.zeros(ref.length) if self.online else shard.get_slice("lse")[rows]
        none = lse_T.new_empty(ref.length, 0)
        return TargetFeatures(
            ids_T=shard.get_slice("ids")[rows].long(),
            supervised_T=shard.get_slice("supervised")[rows].bool(),
            lengths=(ref.length,),
            taps_TE=self._states(shard, "taps", rows, chosen, len(stored)) if chosen else none,
            last_TD=self._states(shard, "last", rows, [0], 1) if self.needs.last else none,
            lse_T=lse_T,
        )

    def read_batch(self, refs: Sequence[DocumentRef], max_length: int | None) -> list[TargetFeatures]:
        """Several documents, cut at `max_length`."""
        return [truncate(self.read(ref), max_length) for ref in refs]

    def _states(self, shard: Any, name: str, rows: slice, chosen: Sequence[int], count: int) -> Tensor:
        """Those `chosen` of the `count` states that lie side by side under this name."""
        columns = shard.get_slice(name)
        width = columns.get_shape()[1] // count
        if list(chosen) == list(range(count)):
            values: Tensor = columns[rows]
        else:
            values = torch.cat([columns[rows, one * width : (one + 1) * width] for one in chosen], 1)
        if self.storage.dtype != "fp8" or f"{name}_scale" not in shard.keys():  # noqa: SIM118  it is no mapping
            return values
        scale_TS = shard.get_slice(f"{name}_scale")[rows][:, list(chosen)]
        return from_fp8(values, scale_TS, getattr(torch, self.manifest["dtype"]))

    def _map(self, name: str) -> Any:
        path = self.folder / f"{name}.safetensors"
        if self.fetch is not None and not path.is_file():
            self.fetch(path.name)
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{name}.safetensors of {self.folder} cannot be read ({error}); {_REPEAT}") from error

    def _is_here(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

    def token_counts(self) -> TokenCounts:
        """Token counts over all documents, for choosing a draft vocabulary."""
        return TokenCounts(**load_file(self.folder / COUNTS))

    def verify(self, large: Callable[[int], None] = lambda size: None) -> None:
        """Read every file that is here once. Raises UserError naming each whose bytes are not what was written.

        large: told the bytes of the shards before, when reading them takes a while.
        """
        shards = [one for one in self.manifest["shards"] if self.fetch is None or self._is_here(one["name"])]
        _check_files(self.folder, self.manifest, shards, large)


class DamagedStore(UserError):
    """Files of a finished store are missing or are not what was written; `files` are their names."""

    def __init__(self, sentence: str, files: Sequence[str]) -> None:
        super().__init__(sentence)
        self.files = tuple(files)


def verify(folder: str | Path, large: Callable[[int], None] = lambda size: None) -> dict[str, Any]:
    """Compare every file of a finished store with its checksum, and return its manifest; `large` as in
    `FeatureStore.verify`. Raises DamagedStore naming each that is missing or changed, UserError without a store."""
    folder = Path(folder)
    manifest = read_manifest(folder, "features")
    _check_files(folder, manifest, manifest["shards"], large)
    return manifest


def _check_files(
    folder: Path, manifest: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], large: Callable[[int], None]
) -> None:
    if (size := sum(shard["bytes"] for shard in shards)) >= _LARGE:
        large(size)
    _compare(folder, {f"{one['name']}.safetensors": one["sha256"] for one in shards} | manifest["files"])


def _compare(folder: Path, sums: Mapping[str, str]) -> None:
    """Raises DamagedStore naming the files of a store whose SHA-256 is another one."""
    bad = [name for name, sum_ in sums.items() if not (folder / name).is_file() or sha256_file(folder / name) != sum_]
    if bad:
        raise DamagedStore(f"{folder} is damaged: {', '.join(bad)} changed after it was written; {_REPEAT}", bad)


_REPEAT = "repeat the command that made the store, which makes only that part again."
