"""The MTP module of DeepSeek-V3 (arXiv 2412.19437, section 2.2) for a dense target, and how one starts from it.

proj(cat(norm(embedding), norm(state))) goes through one whole decoder block; a norm may follow. The module knows no
vocabulary, no loss, and not what its outcome is for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.base import wide
from heads.layers import BlockSizes, DraftBlock, RMSNorm, copy_last_layer
from heads.recurrent import Slot
from heads.target import FrozenTarget

_PROBE = 64  # tokens that the scale of the target's last layer is measured on
_SMALL = 0.1  # gains of the target's final norm below this share of their mean count as this share where divided by


class MTPModule(nn.Module):
    """One decoder block on the projected pair of embedding and state. A head may be one or hold several (`of`).

    The embedding at rope position 0 is zero, as servers have it.
    """

    def add_parts(self, sizes: BlockSizes, final_norm: bool, qkv_bias: bool = False) -> None:
        """Make the weights, for a target of these sizes."""
        config, width = sizes.llama_config(), sizes.hidden_size
        self.embed_norm = RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.layer = DraftBlock(config, width, qkv_bias=qkv_bias)
        self.norm = RMSNorm(width, config.rms_norm_eps) if final_norm else None

    @staticmethod
    def of(sizes: BlockSizes, final_norm: bool) -> MTPModule:
        """A module by itself."""
        module = MTPModule()
        module.add_parts(sizes, final_norm)
        return module

    def join(self, embedded: Tensor, normed: Tensor, positions: Tensor) -> Slot:
        """The projected pair, which is the residual, and behind the block's norm what the attention reads.

        embedded, normed: [..., D], the state by `hidden_norm`; positions [...]: in the rotary embedding.
        """
        embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        projected = self.proj(torch.cat([self.embed_norm(embedded), normed], dim=-1))
        return Slot(self.input_layernorm(projected), projected)

    def close(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The state that is read and fed on [..., D]."""
        hidden = self.layer.finish(residual, attended)
        return hidden if self.norm is None else self.norm(hidden)

    @torch.no_grad()
    def start_as_layer(self, target: FrozenTarget) -> None:
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


def _scale_between_layers(target: FrozenTarget) -> Tensor:
    """Typical size (root of the mean square) of a state in front of the target's last layer, over a few tokens."""
    ids = torch.arange(1, _PROBE + 1, device=target.device)[None] % target.vocab_size
    taps_BTE = target.forward(ids[:, : target.max_length], taps=(target.num_layers - 1,)).taps_BTE
    return wide(taps_BTE).square().mean(-1).sqrt().median()
