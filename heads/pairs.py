"""Which (start, pass) pairs of a packed batch are trained, and what the target says at the places they predict.

Shared by all heads: pass k of a head that starts at slot t predicts x_{t+2+k}, and what the target has to say about it
stands at place t + 1 + k. The module knows no head, no layer and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heads.base import LossSums, TargetFeatures, TargetWeights
from heads.losses import TargetRows, UnrolledSums
from heads.vocab import DraftVocabulary


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


def check_places(starts_N: Tensor, valid_KN: Tensor) -> Tensor:
    """valid_KN, checked: pass k of start n must find its place at row n + k of the starts, as the loss assumes."""
    for k in range(1, len(valid_KN)):
        pairs = valid_KN[k].nonzero()[:, 0]
        assert torch.equal(starts_N[pairs + k], starts_N[pairs] + k)
    return valid_KN


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
    nothing = sum((parameter.sum() * 0.0 for parameter in head.parameters()), torch.zeros(()))
    return LossSums(nothing, torch.zeros(()))


def _draft_ids(ids: Tensor, vocab: DraftVocabulary) -> Tensor:
    """Draft ids of target ids, -1 where the draft cannot propose them."""
    table_V = torch.full((vocab.size,), -1, dtype=torch.long, device=ids.device)
    table_V[vocab.ids_W.to(ids.device)] = torch.arange(len(vocab.ids_W), device=ids.device)
    return table_V[ids]
