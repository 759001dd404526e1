"""A draft model with another tokenizer: its text is cut into the target's tokens and then verified.

Translation and drafting are transformers' own (universal assisted generation): the target's new text is decoded,
read by the draft, continued greedily, and what it wrote is encoded again. So the proposals are deterministic at every
temperature, and exact under the rule for such drafts whatever the translation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers

from eval.proposers.rows import chains, settled
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.target import FrozenTarget

_PROBE = 512  # tokens of the target whose text the draft's tokenizer must be able to read


class _Translation(AssistedCandidateGeneratorDifferentTokenizers):
    """transformers' generator, which would take the encoding of an empty text as a tensor of floats."""

    def convert_source_tokens_to_target_tokens(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().convert_source_tokens_to_target_tokens(*args, **kwargs).long()


@dataclass
class _Row:
    """The text of a row, and its translation from the first proposal on, which has a state of its own."""

    text: list[int]
    translation: _Translation | None = None


class TranslatedDraft:
    """Chains of a model with another tokenizer, at most γ of the target's tokens each.

    Raises UserError when one tokenizer cannot read the text of the other.
    """

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, *, target: FrozenTarget, model: FrozenTarget) -> None:
        self.target, self.model = target, model
        for source, goal in ((target, model), (model, target)):
            if not _reads(goal.tokenizer, source.tokenizer):
                raise UserError(
                    f"The draft model {model.path} cannot draft for {target.path}: the tokenizer of {goal.path} reads "
                    f"none of the text of {source.path}; set rivals.draft_model.path= to a model of the same script."
                )
        self.settings = GenerationConfig(do_sample=False, min_length=0, max_length=target.max_length)
        self.settings.eos_token_id = list(target.eos_token_ids) or None

    def start(self, prompts: Sequence[Sequence[int]]) -> list[_Row]:
        return [_Row([prompt[0]]) for prompt in prompts]

    def commit(self, state: list[_Row], committed: Committed) -> None:
        for row, tokens in zip(state, settled(committed), strict=True):
            row.text.extend(tokens)

    @torch.inference_mode()
    def propose(self, state: list[_Row], depth: int, draw: Draw) -> Proposal:
        return chains([self._continuation(row, depth) for row in state], self.target.device)

    def _continuation(self, row: _Row, depth: int) -> list[int]:
        ids_1N = torch.tensor([row.text], device=self.model.device)
        text = self.target.tokenizer.decode(row.text, skip_special_tokens=True)
        length = len(self.model.tokenizer(text)["input_ids"])
        if length + depth > self.model.max_length or not length:  # no room, or nothing to go on from yet
            return []
        if row.translation is None:
            row.translation = self._translation(ids_1N)
        row.translation.num_assistant_tokens = depth
        candidates_1N, _ = row.translation.get_candidates(ids_1N)
        return [int(token) for token in candidates_1N[0, len(row.text) :][:depth]]

    def _translation(self, ids_1N: Tensor) -> _Translation:
        self.model.model.generation_config.assistant_confidence_threshold = 0.0  # always the whole draft
        return _Translation(
            input_ids=ids_1N,
            assistant_model=self.model.model,
            target_tokenizer=self.target.tokenizer,
            assistant_tokenizer=self.model.tokenizer,
            generation_config=self.settings,
            model_kwargs={},
        )


def _reads(reader: PreTrainedTokenizerBase, writer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer makes anything but unknown tokens of another one's text."""
    ordinary = [index for index in range(len(writer)) if index not in writer.all_special_ids]
    text = writer.decode(ordinary[:: max(1, len(ordinary) // _PROBE)])
    return bool(set(reader(text, add_special_tokens=False)["input_ids"]) - {reader.unk_token_id})
