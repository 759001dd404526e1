"""EAGLE-1: the trained graph is the served graph, the loss is what a plain implementation says, noise is training's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.eagle import EagleHead
from heads.layers import BlockSizes
from heads.pairs import supervised_pairs
from heads.tree_draft import DynamicTree, TreeDrafter
from heads.vocab import DraftVocabulary
from tests.recurrent_cases import (
    check_causal,
    check_packed_is_alone,
    check_trained_is_served,
    documents,
    first_slot,
    randomised,
)
from tests.tiny import VOCABULARY, features_of, load_tiny

BLOCK = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)


def make_head(target, *, draft_size: int = 40, depth: int = 3, **arguments) -> EagleHead:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    sizes = BlockSizes.of(target.config, target.vocab_size)
    return randomised(EagleHead(sizes=sizes, vocab=vocab, depth=depth, **arguments), target)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_trained_graph_is_served_graph(tmp_path, family: str) -> None:
    """The head in training mode, too: noise belongs to the loss."""
    target = load_tiny(tmp_path, family)
    head = make_head(target)
    assert head.training
    check_trained_is_served(head, features_of(target, documents(), ()), head.depth)


def test_it_has_no_norm_but_the_one_before_the_mlp(tmp_path) -> None:
    """What the server's layout has a place for, and nothing else."""
    head = make_head(load_tiny(tmp_path))
    assert set(dict(head.named_parameters())) == {"fc.weight", *(f"layer.{name}" for name in BLOCK)}
    assert list(head.fc.weight.shape) == [32, 64] and set(head.state_dict()) == set(dict(head.named_parameters()))


def test_packed_equals_each_document_alone(tmp_path) -> None:
    target = load_tiny(tmp_path)
    check_packed_is_alone(make_head(target).eval(), target)


def test_nothing_is_seen_before_its_time(tmp_path) -> None:
    target = load_tiny(tmp_path)
    check_causal(make_head(target), target, 3)


# ---- the loss, written out ------------------------------------------------------------------------------------------


def plain_layer(weights: dict[str, torch.Tensor], x_SD: torch.Tensor) -> torch.Tensor:
    """A Llama layer of the tiny targets' sizes over S slots from position 0, without a norm in front."""

    def turned(states: torch.Tensor) -> torch.Tensor:
        first, second = states[..., :4], states[..., 4:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def heads(name: str) -> torch.Tensor:
        return (x_SD @ weights[f"layer.self_attn.{name}_proj.weight"].T).view(len(x_SD), -1, 8).transpose(0, 1)

    angles = torch.arange(len(x_SD)).float()[:, None] * (1 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8))
    cos, sin = angles.cos().double(), angles.sin().double()
    queries, keys = turned(heads("q")), turned(heads("k")).repeat_interleave(2, 0)
    future = torch.full((len(x_SD), len(x_SD)), -math.inf).triu(1)
    shares = torch.softmax(queries @ keys.transpose(1, 2) / math.sqrt(8) + future, -1)
    attended = (shares @ heads("v").repeat_interleave(2, 0)).transpose(0, 1).reshape(len(x_SD), 32)
    hidden = x_SD + attended @ weights["layer.self_attn.o_proj.weight"].T
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = normed * weights["layer.post_attention_layernorm.weight"]
    gate, up = (normed @ weights[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (gate * torch.sigmoid(gate) * up) @ weights["layer.mlp.down_proj.weight"].T


def plain_loss(head: EagleHead, features, depth: int, decay: float) -> tuple[torch.Tensor, list[float]]:
    """Every (start, pass) pair by a round of its own, over the whole distribution; and the distances by pass."""
    weights, target = dict(head.named_parameters()), head.target
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, depth)
    total, distances = torch.zeros((), dtype=torch.float64), [0.0] * depth
    for n, start in enumerate(starts.tolist()):
        first = first_slot(features, start)
        hidden = list(features.last_TD[first : start + 1])
        for k in range(int(valid[:, n].sum())):
            embedded = target.embedding_VD[features.ids_T[first + 1 : start + 2 + k]]
            joined = torch.cat([embedded, torch.stack(hidden)], -1) @ weights["fc.weight"].T
            state = plain_layer(weights, joined)[-1]
            hidden.append(state)
            truth = features.last_TD[start + 1 + k]
            gap = (state - truth).abs()
            distance = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
            logits = [vector @ target.lm_head_VD.T for vector in (truth, state)]
            if target.bias_V is not None:
                logits = [values + target.bias_V for values in logits]
            if target.softcap is not None:
                logits = [target.softcap * torch.tanh(values / target.softcap) for values in logits]
            p = torch.softmax(logits[0], -1)[head.vocab.ids_W]
            log_q = torch.log_softmax(logits[1][head.vocab.ids_W], -1)
            total = total + decay**k * (distance + 0.1 * (p * (p.log() - log_q)).sum())
            distances[k] += distance.item()
    return total, distances


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "bias and softcap"])
def test_loss_equals_a_plain_implementation_in_value_and_gradient(tmp_path, depth: int, softcap: float | None) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, depth=depth).eval()
    features = features_of(target, documents(), ())
    if softcap is not None:
        bias_V = torch.randn(VOCABULARY, dtype=torch.float64)
        head.attach(replace(target.weights, bias_V=bias_V, softcap=softcap))
        features = replace(features, lse_T=head.target.logits(features.last_TD).logsumexp(-1))
    parameters = list(head.parameters())
    sums = head(features)
    expected, distances = plain_loss(head, features, depth, 0.8)
    torch.testing.assert_close(sums.loss, expected)
    gradients = [torch.autograd.grad(loss, parameters) for loss in (sums.loss, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert ours.abs().max() > 0
    assert sums.metrics["feature_loss"][0].tolist() == pytest.approx(distances)
    assert torch.equal(sums.metrics["feature_loss"][1], sums.metrics["loss"][1])


def test_weights_and_survival_weigh_both_parts(tmp_path) -> None:
    target = load_tiny(tmp_path)
    features = features_of(target, documents(), ())
    parts = {"feature_weight": 0.0, "token_weight": 0.0}
    for decay in (0.5, "survival"):
        one, other, both = (
            make_head(target, decay=decay, **arguments).eval()(features).loss
            for arguments in ({"token_weight": 0.0}, {**parts, "token_weight": 1.0}, {"token_weight": 0.3})
        )
        torch.testing.assert_close(both, one + 0.3 * other)
    # Survival: the distance of pass k counts as much as the passes before it overlap with the target.
    alone = features_of(target, documents()[:1], ())
    head = make_head(target, decay="survival", token_weight=0.0, depth=2).eval()
    starts, valid = supervised_pairs(alone.supervised_T, alone.lengths, 2)
    states = head.unroll(alone, starts, 2)
    expected = torch.zeros((), dtype=torch.float64)
    for k, n in valid.nonzero().tolist():
        truth = alone.last_TD[starts[n] + 1]
        p = torch.softmax(target.logits(truth), -1)[head.vocab.ids_W]
        overlap = torch.minimum(p, torch.softmax(head.logits(states[0, n]), -1)).sum()
        distance = functional.smooth_l1_loss(states[k, n], alone.last_TD[starts[n] + 1 + k])
        expected = expected + distance * (overlap if k else 1)
    torch.testing.assert_close(head(alone).loss, expected)


# ---- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_on_what_is_read_only(tmp_path, monkeypatch) -> None:
    target = load_tiny(tmp_path)
    head, read = make_head(target, noise=0.2), []
    unroll = head.unroll
    monkeypatch.setattr(head, "unroll", lambda features, *rest: read.append(features) or unroll(features, *rest))
    features = features_of(target, documents(), ())
    clean = features.last_TD.clone()
    for _ in range(8):
        head(features)
    noise = torch.stack([seen.last_TD - clean for seen in read])
    assert torch.equal(features.last_TD, clean) and noise.abs().max() <= 0.2
    assert noise.mean().abs() < 0.01 and noise.std().item() == pytest.approx(0.4 / math.sqrt(12), rel=0.05)
    head.eval()(features)
    assert torch.equal(read[-1].last_TD, clean)


def test_noise_is_seeded_and_training_only(tmp_path) -> None:
    target = load_tiny(tmp_path)
    features = features_of(target, documents(), ())
    head, silent = make_head(target), make_head(target, noise=0.0)

    def loss(of: EagleHead, seed: int) -> float:
        torch.manual_seed(seed)
        return of(features).loss.item()

    assert loss(head, 0) == loss(head, 0) != loss(head, 1)
    assert loss(head.eval(), 0) == loss(head, 1) == loss(silent, 0) != loss(head.train(), 0)


# ---- drafting and the start -----------------------------------------------------------------------------------------


def test_greedy_text_is_the_targets_own_as_a_chain_and_as_a_tree(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=VOCABULARY).eval()
    requests = [Request(f"r{n}", "all", tuple(range(9, 12 + 4 * n))) for n in range(3)]
    settings = DecodeSettings(gamma=3, max_new_tokens=16, rows=2)
    texts = [
        [trace.tokens for trace in decode(target, requests, proposer, settings)]
        for proposer in (None, head, TreeDrafter(head, DynamicTree(top_k=3, nodes=9)))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_it_starts_as_the_targets_last_layer_sized_for_its_new_place(tmp_path, family: str) -> None:
    target = load_tiny(tmp_path, family)
    decoder, head = target.model.base_model, make_head(target)
    donor, own = decoder.layers[-1], head.layer
    with torch.no_grad():
        donor.input_layernorm.weight.copy_(torch.rand(32) + 0.5)
        decoder.norm.weight.fill_(1.7)
    head.initialise(target)
    h_TD = 20 * torch.randn(5, 32, dtype=torch.float64)
    for part in "qkv":
        # Where the final norm scales all entries alike, the projections see what they saw in the target.
        ours = own.self_attn.get_submodule(f"{part}_proj")(decoder.norm(h_TD))
        theirs = donor.self_attn.get_submodule(f"{part}_proj")(donor.input_layernorm(h_TD))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ids = torch.arange(64)[None]
    states = target.model(ids, output_hidden_states=True).hidden_states
    shrunk = (states[-1].norm(dim=-1) / states[-2].norm(dim=-1)).median()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        torch.testing.assert_close(own.get_submodule(name).weight, donor.get_submodule(name).weight * shrunk)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        assert torch.equal(own.get_submodule(name).weight, donor.get_submodule(name).weight)
    assert torch.equal(head.fc.weight[:, 32:], torch.eye(32, dtype=torch.float64))
    assert 0.01 < head.fc.weight[:, :32].std() < 0.03


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"depth": 0}, "head.depth"),
        ({"loss": "mse"}, "head.loss"),
        ({"noise": -0.1}, "head.noise"),
        ({"feature_weight": math.inf}, "head.feature_weight"),
        ({"token_weight": math.nan}, "head.token_weight"),
        ({"token_weight": 0, "feature_weight": 0}, "head.token_weight"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, wrong: dict, setting: str) -> None:
    target = load_tiny(tmp_path)
    with pytest.raises(UserError, match=setting):
        make_head(target, **wrong)


def test_nothing_to_predict_gives_zero_with_gradient(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target)
    sums = head(features_of(target, [([9, 10, 11], [False] * 3)], ()))
    sums.loss.backward()
    assert sums.count == 0 and sums.loss == 0
