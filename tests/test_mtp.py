"""MTP module: trained graph = served graph = a plain reading of its formula, and it begins as a layer of its target."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.base import DraftHead, FeatureNeeds, Proposal, TargetFeatures
from heads.checkpoint import load_head, save_head
from heads.layers import BlockSizes
from heads.mtp import MTPHead
from heads.pairs import supervised_pairs
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, TreeDrafter
from heads.vocab import DraftVocabulary
from tests.recurrent_cases import check_causal, check_packed_is_alone, check_trained_is_served, first_slot, randomised
from tests.tiny import features_of, load_tiny

LAYOUTS = [pytest.param(False, id="ernie"), pytest.param(True, id="mimo")]


def make_head(target: FrozenTarget, *, draft_size: int = 96, depth: int = 3, **flags) -> MTPHead:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    sizes = BlockSizes.of(target.config, target.vocab_size)
    head = MTPHead(sizes=sizes, vocab=vocab, depth=depth, **flags)
    randomised(head, target)
    return head


def documents() -> list[tuple[list[int], list[bool]]]:
    """The first document is supervised from its first token on, so that a round starts at position 0."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for prompt, answer in ((0, 9), (3, 6), (7, 4)):
        ids = torch.randint(8, 40, (prompt + answer,), generator=generator).tolist()
        result.append((ids, [False] * prompt + [True] * answer))
    return result


def plain(head: MTPHead, target: FrozenTarget, ids: list[int], last_TD: Tensor, start: int, depth: int) -> Tensor:
    """Logits [depth, W] of one round from slot `start`, by the formula alone: one sequence of slots, each of them run
    through the whole block at once with a causal mask, and once more from the beginning for every further slot."""
    eps, sizes = head.arguments["sizes"]["rms_norm_eps"], head.arguments["sizes"]
    weight = dict(head.named_parameters())
    heads, groups, size = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    theta = sizes["rope_parameters"]["rope_theta"]
    states, result = list(last_TD[: start + 1]), []

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = angle.cos()[:, None].double(), angle.sin()[:, None].double()
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for _ in range(depth):
        count = len(states)
        embedded = target.weights.embedding_VD[torch.tensor(ids[1 : count + 1])].clone()
        embedded[0] = 0
        x = torch.cat([norm(embedded, "embed_norm"), norm(torch.stack(states), "hidden_norm")], -1)
        x = x @ weight["proj.weight"].T
        y = norm(x, "input_layernorm")
        q, k, v = (
            (y @ weight[f"layer.self_attn.{name}_proj.weight"].T).view(count, -1, size) for name in ("q", "k", "v")
        )
        q, k = turn(q), turn(k).repeat_interleave(heads // groups, 1)
        scores = torch.einsum("nhd,thd->hnt", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        seen = torch.einsum("hnt,thd->nhd", scores.softmax(-1), v.repeat_interleave(heads // groups, 1)).flatten(1)
        x = x + seen @ weight["layer.self_attn.o_proj.weight"].T
        y = norm(x, "layer.post_attention_layernorm")
        gate, up = (y @ weight[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weight["layer.mlp.down_proj.weight"].T
        out = norm(x, "norm") if head.norm is not None else x
        states.append(out[-1])
        result.append(target.logits(out[-1])[head.vocab.ids_W])
    return torch.stack(result)


def trained_logits(head: MTPHead, features: TargetFeatures) -> tuple[Tensor, Tensor, Tensor]:
    """(starts_N, valid_KN, logits_KNW) of the unrolled training."""
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    return starts, valid, head.logits(head.unroll(features, starts, head.depth))


@pytest.mark.parametrize("final_norm", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_trained_graph_is_served_graph_is_the_formula(tmp_path, family: str, final_norm: bool) -> None:
    target = load_tiny(tmp_path, family)
    head = make_head(target, final_norm=final_norm, draft_size=40)
    features = features_of(target, documents(), ())
    starts, valid, trained = trained_logits(head, features)
    assert starts[0] == 0, "no round begins at position 0, so the zeroed embedding is not looked at"
    with torch.no_grad():
        for n, start in enumerate(starts.tolist()):
            first, depth = first_slot(features, start), int(valid[:, n].sum())
            ids, last_TD = features.ids_T[first:].tolist(), features.last_TD[first:]
            formula = plain(head, target, ids, last_TD, start - first, depth)
            torch.testing.assert_close(trained[:depth, n], formula, rtol=1e-9, atol=1e-9)
    check_trained_is_served(head, features, head.depth)


def test_it_is_transformers_own_module(tmp_path) -> None:
    """MiMo's layout is what `MtpModel` makes of a Llama target, but for the embedding at position 0: here it is zero
    in the target too."""
    target = load_tiny(tmp_path)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[9] = 0
    head = make_head(target, final_norm=True)
    target.model.config.num_mtp_layers = 1
    module = MtpModel(target.model, 1).double()
    names = {"embed_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "post_norm"}
    weights = {name.replace("layer.", "mtp_block.", 1): weight for name, weight in head.state_dict().items()}
    weights["mtp_block.input_layernorm.weight"] = weights.pop("input_layernorm.weight")
    for ours, theirs in names.items():
        weights[f"{theirs}.weight"] = weights.pop(f"{ours}.weight")
    module.layers[0].load_state_dict(weights)
    ids = [11, 9, *range(20, 28)]
    features = features_of(target, [(ids, [True] * 10)], ())
    starts, valid, trained = trained_logits(head, features)
    for n, start in enumerate(starts.tolist()):
        cache, states = MtpCache(config=module.config), features.last_TD[None, : start + 1]
        tokens, positions = torch.tensor([ids[1 : start + 2]]), torch.arange(1, start + 2)[None]
        for k in range(int(valid[:, n].sum())):
            with torch.no_grad():
                states = module.forward_layer(0, states, positions, cache, input_ids=tokens)[:, -1:]
                theirs = target.logits(states)[0, 0]
            torch.testing.assert_close(trained[k, n], theirs, rtol=1e-5, atol=1e-5)
            positions = positions[:, -1:] + 1
            tokens = torch.tensor([ids[int(positions) : int(positions) + 1]])


def test_control_an_embedding_at_position_0_is_seen(tmp_path, monkeypatch) -> None:
    """Without the zero the formula is missed, in a document's first slot and in every later one that sees it."""
    target = load_tiny(tmp_path)
    head = make_head(target)
    features = features_of(target, documents()[1:2], ())
    starts, _, right = trained_logits(head, features)
    monkeypatch.setattr(Tensor, "masked_fill", lambda states, *_: states)
    wrong = trained_logits(head, features)[2]
    assert (starts > 0).all() and ((wrong - right).abs().amax(-1) > 1e-6).all()


def test_packed_equals_each_document_alone(tmp_path) -> None:
    target = load_tiny(tmp_path)
    check_packed_is_alone(make_head(target, draft_size=40), target)


def test_later_tokens_do_not_move_earlier_outputs(tmp_path) -> None:
    target = load_tiny(tmp_path)
    check_causal(make_head(target), target, 3)


@pytest.mark.parametrize("final_norm", LAYOUTS)
def test_every_parameter_learns_and_nothing_of_the_target_does(tmp_path, final_norm: bool) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, final_norm=final_norm)
    head(features_of(target, documents(), ())).loss.backward()
    dead = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert dead == []
    assert all(parameter.grad is None for parameter in target.model.parameters())
    names = set(head.state_dict())
    assert not any("embed_tokens" in name or "lm_head" in name for name in names) and "proj.weight" in names


@pytest.mark.parametrize("final_norm", LAYOUTS)
def test_it_starts_as_one_more_layer_of_its_target(tmp_path, final_norm: bool) -> None:
    """With the embedding's part and the block's writers at zero the target's own states come out; with the writers,
    what the target's last layer adds to a state, seen through the final norm."""
    target = load_tiny(tmp_path)
    with torch.no_grad():
        target.model.model.norm.weight.uniform_(0.5, 2.0)
        target.model.model.layers[-1].input_layernorm.weight.uniform_(0.5, 2.0)
        target.model.model.layers[-1].post_attention_layernorm.weight.uniform_(0.5, 2.0)
    head = make_head(target, final_norm=final_norm)
    head.initialise(target)
    assert all(torch.isfinite(parameter).all() for parameter in head.parameters())
    ids = torch.tensor([[9, 20, 33, 14, 8, 25]])
    output = target.forward(ids)
    last_TD = output.last_BTD[0].clone()
    with torch.no_grad():
        head.proj.weight[:, :32] = 0
        slot = head.slot(ids[0], last_TD, torch.arange(6))
        layer, gain = target.model.model.layers[-1], target.model.model.norm.weight
        # What the block reads is what the last layer would read of the state that the final norm has made f of.
        read = F.normalize(last_TD / gain * layer.input_layernorm.weight)
        torch.testing.assert_close(F.normalize(slot.x), read, rtol=1e-4, atol=1e-4)
        quiet, _ = head.outcome(slot.residual, torch.zeros_like(last_TD))
        head.layer.mlp.down_proj.weight.zero_()
        still, _ = head.outcome(slot.residual, torch.zeros_like(last_TD))
    torch.testing.assert_close(F.normalize(still), F.normalize(last_TD), rtol=1e-4, atol=1e-4)
    assert 0.5 < (still.norm() / last_TD.norm()).item() < 2
    assert (quiet - still).norm() < 3 * still.norm(), "the block's own part swamps the state"


def test_saved_and_loaded_bit_for_bit(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, final_norm=True, draft_size=40, loss="tv", decay=0.5)
    save_head(head, tmp_path / "head", target_fingerprint=target.fingerprint)
    again = load_head(tmp_path / "head", target=target)
    again.attach(target.weights)
    assert again.arguments == head.arguments
    features = features_of(target, documents(), ())
    assert torch.equal(again(features).loss, head(features).loss)


def test_wrong_values_are_refused(tmp_path) -> None:
    target = load_tiny(tmp_path)
    for wrong, named in (({"loss": "mse"}, "head.loss"), ({"depth": 0}, "head.depth")):
        with pytest.raises(UserError, match=named):
            make_head(target, **wrong)


class Watched:
    """Hands the target the truth with a lie at every third token, and keeps what the head would have drafted."""

    needs = FeatureNeeds()

    def __init__(self, head: DraftHead, texts: list[list[int]]) -> None:
        self.head, self.texts, self.seen = head, texts, []

    def start(self, prompts):
        self.prompts, self.done = [list(prompt) for prompt in prompts], [1 - len(prompt) for prompt in prompts]
        return self.head.start(prompts)

    def commit(self, state, committed) -> None:
        self.done = [done + int(count) for done, count in zip(self.done, committed.count_B, strict=True)]
        self.head.commit(state, committed)

    def propose(self, state, depth, draw) -> Proposal:
        own = self.head.propose(state, depth, draw).tokens_BN
        rows = []
        for row, (text, done) in enumerate(zip(self.texts, self.done, strict=True)):
            if done + depth <= len(text):
                self.seen.append((self.prompts[row] + text[:done], own[row].tolist()))
            ahead = (text[done : done + depth] + [0] * depth)[:depth]
            rows.append([token if (done + n) % 3 else (token + 1) % 96 for n, token in enumerate(ahead)])
        return Proposal.chain(torch.tensor(rows))


def test_drafts_of_a_long_decoding_are_those_of_a_fresh_start(tmp_path) -> None:
    """After accepted and rejected drafts, in rows of different speed, a round drafts what the formula gives on the
    text alone; and the text, by chain and by tree, is the target's own."""
    target = load_tiny(tmp_path)
    head = make_head(target, depth=4)
    generator = torch.Generator().manual_seed(5)
    requests = [
        Request(f"r{n}", "all", tuple(torch.randint(8, 40, (length,), generator=generator).tolist()))
        for n, length in enumerate((3, 5, 9))
    ]
    truth = []
    for request in requests:
        ids = torch.tensor([request.prompt])
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        truth.append(output[0, len(request.prompt) :].tolist())
    watched = Watched(head, truth)
    for proposer in (watched, head, TreeDrafter(head, DynamicTree(top_k=3, nodes=9))):
        traces = decode(target, requests, proposer, DecodeSettings(gamma=4, max_new_tokens=16, rows=3))
        assert [trace.tokens for trace in traces] == truth
    assert len(watched.seen) >= 9 and len({len(text) for text, _ in watched.seen}) >= 6
    for text, drafted in watched.seen:
        last_TD = target.forward(torch.tensor([text])).last_BTD[0].clone()
        with torch.no_grad():
            logits = plain(head, target, text + drafted, last_TD, len(text) - 2, 4)
        assert logits.argmax(-1).tolist() == drafted
