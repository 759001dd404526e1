"""The draft vocabulary: which W of the target's V tokens a head can propose, and the maps between both.

It does not know where the counts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.artifact import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """ids_W int64, ascending: the target id of each draft id. `size` is V."""

    ids_W: Tensor
    size: int

    @property
    def d2t(self) -> Tensor:
        """Offsets [W] int64 as servers store them: target id = draft id + d2t[draft id]."""
        return self.ids_W - torch.arange(len(self.ids_W))

    @property
    def t2d(self) -> Tensor:
        """Mask [V] bool: which target tokens the draft can propose."""
        mask_V = torch.zeros(self.size, dtype=torch.bool)
        mask_V[self.ids_W] = True
        return mask_V

    @property
    def full(self) -> bool:
        """Whether every target token is in the draft vocabulary."""
        return len(self.ids_W) == self.size

    @staticmethod
    def identity(size: int) -> DraftVocabulary:
        """The whole target vocabulary."""
        return DraftVocabulary(torch.arange(size), size)

    @staticmethod
    def choose(counts_V: Tensor, draft_size: int, special_ids: Sequence[int] = ()) -> DraftVocabulary:
        """The `draft_size` most frequent tokens, with `special_ids` always among them.

        Fewer distinct tokens than asked for: filled up in ascending order of id (ties too go to the lower id).
        Raises UserError when draft_size is not between the number of special ids and V.
        """
        size = len(counts_V)
        special = sorted(set(special_ids))
        if not max(1, len(special)) <= draft_size <= size:
            raise UserError(
                f"A draft vocabulary of {draft_size} is not between {max(1, len(special))} (special tokens) and {size} "
                f"(the target's vocabulary); set head.draft_vocab_size."
            )
        ranked_V = counts_V.to(torch.float64).clone()
        ranked_V[special] = torch.inf
        order_V = torch.argsort(ranked_V, descending=True, stable=True)
        return DraftVocabulary(order_V[:draft_size].sort().values, size)

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that the draft can propose: a ceiling on acceptance for greedy text."""
        total = counts_V.sum().item()
        return counts_V[self.ids_W].sum().item() / total if total else 0.0

    def to_target(self, index: Tensor) -> Tensor:
        """Draft ids (any shape) to target ids."""
        return index if self.full else self.ids_W.to(index.device)[index]

    def scatter(self, probs_BW: Tensor) -> Tensor:
        """A distribution over W as one over V [B, V]; tokens outside the draft vocabulary get 0."""
        if self.full:
            return probs_BW
        probs_BV = probs_BW.new_zeros(probs_BW.shape[0], self.size)
        return probs_BV.index_copy_(1, self.ids_W.to(probs_BW.device), probs_BW)
