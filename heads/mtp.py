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
from torch import Tensor, nn

from heads.base import FeatureNeeds, LossSums, TargetFeatures, wide
from heads.layers import BlockSizes, DraftBlock, RMSNorm, Rotary, copy_last_layer
from heads.recurrent import RecurrentHead, Slot
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary

_PROBE = 64  # tokens that the scale of the target's last layer is measured on
_SMALL = 0.1  # gains of the target's final norm below this share of their mean count as this share where divided by


class MTPHead(RecurrentHead):
    """One decoder block on the projected pair of embedding and state, with the target's embeddings and projection.

    sizes: of the target's layers; depth: passes K; loss, decay, eta: see heads.losses.Objective; final_norm: a norm
    after the block, whose output is read and fed back, as in MiMo's layout, else the block's own output, as in
    ERNIE's. The embedding at rope position 0 is zero, as servers have it. Raises UserError on values that cannot be.
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
    ) -> None:
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        own = {"sizes": asdict(sizes), "final_norm": final_norm}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        config, width = sizes.llama_config(), sizes.hidden_size
        self.embed_norm = RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.layer = DraftBlock(config, width)
        self.norm = RMSNorm(width, config.rms_norm_eps) if final_norm else None
        self.rotary = Rotary(config)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Start as one more layer of the target like its last: proj hands on the hidden state, beside a small random
        part of the embedding.

        f = g · x / rms(x) for a state x between layers and the gain g of the final norm. With a final norm of its own
        the head turns f back into such an x and puts the target's norm at the end. Without one its states are f's,
        and what the block reads and writes is scaled from x to f instead.
        """
        gains = copy_last_layer(self.layer, target.model)
        ones = torch.ones_like(self.input_layernorm.weight)
        final, first = (gains[name].to(ones) if name in gains else ones for name in ("norm", "input_layernorm"))
        size = final.square().mean().sqrt()
        back = size / torch.where(final < 0, -1.0, 1.0) / final.abs().clamp_min(_SMALL * final.abs().mean())
        scale = _scale_between_layers(target).to(ones)
        block = self.layer
        if self.norm is not None:
            self.norm.weight.copy_(final)
            self.hidden_norm.weight.copy_(back)
        else:
            scale, per_state = size, final / scale
            self.hidden_norm.weight.fill_(1.0)
            first = first * back
            block.post_attention_layernorm.weight.mul_(back)
            for writer in (block.self_attn.o_proj, block.mlp.down_proj):
                writer.weight.mul_(per_state[:, None])
        self.input_layernorm.weight.copy_(first)
        width = len(ones)
        self.proj.weight[:, :width].normal_(0, 0.02 * float(scale))
        self.proj.weight[:, width:] = scale * torch.eye(width, device=ones.device)

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch (see heads.pairs.summed)."""
        return self.learn(features, lambda starts_N: self.unroll(features, starts_N, self.depth))

    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """f as it is."""
        return last if torch.is_autocast_enabled(last.device.type) else last.to(self.proj.weight.dtype)

    def slot(self, next_ids: Tensor, fed: Tensor, positions: Tensor) -> Slot:
        """The projected pair, which is the residual, and behind the block's norm what the attention reads."""
        normed = self.hidden_norm(fed)
        embedded = self.embed(next_ids, normed).masked_fill((positions == 0)[..., None], 0.0)
        projected = self.proj(torch.cat([self.embed_norm(embedded), normed], dim=-1))
        return Slot(self.input_layernorm(projected), projected)

    def outcome(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The same state is fed on and read."""
        hidden = self.layer.finish(residual, attended)
        output = hidden if self.norm is None else self.norm(hidden)
        return output, output

    def logits(self, output: Tensor) -> Tensor:
        """By the target's own projection."""
        return self.draftable.read(output)


def _scale_between_layers(target: FrozenTarget) -> Tensor:
    """Typical size (root of the mean square) of a state in front of the target's last layer, over a few tokens."""
    ids = torch.arange(1, _PROBE + 1, device=target.device)[None] % target.vocab_size
    taps_BTE = target.forward(ids[:, : target.max_length], taps=(target.num_layers - 1,)).taps_BTE
    return wide(taps_BTE).square().mean(-1).sqrt().median()
