"""How a token is chosen: greedy or drawn, after transformers' own logits processors, in the order `generate` has them.

The same transforms are laid on the target and on the draft. This module knows no model and no rule of verification.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heads.artifact import UserError
from heads.base import wide


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled. temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and no
    banned ids leave the distribution alone. Penalty and ban hold for greedy decoding too. Raises UserError."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError(
                f"temperature={self.temperature} top_k={self.top_k} top_p={self.top_p} min_p={self.min_p} cannot be: "
                f"temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1."
            )
        if self.repetition_penalty <= 0 or any(token < 0 for token in self.banned):
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} banned={list(self.banned)} cannot be: "
                f"repetition_penalty > 0 (1 is none), token ids ≥ 0."
            )

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0

    @property
    def looks_back(self) -> bool:
        """Whether the text so far changes the distribution."""
        return self.repetition_penalty != 1

    def scores(self, logits: Tensor, text_RL: Tensor | None = None) -> Tensor:
        """Logits [..., V] after penalty and ban: what greedy decoding takes the argmax of.

        text_RL: the text before each of the R rows of logits, needed where `looks_back` (padding: any id that occurs
        in the same row).
        """
        processors = LogitsProcessorList()
        if self.looks_back:
            processors.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.banned:
            processors.append(SuppressTokensLogitsProcessor(self.banned))
        return self._apply(processors, logits, text_RL)

    def probabilities(self, logits: Tensor, text_RL: Tensor | None = None) -> Tensor:
        """The distribution that is really sampled, [..., V] at least fp32; text_RL as for `scores`."""
        assert not self.greedy, "greedy decoding has no distribution"
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        return torch.softmax(self._apply(warpers, self.scores(wide(logits), text_RL), None), dim=-1)

    def _apply(self, processors: LogitsProcessorList, logits: Tensor, text_RL: Tensor | None) -> Tensor:
        if not processors:
            return logits
        rows = logits.reshape(-1, logits.shape[-1])
        if text_RL is None:
            assert not any(isinstance(one, RepetitionPenaltyLogitsProcessor) for one in processors), "a text is needed"
            text_RL = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
        result: Tensor = processors(text_RL, rows)
        return result.reshape(logits.shape)
