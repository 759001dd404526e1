"""The loss of the unrolled passes of a head, as sums over positions with a gradient of its own.

Each place is judged by what the target says there (heads.kernels has the kinds of loss); `unrolled_loss` walks over
chunks of places, so that the logits of a batch never exist at once. The module knows neither heads nor attention.

Pass k of a start weighs decay^k, as in the public trainers of EAGLE-3 (arXiv 2503.01840), or as much as the passes
before it survive, which is how often a sampling decoder gets there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import Projection, TargetWeights, wide
from heads.compiled import compiled as through_compiler
from heads.kernels import KINDS, Kernel, Said, kernel_of

# Logits of all passes over a chunk of places that exist at the same time: enough for products that keep a CPU or a GPU
# busy, at a few dozen or a few hundred MB. With a large vocabulary at least so many places: each chunk adds to the
# gradient of the whole projection, which costs more than the products of a small one.
LOGITS, LOGITS_GPU, PLACES = 1 << 23, 1 << 27, 512
# Of one pass that its loss is worked out on at the same time: on a CPU what its caches hold, as these are a dozen walks
# over memory, and larger pieces would be paged in anew for each.
SLICE = 1 << 19


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

    def logits(self, places: slice) -> Tensor:
        """The target's logits at these places, in its own dtype."""
        return self.weights.logits(self.last_ND[places])

    def said(self, logits_CW: Tensor, low: int, *, compiled: bool = False) -> Said:
        """What the target says at the places from `low` on that have these logits, fp32 or wider."""
        here = slice(low, low + len(logits_CW))
        p_CW, negentropy_C = through_compiler(_say, compiled)(logits_CW, self.lse_N[here])
        return Said(p_CW, negentropy_C, self.token_N[here])


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
    compiled: what walks over the logits goes through torch.compile, which reads them a few times instead of a dozen.
    """
    how = _How(target, objective, projection.softcap, compiled)
    outputs = _Unrolled.apply(hidden_KND, projection.weight, projection.bias_W, valid_KN, how)  # type: ignore[no-untyped-call]
    return UnrolledSums(*outputs)


@dataclass(frozen=True)
class _How:
    """What a loss is made with beside its tensors; softcap: of the draft's logits."""

    target: TargetRows
    objective: Objective
    softcap: float | None
    compiled: bool


@dataclass(frozen=True)
class _Span:
    """What pass k has to say on a chunk of places: its starts, their places, and which of them count."""

    k: int
    rows: slice
    places: slice
    valid_C: Tensor


def _likeliest(logits_CW: Tensor, token_C: Tensor) -> Tensor:
    """Whether argmax of each row is this token [C], -1 for none; the first of equals is the argmax, as in decoding.

    On a CPU a maximum with its place takes five times as long as one without, so the place is sought for ties alone.
    How many there are is no size that could be compiled.
    """
    if logits_CW.device.type != "cpu" or torch.compiler.is_compiling():
        return logits_CW.max(-1).indices == token_C
    token_C1 = token_C.clamp_min(0)[:, None]
    own_C1 = logits_CW.gather(1, token_C1)
    rest_C1 = logits_CW.scatter(1, token_C1, -math.inf).amax(-1, keepdim=True)
    tied = (own_C1 == rest_C1)[:, 0].nonzero()[:, 0]
    match_C = (own_C1 > rest_C1)[:, 0]
    match_C[tied] = logits_CW[tied].max(-1).indices == token_C[tied]
    return match_C & (token_C >= 0)


def _spans(low: int, high: int, valid_KN: Tensor, known_KN: Tensor) -> list[_Span]:
    """The passes that reach places low…high; pass 0 reaches all of them. known_KN: valid_KN where asking is cheap."""
    spans = []
    for k, valid_N in enumerate(valid_KN):
        rows = slice(max(0, low - k), high - k)
        if rows.start < rows.stop and (k == 0 or bool(known_KN[k, rows].any())):
            spans.append(_Span(k, rows, slice(rows.start + k, high), valid_N[rows]))
    return spans


@dataclass(frozen=True)
class _Product:
    """Passes that share a projection, over one chunk: their states side by side, the draft's logits, of which the walk
    makes their gradient, and what each row weighs."""

    spans: list[_Span]
    hidden_RD: Tensor
    logits_RW: Tensor
    scale_R: Tensor

    def parts(self) -> Iterator[tuple[_Span, Tensor, Tensor]]:
        """Each pass with its own rows of logits and weights."""
        sizes = [len(span.valid_C) for span in self.spans]
        return zip(self.spans, self.logits_RW.split(sizes), self.scale_R.split(sizes), strict=True)


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
        depth, starts, _ = hidden_KND.shape
        most = LOGITS if hidden_KND.device.type == "cpu" else LOGITS_GPU
        chunk = max(1, min(starts, max(PLACES, most // (depth * weight.shape[-2]))))
        walk = _Walk(hidden_KND, weight, bias_W, how, ctx.needs_input_grad[:3], chunk)
        known_KN = valid_KN.cpu()  # once, instead of waiting for the device in every chunk
        for low in range(0, starts, chunk):
            high = min(starts, low + chunk)
            walk.take(_spans(low, high, valid_KN, known_KN))
        ctx.gradients = walk.hidden_grad, walk.weight_grad, walk.bias_grad
        ctx.dtypes = hidden_KND.dtype, weight.dtype, None if bias_W is None else bias_W.dtype
        ctx.mark_non_differentiable(walk.loss_K, walk.match_KN, walk.overlap_KN)
        return walk.total, walk.loss_K, walk.match_KN, walk.overlap_KN

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients are scaled in place: backward runs once"
        scaled = [
            None if grad is None else grad.mul_(total_grad).to(dtype)
            for grad, dtype in zip(gradients, ctx.dtypes, strict=True)
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
        chunk: int,
    ) -> None:
        """trained: whether states, weight and bias want a gradient; what none wants is not computed. chunk: places at
        most."""
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
        # The same memory for every chunk: new one is paged in at first touch, which takes as long as the products.
        self.room_RW = hidden_KND.new_empty(depth * chunk, weight.shape[-2])
        self.room_WD = self.weight.new_empty(weight.shape[-2:]) if trained[1] else None

    def take(self, spans: list[_Span]) -> None:
        """All passes over one chunk of places, and what the target says there."""
        # With one projection, one product for all passes.
        groups = [spans] if self.weight.dim() == 2 else [[span] for span in spans]
        products: list[_Product] = []
        used = 0
        for group in groups:
            products.append(self._product(group, self.room_RW[used:]))
            used += len(products[-1].hidden_RD)
        self._judge(spans[0].places, [part for product in products for part in product.parts()])
        for product in products:
            self._add_gradients(product)

    def _product(self, spans: list[_Span], room_RW: Tensor) -> _Product:
        """The draft's logits, in the first rows of the room."""
        hidden_RD, at = torch.cat([self.hidden_KND[span.k, span.rows] for span in spans]), self._at(spans)
        logits_RW = room_RW[: len(hidden_RD)]
        if self.bias_W is None:
            torch.mm(hidden_RD, self.weight[at].T, out=logits_RW)
        else:
            torch.addmm(self.bias_W[at], hidden_RD, self.weight[at].T, out=logits_RW)
        return _Product(spans, hidden_RD, logits_RW, hidden_RD.new_empty(len(hidden_RD)))

    def _judge(self, places: slice, parts: list[tuple[_Span, Tensor, Tensor]]) -> None:
        """The losses of these places, a few at a time; logits become gradients."""
        target = self.how.target
        target_CW = target.logits(places)
        step = max(1, SLICE // target_CW.shape[1]) if target_CW.device.type == "cpu" else len(target_CW)
        for low in range(places.start, places.stop, step):
            high = min(places.stop, low + step)
            said = target.said(target_CW[low - places.start : high - places.start], low, compiled=self.how.compiled)
            for span, logits_RW, scale_R in parts:
                first = max(low, span.places.start)
                if first < high:
                    here = slice(first - span.places.start, high - span.places.start)
                    scale_R[here] = self._pass(span, here, logits_RW[here], said[first - low :])

    def _pass(self, span: _Span, here: slice, logits: Tensor, says: Said) -> Tensor:
        """One pass over some of its rows: add it to the sums, put the gradient in the place of the logits, and return
        what each row weighs [C]."""
        judge = through_compiler(_judged, self.how.compiled)
        loss_C, overlap_C, match_C = judge(logits, says, self.kernel, self.how.softcap)
        k, valid_C = span.k, span.valid_C[here]
        rows = slice(span.rows.start + here.start, span.rows.start + here.stop)
        self.match_KN[k, rows] = match_C & valid_C
        self.overlap_KN[k, rows] = overlap_C * valid_C
        scale_C = self.how.objective.weight(k, self.overlap_KN[:, rows]) * valid_C
        self.loss_K[k] += (loss_C * valid_C).sum()
        self.total += (loss_C * scale_C).sum()
        return scale_C

    def _add_gradients(self, product: _Product) -> None:
        """Depth weights and invalid pairs scale rows: cheaper on the states than on the logits."""
        spans, hidden_RD, gradient_RW, at = product.spans, product.hidden_RD, product.logits_RW, self._at(product.spans)
        scale_R1 = product.scale_R[:, None]
        if self.hidden_grad is not None:
            grad_RD = (gradient_RW @ self.weight[at]).mul_(scale_R1)
            for span, grad in zip(spans, grad_RD.split([len(span.valid_C) for span in spans]), strict=True):
                self.hidden_grad[span.k, span.rows] = grad
        if self.bias_grad is not None:
            self.bias_grad[at].add_((gradient_RW.T @ scale_R1)[:, 0])
        if self.weight_grad is not None and self.room_WD is not None:
            torch.mm(gradient_RW.T, hidden_RD.mul_(scale_R1), out=self.room_WD)
            # A sum of two formats first makes a copy in the wider one: of a few rows at a time, it stays in the cache.
            rows = max(1, SLICE // hidden_RD.shape[1])
            for grad, more in zip(self.weight_grad[at].split(rows), self.room_WD.split(rows), strict=True):
                grad.add_(more)

    def _at(self, spans: list[_Span]) -> Any:
        """Where the projection of these passes is."""
        return spans[0].k if self.weight.dim() == 3 else ...


def _say(logits_CW: Tensor, lse_C: Tensor) -> tuple[Tensor, Tensor]:
    """p and Σ p log p out of the target's logits."""
    log_p_CW = wide(logits_CW) - lse_C[:, None]
    p_CW = log_p_CW.exp()
    return p_CW, log_p_CW.mul_(p_CW).sum(-1)


def _judged(logits: Tensor, says: Said, kernel: Kernel, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, overlap and match [C] of the draft's logits, in whose place their gradient is put."""
    logits_CW = wide(logits) if softcap is None else (wide(logits) / softcap).tanh_().mul_(softcap)
    match_C = _likeliest(logits_CW, says.token_C)
    loss_C, gradient_CW, overlap_C = kernel(logits_CW, says)
    if softcap is not None:
        gradient_CW.mul_(1 - (logits_CW / softcap).square_())
    logits.copy_(gradient_CW)
    return loss_C, overlap_C, match_C
