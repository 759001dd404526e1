"""Hydra: equal to a plain loop over pairs, trained as it is served, blind to what comes later, exact in the decoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heads.artifact import UserError
from heads.hydra_mlp import HydraHead
from heads.layers import BlockSizes
from heads.pairs import supervised_pairs
from heads.tree_draft import DynamicTree, tree_of
from heads.vocab import DraftVocabulary
from tests.drafting_cases import (
    PROMPTS,
    Watch,
    begun,
    check_greedy,
    check_rejection_leaves_no_trace,
    check_trained_is_served,
)
from tests.recurrent_cases import documents
from tests.tiny import features_of, load_tiny

STATIC = tree_of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 3]])
TREES = {"chain": None, "static": STATIC, "dynamic": DynamicTree(top_k=3, nodes=9)}
KINDS = {"plain": {}, "own": {"projection": "own", "blocks": 2}, "prefix": {"prefix_attention": True}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return load_tiny(tmp_path_factory.mktemp("target"))


def make_head(target, *, draft_size: int = 96, depth: int = 3, **flags) -> HydraHead:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    sizes = BlockSizes.of(target.config, target.vocab_size)
    head = HydraHead(sizes=sizes, vocab=vocab, depth=depth, **flags).to(target.dtype)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + name.endswith("norm.weight"))
    head.attach(target.weights)
    return head


def all_outputs(head: HydraHead, features) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    return head.outputs(features, starts), starts, valid


# ---- training ---------------------------------------------------------------------------------------------------


def plain_logits(head: HydraHead, target, features, t: int, k: int) -> torch.Tensor:
    """Head k at slot t, written out from its weights."""
    weights = dict(head.named_parameters())
    state = features.last_TD[t]
    read = torch.cat([state, *(target.weights.embedding_VD[features.ids_T[t + 1 + i]] for i in range(k + 1))])
    state = state + weights[f"inputs.{k}.weight"] @ read + weights[f"inputs.{k}.bias"]
    for block in range(head.arguments["blocks"]):
        inner = weights[f"blocks.{k}.layers.{block}.weight"] @ state + weights[f"blocks.{k}.layers.{block}.bias"]
        state = state + inner * torch.sigmoid(inner)
    if head.arguments["projection"] == "own":
        return weights[f"lm_heads.{k}.weight"] @ state
    return target.weights.lm_head_VD[head.vocab.ids_W] @ state


@pytest.mark.parametrize("kind", ["plain", "own"])
def test_loss_and_gradient_equal_a_plain_loop(target, kind: str) -> None:
    """The teacher's loss: forward KL from the target's whole distribution, mass outside the draft vocabulary lost."""
    head, features = make_head(target, draft_size=40, **KINDS[kind]), features_of(target, documents(), ())
    p_TW = torch.softmax(target.logits(features.last_TD), -1)[:, head.vocab.ids_W]
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, 3)
    expected = torch.zeros((), dtype=torch.float64)
    for k, n in valid.nonzero().tolist():
        t = int(starts[n])
        log_q, p = F.log_softmax(plain_logits(head, target, features, t, k), -1), p_TW[t + 1 + k]
        expected = expected + 0.8**k * (p * (p.log() - log_q)).sum()
    sums = head(features)
    torch.testing.assert_close(sums.loss, expected)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(sums.loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert ours.abs().max() > 0, "a parameter without gradient is a dead one"


def test_every_parameter_of_the_prefix_block_learns(target) -> None:
    head = make_head(target, prefix_attention=True)
    gradients = torch.autograd.grad(head(features_of(target, documents(), ())).loss, list(head.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_packed_equals_each_document_alone(target) -> None:
    head = make_head(target, prefix_attention=True)
    together = head(features_of(target, documents(), ()))
    alone = [head(features_of(target, [document], ())) for document in documents()]
    torch.testing.assert_close(together.loss, sum(sums.loss for sums in alone))
    assert together.count == sum(sums.count for sums in alone)


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_and_states_do_not_move_earlier_outputs(target, kind: str) -> None:
    head, features = make_head(target, **KINDS[kind]), features_of(target, documents()[:1], ())
    before, starts, valid = all_outputs(head, features)
    for position in range(1, 14):
        ids, last = features.ids_T.clone(), features.last_TD.clone()
        ids[position] = 90
        last[position:] += 1
        changed = type(features)(ids, features.supervised_T, features.lengths, features.taps_TE, last, features.lse_T)
        moved = (head.outputs(changed, starts) - before).abs().amax(-1) > 1e-12
        for k, n in valid.nonzero().tolist():
            start = int(starts[n])
            sees_token, sees_state = start < position <= start + 1 + k, position <= start
            assert bool(moved[k, n]) == (sees_token or sees_state), f"head {k} of slot {start}, position {position}"


@pytest.mark.parametrize("kind", KINDS)
def test_trained_is_served(target, kind: str) -> None:
    head, features = make_head(target, **KINDS[kind]), features_of(target, documents(), ())
    hidden, _, _ = all_outputs(head, features)
    check_trained_is_served(target, head, features, lambda k, n: head.logits(k, hidden[k, n]), depth=3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_head_says_what_the_target_says(target, kind: str) -> None:
    arguments = make_head(target, **KINDS[kind]).arguments
    fresh = HydraHead(vocab=DraftVocabulary.identity(96), **arguments).to(target.dtype)
    fresh.initialise(target)
    fresh.attach(target.weights)
    watch, features = Watch(), target.forward(torch.tensor([PROMPTS[0][:-1]]))
    fresh.propose(begun(target, fresh, [PROMPTS[0]]), 3, watch)
    for logits in watch.logits:
        torch.testing.assert_close(logits, target.logits(features.last_BTD[:, -1]), rtol=1e-12, atol=1e-12)


# ---- drafting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("prefix", [False, True])
def test_rejection_leaves_no_trace(target, kind: str, prefix: bool) -> None:
    head = make_head(target, draft_size=40, prefix_attention=prefix)
    check_rejection_leaves_no_trace(target, head, depth=3, tree=TREES[kind])


def test_a_node_of_a_tree_reads_its_own_path(target) -> None:
    """The children of every node are the best of a chain that is forced along its path."""
    head = make_head(target, prefix_attention=True)
    with torch.no_grad():
        for projection in head.inputs:  # the tokens decide, not the state alone
            projection.weight[:, target.hidden_size :] *= 5
    proposal = head.propose_tree(begun(target, head, PROMPTS), 3, STATIC)
    for row, prompt in enumerate(PROMPTS):
        paths: list[list[int]] = []
        for node, (parent, rank) in enumerate(zip(STATIC.parents, STATIC.ranks, strict=True)):
            before = paths[parent] if parent >= 0 else []
            seen = []

            def forced(logits, before=before, seen=seen, **_):
                seen.append(logits[0])
                return torch.tensor([before[len(seen) - 1] if len(seen) <= len(before) else 0]), None

            head.propose(begun(target, head, [prompt]), len(before) + 1, forced)
            token = int(proposal.tokens_BN[row, node])
            assert token == int(seen[-1].topk(rank + 1).indices[rank])
            paths.append([*before, token])


@pytest.mark.parametrize("kind", TREES)
def test_greedy_text_is_the_targets_own(target, kind: str) -> None:
    head = make_head(target, draft_size=40, prefix_attention=True)
    check_greedy(target, head, TREES[kind])


def test_more_tokens_than_heads_are_refused(target) -> None:
    head = make_head(target)
    state = begun(target, head, PROMPTS)
    for call in (lambda: head.propose(state, 4, Watch()), lambda: head.propose_tree(state, 4, STATIC)):
        with pytest.raises(UserError, match="eval.gamma=3 or less"):
            call()
