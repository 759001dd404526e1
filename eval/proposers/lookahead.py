"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations over a window find n-grams, which are verified on the side.

The window has levels 0 … n-2 of W columns. Level 0 begins with the last settled token and is a chain; (level j,
column i) is a guess of what follows (level j-1, column i). So one tree holds the window and, as branches from its root,
the n-grams found before that begin with the last token; its mask is the paper's. Each pass makes a new n-gram of every
column and the target's word after its end, and moves the levels down by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from eval.proposers.rows import settled
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.target import FrozenTarget

_ROOT = -1  # the parent of nodes that follow the last settled token


@dataclass
class LookaheadRow:
    """One request.

    text: what is settled; levels: guesses by level and column, level 0 with the last settled token in front; ends: the
    tree nodes of the last level; pool: for each first token the n-grams found, without it, the newest last.
    """

    text: list[int]
    levels: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


class Lookahead:
    """Proposes a tree of guesses and found n-grams, chosen by argmax at every temperature.

    window: columns W; candidates: n-grams G that are verified, and kept for each first token. n = γ + 3 - W, so that no
    path of the tree is longer than γ; W is at most γ + 1. Raises UserError when one of them is below 1.
    """

    needs = FeatureNeeds(taps=(), last=False, judged=True)

    def __init__(self, *, target: FrozenTarget, window: int = 3, candidates: int = 5) -> None:
        if window < 1 or candidates < 1:
            raise UserError(
                f"rivals.lookahead.window={window} and rivals.lookahead.candidates={candidates} must be at least 1."
            )
        self.target, self.window, self.candidates = target, window, candidates

    def start(self, prompts: Sequence[Sequence[int]]) -> list[LookaheadRow]:
        return [LookaheadRow([prompt[0]]) for prompt in prompts]

    def commit(self, state: list[LookaheadRow], committed: Committed) -> None:
        if committed.judged is not None:
            last_BND = committed.judged.last_BND
            ends_BW = torch.tensor([row.ends for row in state], device=last_BND.device) + 1  # block node 0 is the root
            each_B1 = torch.arange(len(state), device=last_BND.device)[:, None]
            words_BW = self.target.logits(last_BND[each_B1, ends_BW]).argmax(-1)
            for row, words in zip(state, words_BW.tolist(), strict=True):
                self._iterate(row, words)
        for row, tokens in zip(state, settled(committed), strict=True):
            row.text += tokens

    def propose(self, state: list[LookaheadRow], depth: int, draw: Draw) -> Proposal:
        trees = [self._tree(row, depth) for row in state]
        nodes, device = max(map(len, trees)), self.target.device
        padding = (0, _ROOT)
        padded_BN2 = torch.tensor([[*tree, *[padding] * (nodes - len(tree))] for tree in trees], device=device)
        count_B = torch.tensor([len(tree) for tree in trees], device=device)
        return Proposal(padded_BN2[..., 0], padded_BN2[..., 1], count_B)

    def _tree(self, row: LookaheadRow, depth: int) -> list[tuple[int, int]]:
        """(token, parent) of each node; equal branches are one."""
        columns = min(self.window, depth + 1)
        if [len(row.levels), *map(len, row.levels[:1])] != [depth + 2 - columns, columns]:  # new, or the context ends
            dice = random.Random(0)  # the first guesses may be anything
            row.levels = [[dice.choice(row.text) for _ in range(columns)] for _ in range(depth + 2 - columns)]
        row.levels[0][:1] = row.text[-1:]
        tree: dict[tuple[int, int], int] = {}

        def grown(parent: int, token: int) -> int:
            return tree.setdefault((token, parent), len(tree))

        for ngram in reversed(row.pool.get(row.text[-1], [])):
            end = _ROOT
            for token in ngram[:depth]:
                end = grown(end, token)
        row.ends = [_ROOT]
        for token in row.levels[0][1:]:
            row.ends.append(grown(row.ends[-1], token))
        for level in row.levels[1:]:
            row.ends = [grown(end, token) for end, token in zip(row.ends, level, strict=True)]
        return list(tree)

    def _iterate(self, row: LookaheadRow, words: list[int]) -> None:
        """Keep the n-gram of each column with the target's word after it, and move the levels down."""
        levels = [*row.levels, words]
        for first, *rest in zip(*levels, strict=True):
            found = row.pool.setdefault(first, [])
            if tuple(rest) in found:
                found.remove(tuple(rest))
            found.append(tuple(rest))
            del found[: -self.candidates]
        row.levels = levels[1:]
