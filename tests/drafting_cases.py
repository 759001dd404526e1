"""What every head must keep while it drafts, whatever is accepted and rejected. Not a test by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eval.decode import DecodeSettings, Request, decode
from heads.base import Committed, DraftHead, Proposal, TargetFeatures
from heads.pairs import supervised_pairs
from heads.target import FrozenTarget
from heads.tree_draft import Tree, TreeDrafter

PROMPTS = ([9, 10, 11, 30], [12, 40], [33, 34, 35, 36, 37, 38])


class Watch:
    """Draws the best token, and keeps all logits that it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_BW: Tensor, **unused: Any) -> tuple[Tensor, None]:
        self.logits.append(logits_BW)
        return logits_BW.argmax(-1), None


def settled(target: FrozenTarget, head: DraftHead, texts: Sequence[Sequence[int]], since: Sequence[int]) -> Committed:
    """The slots from `since` on of each row's text, out of plain forwards of the whole texts one by one."""
    rows = [target.forward(torch.tensor([list(text[:-1])]), taps=head.needs.taps) for text in texts]
    counts = [len(text) - 1 - first for text, first in zip(texts, since, strict=True)]

    def padded(states: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(states, batch_first=True)

    return Committed(
        padded([torch.tensor(text[first + 1 :]) for text, first in zip(texts, since, strict=True)]),
        padded([row.taps_BTE[0, first:] for row, first in zip(rows, since, strict=True)]),
        padded([row.last_BTD[0, first:] for row, first in zip(rows, since, strict=True)]),
        torch.tensor(counts),
    )


def begun(target: FrozenTarget, head: DraftHead, texts: Sequence[Sequence[int]]) -> Any:
    """A state that has taken in these texts in one go."""
    state = head.start(texts)
    head.commit(state, settled(target, head, texts, [0] * len(texts)))
    return state


def drafted(head: DraftHead, state: Any, depth: int, tree: Tree | None) -> tuple[Proposal, list[Tensor]]:
    """A greedy chain with its logits, or a tree."""
    watch = Watch()
    return (head.propose(state, depth, watch) if tree is None else head.propose_tree(state, depth, tree)), watch.logits


def check_rejection_leaves_no_trace(
    target: FrozenTarget, head: DraftHead, *, depth: int, tree: Tree | None = None, rounds: int = 5, seed: int = 0
) -> None:
    """Three rows accept different numbers of drafted tokens in each round, none to all, and one of them ends early;
    each proposal is that of a fresh state which took in the same text in one go."""
    dice = random.Random(seed)
    texts = [list(prompt) for prompt in PROMPTS]
    state, ended = begun(target, head, texts), len(texts)
    accepted_before = set()
    for number in range(rounds):
        proposal, logits = drafted(head, state, depth, tree)
        proposal.check()
        fresh, expected = drafted(head, begun(target, head, texts), depth, tree)
        for row in range(ended):
            assert torch.equal(proposal.tokens_BN[row], fresh.tokens_BN[row])
            assert torch.equal(proposal.parents_BN[row], fresh.parents_BN[row])
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours[row], theirs[row], rtol=1e-9, atol=1e-9)
        ended = 3 if number < rounds - 2 else 2
        since = [len(text) - 1 for text in texts]
        for row in range(ended):
            path = _path(proposal, row, dice.randint(-1, proposal.tokens_BN.shape[1] - 1))
            accepted_before.add(len(path))
            texts[row] += [*path, dice.randint(8, 47)]
        head.commit(state, settled(target, head, texts, since))
    assert len(accepted_before) > 2, "the walk must accept none, some and many"


def _path(proposal: Proposal, row: int, node: int) -> list[int]:
    """The tokens from the root to a node; none for -1."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(proposal.tokens_BN[row, node]))
        node = int(proposal.parents_BN[row, node])
    return tokens[::-1]


def check_trained_is_served(
    target: FrozenTarget,
    head: DraftHead,
    features: TargetFeatures,
    trained: Callable[[int, int], Tensor],
    *,
    depth: int,
) -> None:
    """Pass k of start n in training, `trained(k, n)` logits [W], is step k of a decoder that is fed the same tokens.

    The whole vocabulary must be draftable, so that every true token can be fed.
    """
    assert head.vocab.full
    starts_N, valid_KN = supervised_pairs(features.supervised_T, features.lengths, depth)
    assert valid_KN.sum() > depth, "nothing to compare"
    ends = torch.tensor(features.lengths).cumsum(0).tolist()
    ids = features.ids_T.tolist()
    for n, start in enumerate(starts_N.tolist()):
        first = max((end for end in ends if end <= start), default=0)
        steps = int(valid_KN[:, n].sum())
        served: list[Tensor] = []

        def forced(logits_BW: Tensor, served: list[Tensor] = served, start: int = start, **unused: Any) -> Any:
            served.append(logits_BW[0])
            return torch.tensor([ids[start + 1 + len(served)]]), None

        head.propose(begun(target, head, [ids[first : start + 2]]), steps, forced)
        for k in range(steps):
            torch.testing.assert_close(served[k], trained(k, n), rtol=1e-9, atol=1e-9)


def check_greedy(target: FrozenTarget, head: DraftHead, tree: Tree | None) -> None:
    """Decoding with the head, as chain or tree, writes what plain decoding writes, and drafts in every round."""
    requests = [Request(str(n), "all", tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    proposer = head if tree is None else TreeDrafter(head, tree)
    settings = DecodeSettings(gamma=3, max_new_tokens=20, rows=3)
    found, plain = (decode(target, requests, one, settings) for one in (proposer, None))
    assert [trace.tokens for trace in found] == [trace.tokens for trace in plain]
    assert all(round_.proposed for trace in found for round_ in trace.rounds[:-1])
