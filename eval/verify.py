"""Exact verification of drafted tokens: pure tensors and a generator. Knows no model and no proposer.

Greedy decoding has its own rule and never goes through probabilities. For T > 0 the rule is speculative sampling
(arXiv 2211.17192, 2302.01318): accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection draw from
norm(max(0, p - q)); after γ acceptances draw the bonus token from p. A deterministic draft is the case q = one-hot,
so it is accepted with p(x) and its residual is p without x. Both leave the output exactly p-distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heads.artifact import UserError
from heads.base import wide


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution alone."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError(
                f"temperature={self.temperature} top_k={self.top_k} top_p={self.top_p} min_p={self.min_p} cannot be: "
                f"temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1."
            )

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is really sampled, [..., V] at least fp32, by transformers' own processors."""
        assert not self.greedy, "greedy decoding has no distribution"
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        rows = wide(logits).reshape(-1, logits.shape[-1])
        no_ids = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
        return torch.softmax(warpers(no_ids, rows), dim=-1).reshape(logits.shape)


@dataclass(frozen=True)
class Verdict:
    """accepted_B: how many drafted tokens of each row stand; next_B: the token the target adds; beta_BN: Σ min(p, q)
    at each node given its prefix (None for greedy)."""

    accepted_B: Tensor
    next_B: Tensor
    beta_BN: Tensor | None = None


def verify_greedy(logits_BNV: Tensor, tokens_BN: Tensor, count_B: Tensor) -> Verdict:
    """Greedy verification of chains.

    logits_BNV: the target's logits after the last committed token and after each drafted one [B, N + 1, V];
    tokens_BN: the chain; count_B: how many of its tokens are real. Accepts while the draft is the argmax.
    """
    choice_BN = logits_BNV.argmax(-1)
    agreed_BN = (choice_BN[:, :-1] == tokens_BN) & _real(tokens_BN, count_B)
    accepted_B = agreed_BN.long().cumprod(1).sum(1)
    return Verdict(accepted_B, choice_BN.gather(1, accepted_B[:, None])[:, 0])


def verify_sampled(
    p_BNV: Tensor, tokens_BN: Tensor, count_B: Tensor, q_BNV: Tensor | None, generator: torch.Generator
) -> Verdict:
    """Speculative sampling of chains.

    p_BNV [B, N + 1, V]: the target's distributions after all sampling transforms; q_BNV [B, N, V]: what each drafted
    token was drawn from, after the same transforms, or None for deterministic drafts.
    """
    rows, nodes = tokens_BN.shape
    p_drafted_BN = p_BNV[:, :-1].gather(2, tokens_BN[..., None])[..., 0]
    if q_BNV is None:
        q_drafted_BN, beta_BN = torch.ones_like(p_drafted_BN), p_drafted_BN
    else:
        q_drafted_BN = q_BNV.gather(2, tokens_BN[..., None])[..., 0]
        beta_BN = torch.minimum(p_BNV[:, :-1], q_BNV).sum(-1)
    coin_BN = torch.rand(rows, nodes, generator=generator, dtype=p_BNV.dtype, device=p_BNV.device)
    passed_BN = (coin_BN * q_drafted_BN < p_drafted_BN) & _real(tokens_BN, count_B)
    accepted_B = passed_BN.long().cumprod(1).sum(1)
    weights_BV = _residual(p_BNV, tokens_BN, count_B, q_BNV, accepted_B)
    next_B = torch.multinomial(weights_BV, 1, generator=generator)[:, 0]
    return Verdict(accepted_B, next_B, beta_BN)


def _residual(p_BNV: Tensor, tokens_BN: Tensor, count_B: Tensor, q_BNV: Tensor | None, accepted_B: Tensor) -> Tensor:
    """What the next token is drawn from [B, V] (unnormalised): p after full acceptance, else max(0, p - q)."""
    each_B = torch.arange(len(p_BNV), device=p_BNV.device)
    weights_BV = p_BNV[each_B, accepted_B].clone()
    rejected = (accepted_B < count_B).nonzero()[:, 0]
    if not len(rejected):
        return weights_BV
    place = accepted_B[rejected]
    if q_BNV is None:
        weights_BV[rejected, tokens_BN[rejected, place]] = 0
    else:
        weights_BV[rejected] = (weights_BV[rejected] - q_BNV[rejected, place]).clamp_min(0)
    return weights_BV


def _real(tokens_BN: Tensor, count_B: Tensor) -> Tensor:
    """Which nodes are drafted tokens rather than padding."""
    return torch.arange(tokens_BN.shape[1], device=tokens_BN.device) < count_B[:, None]
