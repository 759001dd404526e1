"""EAGLE-3: the trained graph is the served graph, the right pairs are supervised, and nothing leaks."""

from __future__ import annotations

import pytest
import torch

from heads.artifact import UserError
from heads.eagle3 import Eagle3Head, default_taps
from heads.kernels import reference_loss
from heads.layers import BlockSizes
from heads.pairs import check_places, supervised_pairs
from heads.vocab import DraftVocabulary
from tests.recurrent_cases import (
    check_causal,
    check_packed_is_alone,
    check_recomputed_is_kept,
    check_trained_is_served,
    documents,
    randomised,
)
from tests.tiny import features_of, load_tiny

TAPS = (1, 4, 6)
FLAGS = [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]


def make_head(target, *, draft_size: int = 40, depth: int = 3, taps: tuple[int, ...] = TAPS, **flags) -> Eagle3Head:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    head = Eagle3Head(
        sizes=BlockSizes.of(target.config, target.vocab_size), vocab=vocab, taps=taps, depth=depth, **flags
    )
    return randomised(head, target)


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
    check_places(starts, valid)


@pytest.mark.parametrize("starts", [[0, 2, 3], [0, 1, 3], [2, 3]], ids=str)
def test_a_pass_without_a_start_at_its_place_is_noticed(starts: list[int]) -> None:
    """A gap in the middle, one at the end, and no further start at all."""
    with pytest.raises(AssertionError, match="no start at the place"):
        check_places(torch.tensor(starts), torch.ones(2, len(starts), dtype=torch.bool))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "norm_before_residual", "v3.1"])
def test_trained_graph_is_served_graph(tmp_path, family: str, flags: dict) -> None:
    target = load_tiny(tmp_path, family)
    head = make_head(target, **flags)
    check_trained_is_served(head, features_of(target, documents(), TAPS), head.depth)


@pytest.mark.parametrize("flags", [{}, FLAGS[2]], ids=["plain", "v3.1"])
def test_norms_on_queries_and_keys_are_served_as_trained(tmp_path, flags: dict) -> None:
    target = load_tiny(tmp_path, "qwen3")
    head, bare = make_head(target, qk_norm=True, **flags), make_head(target, **flags)
    features = features_of(target, documents(), TAPS)
    check_trained_is_served(head, features, head.depth)
    norms = {f"layer.self_attn.{part}_norm.weight": (8,) for part in "qk"}
    shapes = {name: tuple(weight.shape) for name, weight in head.named_parameters()}
    assert shapes == norms | {name: tuple(weight.shape) for name, weight in bare.named_parameters()}
    # They are used: without them the same weights say something else.
    bare.load_state_dict({name: weight for name, weight in head.state_dict().items() if name not in norms})
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, 1)
    assert not torch.allclose(head.unroll(features, starts, 1), bare.unroll(features, starts, 1))


@pytest.mark.parametrize("taps", [(0, 2, 5, 7), (0, 1, 3, 5, 6)], ids=str)
@pytest.mark.parametrize("flags", [{}, FLAGS[2]], ids=["plain", "v3.1"])
def test_four_and_five_taps_train_and_draft(tmp_path, taps: tuple[int, ...], flags: dict) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, taps=taps, **flags)
    features = features_of(target, documents(), taps)
    check_trained_is_served(head, features, head.depth)
    head(features).loss.backward()
    assert head.fc.weight.shape == (32, 32 * len(taps))
    for part in head.fc.weight.grad.chunk(len(taps), dim=1):
        assert part.abs().max() > 0, "a tap that is not learnt from"


@pytest.mark.parametrize("flags", [{}, FLAGS[2]], ids=["plain", "v3.1"])
def test_recomputed_passes_equal_kept_ones(tmp_path, flags: dict) -> None:
    target = load_tiny(tmp_path)
    check_recomputed_is_kept(make_head(target, **flags), features_of(target, documents(), TAPS))


def test_packed_equals_each_document_alone(tmp_path) -> None:
    target = load_tiny(tmp_path)
    check_packed_is_alone(make_head(target), target)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_loss_equals_reference_in_value_and_gradient(tmp_path, monkeypatch, kind: str, softcap: float | None) -> None:
    """The chunked loss against plain autograd over the target's full distribution, mass outside W included."""
    monkeypatch.setattr("heads.losses.PLACES", 5)  # of a chunk
    monkeypatch.setattr("heads.losses.LOGITS", 1)
    monkeypatch.setattr("heads.losses.SLICE", 100)
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
    check_causal(head, target, head.depth)


@pytest.mark.parametrize(("family", "qk_norm"), [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
def test_queries_and_keys_are_copied_where_they_are_on_the_same_scale(tmp_path, family: str, qk_norm: bool) -> None:
    target = load_tiny(tmp_path, family)
    donor = target.model.base_model.layers[-1]
    with torch.no_grad():
        for weight in donor.parameters():
            if weight.ndim == 1:
                weight.copy_(torch.rand_like(weight) + 0.5)
    head = make_head(target, qk_norm=qk_norm)
    head.initialise(target)
    own = head.layer.self_attn
    same = qk_norm == (family == "qwen3")
    for part in "qk":
        weight = own.get_parameter(f"{part}_proj.weight")[:, 32:]
        assert torch.equal(weight, donor.self_attn.get_parameter(f"{part}_proj.weight")) == same
        if qk_norm and same:
            gains = [layer.get_parameter(f"{part}_norm.weight") for layer in (own, donor.self_attn)]
            torch.testing.assert_close(*gains, rtol=1e-5, atol=0)  # transformers norms in fp32, with an epsilon
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = head.layer.get_parameter(f"{name}.weight")
        assert torch.equal(
            weight[:, -donor.get_parameter(f"{name}.weight").shape[1] :], donor.get_parameter(f"{name}.weight")
        )
    torch.testing.assert_close(
        head.layer.post_attention_layernorm.weight, donor.post_attention_layernorm.weight, rtol=1e-5, atol=0
    )


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
