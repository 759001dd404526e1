"""Which documents a training step sees, and how they become one packed batch.

The plan of batches depends on the documents, the seed and the token budget only, never on how many processes
train: a global batch is the same set of documents for one process with four micro-batches and for four
processes with one.

It does not know where features come from (a stored file or a live target), what a head does with them, or
what a training step is.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from heads.artifact import UserError
from heads.base import TargetFeatures

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


class DocumentRef(Protocol):
    """Names one document of a source; `length` counts its positions."""

    @property
    def id(self) -> str: ...

    @property
    def length(self) -> int: ...


class FeatureSource(Protocol):
    """Where documents come from: a list of references in a stable order, and a way to read some of them."""

    @property
    def documents(self) -> Sequence[DocumentRef]: ...

    def read_batch(self, refs: Sequence[Any], max_length: int | None) -> Sequence[TargetFeatures]:
        """The documents of these references, cut at `max_length`."""


Batch = tuple[DocumentRef, ...]


class BatchPlan:
    """The global batches of every epoch, and their division into micro-batches.

    documents: references in a stable order; global_batch_tokens: most positions of one global batch (a longer
    document is alone in its batch); seed: of the order; max_length: documents are cut there at the end.
    """

    def __init__(
        self,
        documents: Sequence[DocumentRef],
        global_batch_tokens: int,
        seed: int,
        max_length: int | None = None,
    ) -> None:
        if not documents:
            raise UserError("There is no document to train on; collect features first or choose another folder.")
        if global_batch_tokens < 1 or (max_length is not None and max_length < 2):
            raise UserError(
                f"global_batch_tokens={global_batch_tokens} and max_length={max_length} are too small; "
                f"give at least 1 and 2."
            )
        self.documents = tuple(documents)
        self.global_batch_tokens = global_batch_tokens
        self.seed = seed
        self.max_length = max_length

    def length(self, ref: DocumentRef) -> int:
        """Positions of a document that are trained on."""
        return ref.length if self.max_length is None else min(ref.length, self.max_length)

    @property
    def truncated(self) -> int:
        """How many documents lose their end to `max_length`."""
        return sum(self.length(ref) < ref.length for ref in self.documents)

    @property
    def tokens(self) -> int:
        """Positions of one epoch."""
        return sum(map(self.length, self.documents))

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over ids and lengths in their order."""
        sha = hashlib.sha256()
        for ref in self.documents:
            sha.update(f"{ref.id}\0{ref.length}\n".encode())
        return sha.hexdigest()

    def epoch(self, number: int) -> list[Batch]:
        """The global batches of an epoch (from 0): documents shuffled, then taken up to the budget."""
        order = list(self.documents)
        random.Random(f"{self.seed}/{number}").shuffle(order)
        batches: list[Batch] = []
        current: list[DocumentRef] = []
        filled = 0
        for ref in order:
            length = self.length(ref)
            if current and filled + length > self.global_batch_tokens:
                batches.append(tuple(current))
                current, filled = [], 0
            current.append(ref)
            filled += length
        batches.append(tuple(current))
        return batches

    def sizes(self, epochs: int, max_batches: int | None = None) -> list[int]:
        """Number of global batches in each epoch, as far as `max_batches` in all needs them."""
        sizes: list[int] = []
        for number in range(epochs):
            left = None if max_batches is None else max_batches - sum(sizes)
            if left == 0:
                break
            size = len(self.epoch(number))
            sizes.append(size if left is None else min(size, left))
        return sizes

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Divide a global batch into `parts` micro-batches of about the same length.

        With fewer documents than parts some are empty. Longest document first into the shortest part so far;
        inside a part documents keep the batch's order.
        """
        loads = [0] * parts
        members: list[list[int]] = [[] for _ in range(parts)]
        for index in sorted(range(len(batch)), key=lambda i: (-self.length(batch[i]), i)):
            part = min(range(parts), key=lambda p: (loads[p], p))
            loads[part] += self.length(batch[index])
            members[part].append(index)
        return [tuple(batch[index] for index in sorted(indices)) for indices in members]

    def load(self, source: FeatureSource, batch: Batch) -> TargetFeatures | None:
        """Read and pack a micro-batch; None when nothing in it is supervised."""
        if not batch:
            return None
        features = pack(source.read_batch(batch, self.max_length))
        return features if bool(features.supervised_T.any()) else None


def truncate(features: TargetFeatures, max_length: int | None) -> TargetFeatures:
    """One document without what lies behind its first `max_length` positions."""
    if max_length is None or len(features.ids_T) <= max_length:
        return features
    assert len(features.lengths) == 1, "only a single document can be cut"
    return TargetFeatures(
        ids_T=features.ids_T[:max_length],
        supervised_T=features.supervised_T[:max_length],
        lengths=(max_length,),
        taps_TE=features.taps_TE[:max_length],
        last_TD=features.last_TD[:max_length],
        lse_T=features.lse_T[:max_length],
    )


def pack(documents: Sequence[TargetFeatures]) -> TargetFeatures:
    """Documents one after the other along T, without padding; `lengths` keeps the borders."""
    assert documents, "an empty micro-batch has nothing to pack"
    return TargetFeatures(
        ids_T=torch.cat([doc.ids_T for doc in documents]),
        supervised_T=torch.cat([doc.supervised_T for doc in documents]),
        lengths=tuple(length for doc in documents for length in doc.lengths),
        taps_TE=torch.cat([doc.taps_TE for doc in documents]),
        last_TD=torch.cat([doc.last_TD for doc in documents]),
        lse_T=torch.cat([doc.lse_T for doc in documents]),
    )


def unpack(features: TargetFeatures) -> list[TargetFeatures]:
    """The documents of a packed batch, each as a view: the inverse of `pack`."""
    ends = list(accumulate(features.lengths))
    return [
        replace(
            features,
            ids_T=features.ids_T[end - length : end],
            supervised_T=features.supervised_T[end - length : end],
            lengths=(length,),
            taps_TE=features.taps_TE[end - length : end],
            last_TD=features.last_TD[end - length : end],
            lse_T=features.lse_T[end - length : end],
        )
        for end, length in zip(ends, features.lengths, strict=True)
    ]


def read_ahead(items: Iterable[Item], load: Callable[[Item], Loaded], depth: int) -> Generator[Loaded, None, None]:
    """`load(item)` for each item in order, up to `depth` of them ahead of the caller in a background thread.

    depth 0 loads in the caller's thread. An exception of `load` reaches the caller at that item's turn;
    closing the iterator drops what was not asked for.
    """
    if depth == 0:
        yield from map(load, items)
        return
    waiting: deque[Future[Loaded]] = deque()
    source = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        try:
            for item in source:
                waiting.append(pool.submit(load, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
