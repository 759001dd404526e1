"""Losses that compare one draft distribution q with the target's p, row by row, each with its gradient.

p is always over the target's full vocabulary: p(x) = exp(logit(x) - lse), of which the draft sees the W tokens it can
propose. q is zero outside them, so the mass that p has there is lost to the draft: it caps the overlap Σ min(p, q),
which is the probability that a drafted token is accepted. How each loss treats that mass is said with it. Nothing here
knows passes, chunks or heads.

A *kernel* takes fp32 logits and gives value and gradient without autograd; `reference_loss` says the same in plain
differentiable operations, for reading and for the tests.

Sources: KL as in EAGLE-3 (arXiv 2503.01840); the target's best k as in HASS (arXiv 2408.15766, section 3.1);
Jensen-Shannon after Lin, 1991; TV, -log α and their blend from the likelihood-of-acceptance losses (arXiv 2602.23881,
section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

TOP_K = 10  # tokens that topk_kl looks at, as in HASS


@dataclass(frozen=True)
class Said:
    """What the target says on C rows: p [C, W], fp32 or wider, Σ p log p over W [C], and the draft id of the token it
    wrote [C], -1 where the draft cannot propose it."""

    p_CW: Tensor
    negentropy_C: Tensor
    token_C: Tensor

    def __getitem__(self, rows: slice) -> Said:
        return Said(self.p_CW[rows], self.negentropy_C[rows], self.token_C[rows])


Kernel = Callable[[Tensor, Said], tuple[Tensor, Tensor, Tensor]]
"""(draft logits_CW fp32, what the target says) -> (loss_C, gradient with respect to the logits_CW, overlap_C)."""


def ce_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """-log q of the token that the target wrote. One that the draft cannot propose teaches nothing: no loss and no
    gradient, while it does count as lost in acceptance."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    learnable_C1 = (said.token_C >= 0)[:, None].to(log_q_CW)
    token_C1 = said.token_C.clamp_min(0)[:, None]
    loss_C = -(log_q_CW.gather(1, token_C1) * learnable_C1)[:, 0]
    q_CW = log_q_CW.exp_()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    return loss_C, q_CW.mul_(learnable_C1).scatter_add_(1, token_C1, -learnable_C1), overlap_C


def kl_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL Σ p (log p - log q) over the draft vocabulary, p not renormalised on it: a row weighs as much as the
    draft can win there, and the value may lie below zero."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    loss_C = said.negentropy_C - (said.p_CW * log_q_CW).sum(-1)
    q_CW = log_q_CW.exp_()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    return loss_C, q_CW.mul_(said.p_CW.sum(-1, keepdim=True)).sub_(said.p_CW), overlap_C


def topk_kl_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL over the TOP_K likeliest tokens of the target inside the draft vocabulary; neither p nor q is
    renormalised on them, so q is still drawn away from all others."""
    top_p_Ck, top_Ck = said.p_CW.topk(min(TOP_K, said.p_CW.shape[1]), dim=-1, sorted=False)
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    loss_C = (torch.special.xlogy(top_p_Ck, top_p_Ck) - top_p_Ck * log_q_CW.gather(1, top_Ck)).sum(-1)
    q_CW = log_q_CW.exp_()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    return loss_C, q_CW.mul_(top_p_Ck.sum(-1, keepdim=True)).scatter_add_(1, top_Ck, -top_p_Ck), overlap_C


def rkl_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse KL Σ q (log q - log p), exact over the full vocabulary, as q is zero outside W: at best -log of the mass
    inside. In fp32 p reaches zero at 104 nats below the likeliest token, and the loss its end: what is below 1e-38
    counts as that much (88 nats)."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    q_CW = log_q_CW.exp()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    slope_CW = log_q_CW.sub_(said.p_CW.clamp_min(_tiny(q_CW)).log_())
    loss_C = (q_CW * slope_CW).sum(-1)
    return loss_C, q_CW.mul_(slope_CW.sub_(loss_C[:, None])), overlap_C


def jsd_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """Jensen-Shannon divergence, half of KL(p|m) + KL(q|m) with m = (p + q) / 2, exact over the full vocabulary: the
    mass outside W adds log 2 / 2 for each unit of it. At most log 2."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    q_CW = log_q_CW.exp()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    # Where m is too small for its logarithm, q is as small and its slope does not count.
    mean_CW = (said.p_CW + q_CW).mul_(0.5).clamp_min_(_tiny(q_CW))
    log_mean_CW = mean_CW.log()
    outside_C = (1 - said.p_CW.sum(-1)).clamp_min(0)
    mixed_C = mean_CW.mul_(log_mean_CW).sum(-1)
    loss_C = 0.5 * (said.negentropy_C + (q_CW * log_q_CW).sum(-1) + math.log(2) * outside_C) - mixed_C
    slope_CW = log_q_CW.sub_(log_mean_CW).mul_(0.5)
    mean_slope_C1 = (q_CW * slope_CW).sum(-1, keepdim=True)
    return loss_C, q_CW.mul_(slope_CW.sub_(mean_slope_C1)), overlap_C


def tv_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation 1 - Σ min(p, q), exact over the full vocabulary: the probability that a drafted token is
    rejected. Its gradient vanishes for a diffuse q, so it is no loss to start with."""
    q_CW = torch.softmax(logits_CW, dim=-1)
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    return 1 - overlap_C, _overlap_gradient(q_CW, said.p_CW).neg_(), overlap_C


def lk_alpha_kernel(logits_CW: Tensor, said: Said) -> tuple[Tensor, Tensor, Tensor]:
    """-log Σ min(p, q), exact over the full vocabulary: the negative log-likelihood that a drafted token is accepted.
    Its gradient is that of total variation over the overlap, so a row is learnt however small its overlap is, down to
    1e-38 (a loss of 88)."""
    q_CW = torch.softmax(logits_CW, dim=-1)
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    least_C = overlap_C.clamp_min(_tiny(q_CW))
    return -least_C.log(), _overlap_gradient(q_CW, said.p_CW).div_(-least_C[:, None]), overlap_C


def lk_lambda_kernel(logits_CW: Tensor, said: Said, *, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """λ KL + (1 - λ) TV with λ = exp(-eta α), α = Σ min(p, q) of the row, held constant.

    The paper takes one α for each depth, averaged over the batch; a row's own keeps the loss a sum over positions that
    does not depend on how they are spread over micro-batches and processes.
    """
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    kl_C = said.negentropy_C - (said.p_CW * log_q_CW).sum(-1)
    q_CW = log_q_CW.exp_()
    overlap_C = torch.minimum(said.p_CW, q_CW).sum(-1)
    blend_C = (-eta * overlap_C).exp()
    tv_gradient_CW = _overlap_gradient(q_CW, said.p_CW).mul_((blend_C - 1)[:, None])
    kl_gradient_CW = q_CW.mul_(said.p_CW.sum(-1, keepdim=True)).sub_(said.p_CW)
    loss_C = blend_C * kl_C + (1 - blend_C) * (1 - overlap_C)
    return loss_C, kl_gradient_CW.mul_(blend_C[:, None]).add_(tv_gradient_CW), overlap_C


def _overlap_gradient(q_CW: Tensor, p_CW: Tensor) -> Tensor:
    """d Σ min(p, q) / d logits: only where q < p does more q help."""
    helped_CW = torch.where(q_CW < p_CW, q_CW, 0.0)
    return helped_CW - q_CW * helped_CW.sum(-1, keepdim=True)


def _tiny(like: Tensor) -> float:
    """The least positive number that is held without loss of digits."""
    return torch.finfo(like.dtype).tiny


KERNELS: dict[str, Kernel] = {
    "ce": ce_kernel,
    "kl": kl_kernel,
    "topk_kl": topk_kl_kernel,
    "rkl": rkl_kernel,
    "jsd": jsd_kernel,
    "tv": tv_kernel,
    "lk_alpha": lk_alpha_kernel,
}
KINDS = (*KERNELS, "lk_lambda")


@cache
def kernel_of(kind: str, eta: float) -> Kernel:
    """The kernel of one of KINDS."""
    return partial(lk_lambda_kernel, eta=eta) if kind == "lk_lambda" else KERNELS[kind]


def reference_loss(kind: str, logits_CW: Tensor, p_CW: Tensor, token_C: Tensor, eta: float = 3.0) -> Tensor:
    """The same losses [C] in plain differentiable operations: what the kernels are tested against."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    q_CW = log_q_CW.exp()
    overlap_C = torch.minimum(p_CW, q_CW).sum(-1)
    terms_CW = torch.special.xlogy(p_CW, p_CW) - p_CW * log_q_CW
    if kind == "ce":
        return torch.nn.functional.cross_entropy(logits_CW, token_C, reduction="none", ignore_index=-1)
    if kind == "kl":
        return terms_CW.sum(-1)
    if kind == "topk_kl":
        return terms_CW.gather(1, p_CW.argsort(dim=-1, descending=True)[:, :TOP_K]).sum(-1)
    if kind == "rkl":
        return (q_CW * (log_q_CW - p_CW.log())).sum(-1)
    if kind == "jsd":
        # The mass outside as a token of its own, which the draft never proposes.
        p_CX = torch.cat([p_CW, 1 - p_CW.sum(-1, keepdim=True)], dim=-1)
        q_CX = torch.nn.functional.pad(q_CW, (0, 1))
        mean_CX = (p_CX + q_CX) / 2
        halves = torch.special.xlogy(p_CX, p_CX / mean_CX) + torch.special.xlogy(q_CX, q_CX / mean_CX)
        return halves.sum(-1) / 2
    if kind == "tv":
        return 1 - overlap_C
    if kind == "lk_alpha":
        return -overlap_C.log()
    blend_C = (-eta * overlap_C.detach()).exp()
    return blend_C * terms_CW.sum(-1) + (1 - blend_C) * (1 - overlap_C)
