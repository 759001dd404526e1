"""Prompt lookup: propose what followed the last n-gram when it occurred before. The baseline that costs nothing.

The search is transformers' own candidate generator; this file only fits it to the decoding loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from eval.proposers.rows import chains, settled
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal


@dataclass
class LookupState:
    """The whole text of each row, and where its tensors are."""

    texts: list[list[int]]
    device: torch.device | str = "cpu"


class PromptLookup:
    """Proposes up to γ tokens after the longest matching n-gram of at most `max_ngram` tokens, or none.

    Raises UserError when max_ngram is below 1.
    """

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, *, max_ngram: int = 3) -> None:
        if max_ngram < 1:
            raise UserError(f"rivals.prompt_lookup.max_ngram={max_ngram} must be at least 1.")
        self.max_ngram = max_ngram

    def start(self, prompts: Sequence[Sequence[int]]) -> LookupState:
        return LookupState([[prompt[0]] for prompt in prompts])

    def commit(self, state: LookupState, committed: Committed) -> None:
        state.device = committed.next_ids_BM.device
        for text, tokens in zip(state.texts, settled(committed), strict=True):
            text.extend(tokens)

    def propose(self, state: LookupState, depth: int, draw: Draw) -> Proposal:
        return chains([self._continuation(text, depth) for text in state.texts], state.device)

    def _continuation(self, text: list[int], depth: int) -> list[int]:
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=depth, max_matching_ngram_size=self.max_ngram, max_length=len(text) + depth + 1
        )
        candidates, _ = generator.get_candidates(torch.tensor([text]))
        return [int(token) for token in candidates[0, len(text) :]]
