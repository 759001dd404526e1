"""Heads of one decoder layer that read their own output: EAGLE-1, EAGLE-3 and MTP modules.

Slot t joins a hidden state with the embedding of x_{t+1} and predicts x_{t+2}. For settled slots the hidden state is
made of the target's; later slots of a round are fed what the slot before them gave out. Training unrolls the head K
times (training-time test, EAGLE-3, arXiv 2503.01840): pass k of start t stands at slot t + k, reads the output of pass
k - 1 and the embedding of x_{t+1+k}, sees the true slots up to t and its own column, and predicts x_{t+2+k}. That is
what a round of the served decoder does. A subclass says how a slot is made and what it gives out; this module knows
neither, and no loss, file format or sampling rule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heads.base import Committed, Draw, Proposal, TargetFeatures
from heads.cache import Block, BlockCache
from heads.compiled import compiled
from heads.layers import DraftAttention, DraftBlock, Rotary
from heads.pairs import PairHead
from heads.tree_draft import Tree, draft_tree
from heads.unrolled import Columns, fused_attention, unrolled_attention

Rope = tuple[Tensor, Tensor]
"""cos and sin of some positions."""
Column = tuple[Tensor, Tensor]
"""Keys and values of some slots."""


@dataclass
class RecurrentState:
    """The layer's cache over committed slots, and slots that came in since the last proposal."""

    cache: BlockCache
    pending: list[Committed] = field(default_factory=list)


@dataclass(frozen=True)
class Slot:
    """What a slot hands to the layer: the input of the attention [..., width] and the residual beside it [..., D]."""

    x: Tensor
    residual: Tensor


class SelfFedHead(PairHead):
    """Drafts by feeding on its own outcome, over a cache of the committed slots. A subclass sets `rotary` and says
    what settled slots begin with (`given`), how a block of slots is run (`slots`) and read (`logits`)."""

    rotary: nn.Module

    @abstractmethod
    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """The hidden state [..., D] of a slot that the target has settled, out of h_t."""

    @abstractmethod
    def unroll(self, features: TargetFeatures, starts_N: Tensor, depth: int) -> Tensor:
        """Output states [K, N, D] of all passes of the training over one packed batch."""

    @abstractmethod
    def slots(
        self, cache: BlockCache, next_ids_BM: Tensor, hidden_BMD: Tensor, block: Block, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor]:
        """A block of new slots, appended to the cache: (what the slot after each is fed, the state that `logits`
        reads), both [B, M, D]. rope: cos and sin of the slots' positions, where they are known already."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """The draft's logits [..., W] from a state that `slots` gave."""

    def start(self, prompts: Sequence[Sequence[int]]) -> RecurrentState:
        return RecurrentState(BlockCache(len(prompts), next(self.parameters()).device))

    def commit(self, state: RecurrentState, committed: Committed) -> None:
        assert not state.pending, "a proposal comes between two commits"
        state.pending.append(committed)

    @torch.inference_mode()
    def propose(self, state: RecurrentState, depth: int, draw: Draw) -> Proposal:
        fed_BD, output_BD = self._settle(state)
        settled, rows = list(state.cache.lengths), len(fed_BD)
        ahead_BN = torch.tensor(settled, device=fed_BD.device)[:, None] + torch.arange(depth, device=fed_BD.device)
        tables = self.rotary(fed_BD, ahead_BN)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal fed_BD
            if not tokens:
                return self.logits(output_BD)
            ahead = slice(len(tokens) - 1, len(tokens))
            rope = (tables[0][:, ahead], tables[1][:, ahead])
            block = state.cache.place([1] * rows)
            fed_B1D, output_B1D = self.slots(state.cache, tokens[-1][:, None], fed_BD[:, None], block, rope)
            state.cache.keep([1] * rows)
            fed_BD = fed_B1D[:, 0]
            return self.logits(output_B1D[:, 0])

        proposal = self.chain(step, depth, draw)
        state.cache.forget(settled)
        return proposal

    @torch.inference_mode()
    def propose_tree(self, state: RecurrentState, depth: int, tree: Tree) -> Proposal:
        fed_BD, output_BD = self._settle(state)
        fed_BMD = fed_BD[:, None]

        def step(tokens_BM: Tensor, slots_BM: Tensor, seen_BMS: Tensor, level: int) -> Tensor:
            nonlocal fed_BMD
            hidden_BMD = fed_BMD.gather(1, slots_BM[..., None].expand(-1, -1, fed_BMD.shape[-1]))
            block = state.cache.place_open(seen_BMS, level - 1)
            fed_BMD, output_BMD = self.slots(state.cache, tokens_BM, hidden_BMD, block)
            return self.logits(output_BMD)

        proposal = draft_tree(self.logits(output_BD), step, self.vocab, tree, depth)
        state.cache.forget(state.cache.lengths)
        return proposal

    def _settle(self, state: RecurrentState) -> tuple[Tensor, Tensor]:
        """Take in the committed slots; returns what the last of each row feeds on [B, D], and its output [B, D]."""
        committed = state.pending.pop()
        counts = [int(count) for count in committed.count_B]
        hidden_BMD = self.given(committed.taps_BME, committed.last_BMD)
        block = state.cache.place(counts)
        fed_BMD, output_BMD = self.slots(state.cache, committed.next_ids_BM, hidden_BMD, block)
        state.cache.keep(counts)
        last_B = torch.tensor(counts, device=hidden_BMD.device) - 1
        each_B = torch.arange(len(counts), device=hidden_BMD.device)
        return fed_BMD[each_B, last_B], output_BMD[each_B, last_B]

    def embed(self, ids: Tensor, like: Tensor) -> Tensor:
        """The target's embeddings of tokens, in the dtype of other states."""
        return self.target.embedding_VD[ids].to(like.dtype)


class RecurrentHead(SelfFedHead):
    """A self-fed head of one `heads.layers.DraftBlock`. A subclass sets `layer` and `rotary` and says how slots are
    made (`given`, `slot`) and closed (`outcome`, `logits`)."""

    layer: DraftBlock
    rotary: Rotary
    recompute, flex = False, False

    @abstractmethod
    def slot(self, next_ids: Tensor, fed: Tensor, positions: Tensor) -> Slot:
        """A slot of x_{t+1} (ids) and a hidden state [..., D] at rope positions t, all of the same leading shape."""

    @abstractmethod
    def outcome(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next slot is fed, the state that the vocabulary projection reads), both [..., D]."""

    def unroll(self, features: TargetFeatures, starts_N: Tensor, depth: int) -> Tensor:
        """Keys and values of pass 0 are made for every slot, everything else for the starts only."""
        positions_T = torch.cat([torch.arange(length, device=starts_N.device) for length in features.lengths])
        columns = Columns(features.lengths, starts_N)
        following_T = features.ids_T.roll(-1)  # the last slot of a document gets a wrong token and is never a start
        base_TD = self.given(features.taps_TE, features.last_TD)
        rope_T = self._rope(positions_T)
        every, base = self._enter(following_T, base_TD, positions_T, rope_T)
        here = Slot(every.x[starts_N], every.residual[starts_N])
        rope_N = (rope_T[0][starts_N], rope_T[1][starts_N])
        fed_ND, output_ND = self._again(self._attend, here, rope_N, base, [], columns)
        own: list[Column] = []
        outputs = [output_ND]
        for k in range(1, depth):
            place_N = (starts_N + 1 + k).clamp(max=len(features.ids_T) - 1)
            ids_N, there_N = features.ids_T[place_N], positions_T[starts_N] + k
            fed_ND, output_ND, column = self._again(self._pass, ids_N, fed_ND, there_N, base, list(own), columns)
            own.append(column)
            outputs.append(output_ND)
        return torch.stack(outputs)

    def _again(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """What the function gives; with `recompute` only its inputs are kept for the backward."""
        if not self.recompute:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn here

    def _pass(
        self, ids_N: Tensor, fed_ND: Tensor, positions_N: Tensor, base: Column, own: list[Column], columns: Columns
    ) -> tuple[Tensor, Tensor, Column]:
        """A pass after the first: (what the next is fed, the state that is read, keys and values of its own column)."""
        rope_N = self._rope(positions_N)
        here, column = self._enter(ids_N, fed_ND, positions_N, rope_N)
        return *self._attend(here, rope_N, base, [*own, column], columns), column

    def _attend(
        self, here: Slot, rope_N: Rope, base: Column, own: list[Column], columns: Columns
    ) -> tuple[Tensor, Tensor]:
        """(what the next pass is fed, the state that is read) of slots that see the base and their own column."""
        attention = self.layer.self_attn
        queries_NHd = self._run(DraftAttention.queries, attention, here.x, rope_N)
        attend = fused_attention if self.flex else unrolled_attention
        fed_ND, output_ND = self._run(_leave, self, here.residual, attend(queries_NHd, base, own, columns))
        return fed_ND, output_ND

    def _enter(self, ids: Tensor, fed: Tensor, positions: Tensor, rope: Rope) -> tuple[Slot, Column]:
        """Some slots, and their keys and values."""
        x, residual, keys, values = self._run(_enter, self, ids, fed, positions, rope)
        return Slot(x, residual), (keys, values)

    def _run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """What the function gives, compiled where the head is."""
        return compiled(function, self.compiled)(*inputs)

    def slots(
        self, cache: BlockCache, next_ids_BM: Tensor, hidden_BMD: Tensor, block: Block, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor]:
        slot = self.slot(next_ids_BM, hidden_BMD, block.positions_BN)
        rope = rope if rope is not None else self.rotary(slot.x, block.positions_BN)
        return self.outcome(slot.residual, self.layer.self_attn.cached(slot.x, rope, cache, block.allowed_BNC))

    def _rope(self, positions: Tensor) -> Rope:
        """cos and sin [N, head_dim] in fp32 for packed positions [N]."""
        cos, sin = self.rotary(self.rotary.inv_freq, positions[None])
        return cos[0], sin[0]


def _enter(
    head: RecurrentHead, ids: Tensor, fed: Tensor, positions: Tensor, rope: Rope
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slot = head.slot(ids, fed, positions)
    return slot.x, slot.residual, *head.layer.self_attn.keys_values(slot.x, rope)


def _leave(head: RecurrentHead, residual: Tensor, attended_NHd: Tensor) -> tuple[Tensor, Tensor]:
    attended = head.layer.self_attn.o_proj(attended_NHd.flatten(1))
    fed, output = head.outcome(residual, attended)
    return fed, output.to(attended.dtype)
