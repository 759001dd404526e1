"""The one decoder block that autoregressive heads share, of the shape of transformers' Llama layers.

Only the attention differs from a plain block: its input may be wider than the model, and in training it is unrolled
(see `heads.unrolled`). The module knows no head, no loss and no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

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


class RMSNorm(nn.Module):
    """transformers' LlamaRMSNorm with half the passes over memory in training, and one kernel in inference."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] in the dtype of the states."""
        if torch.is_grad_enabled():
            return _Normed.apply(states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return F.rms_norm(states, self.weight.shape, self.weight.to(states.dtype), self.eps)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(wide(states), dim=-1, keepdim=True)
        inverse = size.square_().mul_(1 / states.shape[-1]).add_(eps).rsqrt_()
        normed = (states * inverse).to(states.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight.to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, weight = ctx.saved_tensors
        (grad,) = grads
        weight_grad = (grad * normed).flatten(0, -2).sum(0, dtype=weight.dtype)
        scaled = grad * weight.to(grad.dtype)
        along = (scaled * normed).sum(-1, keepdim=True, dtype=inverse.dtype).mul_(-1 / normed.shape[-1])
        return torch.addcmul(wide(scaled), normed, along).mul_(inverse).to(grad.dtype), weight_grad, None


class DraftAttention(nn.Module):
    """Grouped-query attention with rotary positions over an input of width `width`.

    qk_norm: queries and keys are normed head by head before they are rotated, as in Qwen3. qkv_bias: queries, keys and
    values have a bias, zero at first, as in Qwen2.
    """

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False, qkv_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=qkv_bias)
        for projection in (self.q_proj, self.k_proj, self.v_proj) if qkv_bias else ():
            nn.init.zeros_(projection.bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity() for _ in "qk"
        )

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., T, heads, head_dim] of inputs [..., T, width]."""
        return _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [..., T, kv heads, head_dim]."""
        keys = _rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def cached(
        self,
        x_BND: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: BlockCache,
        allowed_BNC: Tensor | None,
        layer: int = 0,
    ) -> Tensor:
        """Attention of a block over the cache and itself; appends the block to this layer of the cache."""
        parts = [
            project(x_BND).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        cos, sin = (table.to(x_BND.dtype) for table in rope)
        q, k = apply_rotary_pos_emb(self.q_norm(parts[0]), self.k_norm(parts[1]), cos, sin, unsqueeze_dim=-2)
        k, v = cache.kv.update(k.transpose(1, 2), parts[2].transpose(1, 2), layer)
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

    def __init__(self, config: LlamaConfig, width: int, *, qk_norm: bool = False, qkv_bias: bool = False) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, width, qk_norm=qk_norm, qkv_bias=qkv_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
    given_by = dict(decoder.named_parameters())
    donor = {name.removeprefix(prefix): weight for name, weight in given_by.items() if name.startswith(prefix)}
    own = dict(block.named_parameters())
    # A layer that norms its queries and keys has them on another scale than one that does not.
    scaled = {
        f"self_attn.{part}_proj.weight"
        for part in "qk"
        if _shape(donor, f"self_attn.{part}_norm.weight") != _shape(own, f"self_attn.{part}_norm.weight")
    }
    for name, weight in own.items():
        given = donor.get(name)
        if given is not None and name not in scaled and len(given) == len(weight) and given.ndim == weight.ndim == 2:
            weight[:, weight.shape[1] - given.shape[1] :] = given.to(weight)
        if given is not None and name.endswith("bias") and given.shape == weight.shape:
            weight.copy_(given)
    gains = {}
    inside = ("post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "input_layernorm")
    for name in (*(f"{prefix}{norm}" for norm in inside), "norm"):
        if f"{name}.weight" in given_by:
            norm = decoder.get_submodule(name)
            # Of a vector of ones an RMSNorm leaves its gain, however its family stores it.
            gains[name.removeprefix(prefix)] = norm(torch.ones_like(norm.weight)[None])[0]
    for name, gain in gains.items():
        if _shape(own, f"{name}.weight") == gain.shape:
            own[f"{name}.weight"].copy_(gain)
    return gains


def _shape(weights: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]  # transformers is taken as untyped
    """Rotary tables; called with states and positions [rows, T] they give cos and sin [rows, T, head_dim].

    The frequencies stay in fp32 when a head is cast: rounded to bf16, angles are off by up to a radian after some
    hundred positions, which costs acceptance and is not what training and servers compute.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        kept = self.inv_freq, self.original_inv_freq
        super()._apply(fn, recurse)
        self.inv_freq, self.original_inv_freq = (states.to(self.inv_freq.device) for states in kept)
        return self


def _rotate(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table.to(states.dtype) for table in rope)
    rotated, _ = apply_rotary_pos_emb(states, states[..., :0, :], cos, sin, unsqueeze_dim=-2)
    return rotated
