"""What the readers of exported heads do with the tensors of a folder, written down once more and plainly. Most for one
position: attention to itself alone returns its own value, and nothing is rotated at position 0. Not a test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Committed, DraftHead

WIDTH, HEADS, KV_HEADS, EPS, THETA = 32, 4, 2, 1e-6, 10000.0


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def block(x: Tensor, residual: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A Llama layer behind its first norm."""
    value = tensors[f"{name}self_attn.v_proj.weight"] @ x
    each = value.view(KV_HEADS, -1).repeat_interleave(HEADS // KV_HEADS, 0).flatten()
    hidden = residual + tensors[f"{name}self_attn.o_proj.weight"] @ each
    y = normed(hidden, tensors[f"{name}post_attention_layernorm.weight"])
    gate, up = (tensors[f"{name}mlp.{part}_proj.weight"] @ y for part in ("gate", "up"))
    return hidden + tensors[f"{name}mlp.down_proj.weight"] @ (F.silu(gate) * up)


def eagle3(tensors: Mapping[str, Tensor], name: str, taps: Tensor, embedded: Tensor) -> Tensor:
    """Logits over the target's vocabulary by the paper's head, tokens outside d2t at minus infinity."""
    g = tensors["fc.weight"] @ taps
    parts = normed(embedded, tensors[f"{name}input_layernorm.weight"]), normed(g, tensors[f"{name}hidden_norm.weight"])
    hidden = block(torch.cat(parts), g, tensors, name)
    logits = tensors["lm_head.weight"] @ normed(hidden, tensors["norm.weight"])
    if "d2t" not in tensors:
        return logits
    spread = torch.full((len(tensors["t2d"]),), -torch.inf)
    spread[torch.arange(len(logits)) + tensors["d2t"]] = logits
    return spread


def eagle(tensors: Mapping[str, Tensor], last: Tensor, embedded: Tensor, projection: Tensor) -> Tensor:
    """EAGLE-1: no norm before the layer or behind it."""
    x = tensors["fc.weight"] @ torch.cat([embedded, last]) + tensors.get("fc.bias", torch.zeros(WIDTH))
    return projection @ block(x, x, tensors, "layers.0.")


def medusa(tensors: Mapping[str, Tensor], last: Tensor, blocks: int = 1) -> Tensor:
    """The first head of a Medusa."""
    for i in range(blocks):
        last = last + F.silu(tensors[f"0.{i}.linear.weight"] @ last + tensors[f"0.{i}.linear.bias"])
    return tensors[f"0.{blocks}.weight"] @ last


def mtp(tensors: Mapping[str, Tensor], last_TD: Tensor, embedded_TD: Tensor, projection: Tensor) -> Tensor:
    """MiMo's module behind the last of several positions: the state first, no embedding at position 0."""
    own = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    embedded_TD = embedded_TD * (torch.arange(len(embedded_TD)) > 0)[:, None]
    parts = normed(last_TD, own["hidden_layernorm.weight"]), normed(embedded_TD, own["token_layernorm.weight"])
    x_TD = torch.cat(parts, -1) @ own["input_proj.weight"].T
    y_TD, seen = normed(x_TD, own["input_layernorm.weight"]), len(x_TD)
    q, k, v = (
        (y_TD @ own[f"self_attn.{name}_proj.weight"].T + own[f"self_attn.{name}_proj.bias"]).view(seen, -1, 8)
        for name in "qkv"
    )
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotated(k), v))
    scores = torch.einsum("hd,thd->ht", rotated(q)[-1], k) / 8**0.5
    mixed = torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten()
    hidden = x_TD[-1] + own["self_attn.o_proj.weight"] @ mixed
    z = normed(hidden, own["post_attention_layernorm.weight"])
    gate, up = (own[f"mlp.{part}_proj.weight"] @ z for part in ("gate", "up"))
    hidden = hidden + own["mlp.down_proj.weight"] @ (F.silu(gate) * up)
    return projection @ normed(hidden, own["final_layernorm.weight"])


def rotated(x_THd: Tensor) -> Tensor:
    """Rotary embeddings at positions 0, 1, …, over halves of each attention head."""
    half = x_THd.shape[-1] // 2
    angles = torch.arange(len(x_THd))[:, None, None] * THETA ** (-torch.arange(half) / half)
    a, b = x_THd[..., :half], x_THd[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def ours(head: DraftHead, taps_TE: Tensor, last_TD: Tensor, next_ids: list[int]) -> Tensor:
    """What a head itself says after settled positions, over the target's vocabulary."""
    seen: list[Tensor] = []

    def draw(logits_BW, *, drafted_BK=None, vocab=None):
        seen.append(logits_BW[0])
        return logits_BW.argmax(-1), None

    state = head.start([[1, *next_ids]])
    head.commit(state, Committed(torch.tensor([next_ids]), taps_TE[None], last_TD[None], torch.tensor([len(next_ids)])))
    head.propose(state, 1, draw)
    if head.vocab.full:
        return seen[0]
    spread = torch.full((head.vocab.size,), -torch.inf)
    spread[head.vocab.ids_W] = seen[0]
    return spread
