"""The loss of the unrolled passes of a head, as sums over positions with a gradient of its own.

Each place is judged by what the target says there (heads.kernels has the kinds of loss); `unrolled_loss` walks over
chunks of places, so that the logits of a batch never exist at once. The module knows neither heads nor attention.

Pass k of a start weighs decay^k, as in the public trainers of EAGLE-3 (arXiv 2503.01840), or as much as the passes
before it survive, which is how often a sampling decoder gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.artifact import UserError
from heads.base import Projection, TargetWeights, wide
from heads.compiled import compiled as through_compiler
from heads.kernels import KINDS, Kernel, Said, kernel_of

# Logits of all passes over a chunk of places that exist at the same time: few enough for a CPU's caches, and on a GPU
# enough for products that keep it busy, at a few hundred MB.
LOGITS, LOGITS_GPU = 1 << 24, 1 << 27


@dataclass(frozen=True)
class Objective:
    """What is minimised: Σ weight · loss over the supervised pairs.

    kind: one of heads.kernels.KINDS; decay: pass k weighs decay^k, or "survival": as much as the probability Π_{i<k}
    Σ min(p_i, q_i) that the passes before it are accepted, held constant; eta: of lk_lambda, how fast it turns from KL
    to TV (3 for heads that read their own output, 10 for Medusa, arXiv 2602.23881). Raises UserError on others.
    """

    kind: str = "kl"
    decay: float | str = 0.8
    eta: float = 3.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"The loss {self.kind!r} is unknown; set head.loss to one of {', '.join(KINDS)}.")
        if self.decay != "survival" and (isinstance(self.decay, str) or not 0 < self.decay <= 1):
            raise UserError(
                f"A decay of {self.decay!r} cannot be: it is above 0 and at most 1, or survival; set head.decay."
            )
        if not 0 <= self.eta < math.inf:
            raise UserError(f"An eta of {self.eta} cannot be: it is a finite number from 0 on; set head.eta.")

    def weight(self, k: int, overlap_KC: Tensor) -> Tensor:
        """What pass k of C starts weighs [C], from their overlaps in all passes before it [k…, C]."""
        if isinstance(self.decay, str):
            return overlap_KC[:k].prod(0)
        return torch.full_like(overlap_KC[0], self.decay**k)


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

    def said(self, low: int, high: int, *, compiled: bool = False) -> Said:
        """What the target says at places low…high, fp32 or wider."""
        p_CW, negentropy_C = through_compiler(_say, compiled)(
            self.weights.logits(self.last_ND[low:high]), self.lse_N[low:high]
        )
        return Said(p_CW, negentropy_C, self.token_N[low:high])


@dataclass(frozen=True)
class UnrolledSums:
    """total: Σ weight · loss, a scalar with gradient; the rest is detached. loss_K: summed loss of each depth, without
    weights; match_KN: the draft's argmax is the token that the target wrote; overlap_KN: Σ min(p, q). Both are 0
    where the pair is not supervised."""

    total: Tensor
    loss_K: Tensor
    match_KN: Tensor
    overlap_KN: Tensor


def unrolled_loss(
    hidden_KND: Tensor,
    projection: Projection,
    target: TargetRows,
    valid_KN: Tensor,
    objective: Objective,
    *,
    compiled: bool = False,
) -> UnrolledSums:
    """Loss of K unrolled passes over N starts, sorted by position.

    Pass k of start n predicts what the target says at place n + k; where that place lies in another turn the pair is
    not valid. p is computed once for each place and shared by all passes. Gradients go to the states, and to the
    weight and the bias of the projection where they require one: a frozen weight saves a third of the multiplications.
    compiled: what runs over the logits goes through torch.compile, which reads them once instead of ten times.
    """
    weight, bias, said = projection.weight, projection.bias_W, partial(target.said, compiled=compiled)
    judge = _judge_in_place if compiled else _judge
    how = _How(objective, projection.softcap, said, through_compiler(judge, compiled))
    return UnrolledSums(*_Unrolled.apply(hidden_KND, weight, bias, valid_KN, how))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _How:
    """What is minimised, the cap of the draft's logits, what the target says at places low…high, and the function that
    judges a pass (`_judge`)."""

    objective: Objective
    softcap: float | None
    said: Callable[[int, int], Said]
    judge: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Span:
    """What pass k has to say on a chunk of places: its starts, their places, and which of them count."""

    k: int
    rows: slice
    places: slice
    valid_C: Tensor


def _spans(low: int, high: int, valid_KN: Tensor, known_KN: Tensor) -> list[_Span]:
    """The passes that reach places low…high; pass 0 reaches all of them. known_KN: valid_KN where asking is cheap."""
    spans = []
    for k, valid_N in enumerate(valid_KN):
        rows = slice(max(0, low - k), high - k)
        if rows.start < rows.stop and (k == 0 or bool(known_KN[k, rows].any())):
            spans.append(_Span(k, rows, slice(rows.start + k, high), valid_N[rows]))
    return spans


class _Unrolled(torch.autograd.Function):
    """Value and gradient in one walk over chunks of places; backward only scales what forward has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        weight: Tensor,
        bias_W: Tensor | None,
        valid_KN: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        walk = _Walk(hidden_KND, weight, bias_W, how, ctx.needs_input_grad[:3])
        depth, starts, _ = hidden_KND.shape
        chunk = max(1, (LOGITS if hidden_KND.device.type == "cpu" else LOGITS_GPU) // (depth * weight.shape[-2]))
        known_KN = valid_KN.cpu()  # once, instead of waiting for the device in every chunk
        for low in range(0, starts, chunk):
            high = min(starts, low + chunk)
            spans = _spans(low, high, valid_KN, known_KN)
            said = how.said(low, high)
            # With one projection, one product for all passes over these places.
            for group in [spans] if weight.dim() == 2 else [[span] for span in spans]:
                walk.take(group, [said[span.places.start - low :] for span in group])
        ctx.save_for_backward(walk.hidden_grad, walk.weight_grad, walk.bias_grad)
        ctx.dtypes = hidden_KND.dtype, weight.dtype, None if bias_W is None else bias_W.dtype
        ctx.mark_non_differentiable(walk.loss_K, walk.match_KN, walk.overlap_KN)
        return walk.total, walk.loss_K, walk.match_KN, walk.overlap_KN

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * total_grad.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


class _Walk:
    """The sums and gradients that grow from chunk to chunk. Chunks and passes come in ascending order, so that what the
    passes before it made of a start is known when a pass is weighed."""

    def __init__(
        self,
        hidden_KND: Tensor,
        weight: Tensor,
        bias_W: Tensor | None,
        how: _How,
        trained: tuple[bool, bool, bool],
    ) -> None:
        """trained: whether states, weight and bias want a gradient; what none wants is not computed."""
        depth, starts, _ = hidden_KND.shape
        self.hidden_KND, self.how = hidden_KND, how
        self.kernel = kernel_of(how.objective.kind, how.objective.eta)
        self.weight = weight.to(hidden_KND.dtype)
        self.bias_W = None if bias_W is None else bias_W.to(hidden_KND.dtype)
        self.total = wide(hidden_KND).new_zeros(())
        self.loss_K = wide(hidden_KND).new_zeros(depth)
        self.match_KN = torch.zeros(depth, starts, dtype=torch.bool, device=hidden_KND.device)
        self.overlap_KN = wide(hidden_KND).new_zeros(depth, starts)
        self.hidden_grad = torch.zeros_like(hidden_KND) if trained[0] else None
        self.weight_grad = torch.zeros_like(wide(weight)) if trained[1] else None
        self.bias_grad = torch.zeros_like(wide(bias_W)) if bias_W is not None and trained[2] else None

    def take(self, spans: list[_Span], said: list[Said]) -> None:
        """Passes that share a projection, over one chunk, and what the target says to each."""
        k = spans[0].k if self.weight.dim() == 3 else ...
        weight_WD, sizes = self.weight[k], [len(span.valid_C) for span in spans]
        hidden_RD = torch.cat([self.hidden_KND[span.k, span.rows] for span in spans])
        logits_RW = F.linear(hidden_RD, weight_WD, None if self.bias_W is None else self.bias_W[k])
        scales = []
        for span, says, logits in zip(spans, said, logits_RW.split(sizes), strict=True):
            # What a pass leaves lives until the next one has made its own. Given back to the system in between, the
            # memory would be paged in anew each time.
            loss_C, overlap_C, match_C, *_left = self.how.judge(logits, says, self.kernel, self.how.softcap)
            scales.append(self._count(span, loss_C, overlap_C, match_C))
        # Depth weights and invalid pairs scale rows: cheaper on the states than on the logits.
        gradient_RW, scale_R1 = logits_RW, torch.cat(scales)[:, None].to(logits_RW.dtype)
        if self.hidden_grad is not None:
            grad_RD = (gradient_RW @ weight_WD).mul_(scale_R1)
            for span, grad in zip(spans, grad_RD.split(sizes), strict=True):
                self.hidden_grad[span.k, span.rows] = grad
        if self.bias_grad is not None:
            self.bias_grad[k].add_((gradient_RW.T @ scale_R1)[:, 0])
        if self.weight_grad is not None:
            self.weight_grad[k].add_(gradient_RW.T @ hidden_RD.mul_(scale_R1))

    def _count(self, span: _Span, loss_C: Tensor, overlap_C: Tensor, match_C: Tensor) -> Tensor:
        """Add one pass to the sums; returns what each of its rows weighs [C]."""
        k, rows, valid_C = span.k, span.rows, span.valid_C
        self.match_KN[k, rows] = match_C & valid_C
        self.overlap_KN[k, rows] = overlap_C * valid_C
        scale_C = self.how.objective.weight(k, self.overlap_KN[:, rows]) * valid_C
        self.loss_K[k] += (loss_C * valid_C).sum()
        self.total += (loss_C * scale_C).sum()
        return scale_C


def _say(logits_CW: Tensor, lse_C: Tensor) -> tuple[Tensor, Tensor]:
    """p and Σ p log p out of the target's logits, which are done with."""
    log_p_CW = wide(logits_CW).sub_(lse_C[:, None])
    p_CW = log_p_CW.exp()
    return p_CW, log_p_CW.mul_(p_CW).sum(-1)


def _judge(logits: Tensor, said: Said, kernel: Kernel, softcap: float | None) -> tuple[Tensor, ...]:
    """Loss, overlap and match [C] of a pass, and what else was made on the way; its logits become their gradient."""
    logits_CW = wide(logits) if softcap is None else (wide(logits) / softcap).tanh_().mul_(softcap)
    match_C = logits_CW.max(-1).indices == said.token_C
    loss_C, gradient_CW, overlap_C = kernel(logits_CW, said)
    if softcap is not None:
        gradient_CW.mul_(1 - (logits_CW / softcap).square_())
    logits.copy_(gradient_CW)
    return loss_C, overlap_C, match_C, logits_CW, gradient_CW


def _judge_in_place(logits: Tensor, said: Said, kernel: Kernel, softcap: float | None) -> tuple[Tensor, ...]:
    """The same without what was made on the way, which compiled need not exist."""
    return _judge(logits, said, kernel, softcap)[:3]
