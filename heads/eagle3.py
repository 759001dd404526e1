"""EAGLE-3 (arXiv 2503.01840) and the norms of EAGLE-3.1 (arXiv 2605.09992): one decoder layer over tapped states.

Slot t joins g_t = fc(taps of x_t) with the embedding of x_{t+1} and predicts x_{t+2}; later slots of a round are fed
the head's own output in the place of g (heads.recurrent has the unrolled training and the drafting). This file knows
no file format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import FeatureNeeds, LossSums, Projection, TargetFeatures
from heads.layers import BlockSizes, DraftBlock, RMSNorm, Rotary, copy_last_layer
from heads.recurrent import RecurrentHead, Slot
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Boundaries (2, L/2, L-3), as servers assume; UserError where they collapse on a shallow target."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"The default taps {list(taps)} are not distinct on a target of {num_layers} layers; "
            f"set head.taps to ascending boundaries below {num_layers}."
        )
    return taps


class Eagle3Head(RecurrentHead):
    """One decoder layer on fc(taps), with its own final norm and its own projection to the draft vocabulary.

    sizes: of the target's layers; taps: boundary ids (None: `default_taps`); depth: unrolled passes K; loss, decay,
    eta: what is minimised (heads.losses.Objective); norm_before_residual: the residual is the normed hidden state;
    fc_norm: RMSNorm on each tapped state; norm_output: the state after the final norm is fed back; qk_norm: queries
    and keys are normed, as Qwen3's are. Raises UserError on taps, depth or an objective that cannot be.
    """

    projections = ("lm_head",)

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        taps: Sequence[int] | None = None,
        depth: int = 4,
        loss: str = "kl",
        decay: float | str = 0.8,
        eta: float = 3.0,
        norm_before_residual: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        qk_norm: bool = False,
    ) -> None:
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        if taps is not None and not taps:
            raise UserError("head.taps=[] gives the head nothing to read; name a boundary or more, or set null.")
        needs = FeatureNeeds(taps=tuple(taps) if taps is not None else default_taps(sizes.num_target_layers))
        needs.check(sizes.num_target_layers)
        own = {
            "sizes": asdict(sizes),
            "taps": list(needs.taps),
            "norm_before_residual": norm_before_residual,
            "fc_norm": fc_norm,
            "norm_output": norm_output,
            "qk_norm": qk_norm,
        }
        super().__init__(needs=needs, vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        config, width = sizes.llama_config(), sizes.hidden_size
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in needs.taps) if fc_norm else None
        self.fc = nn.Linear(len(needs.taps) * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layer = DraftBlock(config, 2 * width, qk_norm=qk_norm)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(vocab.ids_W), bias=False)
        self.rotary = Rotary(config)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Start from the target: the block from its last layer, the norms, and the rows of its vocabulary projection;
        fc hands on the highest tap. What reads the embedding starts small and random."""
        width, std = self.fc.out_features, 0.02
        for projection in (self.layer.self_attn.q_proj, self.layer.self_attn.k_proj, self.layer.self_attn.v_proj):
            projection.weight[:, :width].normal_(0, std)
        gains = copy_last_layer(self.layer, target.model)
        for name, norm in (("input_layernorm", self.hidden_norm), ("norm", self.norm)):
            if name in gains:
                norm.weight.copy_(gains[name])
        self.fc.weight.zero_()
        self.fc.weight[:, -width:] = torch.eye(width)
        self.fc.weight[:, :-width].normal_(0, 1e-3)
        self.lm_head.weight.copy_(target.weights.lm_head_VD[self.vocab.ids_W.to(target.device)])

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch (see heads.pairs.summed)."""
        own = Projection(self.lm_head.weight)
        return self.learn(features, lambda starts_N: self.unroll(features, starts_N, self.depth), own)

    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """g = fc(taps), each tapped state normed first if the head has fc_norm."""
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.needs.taps), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps if torch.is_autocast_enabled(taps.device.type) else taps.to(self.fc.weight.dtype))

    def slot(self, next_ids: Tensor, fed: Tensor, positions: Tensor) -> Slot:
        """Embedding and hidden state side by side, each behind its norm."""
        normed = self.hidden_norm(fed)
        x = torch.cat([self.input_layernorm(self.embed(next_ids, normed)), normed], dim=-1)
        return Slot(x, normed if self.norm_before_residual else fed)

    def outcome(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The state after the final norm is read, and fed back with norm_output."""
        plain = self.layer.finish(residual, attended)
        output = self.norm(plain)
        return (output if self.norm_output else plain), output

    def logits(self, output: Tensor) -> Tensor:
        """By the head's own projection."""
        return self.lm_head(output)
