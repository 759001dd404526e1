"""An MTP module for a dense target: DeepSeek-V3 (arXiv 2412.19437, section 2.2), one block used K times as in FastMTP
(arXiv 2509.18362).

Slot t joins f_t, the target's state after its final norm, with the embedding of x_{t+1}: proj(cat(norm(embedding),
norm(f_t))) goes through one whole decoder block, and the target's own projection reads the outcome. Later slots of a
round are fed that outcome in the place of f (heads.recurrent has the unrolled training and the drafting). This file
knows no file format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import FeatureNeeds, LossSums, TargetFeatures
from heads.layers import BlockSizes, Rotary
from heads.mtp_module import MTPModule
from heads.recurrent import RecurrentHead, Slot
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary


class MTPHead(RecurrentHead, MTPModule):
    """One decoder block on the projected pair of embedding and state, with the target's embeddings and projection.

    sizes: of the target's layers; depth: passes K; loss, decay, eta: see heads.losses.Objective; final_norm: a norm
    after the block, whose output is read and fed back, as in MiMo's layout, else the block's own output, as in
    ERNIE's; qkv_bias: queries, keys and values have a bias, as in MiMo's. The embedding at rope position 0 is zero, as
    servers have it. Raises UserError on values that cannot be.
    """

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        loss: str = "kl",
        decay: float | str = 0.6,
        eta: float = 3.0,
        final_norm: bool = True,
        qkv_bias: bool = False,
    ) -> None:
        if qkv_bias and not final_norm:
            raise UserError("head.qkv_bias=true has no place without head.final_norm=true; set one of them otherwise.")
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        own = {"sizes": asdict(sizes), "final_norm": final_norm, "qkv_bias": qkv_bias}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        self.add_parts(sizes, final_norm, qkv_bias)
        self.rotary = Rotary(sizes.llama_config())

    def initialise(self, target: FrozenTarget) -> None:
        """Start as one more layer of the target (see heads.mtp_module)."""
        self.start_as_layer(target)

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch (see heads.pairs.summed)."""
        return self.learn(features, lambda starts_N: self.unroll(features, starts_N, self.depth))

    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """f as it is."""
        return last if torch.is_autocast_enabled(last.device.type) else last.to(self.proj.weight.dtype)

    def slot(self, next_ids: Tensor, fed: Tensor, positions: Tensor) -> Slot:
        """The projected pair, which is the residual, and behind the block's norm what the attention reads."""
        normed = self.hidden_norm(fed)
        return self.join(self.embed(next_ids, normed), normed, positions)

    def outcome(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The same state is fed on and read."""
        output = self.close(residual, attended)
        return output, output

    def logits(self, output: Tensor) -> Tensor:
        """By the target's own projection."""
        return self.draftable.read(output)
