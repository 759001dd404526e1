"""States by vLLM against states by the target in this process, over the same documents: how alike, and how fast.

Each side rounds in its own order, so in half precision neither is the other's truth: both are also compared with the
target in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.chat import Encoded
from training.collect_bench import Pair, in_turn
from training.extracted import ExtractedStates
from training.states import Answer, known_states
from training.store import FeatureStore

States = dict[str, Tensor]
"""fp32 states [N, D] of all positions but the last of each document, by boundary: its id, or "last"."""


@dataclass(frozen=True)
class Likeness:
    """Cosines of one boundary's states, position by position: the lowest, the median, how many of all are below what
    is asked for, and where the lowest is (document, position in it, token id)."""

    lowest: float
    median: float
    below: int
    count: int
    place: tuple[int, int, int]

    @classmethod
    def of(cls, cosine_N: Tensor, documents: Sequence[Encoded], least: float) -> Likeness:
        """least: what is asked for."""
        at = int(cosine_N.argmin())
        document, position = _place(at, documents)
        return cls(
            lowest=float(cosine_N.min()),
            median=float(cosine_N.median()),
            below=int((cosine_N < least).sum()),
            count=len(cosine_N),
            place=(document, position, documents[document].ids[position]),
        )


@dataclass(frozen=True)
class Comparison:
    """likeness: of vLLM with the target here, by boundary; here and vllm: of each with float32, where that is another
    number format; lse: the largest difference of log-sum-exps at supervised positions; same_tokens: documents whose ids
    and mask are equal; speed: positions of vLLM against those of the target here."""

    likeness: Mapping[str, Likeness]
    here: Mapping[str, Likeness]
    vllm: Mapping[str, Likeness]
    lse: float
    same_tokens: int
    speed: Pair


def stored_documents(store: FeatureStore, count: int) -> list[Encoded]:
    """So many documents of a store, evenly taken, the longest first as they are collected. Raises UserError when there
    are fewer."""
    there = store.documents
    if count > len(there):
        raise UserError(
            f"bench.documents={count} are more than the {len(there)} of {store.folder}; set bench.documents="
            f"{len(there)}, or collect more traffic."
        )
    read = [store.read(there[index * len(there) // count]) for index in range(count)]
    documents = [Encoded(tuple(one.ids_T.tolist()), tuple(one.supervised_T.tolist())) for one in read]
    return sorted(documents, key=lambda document: -len(document.ids))


def reference(target: FrozenTarget, documents: Sequence[Encoded], taps: Sequence[int], batch: int) -> States:
    """States of the target in this process."""
    answers = [answer for group in _groups(documents, batch) for answer in known_states(target, group, taps=taps)]
    return _states(answers, taps)


def compare(
    target: FrozenTarget,
    reader: ExtractedStates,
    documents: Sequence[Encoded],
    *,
    taps: Sequence[int],
    batch: int,
    repeats: int,
    least: float,
    truth: States | None = None,
) -> Comparison:
    """Both sides in turn, batch by batch. least: the cosine that is asked for; truth: the target's states in float32.

    Raises UserError when vLLM fails.
    """
    groups = _groups(documents, batch)
    found: tuple[dict[int, list[Answer]], dict[int, list[Answer]]] = ({}, {})

    def extract(index: int) -> None:
        found[0][index] = reader(target, groups[index], taps=taps)

    def forward(index: int) -> None:
        found[1][index] = known_states(target, groups[index], taps=taps)

    seconds = in_turn(len(groups), repeats, extract, forward)
    theirs, ours = ([answer for index in sorted(side) for answer in side[index]] for side in found)
    positions = sum(len(document.ids) for document in documents)
    states = [_states(side, taps) for side in (theirs, ours)]

    def like(one: States, other: States | None) -> dict[str, Likeness]:
        if other is None:
            return {}
        cosines = {name: torch.cosine_similarity(one[name], other[name], dim=-1) for name in one}
        return {name: Likeness.of(cosine_N, documents, least) for name, cosine_N in cosines.items()}

    return Comparison(
        likeness=like(*states),
        here=like(states[1], truth),
        vllm=like(states[0], truth),
        lse=max(float((a.lse_T - b.lse_T).abs().max()) for a, b in zip(theirs, ours, strict=True)),
        same_tokens=sum(_same_tokens(a, b) for a, b in zip(theirs, ours, strict=True)),
        speed=Pair((positions, positions), seconds),
    )


def _groups(documents: Sequence[Encoded], batch: int) -> list[Sequence[Encoded]]:
    return [documents[begin : begin + batch] for begin in range(0, len(documents), batch)]


def _states(answers: Sequence[Answer], taps: Sequence[int]) -> States:
    tapped = torch.cat([one.taps_TE[:-1] for one in answers]).float()
    last = torch.cat([one.last_TD[:-1] for one in answers]).float()
    split = tapped.split(last.shape[1], -1) if taps else ()
    return {**{str(tap): one for tap, one in zip(taps, split, strict=True)}, "last": last}


def _same_tokens(one: Answer, other: Answer) -> bool:
    alike = (one.answer_start, one.finish_reason) == (other.answer_start, other.finish_reason)
    return alike and torch.equal(one.ids_T, other.ids_T)


def _place(at: int, documents: Sequence[Encoded]) -> tuple[int, int]:
    """The document and the position in it of a row of all states."""
    for number, document in enumerate(documents):
        if at < len(document.ids) - 1:
            return number, at
        at -= len(document.ids) - 1
    raise AssertionError("a row of no document")
