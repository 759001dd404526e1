"""Losses that compare a draft's distribution with the target's, as sums over positions with a gradient of their own.

The target's distribution p is always over its full vocabulary: p(x) = exp(logit(x) - lse), so the mass outside the
draft vocabulary counts as lost. Each kind of loss is a *kernel* that returns value and gradient for a chunk of rows
in fp32; `unrolled_loss` walks over chunks so that the logits of a batch never exist at once. The plain references,
written for reading and for the tests, stand beside them. The module knows neither heads nor attention.

Sources: forward KL as in EAGLE-3 (arXiv 2503.01840); -log α and TV from the likelihood-of-acceptance losses
(arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.base import TargetWeights, wide

LOGITS = 1 << 24  # of all passes over a chunk of places that exist at the same time
_TINY = 1e-12

Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(draft logits_CW fp32, p_CW fp32, Σ p log p of each row) -> (loss_C, gradient with respect to the logits_CW,
overlap_C = Σ min(p, q))."""


def kl_kernel(logits_CW: Tensor, p_CW: Tensor, negentropy_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL Σ p (log p - log q) over the draft vocabulary, p not renormalised on it."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    loss_C = negentropy_C - (p_CW * log_q_CW).sum(-1)
    q_CW = log_q_CW.exp_()
    overlap_C = torch.minimum(p_CW, q_CW).sum(-1)
    return loss_C, q_CW.mul_(p_CW.sum(-1, keepdim=True)).sub_(p_CW), overlap_C


def lk_alpha_kernel(logits_CW: Tensor, p_CW: Tensor, negentropy_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-log Σ min(p, q): the negative log-likelihood that a drafted token is accepted."""
    q_CW = torch.softmax(logits_CW, dim=-1)
    overlap_C = torch.minimum(p_CW, q_CW).sum(-1)
    gradient_CW = _overlap_gradient(q_CW, p_CW).div_(-overlap_C.clamp_min(_TINY)[:, None])
    return -overlap_C.clamp_min(_TINY).log(), gradient_CW, overlap_C


def tv_kernel(logits_CW: Tensor, p_CW: Tensor, negentropy_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation 1 - Σ min(p, q): the probability that a drafted token is rejected."""
    q_CW = torch.softmax(logits_CW, dim=-1)
    overlap_C = torch.minimum(p_CW, q_CW).sum(-1)
    return 1 - overlap_C, _overlap_gradient(q_CW, p_CW).neg_(), overlap_C


def _overlap_gradient(q_CW: Tensor, p_CW: Tensor) -> Tensor:
    """d Σ min(p, q) / d logits: only where q < p does more q help."""
    helped_CW = torch.where(q_CW < p_CW, q_CW, 0.0)
    return helped_CW - q_CW * helped_CW.sum(-1, keepdim=True)


KERNELS: dict[str, Kernel] = {"kl": kl_kernel, "lk_alpha": lk_alpha_kernel, "tv": tv_kernel}


def reference_loss(kind: str, logits_CW: Tensor, p_CW: Tensor) -> Tensor:
    """The same losses [C] in plain differentiable operations: what the kernels are tested against."""
    log_q_CW = torch.log_softmax(logits_CW, dim=-1)
    if kind == "kl":
        return (torch.special.xlogy(p_CW, p_CW) - p_CW * log_q_CW).sum(-1)
    overlap_C = torch.minimum(p_CW, log_q_CW.exp()).sum(-1)
    return -overlap_C.clamp_min(_TINY).log() if kind == "lk_alpha" else 1 - overlap_C


@dataclass(frozen=True)
class TargetRows:
    """The target at the N predicted places, as much of it as the loss needs.

    last_ND: states after the final norm; weights: the target's own, over the draft vocabulary; lse_N: log-sum-exp over
    the full vocabulary; token_N: the draft id of the token that the target wrote, -1 if the draft cannot propose it.
    """

    last_ND: Tensor
    weights: TargetWeights
    lse_N: Tensor
    token_N: Tensor

    def probs(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """p_CW over the draft vocabulary for places low…high, fp32, which may sum to less than one, and Σ p log p."""
        logits_CW = wide(self.weights.logits(self.last_ND[low:high]))
        log_p_CW = logits_CW.sub_(self.lse_N[low:high, None])
        p_CW = log_p_CW.exp()
        return p_CW, log_p_CW.mul_(p_CW).sum(-1)


@dataclass(frozen=True)
class UnrolledSums:
    """total: Σ_k weight_k · loss_k, a scalar with gradient; the rest is detached. loss_K: summed loss of each depth;
    match_KN: the draft's argmax is the token that the target wrote; overlap_KN: Σ min(p, q). Both are 0 where the
    pair is not supervised."""

    total: Tensor
    loss_K: Tensor
    match_KN: Tensor
    overlap_KN: Tensor


def unrolled_loss(
    hidden_KND: Tensor, weight_WD: Tensor, target: TargetRows, valid_KN: Tensor, weights_K: Tensor, kind: str
) -> UnrolledSums:
    """Loss of K unrolled passes over N starts, sorted by position.

    Pass k of start n predicts what the target says at place n + k; where that place lies in another turn the pair is
    not valid. p is computed once for each place and shared by all passes. weights_K weighs the depths.
    """
    outputs = _Unrolled.apply(hidden_KND, weight_WD, target, valid_KN, weights_K, KERNELS[kind])  # type: ignore[no-untyped-call]
    return UnrolledSums(*outputs)


@dataclass(frozen=True)
class _Span:
    """What pass k has to say on a chunk of places: its starts, their places, and which of them count."""

    k: int
    rows: slice
    places: slice
    valid_C: Tensor


def _spans(low: int, high: int, valid_KN: Tensor) -> list[_Span]:
    """The passes that reach places low…high; pass 0 reaches all of them."""
    spans = []
    for k, valid_N in enumerate(valid_KN):
        rows = slice(max(0, low - k), high - k)
        if rows.start < rows.stop and (k == 0 or bool(valid_N[rows].any())):
            spans.append(_Span(k, rows, slice(rows.start + k, high), valid_N[rows]))
    return spans


class _Unrolled(torch.autograd.Function):
    """Value and gradient in one walk over chunks of places; backward only scales what forward has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        weight_WD: Tensor,
        target: TargetRows,
        valid_KN: Tensor,
        weights_K: Tensor,
        kernel: Kernel,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        depth, starts, _ = hidden_KND.shape
        weight, scale_K = weight_WD.to(hidden_KND.dtype), weights_K.to(wide(weight_WD))
        loss_K = wide(weight_WD).new_zeros(depth)
        match_KN = torch.zeros(depth, starts, dtype=torch.bool, device=hidden_KND.device)
        overlap_KN = wide(hidden_KND).new_zeros(depth, starts)
        hidden_grad = torch.zeros_like(hidden_KND)
        weight_grad = torch.zeros_like(wide(weight_WD))
        chunk = max(1, LOGITS // (depth * len(weight_WD)))
        for low in range(0, starts, chunk):
            p_CW, negentropy_C = target.probs(low, min(starts, low + chunk))
            spans = _spans(low, min(starts, low + chunk), valid_KN)
            # One product for all passes over these places, and the rows of a pass are a view of it.
            hidden_RD = torch.cat([hidden_KND[span.k, span.rows] for span in spans])
            logits_RW = hidden_RD @ weight.T
            gradient_RW = torch.empty_like(logits_RW)
            for span, logits, gradient in zip(
                spans,
                *(states.split([len(span.valid_C) for span in spans]) for states in (logits_RW, gradient_RW)),
                strict=True,
            ):
                k, rows, valid_C, here = span.k, span.rows, span.valid_C, slice(span.places.start - low, None)
                logits_CW = wide(logits)
                match_KN[k, rows] = (logits_CW.max(-1).indices == target.token_N[span.places]) & valid_C
                loss_C, gradient_CW, overlap_C = kernel(logits_CW, p_CW[here], negentropy_C[here])
                loss_K[k] += (loss_C * valid_C).sum()
                overlap_KN[k, rows] = overlap_C * valid_C
                gradient.copy_(gradient_CW)
            # Depth weights and invalid pairs scale rows: cheaper on the states than on the logits.
            scale_R1 = torch.cat([scale_K[span.k] * span.valid_C for span in spans])[:, None].to(weight.dtype)
            grad_RD = (gradient_RW @ weight).mul_(scale_R1)
            for span, grad in zip(spans, grad_RD.split([len(span.valid_C) for span in spans]), strict=True):
                hidden_grad[span.k, span.rows] = grad
            weight_grad += gradient_RW.T @ hidden_RD.mul_(scale_R1)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight_WD.dtype
        ctx.mark_non_differentiable(loss_K, match_KN, overlap_KN)
        return (loss_K * weights_K.to(loss_K)).sum(), loss_K, match_KN, overlap_KN

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        hidden = hidden_grad * total_grad.to(hidden_grad.dtype)
        return hidden, (weight_grad * total_grad).to(ctx.weight_dtype), None, None, None, None
