"""What all heads learn from: (start, pass) pairs of a packed batch, and what the target says where they predict.

Pass k of a head that starts at slot t predicts x_{t+2+k}, and what the target has to say about it stands at place
t + 1 + k. The module knows no layer and no kind of loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import DraftHead, FeatureNeeds, LossSums, Projection, TargetFeatures, TargetWeights
from heads.losses import Objective, TargetRows, UnrolledSums, unrolled_loss
from heads.vocab import DraftVocabulary

MOST_PASSES = 64


class PairHead(DraftHead):
    """A head that learns `depth` passes from each start.

    depth: passes K; loss, decay, eta: see heads.losses.Objective; own: other arguments of the subclass, plain values.
    Raises UserError on a depth or an objective that cannot be.
    """

    compiled = False

    def __init__(
        self,
        *,
        needs: FeatureNeeds,
        vocab: DraftVocabulary,
        depth: int,
        loss: str,
        decay: float | str,
        eta: float,
        own: Mapping[str, Any],
    ) -> None:
        check_passes(depth)
        arguments = {"depth": depth, "loss": loss, "decay": decay, "eta": eta, **own}
        super().__init__(needs=needs, vocab=vocab, arguments=arguments)
        self.depth, self.objective = depth, Objective(kind=loss, decay=decay, eta=eta)

    def learn(
        self, features: TargetFeatures, outputs: Callable[[Tensor], Tensor], projection: Projection | None = None
    ) -> LossSums:
        """The loss of one packed batch (see `summed`). outputs: from starts_N to the states [K, N, D] of all passes,
        fed the true tokens; projection: what reads them, None for the target's own."""
        starts_N, valid_KN = supervised_pairs(features.supervised_T, features.lengths, self.depth)
        if not len(starts_N):
            return nothing_to_learn(self)
        sums = self.judged(features, starts_N, valid_KN, outputs(starts_N), projection)
        return summed(sums, valid_KN)

    def judged(
        self,
        features: TargetFeatures,
        starts_N: Tensor,
        valid_KN: Tensor,
        hidden_KND: Tensor,
        projection: Projection | None = None,
    ) -> UnrolledSums:
        """The states of all passes against what the target says where they predict (see `learn`)."""
        check_places(starts_N, valid_KN)
        rows = target_rows(features, starts_N, self.draftable, self.vocab)
        read = projection or self.draftable.projection
        return unrolled_loss(hidden_KND, read, rows, valid_KN, self.objective, compiled=self.compiled)


def check_passes(depth: int) -> None:
    """Raises UserError on a depth that trains nothing, or more than any decoder drafts."""
    if depth < 1:
        raise UserError(f"head.depth={depth} trains nothing; give at least 1.")
    if depth > MOST_PASSES:
        raise UserError(
            f"head.depth={depth} is beyond any sense, as each pass costs training as much as the first and drafts that "
            f"long are never accepted; give at most {MOST_PASSES}, 4 to 7 are usual."
        )


def supervised_pairs(supervised_T: Tensor, lengths: Sequence[int], depth: int) -> tuple[Tensor, Tensor]:
    """Which (start, pass) pairs of a packed batch are trained: starts_N ascending and valid_KN.

    A round of the decoder starts at slot t when x_{t+1} has just been written by the target; its pass k predicts
    x_{t+2+k}. So the pair counts when x_{t+1} … x_{t+2+k} were all written by the target, in one turn of one document.
    """
    total = len(supervised_T)
    ends_T = torch.repeat_interleave(torch.tensor(lengths).cumsum(0), torch.tensor(lengths)).to(supervised_T.device)
    slot_T = torch.arange(total, device=supervised_T.device)

    def written(offset: int) -> Tensor:
        inside_T = slot_T + offset < ends_T
        return inside_T & supervised_T[(slot_T + offset).clamp(max=total - 1)]

    alive_T = written(1)
    passes = []
    for k in range(depth):
        alive_T = alive_T & written(2 + k)
        passes.append(alive_T)
    starts_N = passes[0].nonzero()[:, 0]
    return starts_N, torch.stack(passes)[:, starts_N]


def check_places(starts_N: Tensor, valid_KN: Tensor) -> None:
    """Pass k of a valid start n must find its place at row n + k of the starts, as the loss assumes."""
    last = len(starts_N) - 1
    pass_K1 = torch.arange(len(valid_KN), device=starts_N.device)[:, None]
    row_KN = torch.arange(len(starts_N), device=starts_N.device) + pass_K1
    found_KN = (row_KN <= last) & (starts_N[row_KN.clamp(max=last)] == starts_N + pass_K1)
    assert bool((found_KN | ~valid_KN).all()), "a pass has no start at the place that it predicts"


def target_rows(
    features: TargetFeatures, starts_N: Tensor, weights: TargetWeights, vocab: DraftVocabulary
) -> TargetRows:
    """The target at the place that pass 0 of each start predicts; weights: over the draft vocabulary."""
    places_N = starts_N + 1
    return TargetRows(
        last_ND=features.last_TD[places_N],
        weights=weights,
        lse_N=features.lse_T[places_N],
        token_N=_draft_ids(features.ids_T[places_N + 1], vocab),
    )


def summed(sums: UnrolledSums, valid_KN: Tensor) -> LossSums:
    """The loss of a batch with its metrics; `count` is the number of starts that have anything to predict.

    metrics: `acceptance` is the teacher-forced conditional acceptance by depth (the draft's argmax is the target's
    token, given that it was at all earlier depths); `overlap` is Σ min(p, q); `loss` the loss of each depth.
    """
    count_K = valid_KN.sum(1).float()
    alive_KN = sums.match_KN.cumprod(0).float()
    reached_K = torch.cat([count_K[:1], (alive_KN[:-1] * valid_KN[1:]).sum(1)])
    metrics = {
        "acceptance": (alive_KN.sum(1), reached_K),
        "overlap": (sums.overlap_KN.sum(1).float(), count_K),
        "loss": (sums.loss_K.float(), count_K),
    }
    return LossSums(sums.total, count_K[0], metrics)


def nothing_to_learn(head: nn.Module) -> LossSums:
    """The loss of a batch without a supervised pair: zero, with a gradient of zero for every parameter."""
    zero = next(head.parameters()).new_zeros(())
    return LossSums(sum((parameter.sum() * 0.0 for parameter in head.parameters()), zero), zero)


def _draft_ids(ids: Tensor, vocab: DraftVocabulary) -> Tensor:
    """Draft ids of target ids, -1 where the draft cannot propose them."""
    table_V = torch.full((vocab.size,), -1, dtype=torch.long, device=ids.device)
    table_V[vocab.ids_W.to(ids.device)] = torch.arange(len(vocab.ids_W), device=ids.device)
    return table_V[ids]
