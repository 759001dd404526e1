"""Prompt lookup: propose what followed the last n-gram when it occurred before. The baseline that costs nothing.

The search is transformers' own candidate generator; this file only fits it to the decoding loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from heads.base import Committed, Draw, FeatureNeeds, Proposal


@dataclass
class LookupState:
    """The whole text of each row."""

    texts: list[list[int]]


class PromptLookup:
    """Proposes up to γ tokens after the longest matching n-gram of at most `max_ngram` tokens, or none."""

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, *, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram

    def start(self, prompts: Sequence[Sequence[int]]) -> LookupState:
        return LookupState([[prompt[0]] for prompt in prompts])

    def commit(self, state: LookupState, committed: Committed) -> None:
        rows = zip(state.texts, committed.next_ids_BM.tolist(), committed.count_B.tolist(), strict=True)
        for text, following, count in rows:
            text.extend(following[:count])

    def propose(self, state: LookupState, depth: int, draw: Draw) -> Proposal:
        found = [self._continuation(text, depth) for text in state.texts]
        count_B = torch.tensor([len(tokens) for tokens in found])
        tokens_BN = torch.zeros(len(found), max(map(len, found)), dtype=torch.long)
        for row, tokens in enumerate(found):
            tokens_BN[row, : len(tokens)] = torch.tensor(tokens)
        return Proposal.chain(tokens_BN, count_B)

    def _continuation(self, text: list[int], depth: int) -> list[int]:
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=depth, max_matching_ngram_size=self.max_ngram, max_length=len(text) + depth + 1
        )
        candidates, _ = generator.get_candidates(torch.tensor([text]))
        return [int(token) for token in candidates[0, len(text) :]]
