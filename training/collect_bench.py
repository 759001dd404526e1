"""How fast features are collected, against what the target could do at best, in one run.

Collecting known answers (`known_states`, and the store on the disk with its checksums) is compared with the bare
forward of the target over the same batches; writing answers in batches with transformers' own `generate`, one prompt at
a time. Both sides take turns batch by batch, so that the machine's drift falls on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.cache import growing_cache
from heads.target import FrozenTarget
from training.chat import Encoded
from training.regenerate import Generation, answer_batch, generation_config, seed_of
from training.states import Answer, alike, at_once, known_states
from training.store_writer import Document, StoreWriter


@dataclass(frozen=True)
class Pair:
    """Two sides over the same work: tokens and seconds of each, the seconds one by one for each repeat."""

    tokens: tuple[int, int]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second of each side, over all repeats."""
        first, second = (
            tokens * len(seconds) / sum(seconds) for tokens, seconds in zip(self.tokens, self.seconds, strict=True)
        )
        return first, second

    @property
    def ratio(self) -> tuple[float, float, float]:
        """How many times the second side's rate the first one's is, with the lowest and the highest of the repeats."""
        share = self.tokens[0] / self.tokens[1]
        each = [share * other / own for own, other in zip(*self.seconds, strict=True)]
        return self.rates[0] / self.rates[1], min(each), max(each)


@dataclass(frozen=True)
class CollectSpeed:
    """states: positions of collected states against those of bare forwards; answers: tokens that are generated in
    batches, their states included, against those of one prompt at a time without states."""

    states: Pair
    answers: Pair


def collect_speed(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    needs: FeatureNeeds,
    generation: Generation,
    folder: str | Path,
    repeats: int,
) -> CollectSpeed:
    """Measure on these prompts, in batches as a collection takes them, the longest first; `folder` is written to.

    Raises UserError without prompts. A first batch, not counted, warms up.
    """
    if not prompts:
        raise UserError("There are no prompts to measure with; give more traffic or a longer max_prompt_tokens.")
    ordered = sorted(map(tuple, prompts), key=lambda ids: -len(ids))
    size = generation.batch_size
    batches = [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]
    written = [_write(target, batch, needs, generation) for batch in batches]
    documents = [[_encoded(answer) for answer in answers] for answers in written]
    writer = StoreWriter(folder, {"needs": {"taps": list(needs.taps), "last": needs.last}, "target": {}})

    def collect(index: int) -> None:
        answers = known_states(target, documents[index], taps=needs.taps)
        writer.add(f"shard-{index:05d}", [str(index)], [_document(answer, needs) for answer in answers], {})

    positions = sum(len(document.ids) for batch in documents for document in batch)
    states = in_turn(len(batches), repeats, collect, lambda index: bare_forward(target, documents[index]))
    counts: list[int] = []

    def alone(index: int) -> None:
        counts.extend(one_at_a_time(target, ids, generation) for ids in batches[index])

    answers = in_turn(
        len(batches), repeats, lambda index: _write(target, batches[index], needs, generation), alone, warm=False
    )
    new = sum(len(one.ids_T) - one.answer_start for batch in written for one in batch)
    return CollectSpeed(Pair((positions, positions), states), Pair((new, sum(counts) // repeats), answers))


@torch.inference_mode()
def bare_forward(target: FrozenTarget, documents: Sequence[Encoded]) -> None:
    """The least that predicts the answers of documents, put together as `forward_states` does: all layers once, and the
    vocabulary projection at the positions before the answers' tokens."""
    lengths = [len(document.ids) for document in documents]
    for group in alike(lengths, at_once(target)):
        longest = max(lengths[index] for index in group)
        ids = [[*documents[index].ids, *[0] * (longest - lengths[index])] for index in group]
        output = target.model.base_model(input_ids=torch.tensor(ids, device=target.device), use_cache=False)
        for row, index in enumerate(group):
            target.logits(output.last_hidden_state[row, documents[index].answer_start - 1 : lengths[index] - 1])


@torch.inference_mode()
def one_at_a_time(target: FrozenTarget, ids: Sequence[int], generation: Generation) -> int:
    """transformers' `generate` on one prompt, with the cache and the settings that the batches have; returns how many
    tokens it wrote."""
    ids_1T = torch.tensor([list(ids)], device=target.device)
    with target.settings_aside():
        result = target.model.generate(
            inputs=ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            generation_config=generation_config(target, generation, states=False),
            cache=growing_cache(),
        )
    return int(result.sequences.shape[1] - len(ids))


def _write(target: FrozenTarget, batch: Sequence[Sequence[int]], needs: FeatureNeeds, how: Generation) -> list[Answer]:
    return answer_batch(target, batch, taps=needs.taps, generation=how, seed=seed_of(how.seed, ["bench"]))


def _encoded(answer: Answer) -> Encoded:
    ids = tuple(answer.ids_T.tolist())
    return Encoded(ids, tuple(position >= answer.answer_start for position in range(len(ids))))


def _document(answer: Answer, needs: FeatureNeeds) -> Document:
    return Document(
        conversation="bench",
        slice="bench",
        turn=0,
        ids_T=answer.ids_T,
        answer_start=answer.answer_start,
        finish_reason=answer.finish_reason,
        text="",
        taps_TE=answer.taps_TE if needs.taps else None,
        last_TD=answer.last_TD if needs.last else None,
        lse_T=answer.lse_T,
    )


def in_turn(
    batches: int, repeats: int, first: Callable[[int], object], second: Callable[[int], object], *, warm: bool = True
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each repeat over all batches, of both; who begins changes with every batch."""
    if warm:
        first(0)
        second(0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        sums = [0.0, 0.0]
        for index in range(batches):
            for side in (0, 1) if index % 2 == 0 else (1, 0):
                started = time.perf_counter()
                (first, second)[side](index)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                sums[side] += time.perf_counter() - started
        for side in (0, 1):
            seconds[side].append(sums[side])
    return tuple(seconds[0]), tuple(seconds[1])
