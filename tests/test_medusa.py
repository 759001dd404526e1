"""Medusa: equal to a plain re-implementation, all heads distinct, exact in the decoder as chain and as tree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from heads.artifact import UserError
from heads.checkpoint import load_head, save_head
from heads.layers import BlockSizes
from heads.medusa import MedusaHead
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

STATIC = tree_of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
TREES = {"chain": None, "static": STATIC, "dynamic": DynamicTree(top_k=3, nodes=9)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return load_tiny(tmp_path_factory.mktemp("target"), "qwen2")


def make_head(target, *, draft_size: int = 96, depth: int = 3, **flags) -> MedusaHead:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    sizes = BlockSizes.of(target.config, target.vocab_size)
    head = MedusaHead(sizes=sizes, vocab=vocab, depth=depth, **flags).to(target.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    head.attach(target.weights)
    return head


# ---- parity -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """The paper's heads as plain lists of linear layers, with a state dict of the same order."""

    def __init__(self, width: int, depth: int, blocks: int, rows: list[torch.Tensor]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(blocks)) for _ in range(depth)
        )
        self.rows = rows

    def forward(self, state: torch.Tensor, head: int, bias: torch.Tensor | None, softcap: float | None):
        for linear in self.heads[head]:
            state = state + torch.sigmoid(linear(state)) * linear(state)
        logits = self.rows[head] @ state + (0 if bias is None else bias)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain_loss(plain: Plain, features, decay: float, ids: list[int], **of_projection) -> torch.Tensor:
    """Hard cross-entropy over every pair that a decoder can come to, one by one."""
    total, first = torch.zeros((), dtype=torch.float64), 0
    tokens, written = features.ids_T.tolist(), features.supervised_T.tolist()
    for length in features.lengths:
        for t in range(first, first + length):
            for k in range(len(plain.heads)):
                goal = t + 2 + k
                if goal >= first + length or not all(written[t + 1 : goal + 1]) or tokens[goal] not in ids:
                    continue
                logits = plain(features.last_TD[t], k, **of_projection)
                total = total + decay**k * F.cross_entropy(logits, torch.tensor(ids.index(tokens[goal])))
        first += length
    return total


@pytest.mark.parametrize("projection", ["target", "own"])
@pytest.mark.parametrize(("draft_size", "blocks", "extra"), [(96, 1, False), (40, 2, True)])
def test_loss_and_gradient_equal_a_plain_loop(target, projection: str, draft_size: int, blocks: int, extra: bool):
    """Also where the target's projection has a bias and a cap, which an own one has not."""
    head = make_head(target, draft_size=draft_size, projection=projection, blocks=blocks)
    weights, ids = target.weights, head.vocab.ids_W
    features = features_of(target, documents(), ())
    bias, softcap = (torch.linspace(-1, 1, 96, dtype=torch.float64), 3.0) if extra else (None, None)
    head.attach(type(weights)(weights.embedding_VD, weights.lm_head_VD, bias, softcap))
    shared = projection == "target"
    rows = [weights.lm_head_VD[ids]] * 3 if shared else [one.weight.detach().requires_grad_() for one in head.lm_heads]
    plain = Plain(target.hidden_size, 3, blocks, rows)
    ours = [parameter for name, parameter in head.named_parameters() if name.startswith("blocks")]
    with torch.no_grad():
        for theirs, own in zip(plain.parameters(), ours, strict=True):
            theirs.copy_(own)
    of_projection = {"bias": bias[ids] if shared and extra else None, "softcap": softcap if shared else None}
    expected = plain_loss(plain, features, 0.8, ids.tolist(), **of_projection)
    sums = head(features)
    torch.testing.assert_close(sums.loss, expected)
    gradients = torch.autograd.grad(sums.loss, list(head.parameters()))
    wanted = torch.autograd.grad(expected, [*plain.parameters(), *([] if shared else rows)])
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0, "a parameter without gradient is a dead one"


@pytest.mark.parametrize(("projection", "rows"), [("target", 0), ("own", 40)])
def test_no_module_is_shared(target, projection: str, rows: int) -> None:
    head = make_head(target, draft_size=40, projection=projection, blocks=2)
    width = target.hidden_size
    assert sum(one.numel() for one in head.parameters()) == 3 * (2 * (width * width + width) + rows * width)


@pytest.mark.parametrize("projection", ["target", "own"])
def test_an_untrained_head_says_what_the_target_says(target, projection: str) -> None:
    head = make_head(target, projection=projection)
    fresh = MedusaHead(sizes=head.sizes, vocab=head.vocab, depth=3, projection=projection).to(target.dtype)
    fresh.initialise(target)
    fresh.attach(target.weights)
    watch, state = Watch(), begun(target, fresh, PROMPTS)
    fresh.propose(state, 3, watch)
    for logits in watch.logits:
        torch.testing.assert_close(logits, target.logits(state.last_BD), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ["kl", "lk_lambda"])
def test_other_losses_learn_too(target, loss: str) -> None:
    """A few steps of plain descent on the same batch bring the loss down."""
    head, features = make_head(target, loss=loss, decay="survival"), features_of(target, documents(), ())
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    losses = []
    for _ in range(12):
        sums = head(features)
        losses.append(float(sums.metrics["loss"][0].sum()))
        optimizer.zero_grad()
        sums.loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


# ---- drafting ---------------------------------------------------------------------------------------------------


def test_trained_is_served(target) -> None:
    head, features = make_head(target, projection="own"), features_of(target, documents(), ())
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, 3)
    hidden = head.outputs(features, starts)
    check_trained_is_served(target, head, features, lambda k, n: head.logits(k, hidden[k, n]), depth=3)


@pytest.mark.parametrize("kind", TREES)
def test_rejection_leaves_no_trace(target, kind: str) -> None:
    check_rejection_leaves_no_trace(target, make_head(target, draft_size=40), depth=3, tree=TREES[kind])


@pytest.mark.parametrize("kind", TREES)
def test_greedy_text_is_the_targets_own(target, kind: str) -> None:
    head = make_head(target, draft_size=40)
    check_greedy(target, head, TREES[kind])


def test_each_head_reads_one_state_and_nothing_else(target) -> None:
    head, features = make_head(target), features_of(target, documents(), ())
    starts = torch.arange(0, 20, 3)
    before = head.outputs(features, starts)
    for position in range(0, 20, 2):
        last = features.last_TD.clone()
        last[position] += 1
        ids = features.ids_T.clone()
        ids[position] = 90
        changed = type(features)(ids, features.supervised_T, features.lengths, features.taps_TE, last, features.lse_T)
        moved = (head.outputs(changed, starts) - before).abs().amax(-1) > 1e-12
        assert moved.any(0).tolist() == moved.all(0).tolist() == (starts == position).tolist()


def test_a_head_that_is_saved_comes_back(target, tmp_path) -> None:
    head = make_head(target, draft_size=40, projection="own")
    save_head(head, tmp_path, target_fingerprint=target.fingerprint)
    again = load_head(tmp_path, target=target)
    again.attach(target.weights)
    watches = [Watch(), Watch()]
    for one, watch in zip((head, again), watches, strict=True):
        one.propose(begun(target, one, PROMPTS), 3, watch)
    assert all(map(torch.equal, watches[0].logits, watches[1].logits))


def test_nothing_to_predict_gives_zero_with_gradient(target) -> None:
    head = make_head(target)
    sums = head(features_of(target, [([9, 10, 11], [False] * 3)], ()))
    sums.loss.backward()
    assert sums.count == 0 and sums.loss == 0


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_more_tokens_than_heads_are_refused(target) -> None:
    head = make_head(target)
    assert head.longest == 3
    state = begun(target, head, PROMPTS)
    for call in (lambda: head.propose(state, 4, Watch()), lambda: head.propose_tree(state, 4, STATIC)):
        with pytest.raises(UserError, match="eval.gamma=3 or less"):
            call()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"depth": 0}, "head.depth=0"),
        ({"blocks": 0}, "head.blocks=0"),
        ({"projection": "both"}, "one of target, own"),
        ({"loss": "mse"}, "head.loss"),
        ({"decay": 2.0}, "head.decay"),
        ({"eta": -1.0}, "head.eta"),
    ],
)
def test_arguments_that_cannot_be_are_refused(target, wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_head(target, **wrong)
