"""The one decoder block that autoregressive heads share, from transformers' own Llama modules.

Only the attention differs from a plain block: its input may be wider than the model, and in training it sees the base
slots causally plus its own column of each earlier unrolled pass. Two forms are kept: a fast one and a dense reference
that says the same in five lines. The module knows no head, no loss and no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from heads.base import wide
from heads.cache import BlockCache
from heads.packed import grouped_attention


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a head's block, taken from its target (`of`) unless given."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"

    @staticmethod
    def of(config: PretrainedConfig, vocab_size: int) -> BlockSizes:
        """The sizes of a target's own layers."""
        facts = config.to_dict()
        heads = facts["num_attention_heads"]
        rope = facts["rope_parameters"]
        return BlockSizes(
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            vocab_size=vocab_size,
            num_target_layers=facts["num_hidden_layers"],
            max_position_embeddings=facts["max_position_embeddings"],
            rms_norm_eps=facts.get("rms_norm_eps", 1e-6),
            # Targets that mix kinds of layers keep one entry for each kind; a head's block is a full-attention one.
            rope_parameters=rope.get("full_attention", rope),
        )

    def llama_config(self) -> LlamaConfig:
        """The same sizes as transformers' modules want them."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            hidden_act=self.hidden_act,
        )


class DraftAttention(nn.Module):
    """Grouped-query attention with rotary positions over an input of width `width`."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., T, heads, head_dim] of inputs [..., T, width]."""
        return _rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rope)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [..., T, kv heads, head_dim]."""
        keys = _rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rope)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def cached(
        self, x_BND: Tensor, rope: tuple[Tensor, Tensor], cache: BlockCache, allowed_BNC: Tensor | None
    ) -> Tensor:
        """Attention of a block over the cache and itself; appends the block to the cache."""
        parts = [
            project(x_BND).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        cos, sin = (table.to(x_BND.dtype) for table in rope)
        q, k = apply_rotary_pos_emb(parts[0], parts[1], cos, sin, unsqueeze_dim=-2)
        k, v = cache.kv.update(k.transpose(1, 2), parts[2].transpose(1, 2), 0)
        nodes, columns = q.shape[1], k.shape[2]
        mask = None
        if allowed_BNC is not None:
            mask = allowed_BNC[:, None]
        elif 1 < nodes < columns:
            mask = torch.ones(1, 1, nodes, columns, dtype=torch.bool, device=q.device).tril(columns - nodes)
        out, _ = grouped_attention(self, q.transpose(1, 2), k, v, mask)
        return self.o_proj(out.flatten(-2))


class DraftBlock(nn.Module):
    """Attention and MLP with their residuals; the caller owns the norms in front of the attention."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, width)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual + attention output, then the MLP with its own residual."""
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@torch.no_grad()
def copy_last_layer(block: DraftBlock, model: PreTrainedModel) -> dict[str, Tensor]:
    """Start a block from the target's last layer, as far as names and shapes agree, and return its norm gains
    (`input_layernorm` of that layer and the final `norm`) by name.

    Inputs wider than the target's are filled from the right: the hidden state comes last in them.
    """
    decoder = model.base_model
    prefix = f"layers.{model.config.get_text_config().num_hidden_layers - 1}."
    donor = {
        name.removeprefix(prefix): weight for name, weight in decoder.named_parameters() if name.startswith(prefix)
    }
    # A layer that norms its queries and keys has them on another scale than a block without those norms.
    scaled = {"self_attn.q_proj.weight", "self_attn.k_proj.weight"} if "self_attn.q_norm.weight" in donor else set()
    for name, weight in block.named_parameters():
        given = donor.get(name)
        if given is not None and name not in scaled and len(given) == len(weight) and given.ndim == weight.ndim == 2:
            weight[:, weight.shape[1] - given.shape[1] :] = given.to(weight)
    gains = {}
    for name in (f"{prefix}post_attention_layernorm", f"{prefix}input_layernorm", "norm"):
        if f"{name}.weight" in dict(decoder.named_parameters()):
            norm = decoder.get_submodule(name)
            # Of a vector of ones an RMSNorm leaves its gain, however its family stores it.
            gains[name.removeprefix(prefix)] = norm(torch.ones_like(norm.weight)[None])[0]
    if "post_attention_layernorm" in gains:
        block.post_attention_layernorm.weight.copy_(gains["post_attention_layernorm"])
    return gains


def rotary(config: LlamaConfig) -> LlamaRotaryEmbedding:
    """Rotary tables; called as rope(states, positions [rows, T]) they give cos and sin [rows, T, head_dim]."""
    return LlamaRotaryEmbedding(config)


def _rotate(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table.to(states.dtype) for table in rope)
    rotated, _ = apply_rotary_pos_emb(states, states[..., :0, :], cos, sin, unsqueeze_dim=-2)
    return rotated


@dataclass(frozen=True)
class Columns:
    """Who sees whom in an unrolled pass: documents of these lengths lie one after the other, and query n belongs to
    slot starts_N[n]. It sees the slots of its own document up to its own, and its own entry of each earlier pass."""

    lengths: tuple[int, ...]
    starts_N: Tensor


def unrolled_attention(
    q_NHd: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], columns: Columns
) -> Tensor:
    """Attention output [N, H, d] over the base keys and values [T, G, d] and the own column: one pair [N, G, d] for
    each earlier pass and the present one. Linear memory on CPU; elsewhere the dense reference."""
    own_k, own_v = (torch.stack(states) if states else q_NHd.new_zeros(0) for states in _unzip(own))
    if q_NHd.device.type == "cpu":
        return _Merged.apply(q_NHd, *base, own_k, own_v, columns)  # type: ignore[no-untyped-call]
    return dense_attention(q_NHd, base, own, columns)


def dense_attention(
    q_NHd: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], columns: Columns
) -> Tensor:
    """The reference: every score written out, one softmax over base slots and own column together."""
    keys, values = (_spread(states, q_NHd.shape[1]) for states in base)
    document_T = torch.repeat_interleave(torch.arange(len(columns.lengths)), torch.tensor(columns.lengths)).to(
        q_NHd.device
    )
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


class _Merged(torch.autograd.Function):
    """Flash attention over each document, merged with the own column by log-sum-exp.

    The backward pass of flash attention needs nothing but the final output and the final log-sum-exp; handing it the
    *merged* ones makes its probabilities those of the joint softmax, so the base part of the gradient is exact.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, columns: Columns) -> Tensor:
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        starts, total = columns.starts_N, k.shape[0]
        q_all = q.new_zeros(total, *q.shape[1:]).index_copy_(0, starts, q)
        out_all, lse_all = _flash(q_all, _spread(k, q.shape[1]), _spread(v, q.shape[1]), columns.lengths)
        out, lse = out_all[starts], lse_all[starts]
        if len(own_k):
            scores = (_grouped(q, groups)[None] * own_k[:, :, :, None]).sum(-1, dtype=lse.dtype).flatten(-2) * scale
            merged = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
            share = (scores - merged).exp()
            out = (lse - merged).exp()[..., None] * out
            out = out + (share.unflatten(-1, (-1, groups))[..., None] * own_v[:, :, :, None]).sum(0).flatten(1, 2)
            out, lse = out.to(q.dtype), merged
        else:
            share = lse.new_zeros(0)
        ctx.save_for_backward(q_all, k, v, own_k, own_v, out, lse, share)
        ctx.columns = columns
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_all, k, v, own_k, own_v, out, lse, share = ctx.saved_tensors
        starts, heads, scale = ctx.columns.starts_N, q_all.shape[1], q_all.shape[-1] ** -0.5
        groups, grad = heads // k.shape[1], grads[0].to(out.dtype)

        def placed(states: Tensor) -> Tensor:
            return states.new_zeros(len(k), *states.shape[1:]).index_copy_(0, starts, states)

        dq_all, dk, dv = _flash_backward(
            placed(grad),
            q_all,
            _spread(k, heads),
            _spread(v, heads),
            (placed(out), placed(lse), ctx.columns.lengths),
        )
        dq = dq_all[starts]
        dk, dv = (states.unflatten(1, (-1, groups)).sum(2) for states in (dk, dv))
        if not len(own_k):
            return dq, dk, dv, None, None, None
        share_g, grad_g = share.unflatten(-1, (-1, groups))[..., None], _grouped(grad, groups)[None]
        delta = (grad * out).sum(-1, dtype=lse.dtype).unflatten(-1, (-1, groups))[None, ..., None]
        own_dv = (share_g * grad_g).sum(3)
        dscore = share_g * ((grad_g * own_v[:, :, :, None]).sum(-1, keepdim=True, dtype=lse.dtype) - delta) * scale
        own_dk = (dscore * _grouped(q_all[starts], groups)[None]).sum(3)
        dq = dq + (dscore * own_k[:, :, :, None]).sum(0).flatten(1, 2)
        return dq.to(out.dtype), dk, dv, own_dk.to(own_k.dtype), own_dv.to(own_v.dtype), None


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: output [T, H, d] and log-sum-exp [T, H]."""
    out, lse = [], []
    for parts in zip(*(_documents(states, lengths) for states in (q, k, v)), strict=True):
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
        out.append(o[0].transpose(0, 1))
        lse.append(s[0].T)
    return torch.cat(out), torch.cat(lse)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: tuple[Tensor, Tensor, Sequence[int]]
) -> tuple[Tensor, ...]:
    out, lse, lengths = result
    pieces = []
    for parts in zip(
        *(_documents(states, lengths) for states in (grad, q, k, v, out)), lse.split(list(lengths)), strict=True
    ):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts[:5], parts[5].T[None], 0.0, True
        )
        pieces.append([states[0].transpose(0, 1) for states in grads])
    return tuple(torch.cat(states) for states in zip(*pieces, strict=True))


def _documents(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """[T, H, d] as one [1, H, t, d] for each document."""
    return [part.transpose(0, 1)[None] for part in states.split(list(lengths))]


def _spread(states: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads [T, G, d] so that each query head has its own [T, H, d]."""
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _grouped(states: Tensor, groups: int) -> Tensor:
    """Query heads [N, H, d] grouped by the key/value head they share [N, G, groups, d]."""
    return states.unflatten(1, (-1, groups))


def _unzip(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
