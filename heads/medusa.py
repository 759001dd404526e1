"""Medusa-1 (arXiv 2401.10774): K heads on the target's last state that do not see each other's tokens.

Head i (from 0) reads h_t, the state after the final norm, and predicts x_{t+2+i}; the target itself gives x_{t+1}.
heads.stacked has the blocks, the projection and the loss. This file knows no file format, no sampling rule and no
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.base import Committed, Draw, Proposal, TargetFeatures
from heads.layers import BlockSizes
from heads.stacked import Settled, StackedHead
from heads.tree_draft import Tree, draft_tree
from heads.vocab import DraftVocabulary


class MedusaHead(StackedHead):
    """Stacks that read h_t and nothing else.

    sizes: of the target's layers; depth: heads K, the longest draft; blocks: residual blocks L of each; projection:
    "target" (frozen, shared by all heads) or "own" (one per head, trained, started from the target's rows); loss,
    decay, eta: see heads.losses.Objective. Raises UserError on values that cannot be.
    """

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        blocks: int = 1,
        projection: str = "target",
        loss: str = "ce",
        decay: float | str = 0.8,
        eta: float = 10.0,
    ) -> None:
        super().__init__(
            sizes=sizes,
            vocab=vocab,
            depth=depth,
            blocks=blocks,
            projection=projection,
            loss=loss,
            decay=decay,
            eta=eta,
        )

    def outputs(self, features: TargetFeatures, starts_N: Tensor) -> Tensor:
        """Every head on the states of the starts."""
        last_ND = features.last_TD[starts_N]
        return torch.stack([stack(last_ND) for stack in self.blocks])

    def start(self, prompts: Sequence[Sequence[int]]) -> Settled:
        return Settled()

    def commit(self, state: Settled, committed: Committed) -> None:
        state.take(committed)

    @torch.inference_mode()
    def propose(self, state: Settled, depth: int, draw: Draw) -> Proposal:
        logits = self._all_logits(state, depth)
        return self.chain(lambda tokens: logits[len(tokens)], depth, draw)

    @torch.inference_mode()
    def propose_tree(self, state: Settled, depth: int, tree: Tree) -> Proposal:
        """All nodes of one depth have the same children, for a head does not see what stands before them."""
        logits = self._all_logits(state, depth)

        def step(tokens_BM: Tensor, slots_BM: Tensor, seen_BMS: Tensor, level: int) -> Tensor:
            return logits[level][:, None].expand(-1, tokens_BM.shape[1], -1)

        return draft_tree(logits[0], step, self.vocab, tree, depth)

    def _all_logits(self, state: Settled, depth: int) -> list[Tensor]:
        """The logits [B, W] of the first `depth` heads. UserError when there are not as many."""
        self.check_depth(depth)
        last_BD, _ = state.newest
        hidden = [self.blocks[level](last_BD) for level in range(depth)]
        if self.shared:  # one product for all depths reads the large matrix once
            return list(self.logits(0, torch.stack(hidden)))
        return [self.logits(level, one_BD) for level, one_BD in enumerate(hidden)]
