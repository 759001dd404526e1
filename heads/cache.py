"""Keys and values of a batch whose rows grow at different speeds, on top of transformers' caches.

A round appends one block of nodes to every row and then keeps only what was accepted. A cache appends at the same
column for all rows, so a row that kept less has a gap; `keep` closes it by moving the kept columns to the left.
The module knows neither models nor acceptance rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is taken as untyped
    """A DynamicLayer that appends in place: it keeps spare columns instead of copying all of them at every step."""

    _SPARE = 64
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new states [B, heads, N, head_dim]; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < end or self.keys.data_ptr() != self._room[0].data_ptr():
            self._room = (self._grown(self.keys, key_states, end), self._grown(self.values, value_states, end))
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., used:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def _grown(self, held: Tensor, states: Tensor, end: int) -> Tensor:
        room = states.new_empty(*states.shape[:-2], end + max(self._SPARE, end // 4), states.shape[-1])
        if held.numel():
            room[..., : held.shape[-2], :] = held
        return room


def growing_cache() -> Cache:
    """An empty cache that keeps everything, whatever window a layer looks through."""
    return Cache(layer_class_to_replicate=GrowingLayer)


@dataclass(frozen=True)
class Block:
    """Where a block of N nodes sits: rope positions_BN, and which of the C = width + N columns each node may see
    (allowed_BNC bool), or None when plain causal attention says the same."""

    positions_BN: Tensor
    allowed_BNC: Tensor | None


class BlockCache:
    """A cache plus the true length of each row; columns past a row's length are garbage and never seen."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.kv = growing_cache()
        self.lengths = [0] * rows
        self.width = 0
        self.device = torch.device(device)

    def place(self, counts: Sequence[int], parents_N: Tensor | None = None) -> Block:
        """Positions and visibility for a block of N = max(counts) nodes appended to every row.

        counts: valid nodes per row (padding on the right). parents_N: a tree (parents before children, -1 for the
        root's predecessor, i.e. the committed text), or one for each row [B, N]; None means a chain.
        """
        nodes, rows = max(counts), len(self.lengths)
        if parents_N is None:
            depth_N = torch.arange(nodes)
            inside_NN = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        else:
            depth_N, inside_NN = ancestry(parents_N.cpu())
        positions_BN = (torch.tensor(self.lengths)[:, None] + depth_N).to(self.device)
        whole = all(length == self.width for length in self.lengths) and min(counts) == nodes
        if whole and parents_N is None:
            return Block(positions_BN, None)
        past_BC = torch.arange(self.width) < torch.tensor(self.lengths)[:, None]
        valid_BN = torch.arange(nodes) < torch.tensor(list(counts))[:, None]
        # A padded node sees itself, so that its softmax has something to sum.
        block_BNN = (inside_NN & valid_BN[:, None, :]) | torch.eye(nodes, dtype=torch.bool)
        allowed_BNC = torch.cat([past_BC[:, None, :].expand(rows, nodes, self.width), block_BNN], dim=-1)
        return Block(positions_BN, allowed_BNC.to(self.device))

    def place_open(self, seen_BMS: Tensor, depth: int) -> Block:
        """Positions and visibility for M nodes at this depth (from 0) of a tree that grows step by step.

        seen_BMS: which of the S nodes appended since the last `keep`, these M the last of them, each may see.
        """
        lengths_B = torch.tensor(self.lengths, device=self.device)
        past_BC = torch.arange(self.width, device=self.device) < lengths_B[:, None]
        past_BMC = past_BC[:, None].expand(-1, seen_BMS.shape[1], -1)
        positions_BM = (lengths_B + depth)[:, None].expand(-1, seen_BMS.shape[1])
        return Block(positions_BM, torch.cat([past_BMC, seen_BMS], -1))

    @torch.inference_mode()
    def keep(self, counts: Sequence[int], path_BN: Tensor | None = None) -> None:
        """After a forward over a block: keep `counts[b]` of its nodes in row b and forget the others.

        path_BN: indices of the kept nodes, in order (entries past the count are ignored); None means the first ones.
        """
        before, lengths = self.width, [length + count for length, count in zip(self.lengths, counts, strict=True)]
        straight = path_BN is None and all(length == before for length in self.lengths)
        if not straight and max(counts) > 0:
            self._compact(before, max(counts), path_BN)
        self.lengths, self.width = lengths, max(lengths)
        self.kv.crop(self.width - self.kv.get_seq_length())

    def forget(self, lengths: Sequence[int]) -> None:
        """Go back to these shorter lengths: what was kept since is dropped."""
        self.lengths, self.width = list(lengths), max(lengths)
        self.kv.crop(self.width - self.kv.get_seq_length())

    def drop(self, layer: int, columns: int) -> None:
        """Take away the newest columns of one layer, which others have not."""
        self.kv.layers[layer].crop(-columns)

    def _compact(self, before: int, kept: int, path_BN: Tensor | None) -> None:
        offset_BN = torch.arange(kept).expand(len(self.lengths), kept) if path_BN is None else path_BN[:, :kept].cpu()
        source_BN = (before + offset_BN.clamp(min=0)).to(self.device)
        goal_BN = (torch.tensor(self.lengths)[:, None] + torch.arange(kept)).to(self.device)
        for layer in self.kv.layers:
            for states in (layer.keys, layer.values):  # latent attention has them of different widths
                source, goal = (
                    index_BN[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                    for index_BN in (source_BN, goal_BN)
                )
                states.scatter_(2, goal, states.gather(2, source))


def ancestry(parents_N: Tensor) -> tuple[Tensor, Tensor]:
    """Depth of each node [N] (roots have 0) and the mask [N, N] of who is an ancestor of whom, itself included; for
    one tree per row all of them have the rows in front."""
    nodes = parents_N.shape[-1]
    assert bool((parents_N < torch.arange(nodes)).all()), "parents come before their children"
    above_NN = torch.nn.functional.one_hot(parents_N + 1, nodes + 1)[..., 1:].float()
    inside_NN = above_NN + torch.eye(nodes)
    for _ in range(nodes.bit_length()):  # each turn doubles how far up a node sees
        inside_NN = (inside_NN @ inside_NN).clamp(max=1)
    return inside_NN.sum(-1).long() - 1, inside_NN > 0
