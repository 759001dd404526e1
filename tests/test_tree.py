"""Trees: what the head drafts equals a plain search over chains, what is chosen by measuring is the best, refusals."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from eval.decode import DecodeSettings, Request, decode
from eval.static_tree import tree_setting
from eval.tree import RankCounter, best_static_tree, comb, height, node_texts
from heads.artifact import UserError
from heads.base import Committed, DraftHead, Proposal
from heads.cache import ancestry
from heads.tree_draft import DynamicTree, StaticTree, TreeDrafter, tree_of
from tests.test_eagle3 import FLAGS, TAPS, make_head
from tests.tiny import load_tiny

PROMPTS = [[9, 10, 11, 30], [12, 40], [33, 34, 35, 36, 37, 38]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return load_tiny(tmp_path_factory.mktemp("target"))


def begun(target, head, prompts):
    """A drafting state that has taken in these prompts, of different lengths."""
    state = head.start(prompts)
    longest = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    counts = [len(prompt) - 1 for prompt in prompts]
    output = target.forward(ids[:, :-1], counts=counts, taps=TAPS)
    head.commit(state, Committed(ids[:, 1:], output.taps_BTE, output.last_BTD, torch.tensor(counts)))
    return state


def chain_logits(target, head, prompt, path):
    """The draft's log-probabilities after a path, by a chain that is forced along it."""
    seen = []

    def forced(logits, **_):
        seen.append(torch.log_softmax(logits[0].double(), -1))
        token = path[len(seen) - 1] if len(seen) <= len(path) else 0
        return torch.tensor([token]), None

    head.propose(begun(target, head, [prompt]), len(path) + 1, forced)
    return seen[-1]


def plain_dynamic(target, head, prompt, tree: DynamicTree, depth: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree as paths of draft ids, by searching over chains."""
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        grown = {}
        for path in frontier:
            own = chain_logits(target, head, prompt, list(path))
            for token in own.topk(tree.top_k).indices.tolist():
                grown[(*path, token)] = scores.get(path, 0.0) + own[token].item()
        scores |= grown
        frontier = sorted(grown, key=grown.__getitem__, reverse=True)[: tree.top_k]
    return sorted(scores, key=scores.__getitem__, reverse=True)[: tree.nodes]


def paths(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """The path of tokens to every node."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(proposal.parents_BN[row].tolist()):
        before = found[parent] if parent >= 0 else ()
        found.append((*before, int(proposal.tokens_BN[row, node])))
    return found


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "norm_before_residual", "v3.1"])
def test_the_dynamic_tree_is_the_best_of_all_chains(target, flags: dict) -> None:
    """Several rows at once, each with a tree of its own, against one chain at a time."""
    head, tree = make_head(target, **flags), DynamicTree(top_k=3, nodes=10)
    proposal = head.propose_tree(begun(target, head, PROMPTS), 4, tree)
    proposal.check()
    for row, prompt in enumerate(PROMPTS):
        expected = plain_dynamic(target, head, prompt, tree, 4)
        ids = head.vocab.ids_W.tolist()
        assert set(paths(proposal, row)) == {tuple(ids[token] for token in path) for path in expected}


def test_the_static_tree_has_the_drafts_own_ranks(target) -> None:
    head = make_head(target)
    tree = tree_of([[0], [2], [0, 1], [2, 0], [0, 1, 0], [0, 1, 3]])
    proposal = head.propose_tree(begun(target, head, PROMPTS), 3, tree)
    ids = head.vocab.ids_W.tolist()
    for row, prompt in enumerate(PROMPTS):
        for path, ranks in zip(paths(proposal, row), ([0], [2], [0, 1], [2, 0], [0, 1, 0], [0, 1, 3]), strict=True):
            drafted: list[int] = []
            for rank in ranks:
                drafted.append(int(chain_logits(target, head, prompt, drafted).topk(rank + 1).indices[rank]))
            assert path == tuple(ids[token] for token in drafted)


def test_drafting_a_tree_leaves_no_trace(target) -> None:
    """The same state gives the same chain whether a tree was drafted in between or not."""
    head = make_head(target)

    def greedy(logits, **_):
        return logits.argmax(-1), None

    first = head.propose(begun(target, head, PROMPTS), 3, greedy)
    state = begun(target, head, PROMPTS)
    pending = list(state.pending)
    head.propose_tree(state, 3, DynamicTree(3, 9))
    state.cache.forget([0] * len(PROMPTS))
    state.pending += pending
    assert torch.equal(first.tokens_BN, head.propose(state, 3, greedy).tokens_BN)


def test_a_tree_is_cut_where_fewer_tokens_are_wanted() -> None:
    tree = tree_of([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
    assert tree.depths == (1, 1, 2, 2, 3)
    assert tree.cut(2) == tree_of([[0], [1], [0, 0], [1, 0]]) and tree.cut(1) == tree_of([[0], [1]])


# ---- chosen by measuring ----------------------------------------------------------------------------------------


def test_the_static_tree_is_the_best_of_all_trees() -> None:
    acceptance = [[0.5, 0.2], [0.6, 0.15]]
    every = [path for depth in (1, 2) for path in product(range(2), repeat=depth)]

    def value(chosen) -> float:
        worth = 0.0
        for path in chosen:
            share = 1.0
            for depth, rank in enumerate(path):
                share *= acceptance[depth][rank]
            worth += share
        return worth

    for nodes in range(1, 7):
        whole = [
            [path for path, taken in zip(every, choice, strict=True) if taken]
            for choice in product((False, True), repeat=len(every))
            if sum(choice) == nodes
        ]
        closed = [trees for trees in whole if all(len(path) == 1 or path[:-1] in trees for path in trees)]
        assert best_static_tree(acceptance, nodes) == tree_of(max(closed, key=value))


def test_ranks_are_counted_where_the_chain_held(target) -> None:
    """The counter agrees with what the target would have written after each prefix."""
    head, requests = make_head(target), [Request(str(n), "all", tuple(p)) for n, p in enumerate(PROMPTS)]
    counter = RankCounter(TreeDrafter(head, comb(2, 3)), 2, 3)
    settings = DecodeSettings(gamma=2, max_new_tokens=20, rows=3)
    traces = decode(target, requests, counter, settings)
    assert [t.tokens for t in traces] == [t.tokens for t in decode(target, requests, None, settings)]
    expected, reached = [[0, 0, 0], [0, 0, 0]], [0, 0]
    for trace, prompt in zip(traces, PROMPTS, strict=True):
        place = 1
        for round_ in trace.rounds:
            drafted: list[int] = []
            for depth, token in enumerate(trace.tokens[place : place + min(2, round_.emitted)]):
                order = chain_logits(target, head, [*prompt, *trace.tokens[:place]], drafted)
                ranked = head.vocab.ids_W[order.topk(3).indices].tolist()
                reached[depth] += 1
                if token in ranked:
                    expected[depth][ranked.index(token)] += 1
                if token != ranked[0]:
                    break
                drafted.append(int(order.argmax()))
            place += round_.emitted
    # A round that the length limit cuts is counted with the tokens behind the cut as well.
    assert abs(sum(counter.reached_D) - sum(reached)) <= 2 * len(PROMPTS)
    assert all(
        abs(a - b) <= len(PROMPTS)
        for one, two in zip(counter.counts_DR, expected, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert counter.acceptance[0][0] == counter.counts_DR[0][0] / counter.reached_D[0]


def test_a_measured_tree_accepts_more_than_a_chain_of_its_size(target) -> None:
    head, requests = make_head(target), [Request(str(n), "all", tuple(p)) for n, p in enumerate(PROMPTS)]
    counter = RankCounter(TreeDrafter(head, comb(3, 8)), 3, 8)
    decode(target, requests, counter, DecodeSettings(gamma=3, max_new_tokens=60, rows=3))
    tree = best_static_tree(counter.acceptance, 12)
    settings = DecodeSettings(gamma=3, max_new_tokens=60, rows=3)
    rounds = [
        sum(len(trace.rounds) for trace in decode(target, requests, TreeDrafter(head, one), settings))
        for one in (tree, tree_of([[0], [0, 0], [0, 0, 0]]))
    ]
    assert rounds[0] < rounds[1]


# ---- parts ------------------------------------------------------------------------------------------------------


def test_the_text_before_each_node() -> None:
    """Every id of the text and of the path, nothing else."""
    proposal = Proposal(
        torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]),
        torch.tensor([[-1, 0, -1, 2], [-1, -1, 1, 2]]),
        torch.tensor([4, 4]),
    )
    texts = node_texts([[1, 2, 3], [9]], proposal)
    assert [sorted(set(row)) for row in texts[0].tolist()] == [
        *([1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5, 6], [1, 2, 3, 7], [1, 2, 3, 7, 8])
    ]
    assert [sorted(set(row)) for row in texts[1].tolist()] == [[9], [5, 9], [6, 9], [6, 7, 9], [6, 7, 8, 9]]


def test_how_far_a_tree_goes_on() -> None:
    parents = [-1, -1, 0, 2, 1]
    assert [height(parents, 5, node) for node in range(-1, 5)] == [3, 2, 1, 1, 0, 0]
    assert height(parents, 3, -1) == 2 and height([], 0, -1) == 0


def test_ancestry_is_what_walking_up_finds() -> None:
    """One tree and one tree per row, against a walk from each node to its root."""
    generator = torch.Generator().manual_seed(0)
    trees = torch.stack([(torch.rand(3, generator=generator) * (node + 1)).long() - 1 for node in range(40)], 1)
    depths, inside = ancestry(trees)
    for row, parents in enumerate(trees.tolist()):
        for node in range(40):
            walk = [node]
            while parents[walk[-1]] >= 0:
                walk.append(parents[walk[-1]])
            assert inside[row, node].nonzero()[:, 0].tolist() == sorted(walk)
            assert int(depths[row, node]) == len(walk) - 1
        assert all(
            torch.equal(ours, one) for ours, one in zip((depths[row], inside[row]), ancestry(trees[row]), strict=True)
        )


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: DynamicTree(top_k=0),
        lambda: DynamicTree(nodes=0),
        lambda: tree_setting({"top_k": 3}, "eval.tree"),
        lambda: tree_setting({"nodes": 3, "top_k": 2, "prompts": 4}, "eval.tree"),
        lambda: tree_setting({"nodes": 0}, "eval.tree"),
        lambda: tree_setting({"nodes": 4, "prompts": 0}, "eval.tree"),
        lambda: StaticTree((-1, 1), (0, 0)),
        lambda: StaticTree((-1, -1), (0, 0)),
        lambda: StaticTree((), ()),
        lambda: tree_of([[0], [1, 0]]),
        lambda: best_static_tree([[0.5, 0.1]], 3),
        lambda: best_static_tree([[0.0, 0.0]], 1),
    ],
)
def test_trees_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(UserError):
        wrong()


def test_a_rank_that_the_draft_does_not_have_is_refused(target) -> None:
    head = make_head(target, draft_size=8)
    with pytest.raises(UserError, match="rank 9"):
        head.propose_tree(begun(target, head, PROMPTS), 1, tree_of([[9]]))


def test_a_head_without_trees_says_so(target) -> None:
    class Chains(type(make_head(target))):
        propose_tree = DraftHead.propose_tree

    head = make_head(target)
    head.__class__ = Chains
    with pytest.raises(UserError, match="eval.tree=null"):
        head.propose_tree(None, 3, DynamicTree())
