"""Trees of tokens: the text before each node, how far a tree goes on, and static trees chosen by measuring.

It knows no model; what proposes is only wrapped here in order to count.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import Committed, Draw, Proposal
from heads.tree_draft import StaticTree, tree_of


def node_texts(texts: Sequence[Sequence[int]], proposal: Proposal) -> Tensor:
    """The text before what follows each block node [B, 1 + N, L]: the row's text, then the path to the node.

    Shorter texts are filled up on the left with their own first token, shorter paths with the text's last token, so
    that every id of a row occurs in it.
    """
    tokens_BN, parents_BN = proposal.tokens_BN, proposal.parents_BN
    rows, nodes = tokens_BN.shape
    longest = max(map(len, texts))
    filled = [[text[0]] * (longest - len(text)) + list(text) for text in texts]
    text_BL = torch.tensor(filled, dtype=torch.long, device=tokens_BN.device)
    depth_BM = torch.zeros(rows, nodes + 1, dtype=torch.long, device=tokens_BN.device)
    path_BMN = text_BL[:, -1:, None].expand(-1, nodes + 1, nodes).clone()
    each_B = torch.arange(rows, device=tokens_BN.device)
    for node in range(nodes):
        above_B = parents_BN[:, node] + 1
        path_BMN[:, node + 1] = path_BMN[each_B, above_B]
        path_BMN[each_B, node + 1, depth_BM[each_B, above_B]] = tokens_BN[:, node]
        depth_BM[:, node + 1] = depth_BM[each_B, above_B] + 1
    return torch.cat([text_BL[:, None].expand(-1, nodes + 1, -1), path_BMN], -1)


def height(parents: Sequence[int], count: int, node: int) -> int:
    """How many tokens the tree goes on below a node (-1: the root), over its first `count` nodes."""
    below = {node: 0}
    for child in range(node + 1, count):
        if parents[child] in below:
            below[child] = below[parents[child]] + 1
    return max(below.values())


# ---- static trees -----------------------------------------------------------------------------------------------


def comb(depth: int, width: int) -> StaticTree:
    """The chain of best tokens with the next best ones beside each: what `RankCounter` measures on."""
    return tree_of([[*[0] * before, rank] for before in range(depth) for rank in range(width)])


class RankCounter:
    """Wraps a proposer of `comb` trees and counts, at each depth, which rank the target's own token had.

    A depth counts where all tokens before it had rank 0. For greedy decoding of *train* traffic: a tree that is chosen
    on the prompts it is measured on flatters itself.
    """

    def __init__(self, proposer: Any, depth: int, width: int) -> None:
        self.proposer, self.needs = proposer, proposer.needs
        self.reached_D = [0] * depth
        self.counts_DR = [[0] * width for _ in range(depth)]
        self._proposal: Proposal | None = None

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        self._proposal = None
        return self.proposer.start(prompts)

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        self._proposal = self.proposer.propose(state, depth, draw)
        return self._proposal

    def commit(self, state: Any, committed: Committed) -> None:
        if self._proposal is not None:
            rows = zip(
                self._proposal.tokens_BN.tolist(),
                committed.next_ids_BM.tolist(),
                committed.count_B.tolist(),
                strict=True,
            )
            for tokens, following, count in rows:
                self._count(tokens, following[:count])
        self.proposer.commit(state, committed)

    def _count(self, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Depth by depth: siblings lie together in a comb, rank 0 first."""
        width = len(self.counts_DR[0])
        for depth, token in enumerate(following[: len(tokens) // width]):
            siblings = tokens[depth * width : (depth + 1) * width]
            self.reached_D[depth] += 1
            if token in siblings:
                self.counts_DR[depth][siblings.index(token)] += 1
            if token != siblings[0]:
                return

    @property
    def acceptance(self) -> list[list[float]]:
        """Share of rounds that reached depth d in which rank r was the target's token: [depth][rank]."""
        return [
            [count / max(reached, 1) for count in counts]
            for counts, reached in zip(self.counts_DR, self.reached_D, strict=True)
        ]


def best_static_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of this many nodes with the most expected accepted tokens, if acceptance depends on depth and rank only.

    acceptance[depth][rank] as `RankCounter` measures it. The value of a node is the product along its path; taking the
    best node whose parent is taken, again and again, is optimal, for no child is worth more than its parent (Medusa,
    arXiv 2401.10774, section 2.3.2). Raises UserError when there are fewer nodes than asked for or nothing was counted.
    """
    whole = sum(len(acceptance[0]) ** depth for depth in range(1, len(acceptance) + 1))
    if not 1 <= nodes <= whole or not any(map(any, acceptance)):
        raise UserError(
            f"A static tree of {nodes} nodes cannot be chosen: {len(acceptance)} depths of {len(acceptance[0])} ranks "
            f"allow 1 to {whole}, and some acceptance must be above 0; ask for fewer nodes or measure on more prompts."
        )
    waiting = [(-share, 1, (rank,)) for rank, share in enumerate(acceptance[0])]
    heapq.heapify(waiting)
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < nodes:
        value, depth, path = heapq.heappop(waiting)
        chosen.append(path)
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth]):
                heapq.heappush(waiting, (value * share, depth + 1, (*path, rank)))
    return tree_of(chosen)
