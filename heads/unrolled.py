"""Attention of the unrolled passes of training: the base slots causally, and the own column of each earlier pass.

Three forms are kept: one that walks over blocks of queries in linear memory, with a gradient of its own; FlexAttention
over the base slots, which on a GPU is one kernel that never writes a score; and a dense reference that says the same in
a few lines. The first and the last work on any device. The module knows no head and no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from heads.base import wide
from heads.compiled import compiled

# Of one query head that exist at a time; and queries on a CPU, the fewer of them, the less of what they see is masked.
SCORES, QUERIES = 1 << 18, 96
_SIDE = 128  # of a block of the mask, as the kernels of FlexAttention have it


@dataclass(frozen=True)
class Columns:
    """Who sees whom in an unrolled pass: documents of these lengths lie one after the other, and query n belongs to
    slot starts_N[n], ascending. It sees the slots of its own document up to its own, and its own entry of each
    earlier pass."""

    lengths: tuple[int, ...]
    starts_N: Tensor

    @cached_property
    def blocks(self) -> list[tuple[slice, slice]]:
        """Consecutive queries of one document, and the slots that any of them sees."""
        blocks = []
        starts = self.starts_N.tolist()
        queries = QUERIES if self.starts_N.device.type == "cpu" else SCORES
        first, document = 0, 0
        for length in self.lengths:
            last = first
            while last < len(starts) and starts[last] < document + length:
                last += 1
            while first < last:
                stop = min(last, first + max(1, min(queries, SCORES // length)))
                blocks.append((slice(first, stop), slice(document, starts[stop - 1] + 1)))
                first = stop
            document += length
        return blocks

    @cached_property
    def mask(self) -> BlockMask:
        """The same for FlexAttention: blocks that no query sees are left out, those that all of their queries see go
        without a test of each pair. Made of the edges of blocks, so that no matrix over all pairs is needed."""
        lengths, starts_N, device = torch.tensor(self.lengths), self.starts_N, self.starts_N.device
        first_N = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths).to(device)[starts_N]
        top_Q = torch.arange(0, len(starts_N), _SIDE, device=device)
        end_Q = (top_Q + _SIDE).clamp(max=len(starts_N)) - 1
        left_S = torch.arange(0, sum(self.lengths), _SIDE, device=device)
        right_S = left_S + _SIDE - 1
        # Both bounds ascend: some query sees a slot between the least of them, every one a slot between the greatest.
        some_QS = (right_S >= first_N[top_Q, None]) & (left_S <= starts_N[end_Q, None])
        every_QS = (left_S >= first_N[end_Q, None]) & (right_S <= starts_N[top_Q, None])
        every_QS &= (top_Q + _SIDE <= len(starts_N))[
            :, None
        ]  # a last block that is not full is tested, as torch has it

        def sees(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            return (slot >= first_N[query]) & (slot <= starts_N[query])

        return BlockMask.from_kv_blocks(
            *_listed(some_QS & ~every_QS),
            *_listed(every_QS),
            BLOCK_SIZE=_SIDE,
            mask_mod=sees,
            seq_lengths=(len(starts_N), sum(self.lengths)),
        )


def unrolled_attention(
    q_NHd: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], columns: Columns
) -> Tensor:
    """Attention output [N, H, d] over the base keys and values [T, G, d] and the own column: one pair [N, G, d] for
    each earlier pass and the present one."""
    own_k, own_v = (torch.stack(states) if states else q_NHd.new_zeros(0) for states in _unzip(own))
    return _Merged.apply(q_NHd, *base, own_k, own_v, columns)  # type: ignore[no-untyped-call]


def fused_attention(
    q_NHd: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], columns: Columns
) -> Tensor:
    """The same by FlexAttention. On CPU, where it has no gradient, it runs uncompiled and writes every score."""
    gpu = q_NHd.is_cuda
    with torch.autocast(q_NHd.device.type, enabled=False):  # as in _Merged
        out_NHd, lse_NH = compiled(_flex, gpu)(q_NHd, *base, columns.mask)
        if own:
            columns_of_own = (torch.stack(states) for states in _unzip(own))
            out_NHd = compiled(_merge, gpu)(q_NHd, out_NHd, lse_NH, *columns_of_own)
    merged_NHd: Tensor = out_NHd
    return merged_NHd


def dense_attention(
    q_NHd: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], columns: Columns
) -> Tensor:
    """The reference: every score written out, one softmax over base slots and own column together."""
    keys, values = (_spread(states, q_NHd.shape[1]) for states in base)
    lengths = torch.tensor(columns.lengths)
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(q_NHd.device)
    slot_T = torch.arange(len(document_T), device=q_NHd.device)
    starts = columns.starts_N
    seen_NT = (document_T[starts][:, None] == document_T) & (slot_T <= starts[:, None])
    scores = torch.einsum("nhd,thd->nht", q_NHd, keys).masked_fill(~seen_NT[:, None], -torch.inf)
    diagonal = [(q_NHd * _spread(k, q_NHd.shape[1])).sum(-1, keepdim=True) for k, _ in own]
    logits = wide(torch.cat([scores, *diagonal], dim=-1)) * q_NHd.shape[-1] ** -0.5
    weights = torch.softmax(logits, -1).to(values.dtype)
    out = torch.einsum("nht,thd->nhd", weights[..., : len(slot_T)], values)
    for j, (_, v) in enumerate(own):
        out = out + weights[..., len(slot_T) + j, None] * _spread(v, q_NHd.shape[1])
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Output [N, H, d] and log-sum-exp [N, H] over the base slots alone, both with a gradient."""
    q_1HNd, k_1GTd, v_1GTd = (states.transpose(0, 1)[None] for states in (q, k, v))
    wanted = AuxRequest(lse=True)
    out, more = flex_attention(q_1HNd, k_1GTd, v_1GTd, block_mask=mask, enable_gqa=True, return_aux=wanted)
    assert more.lse is not None
    return out[0].transpose(0, 1), more.lse[0].T


def _merge(q: Tensor, out: Tensor, lse: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """What `_Merged` does with the own column, in differentiable operations."""
    groups, scale = q.shape[1] // own_k.shape[2], q.shape[-1] ** -0.5
    scores = (wide(_grouped(q, groups)) * wide(own_k)[:, :, :, None]).sum(-1).flatten(-2) * scale
    merged = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
    share = (scores - merged).exp().unflatten(-1, (-1, groups))[..., None]
    own = (share * wide(own_v)[:, :, :, None]).sum(0).flatten(1, 2)
    return ((lse - merged).exp()[..., None] * wide(out) + own).to(q.dtype)


def _listed(blocks_QS: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen [1, 1, Q], and all of them, those first [1, 1, Q, S]."""
    order_QS = torch.argsort(blocks_QS.int(), dim=-1, descending=True, stable=True)
    return blocks_QS.sum(-1, dtype=torch.int32)[None, None], order_QS.int()[None, None]


class _Merged(torch.autograd.Function):
    """Attention over the base slots, block by block, merged with the own column by log-sum-exp.

    The gradient needs nothing but the final output and the final log-sum-exp, as in flash attention; with the *merged*
    ones the recomputed probabilities are those of the joint softmax, so the base part of the gradient is exact.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, columns: Columns) -> Tensor:
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):  # it would round the scores, which backward takes in full
            out, lse = _base(q, k, v, columns)
        if len(own_k):
            scores = (_grouped(q, groups)[None] * own_k[:, :, :, None]).sum(-1, dtype=lse.dtype).flatten(-2) * scale
            merged = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
            share = (scores - merged).exp()
            out = (lse - merged).exp()[..., None] * out
            out = out + (share.unflatten(-1, (-1, groups))[..., None] * own_v[:, :, :, None]).sum(0).flatten(1, 2)
            out, lse = out.to(q.dtype), merged
        else:
            share = lse.new_zeros(0)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, share)
        ctx.columns = columns
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out, lse, share = ctx.saved_tensors
        groups, scale, grad = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, grads[0].to(out.dtype)
        delta = (grad * out).sum(-1, dtype=lse.dtype)
        dq, dk, dv = _base_backward(grad, q, k, v, (lse, delta, ctx.columns))
        if not len(own_k):
            return dq.to(q.dtype), dk, dv, None, None, None
        share_g, grad_g = share.unflatten(-1, (-1, groups))[..., None], _grouped(grad, groups)[None]
        delta_g = delta.unflatten(-1, (-1, groups))[None, ..., None]
        own_dv = (share_g * grad_g).sum(3)
        dscore = share_g * ((grad_g * own_v[:, :, :, None]).sum(-1, keepdim=True, dtype=lse.dtype) - delta_g) * scale
        own_dk = (dscore * _grouped(q, groups)[None]).sum(3)
        dq = dq + (dscore * own_k[:, :, :, None]).sum(0).flatten(1, 2)
        return dq.to(q.dtype), dk, dv, own_dk.to(own_k.dtype), own_dv.to(own_v.dtype), None


def _base(q: Tensor, k: Tensor, v: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Output [N, H, d] and log-sum-exp [N, H] over the base slots alone."""
    keys_GTd, values_GTd = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = torch.empty_like(q), wide(q.new_empty(q.shape[:2]))
    for rows, slots in columns.blocks:
        scores_GRT = _scores(q[rows], keys_GTd[:, slots], columns.starts_N[rows] - slots.start)
        most_GR1 = scores_GRT.amax(-1, keepdim=True)
        weights_GRT = scores_GRT.sub_(most_GR1).exp_()
        sum_GR1 = weights_GRT.sum(-1, keepdim=True)
        out[rows] = _by_query((weights_GRT.to(v.dtype) @ values_GTd[:, slots]) / sum_GR1, len(out[rows]))
        lse[rows] = _by_query(sum_GR1.log().add_(most_GR1), len(out[rows]))[..., 0]
    return out, lse


def _base_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: tuple[Tensor, Tensor, Columns]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; lse: of the joint softmax; delta: Σ grad · output, both [N, H]."""
    lse, delta, columns = result
    keys_GTd, values_GTd = k.transpose(0, 1), v.transpose(0, 1)
    dq = torch.empty_like(q)
    dk_GTd, dv_GTd = torch.zeros_like(wide(keys_GTd)), torch.zeros_like(wide(values_GTd))
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    for rows, slots in columns.blocks:
        grad_GRd, q_GRd = _by_group(grad[rows], groups), _by_group(q[rows], groups)
        lse_GR1, delta_GR1 = (_by_group(states[rows][..., None], groups) for states in (lse, delta))
        scores_GRT = _scores(q[rows], keys_GTd[:, slots], columns.starts_N[rows] - slots.start)
        weights_GRT = scores_GRT.sub_(lse_GR1).exp_()
        dv_GTd[:, slots] += weights_GRT.to(v.dtype).transpose(1, 2) @ grad_GRd
        dweights_GRT = wide(grad_GRd) @ wide(values_GTd[:, slots]).transpose(1, 2)
        dscores_GRT = dweights_GRT.sub_(delta_GR1).mul_(weights_GRT).mul_(scale).to(k.dtype)
        dq[rows] = _by_query(dscores_GRT @ keys_GTd[:, slots], len(dq[rows]))
        dk_GTd[:, slots] += dscores_GRT.transpose(1, 2) @ q_GRd
    return dq, dk_GTd.transpose(0, 1).to(k.dtype), dv_GTd.transpose(0, 1).to(v.dtype)


def _scores(q: Tensor, keys_GTd: Tensor, last_N: Tensor) -> Tensor:
    """Scaled scores [G, N · groups, T] in at least fp32; query n sees the slots up to last_N[n]."""
    groups = q.shape[1] // len(keys_GTd)
    scores_GRT = (wide(_by_group(q, groups)) * q.shape[-1] ** -0.5) @ wide(keys_GTd).transpose(1, 2)
    ahead_NT = torch.arange(keys_GTd.shape[1], device=q.device) > last_N[:, None]
    scores_GNgT = scores_GRT.unflatten(1, (-1, groups))
    scores_GNgT.masked_fill_(ahead_NT[None, :, None], -torch.inf)
    return scores_GRT


def _by_group(states: Tensor, groups: int) -> Tensor:
    """[N, H, d] as [G, N · groups, d]: the query heads of one key/value head side by side."""
    return states.unflatten(1, (-1, groups)).transpose(0, 1).flatten(1, 2)


def _by_query(states: Tensor, queries: int) -> Tensor:
    """[G, N · groups, d] as [N, H, d]: the inverse of `_by_group`."""
    return states.unflatten(1, (queries, -1)).transpose(0, 1).flatten(1, 2)


def _spread(states: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads [T, G, d] so that each query head has its own [T, H, d]."""
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _grouped(states: Tensor, groups: int) -> Tensor:
    """Query heads [N, H, d] grouped by the key/value head they share [N, G, groups, d]."""
    return states.unflatten(1, (-1, groups))


def _unzip(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
