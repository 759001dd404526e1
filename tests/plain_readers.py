"""What the readers of exported heads do with the tensors of a folder, written down once more and plainly, for one
position: attention to itself alone returns its own value, and nothing is rotated at position 0. Not a test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Committed, DraftHead

WIDTH, HEADS, KV_HEADS, EPS = 32, 4, 2, 1e-6


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


def medusa(tensors: Mapping[str, Tensor], last: Tensor) -> Tensor:
    """The first head of a Medusa with one block."""
    moved = F.silu(tensors["0.0.linear.weight"] @ last + tensors["0.0.linear.bias"])
    return tensors["0.1.weight"] @ (last + moved)


def ours(head: DraftHead, taps: Tensor, last: Tensor, next_id: int) -> Tensor:
    """What a head itself says after one settled position, over the target's vocabulary."""
    seen: list[Tensor] = []

    def draw(logits_BW, *, drafted_BK=None, vocab=None):
        seen.append(logits_BW[0])
        return logits_BW.argmax(-1), None

    state = head.start([[1, next_id]])
    count_B = torch.ones(1, dtype=torch.long)
    head.commit(state, Committed(torch.tensor([[next_id]]), taps[None, None], last[None, None], count_B))
    head.propose(state, 1, draw)
    if head.vocab.full:
        return seen[0]
    spread = torch.full((head.vocab.size,), -torch.inf)
    spread[head.vocab.ids_W] = seen[0]
    return spread
