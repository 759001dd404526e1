"""EAGLE-1 (arXiv 2401.15077): one decoder layer that predicts the target's next final state, and through it the token.

Slot t joins the state of x_t after the target's final norm with the embedding of x_{t+1}; what comes out stands for the
state of x_{t+1}: the target's own projection reads x_{t+2} off it, and the next slot of a round is fed it. As servers
run it, the layer has no norm in front of its attention and there is none at the end. EAGLE-2 (arXiv 2406.16858) is the
same head with a tree (heads.tree_draft). This file knows no file format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import FeatureNeeds, LossSums, TargetFeatures, wide
from heads.layers import BlockSizes, DraftBlock, Rotary, copy_last_layer
from heads.losses import UnrolledSums
from heads.pairs import nothing_to_learn, summed, supervised_pairs
from heads.recurrent import RecurrentHead, Slot
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary

_PROBE = 64  # tokens that the size of the target's states is measured on


class EagleHead(RecurrentHead):
    """One decoder layer on fc(embedding, state), read by the target's own frozen projection.

    sizes: of the target's layers; depth: unrolled passes K, 1 in the paper; loss, decay, eta: what is minimised of the
    tokens (heads.losses.Objective), times token_weight; feature_weight: of the SmoothL1 distance to the target's own
    state, a mean over D, with the same weights by pass; noise: U(-noise, noise) is added to the target's states that
    are read in training. Raises UserError on what cannot be.
    """

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        loss: str = "kl",
        decay: float | str = 0.8,
        eta: float = 3.0,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.1,
    ) -> None:
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        amounts = {"feature_weight": feature_weight, "token_weight": token_weight, "noise": noise}
        for name, amount in amounts.items():
            if not 0 <= amount < float("inf"):
                raise UserError(f"A {name} of {amount} cannot be: it is a finite number from 0 on; set head.{name}.")
        if feature_weight == token_weight == 0:
            raise UserError("With feature_weight and token_weight 0 nothing is learnt; set head.token_weight above 0.")
        own = {"sizes": asdict(sizes), **amounts}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        config, width = sizes.llama_config(), sizes.hidden_size
        self.feature_weight, self.token_weight, self.noise = feature_weight, token_weight, noise
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = DraftBlock(config, width)
        self.rotary = Rotary(config)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Start from the target: the layer from its last one; fc hands on the state, and what it makes of the embedding
        starts small and random.

        The last layer is written for the sum that runs through the layers, here that sum is the state after the final
        norm. So three sizes are adapted. What the layer's own norm would scale (the columns of q, k and v) has its
        gain, over the mean size of the gain that the state bears already; dividing that out entry by entry would blow
        up noise where it is small. What is added to the sum (the rows of o and down) shrinks as the sum does: on
        SmolLM2-135M the distance to the true state begins at 1.4 so, and at 41 without, forty times as much with each
        pass. The norm in front of the MLP does not see sizes.
        """
        width, attention = self.fc.out_features, self.layer.self_attn
        gains = copy_last_layer(self.layer, target.model)
        if {"input_layernorm", "norm"} <= gains.keys():
            scale_D = wide(gains["input_layernorm"]) / wide(gains["norm"]).square().mean().sqrt()
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.mul_(scale_D)
        shrunk = _state_over_sum(target)
        for projection in (attention.o_proj, self.layer.mlp.down_proj):
            projection.weight.mul_(shrunk)
        self.fc.weight[:, :width].normal_(0, 0.02)
        self.fc.weight[:, width:] = torch.eye(width)

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch (heads.pairs.summed, whose `loss` is that of the tokens), with the metric
        `feature_loss`: the SmoothL1 distance by depth."""
        starts_N, valid_KN = supervised_pairs(features.supervised_T, features.lengths, self.depth)
        if not len(starts_N):
            return nothing_to_learn(self)
        hidden_KND = self.unroll(self._noisy(features), starts_N, self.depth)
        tokens = self.judged(features, starts_N, valid_KN, hidden_KND)
        distance_KN = self._distance(hidden_KND, features.last_TD, starts_N) * valid_KN
        sums = summed(tokens, valid_KN)
        return replace(
            sums,
            loss=self.feature_weight * self._weighted(distance_KN, tokens) + self.token_weight * tokens.total,
            metrics={**sums.metrics, "feature_loss": (distance_KN.detach().sum(1).float(), sums.metrics["loss"][1])},
        )

    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """The state after the target's final norm."""
        return last if torch.is_autocast_enabled(last.device.type) else last.to(self.fc.weight.dtype)

    def slot(self, next_ids: Tensor, fed: Tensor, positions: Tensor) -> Slot:
        """fc of embedding and state, side by side in this order; it is also the residual."""
        joined = self.fc(torch.cat([self.embed(next_ids, fed), fed], dim=-1))
        return Slot(joined, joined)

    def outcome(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """One state, read and fed back."""
        output = self.layer.finish(residual, attended)
        return output, output

    def logits(self, output: Tensor) -> Tensor:
        """By the target's own projection."""
        return self.draftable.read(output)

    def _noisy(self, features: TargetFeatures) -> TargetFeatures:
        """What the head reads in training. The target's say and the states to be met stay clean."""
        if not self.training or not self.noise:
            return features
        noise_TD = torch.rand_like(features.last_TD).mul_(2 * self.noise).sub_(self.noise)
        return replace(features, last_TD=features.last_TD + noise_TD)

    def _distance(self, hidden_KND: Tensor, last_TD: Tensor, starts_N: Tensor) -> Tensor:
        """SmoothL1 [K, N] between the state of each pass and the target's own at its place, a mean over D."""
        distances = []
        for k, hidden_ND in enumerate(hidden_KND):
            place_N = (starts_N + 1 + k).clamp(max=len(last_TD) - 1)
            truth_ND = last_TD[place_N].to(wide(hidden_ND))
            distances.append(F.smooth_l1_loss(wide(hidden_ND), truth_ND, reduction="none").mean(-1))
        return torch.stack(distances)

    def _weighted(self, distance_KN: Tensor, tokens: UnrolledSums) -> Tensor:
        """The sum over all pairs, the passes weighed as those of the tokens are."""
        weights = [self.objective.weight(k, tokens.overlap_KN) for k in range(self.depth)]
        return (distance_KN * torch.stack(weights)).sum()


def _state_over_sum(target: FrozenTarget) -> float:
    """How large the target's states are after the final norm, against the sum that its last layer reads; a median, for
    the first positions of a text can be hundreds of times larger."""
    ids_BN = torch.arange(_PROBE, device=target.device)[None] % target.vocab_size
    output = target.forward(ids_BN, taps=(target.num_layers - 1,))
    sizes_BN = wide(output.last_BTD).norm(dim=-1) / wide(output.taps_BTE).norm(dim=-1)
    return float(sizes_BN.median())
