"""Drafting trees instead of chains, for any head: which nodes are expanded, and which are handed to the target.

Two kinds of tree. `DynamicTree` is EAGLE-2's (arXiv 2406.16858, section 4): at each depth the nodes of the highest
cumulative draft probability are expanded, and in the end the best of all nodes are kept. `StaticTree` has the same
shape in every round (Medusa, arXiv 2401.10774, section 2.3.3). Nodes are chosen, never drawn, so that both are
verified by the rule for deterministic siblings at any temperature.

The head is a step function here: given nodes, their parents among the nodes of the last step and which nodes of this
round each one may see, it returns the draft's logits after each node. This module knows no head and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import Committed, DraftHead, Draw, Proposal, wide
from heads.vocab import DraftVocabulary


@dataclass(frozen=True)
class DynamicTree:
    """top_k: nodes expanded at each depth, and children of each; nodes: how many the target judges. UserError."""

    top_k: int = 8
    nodes: int = 32

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.nodes < 1:
            raise UserError(f"A tree of top_k={self.top_k} nodes={self.nodes} cannot be; both must be at least 1.")


@dataclass(frozen=True)
class StaticTree:
    """parents: of each node, -1 for the last committed token, ascending; ranks: 0 for the draft's best child of its
    parent, 1 for the second best, …. UserError when this is no tree or a parent has a rank twice."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        twice = len(set(zip(self.parents, self.ranks, strict=True))) < len(self.parents)
        wrong = [node for node, parent in enumerate(self.parents) if not -1 <= parent < node]
        if not self.parents or twice or wrong or min(self.ranks) < 0:
            raise UserError(
                f"The tree with parents {list(self.parents)} and ranks {list(self.ranks)} cannot be; parents come "
                f"before their children (-1 is the root), ranks are 0 and more, different among siblings."
            )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """1 for the children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def cut(self, depth: int) -> StaticTree:
        """The nodes down to this depth."""
        kept = [node for node, own in enumerate(self.depths) if own <= depth]
        place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
        return StaticTree(tuple(place[self.parents[n]] for n in kept), tuple(self.ranks[n] for n in kept))


Tree = DynamicTree | StaticTree


class TreeDrafter:
    """A head as a proposer of trees instead of chains."""

    def __init__(self, head: DraftHead, tree: Tree) -> None:
        self.head, self.tree, self.needs = head, tree, head.needs

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        return self.head.start(prompts)

    def commit(self, state: Any, committed: Committed) -> None:
        self.head.commit(state, committed)

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        """A tree of this depth; nothing is drawn."""
        return self.head.propose_tree(state, depth, self.tree)


Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens_BM target ids, parents_BM index into the M' nodes of the last step, seen_BMS which of the S nodes stepped so
far in this round, these M the last of them, each sees: its ancestors and itself, depth of the nodes from 1)
-> logits_BMW after each node."""


def draft_tree(first_BW: Tensor, step: Step, vocab: DraftVocabulary, tree: Tree, depth: int) -> Proposal:
    """A tree of at most this depth. first_BW: the draft's logits after the last committed token."""
    if isinstance(tree, StaticTree):
        return _static(first_BW, step, vocab, tree.cut(depth))
    return _dynamic(first_BW, step, vocab, tree, depth)


def _dynamic(first_BW: Tensor, step: Step, vocab: DraftVocabulary, tree: DynamicTree, depth: int) -> Proposal:
    """EAGLE-2: expansion by cumulative log-probability, then the best `nodes` of all candidates."""
    rows, width = first_BW.shape
    top_k = min(tree.top_k, width)
    scores_BM, index_BM = torch.log_softmax(wide(first_BW), -1).topk(top_k)
    all_tokens, all_scores = [vocab.to_target(index_BM)], [scores_BM]
    all_parents = [torch.full_like(index_BM, -1)]
    frontier_BM = torch.arange(top_k, device=first_BW.device).expand(rows, top_k)  # as ids among all candidates
    slot_BM, known = torch.zeros_like(frontier_BM), top_k
    seen_BMS = first_BW.new_zeros(rows, top_k, 0, dtype=torch.bool)
    for level in range(1, depth):
        tokens_BM = torch.cat(all_tokens, 1).gather(1, frontier_BM)
        seen_BMS = _with_itself(seen_BMS, slot_BM)
        logits_BMW = step(tokens_BM, slot_BM, seen_BMS, level)
        own_BMk, index_BMk = torch.log_softmax(wide(logits_BMW), -1).topk(top_k)
        children_BM = (scores_BM[..., None] + own_BMk).flatten(1)
        all_tokens.append(vocab.to_target(index_BMk).flatten(1))
        all_scores.append(children_BM)
        all_parents.append(frontier_BM.repeat_interleave(top_k, 1))
        scores_BM, chosen_BM = children_BM.topk(top_k)
        slot_BM, frontier_BM = chosen_BM // top_k, known + chosen_BM
        known += top_k * top_k
    return _best(torch.cat(all_tokens, 1), torch.cat(all_scores, 1), torch.cat(all_parents, 1), tree.nodes)


def _best(tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, nodes: int) -> Proposal:
    """The best candidates, parents before children. A stable sort keeps a parent before a child of equal score."""
    kept_BN = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
    place_BC = torch.full_like(parents_BC, -1)
    places_BN = torch.arange(kept_BN.shape[1], device=kept_BN.device).expand_as(kept_BN)
    place_BC.scatter_(1, kept_BN, places_BN)
    above_BN = parents_BC.gather(1, kept_BN)
    parents_BN = torch.where(above_BN < 0, -1, place_BC.gather(1, above_BN.clamp(min=0)))
    count_B = torch.full_like(kept_BN[:, 0], kept_BN.shape[1])
    return Proposal(tokens_BC.gather(1, kept_BN), parents_BN, count_B)


def _static(first_BW: Tensor, step: Step, vocab: DraftVocabulary, tree: StaticTree) -> Proposal:
    """One step for each depth, over the nodes that have children."""
    rows, device = len(first_BW), first_BW.device
    tokens_BN = torch.zeros(rows, len(tree.parents), dtype=torch.long, device=device)
    last, logits_BMW = [-1], first_BW[:, None]  # the nodes of the last step, and the logits after them
    seen_BMS = first_BW.new_zeros(rows, 1, 0, dtype=torch.bool)
    for level in range(1, max(tree.depths) + 1):
        nodes = [node for node, depth in enumerate(tree.depths) if depth == level]
        most = 1 + max(tree.ranks[node] for node in nodes)
        if most > logits_BMW.shape[-1]:
            raise UserError(
                f"The tree asks for rank {most - 1} of {logits_BMW.shape[-1]} draft tokens; give a smaller one."
            )
        ranked_BMk = vocab.to_target(logits_BMW.topk(most).indices)
        for node in nodes:
            tokens_BN[:, node] = ranked_BMk[:, last.index(tree.parents[node]), tree.ranks[node]]
        inner = [node for node in nodes if node in tree.parents]
        if not inner:
            break
        slots = torch.tensor([last.index(tree.parents[node]) for node in inner], device=device).expand(rows, -1)
        seen_BMS = _with_itself(seen_BMS, slots)
        logits_BMW = step(tokens_BN[:, inner], slots, seen_BMS, level)
        last = inner
    count_B = torch.full((rows,), len(tree.parents), dtype=torch.long, device=device)
    return Proposal(tokens_BN, torch.tensor(tree.parents, device=device), count_B)


def _with_itself(seen_BMS: Tensor, slot_BM: Tensor) -> Tensor:
    """What new nodes see: what their parents (of these slots) see, and themselves."""
    rows, count = slot_BM.shape
    above_BMS = seen_BMS.gather(1, slot_BM[..., None].expand(-1, -1, seen_BMS.shape[-1]))
    own_BMM = torch.eye(count, dtype=torch.bool, device=slot_BM.device).expand(rows, -1, -1)
    return torch.cat([above_BMS, own_BMM], -1)


def tree_of(values: Sequence[Sequence[int]]) -> StaticTree:
    """A static tree out of paths of ranks, as Medusa writes them: [[0], [1], [0, 0], …]. UserError without a prefix."""
    paths = sorted((tuple(path) for path in values), key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate(paths)}
    orphans = [path for path in paths if len(path) > 1 and path[:-1] not in place]
    if orphans or () in place:
        raise UserError(f"The tree path {list(orphans[0]) if orphans else []} has no parent; add all of its prefixes.")
    return StaticTree(tuple(place.get(path[:-1], -1) for path in paths), tuple(path[-1] for path in paths))
