"""Heads that predict several tokens ahead from one state of the target, each depth by a stack of layers of its own.

Depth i (from 0) of slot t predicts x_{t+2+i}: its stack of residual blocks makes a state [D], and a vocabulary
projection reads it. The projection is the target's own, frozen and shared, or one of each depth that is trained.
A subclass says what the stacks read (Medusa h_t alone, Hydra the drafted tokens too); this module knows neither that
nor any file format or sampling rule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import Committed, FeatureNeeds, LossSums, Projection, TargetFeatures
from heads.layers import BlockSizes
from heads.pairs import PairHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary

PROJECTIONS = ("target", "own")
MOST_BLOCKS = 64  # of a depth; one is usual


class Stack(nn.Module):
    """Residual blocks h + SiLU(W h + b) (Medusa, arXiv 2401.10774, section 2.1.1), the identity to begin with."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zeroed(nn.Linear(width, width)) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] in the number format that the layers compute in."""
        for layer in self.layers:
            moved = F.silu(layer(hidden))
            hidden = hidden.to(moved.dtype) + moved
        return hidden


def zeroed(layer: nn.Linear) -> nn.Linear:
    """The layer with weight and bias 0."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


@dataclass
class Settled:
    """The newest slot of each row that the target has settled: h_t and x_{t+1}. None before the prompt."""

    last_BD: Tensor | None = None
    next_B: Tensor | None = None

    def take(self, committed: Committed) -> None:
        """Go on to the newest slots; a row without new ones keeps what it has."""
        count_B = committed.count_B.to(committed.last_BMD.device)
        each_B, newest_B = torch.arange(len(count_B), device=count_B.device), (count_B - 1).clamp(min=0)
        last_BD, next_B = committed.last_BMD[each_B, newest_B], committed.next_ids_BM[each_B, newest_B]
        if self.last_BD is not None and self.next_B is not None:
            last_BD = torch.where(count_B[:, None] > 0, last_BD, self.last_BD)
            next_B = torch.where(count_B > 0, next_B, self.next_B)
        self.last_BD, self.next_B = last_BD, next_B

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """h_t [B, D] and x_{t+1} [B]; asking before the prompt was committed is a programming error."""
        assert self.last_BD is not None and self.next_B is not None, "commit comes before propose"
        return self.last_BD, self.next_B


class StackedHead(PairHead):
    """K = depth stacks of L = blocks residual blocks; projection: one of PROJECTIONS, where own ones have neither bias
    nor cap, as servers read them; loss, decay, eta: see heads.losses.Objective; own: arguments of the subclass. Raises
    UserError on values that cannot be."""

    projections = ("lm_heads",)

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int,
        blocks: int,
        projection: str,
        loss: str,
        decay: float | str,
        eta: float,
        **own: Any,
    ) -> None:
        self.sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        if not 1 <= blocks <= MOST_BLOCKS or projection not in PROJECTIONS:
            raise UserError(
                f"head.blocks={blocks} head.projection={projection}: there are 1 to {MOST_BLOCKS} blocks, and the "
                f"projection is one of {', '.join(PROJECTIONS)}."
            )
        own |= {"sizes": asdict(self.sizes), "blocks": blocks, "projection": projection}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        self.longest = depth
        width = self.sizes.hidden_size
        self.blocks = nn.ModuleList(Stack(width, blocks) for _ in range(depth))
        own_heads = depth if projection == "own" else 0
        self.lm_heads = nn.ModuleList(nn.Linear(width, len(vocab.ids_W), bias=False) for _ in range(own_heads))

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Own projections start as the target's rows; the blocks are the identity already."""
        for weight_WD in self.lm_heads.parameters():
            weight_WD.copy_(target.weights.lm_head_VD[self.vocab.ids_W.to(target.device)])

    # ---- training -------------------------------------------------------------------------------------------------

    @abstractmethod
    def outputs(self, features: TargetFeatures, starts_N: Tensor) -> Tensor:
        """What the stacks make of the starts [K, N, D], fed the true tokens. Where a pair of start and depth is not
        supervised it means nothing."""

    def loss(self, features: TargetFeatures) -> LossSums:
        """Every depth at every start over one packed batch (see heads.pairs.summed)."""
        own = None if self.shared else Projection(torch.stack(list(self.lm_heads.parameters())))
        return self.learn(features, lambda starts_N: self.outputs(features, starts_N), own)

    # ---- drafting -------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether all depths read by the target's projection."""
        return not len(self.lm_heads)

    def logits(self, level: int, hidden: Tensor) -> Tensor:
        """The draft's logits [..., W] at a depth (from 0) from what its stack gave [..., D]."""
        if self.shared:
            return self.draftable.read(hidden)
        logits: Tensor = self.lm_heads[level](hidden)
        return logits
