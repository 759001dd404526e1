"""Jacobi decoding (arXiv 2305.10427, section 3): the target corrects γ guessed tokens in parallel until they stand.

Every pass tells what the target would write after each guess; those words are the next guesses. So nothing drafts,
and a pass gains more than one token where the target's words do not depend on the guesses that were wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.proposers.rows import chains, settled
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.target import FrozenTarget


@dataclass
class JacobiRow:
    """The last settled token, and the guesses for the positions after it."""

    last: int
    guesses: list[int]


class Jacobi:
    """Proposes γ guesses, chosen by argmax at every temperature. The first ones repeat the last token."""

    needs = FeatureNeeds(taps=(), last=False, judged=True)

    def __init__(self, *, target: FrozenTarget) -> None:
        self.target = target

    def start(self, prompts: Sequence[Sequence[int]]) -> list[JacobiRow]:
        return [JacobiRow(prompt[0], []) for prompt in prompts]

    def commit(self, state: list[JacobiRow], committed: Committed) -> None:
        """The target's words after the nodes beyond the first rejected one: those after accepted ones are settled."""
        for row, tokens in zip(state, settled(committed), strict=True):
            row.last, row.guesses = (tokens or [row.last])[-1], []
        judged = committed.judged
        if judged is None:
            return
        words_BN = self.target.logits(judged.last_BND).argmax(-1).tolist()
        counts = zip(committed.count_B.tolist(), judged.count_B.tolist(), strict=True)
        for row, words, (kept, nodes) in zip(state, words_BN, counts, strict=True):
            row.guesses = words[kept:nodes]

    def propose(self, state: list[JacobiRow], depth: int, draw: Draw) -> Proposal:
        found = []
        for row in state:
            filler = row.guesses[-1] if row.guesses else row.last
            found.append((row.guesses + [filler] * depth)[:depth])
        return chains(found, self.target.device)
