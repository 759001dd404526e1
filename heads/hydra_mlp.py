"""Hydra (arXiv 2402.05109): as Medusa, but each head also reads the tokens that are drafted before its own.

Head i (from 0) reads h_t and the embeddings of x_{t+1} … x_{t+1+i} and predicts x_{t+2+i}. Training feeds the true
tokens, drafting the drafted ones. With `prefix_attention` (Hydra++) one decoder block over the settled states h_0 … h_t
gives what takes the place of h_t. heads.stacked has the blocks, the projection and the loss. This file knows no file
format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Committed, Draw, Proposal, TargetFeatures
from heads.cache import BlockCache
from heads.layers import BlockSizes, DraftBlock, RMSNorm, Rotary, copy_last_layer
from heads.stacked import Settled, StackedHead, zeroed
from heads.target import FrozenTarget
from heads.tree_draft import Tree, draft_tree
from heads.unrolled import Columns, unrolled_attention
from heads.vocab import DraftVocabulary


@dataclass
class HydraState:
    """What the newest settled slots hand to the heads, and the keys and values of the prefix block."""

    settled: Settled
    cache: BlockCache


class HydraHead(StackedHead):
    """Stacks that read h_t and the tokens of the round, through a projection beside the residual on h_t.

    sizes: of the target's layers; depth: heads K, the longest draft; blocks: residual blocks L of each; projection:
    "target" (frozen, shared by all heads) or "own" (one per head, trained, started from the target's rows);
    prefix_attention: the decoder block of Hydra++; loss, decay, eta: see heads.losses.Objective. Raises UserError on
    values that cannot be.
    """

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        blocks: int = 1,
        projection: str = "target",
        prefix_attention: bool = False,
        loss: str = "kl",
        decay: float | str = 0.8,
        eta: float = 10.0,
    ) -> None:
        super().__init__(
            sizes=sizes,
            vocab=vocab,
            depth=depth,
            blocks=blocks,
            projection=projection,
            loss=loss,
            decay=decay,
            eta=eta,
            prefix_attention=prefix_attention,
        )
        width = self.sizes.hidden_size
        self.inputs = nn.ModuleList(zeroed(nn.Linear((2 + level) * width, width)) for level in range(depth))
        self.prefix = PrefixBlock(self.sizes) if prefix_attention else None

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """As Medusa; the prefix block is the target's last layer, but hands on h_t unchanged at first."""
        super().initialise(target)
        if self.prefix is not None:
            self.prefix.initialise(target)

    def outputs(self, features: TargetFeatures, starts_N: Tensor) -> Tensor:
        """Every head on the states of the starts and the true tokens after them."""
        path_NC = features.last_TD[starts_N] if self.prefix is None else self.prefix.packed(features, starts_N)
        outputs = []
        for level in range(self.depth):
            # Past the end of a document the token is a wrong one, and the pair is not supervised.
            place_N = (starts_N + 1 + level).clamp(max=len(features.ids_T) - 1)
            path_NC = self._extended(path_NC, features.ids_T[place_N])
            outputs.append(self._stack(level, path_NC))
        return torch.stack(outputs)

    def start(self, prompts: Sequence[Sequence[int]]) -> HydraState:
        return HydraState(Settled(), BlockCache(len(prompts), next(self.inputs.parameters()).device))

    @torch.inference_mode()
    def commit(self, state: HydraState, committed: Committed) -> None:
        if self.prefix is not None:
            committed = replace(committed, last_BMD=self.prefix.settle(committed, state.cache))
        state.settled.take(committed)

    @torch.inference_mode()
    def propose(self, state: HydraState, depth: int, draw: Draw) -> Proposal:
        self.check_depth(depth)
        last_BD, next_B = state.settled.newest
        path_BC = self._extended(last_BD, next_B)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal path_BC
            if tokens:
                path_BC = self._extended(path_BC, tokens[-1])
            return self.logits(len(tokens), self._stack(len(tokens), path_BC))

        return self.chain(step, depth, draw)

    @torch.inference_mode()
    def propose_tree(self, state: HydraState, depth: int, tree: Tree) -> Proposal:
        self.check_depth(depth)
        last_BD, next_B = state.settled.newest
        path_BMC = self._extended(last_BD, next_B)[:, None]
        first_BW = self.logits(0, self._stack(0, path_BMC))[:, 0]

        def step(tokens_BM: Tensor, slots_BM: Tensor, seen_BMS: Tensor, level: int) -> Tensor:
            nonlocal path_BMC
            above_BMC = path_BMC.gather(1, slots_BM[..., None].expand(-1, -1, path_BMC.shape[-1]))
            path_BMC = self._extended(above_BMC, tokens_BM)
            return self.logits(level, self._stack(level, path_BMC))

        return draft_tree(first_BW, step, self.vocab, tree, depth)

    def _extended(self, path: Tensor, tokens: Tensor) -> Tensor:
        """What the next head reads [..., C + D]: the path so far, which begins with h_t, and one more token."""
        return torch.cat([path, self.target.embedding_VD[tokens].to(path.dtype)], -1)

    def _stack(self, level: int, path: Tensor) -> Tensor:
        """The output [..., D] of a head on its path [..., (2 + level) · D]."""
        read = self.inputs[level](path)
        hidden: Tensor = self.blocks[level](path[..., : read.shape[-1]].to(read.dtype) + read)
        return hidden


class PrefixBlock(nn.Module):
    """One decoder block over the states that the target has settled, causal, at their own positions (Hydra++).
    It never sees a drafted token, so there is nothing to forget after a rejection."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        config = sizes.llama_config()
        self.norm = RMSNorm(sizes.hidden_size, config.rms_norm_eps)
        self.layer = DraftBlock(config, sizes.hidden_size)
        self.rotary = Rotary(config)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """The target's last layer, whose two outputs are 0 at first: the heads begin with h_t itself."""
        gains = copy_last_layer(self.layer, target.model)
        if "input_layernorm" in gains:
            self.norm.weight.copy_(gains["input_layernorm"])
        for projection in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            projection.weight.zero_()

    def packed(self, features: TargetFeatures, starts_N: Tensor) -> Tensor:
        """The block's output [N, D] at the starts of a packed batch."""
        positions_T = torch.cat([torch.arange(length, device=starts_N.device) for length in features.lengths])
        x_TD = self.norm(features.last_TD)
        cos, sin = (table[0] for table in self.rotary(x_TD, positions_T[None]))
        attention = self.layer.self_attn
        base = attention.keys_values(x_TD, (cos, sin))
        queries_NHd = attention.queries(x_TD[starts_N], (cos[starts_N], sin[starts_N]))
        attended_NHd = unrolled_attention(queries_NHd, base, [], Columns(features.lengths, starts_N))
        return self.layer.finish(features.last_TD[starts_N], attention.o_proj(attended_NHd.flatten(1)))

    def settle(self, committed: Committed, cache: BlockCache) -> Tensor:
        """The block's output [B, M, D] at new slots, which the cache then holds."""
        counts = [int(count) for count in committed.count_B]
        block = cache.place(counts)
        x_BMD = self.norm(committed.last_BMD)
        rope = self.rotary(x_BMD, block.positions_BN)
        attended_BMD = self.layer.self_attn.cached(x_BMD, rope, cache, block.allowed_BNC)
        cache.keep(counts)
        return self.layer.finish(committed.last_BMD, attended_BMD)
