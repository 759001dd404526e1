"""EAGLE-3: the trained graph is the served graph, the right pairs are supervised, and nothing leaks."""

from __future__ import annotations

import pytest
import torch

from heads.artifact import UserError
from heads.base import Committed
from heads.eagle3 import Eagle3Head, default_taps
from heads.layers import BlockSizes
from heads.losses import reference_loss
from heads.pairs import supervised_pairs
from heads.vocab import DraftVocabulary
from tests.tiny import features_of, load_tiny

TAPS = (1, 4, 6)
FLAGS = [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]


def make_head(target, *, draft_size: int = 40, depth: int = 3, **flags) -> Eagle3Head:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    head = Eagle3Head(
        sizes=BlockSizes.of(target.config, target.vocab_size), vocab=vocab, taps=TAPS, depth=depth, **flags
    ).to(target.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    head.attach(target.weights)
    return head


def documents(seed: int = 3) -> list[tuple[list[int], list[bool]]]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for prompt, answer in ((5, 9), (3, 6), (7, 4)):
        ids = torch.randint(8, 48, (prompt + answer,), generator=generator).tolist()
        result.append((ids, [False] * prompt + [True] * answer))
    return result


def test_two_turn_pairs_are_exactly_those_a_decoder_reaches() -> None:
    # positions:            0  1  2  3  4  5  6  7  8  9  10 11 12
    written = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]).bool()
    starts, valid = supervised_pairs(written, (13,), 3)
    pairs = {(int(starts[n]), k) for k, n in valid.nonzero().tolist()}
    # A round starts at slot t once x_{t+1} is written; pass k predicts x_{t+2+k} of the same turn.
    assert pairs == {(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0), (9, 0), (9, 1), (10, 0)}


def test_pairs_do_not_cross_documents() -> None:
    starts, valid = supervised_pairs(torch.ones(7, dtype=torch.bool), (4, 3), 2)
    assert [(int(starts[n]), k) for k, n in valid.nonzero().tolist()] == [(0, 0), (1, 0), (4, 0), (0, 1)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "norm_before_residual", "v3.1"])
def test_trained_graph_is_served_graph(tmp_path, family: str, flags: dict) -> None:
    """Pass k of the unrolled training equals draft step k of the decoder that is fed the same tokens."""
    target = load_tiny(tmp_path, family)
    head = make_head(target, **flags)
    features = features_of(target, documents(), TAPS)
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    trained = head.lm_head(head.unroll(features, starts, head.depth))
    offsets = [0, *torch.tensor(features.lengths).cumsum(0).tolist()]
    for n, start in enumerate(starts.tolist()):
        first = max(offset for offset in offsets if offset <= start)
        depth = int(valid[:, n].sum())
        served = []

        def forced(logits, start=start, served=served, **_):
            served.append(logits[0])
            following = features.ids_T[start + 1 + len(served)]
            return (head.vocab.ids_W == following).nonzero()[:, 0][:1] if following < 40 else torch.zeros(
                1
            ).long(), None

        state = head.start([[0]])
        slots = slice(first, start + 1)
        head.commit(
            state,
            Committed(
                features.ids_T[first + 1 : start + 2][None],
                features.taps_TE[slots][None],
                features.last_TD[slots][None],
                torch.tensor([start + 1 - first]),
            ),
        )
        head.propose(state, depth, forced)
        for k in range(depth):
            if k and int(features.ids_T[start + 1 + k]) >= 40:
                break  # outside the draft vocabulary: the decoder could not have drafted it
            torch.testing.assert_close(served[k], trained[k, n], rtol=1e-9, atol=1e-9)


def test_packed_equals_each_document_alone(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target)
    together = head(features_of(target, documents(), TAPS))
    alone = [head(features_of(target, [document], TAPS)) for document in documents()]
    torch.testing.assert_close(together.loss, sum(sums.loss for sums in alone))
    assert together.count == sum(sums.count for sums in alone)
    for name, (total, count) in together.metrics.items():
        torch.testing.assert_close(total, sum(sums.metrics[name][0] for sums in alone))
        torch.testing.assert_close(count, sum(sums.metrics[name][1] for sums in alone))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_loss_equals_reference_in_value_and_gradient(tmp_path, monkeypatch, kind: str, softcap: float | None) -> None:
    """The chunked loss against plain autograd over the target's full distribution, mass outside W included."""
    monkeypatch.setattr("heads.losses.LOGITS", 400)  # chunks of a few places
    target = load_tiny(tmp_path)
    target._softcap = softcap
    head = make_head(target, loss=kind)
    features = features_of(target, documents(), TAPS)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    sums = head(features)
    ours = torch.autograd.grad(sums.loss, parameters)
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    logits = head.lm_head(head.unroll(features, starts, head.depth))
    p_TW = torch.softmax(target.logits(features.last_TD), -1)[:, head.vocab.ids_W]
    total = torch.zeros((), dtype=torch.float64)
    for k, n in valid.nonzero().tolist():
        total = total + 0.8**k * reference_loss(kind, logits[k, n][None], p_TW[starts[n] + 1 + k][None], None)[0]
    torch.testing.assert_close(sums.loss, total)
    for a, b in zip(ours, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(a, b)
    assert all(gradient.abs().max() > 0 for gradient in ours), "a parameter without gradient is a dead one"


def test_a_cast_head_keeps_its_rotary_frequencies(tmp_path) -> None:
    """Rounded to bf16 they would turn the queries of distant positions by up to a radian."""
    head = make_head(load_tiny(tmp_path))
    before = head.rotary.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.fc.weight.dtype is torch.bfloat16
    assert head.rotary.inv_freq.dtype is torch.float32 and torch.equal(head.rotary.inv_freq, before)


def test_nothing_to_predict_gives_zero_with_gradient(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target)
    sums = head(features_of(target, [([9, 10, 11], [False] * 3)], TAPS))
    sums.loss.backward()
    assert sums.count == 0 and sums.loss == 0


def test_later_tokens_do_not_move_earlier_outputs(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target)
    features = features_of(target, documents()[:1], TAPS)
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    before = head.unroll(features, starts, head.depth)
    for position in range(1, 14):
        ids = features.ids_T.clone()
        ids[position] = 90
        taps = features.taps_TE.clone()
        taps[position:] += 1
        changed = type(features)(ids, features.supervised_T, features.lengths, taps, features.last_TD, features.lse_T)
        moved = (head.unroll(changed, starts, head.depth) - before).abs().amax(-1) > 1e-12
        for k, n in moved.nonzero().tolist():
            assert position <= starts[n] + 1 + k, f"pass {k} of slot {int(starts[n])} saw position {position}"


def test_shallow_target_and_bad_arguments_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="head.taps"):
        default_taps(6)
    target = load_tiny(tmp_path)
    for wrong in ({"taps": (4, 1)}, {"taps": (1, 1)}, {"taps": (1, 8)}, {"loss": "mse"}, {"depth": 0}):
        arguments = {"taps": TAPS, **wrong}
        with pytest.raises(UserError):
            Eagle3Head(
                sizes=BlockSizes.of(target.config, target.vocab_size), vocab=DraftVocabulary.identity(96), **arguments
            )


def test_draft_vocabulary_fills_up_and_keeps_special_tokens() -> None:
    counts = torch.zeros(20)
    counts[[7, 9]] = 5
    vocab = DraftVocabulary.choose(counts, 5, special_ids=[19])
    assert vocab.ids_W.tolist() == [0, 1, 7, 9, 19]
    assert (torch.arange(5) + vocab.d2t).tolist() == vocab.ids_W.tolist()
    assert vocab.t2d.nonzero()[:, 0].tolist() == vocab.ids_W.tolist()
    assert vocab.coverage(counts) == 1.0
    with pytest.raises(UserError, match="draft_vocab_size"):
        DraftVocabulary.choose(counts, 21)
