"""MTP modules in a row: trained graph = served graph = transformers' MtpModel, each module on true tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.checkpoint import load_head, save_head
from heads.layers import BlockSizes
from heads.mtp_blocks import MTPBlocksHead
from heads.pairs import supervised_pairs
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, TreeDrafter
from heads.vocab import DraftVocabulary
from tests.recurrent_cases import check_causal, check_packed_is_alone, check_trained_is_served, first_slot, randomised
from tests.test_mtp import Watched
from tests.test_mtp import documents as from_the_first_token
from tests.tiny import features_of, load_tiny

NAMES = {"embed_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "post_norm"}


def make_head(target: FrozenTarget, *, draft_size: int = 96, depth: int = 4, **flags) -> MTPBlocksHead:
    torch.manual_seed(1)
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), draft_size)
    head = MTPBlocksHead(sizes=BlockSizes.of(target.config, target.vocab_size), vocab=vocab, depth=depth, **flags)
    randomised(head, target)
    return head


def as_transformers(target: FrozenTarget, head: MTPBlocksHead) -> MtpModel:
    """transformers' model of as many modules with the same weights. At position 0 it embeds, where ours is zero: the
    token there must have the embedding 0 in the target."""
    target.model.config.num_mtp_layers = head.depth
    model = MtpModel(target.model, head.depth).double()
    for ours, theirs in zip(head.blocks, model.layers, strict=True):
        weights = {name.replace("layer.", "mtp_block.", 1): weight for name, weight in ours.state_dict().items()}
        weights["mtp_block.input_layernorm.weight"] = weights.pop("input_layernorm.weight")
        for name, their_name in NAMES.items():
            weights[f"{their_name}.weight"] = weights.pop(f"{name}.weight")
        theirs.load_state_dict(weights)
    return model


def without_embedding(target: FrozenTarget, token: int) -> FrozenTarget:
    with torch.no_grad():
        target.model.get_input_embeddings().weight[token] = 0
    return target


def theirs_of_a_round(model: MtpModel, target: FrozenTarget, ids: list[int], last_TD: Tensor, start: int) -> Tensor:
    """Logits [K, V] of transformers' modules for a round from slot `start`, all slots up to it in one go: module k
    is fed the tokens k further on, as in `MtpModel.forward`, and here the true ones."""
    cache, states, result = MtpCache(config=model.config), last_TD[None, : start + 1], []
    for k in range(model.num_mtp_layers):
        tokens = torch.tensor([ids[1 + k : start + 2 + k]])
        if tokens.shape[1] <= start:
            break
        positions = torch.arange(1 + k, start + 2 + k)[None]
        with torch.no_grad():
            states = model.forward_layer(k, states, positions, cache, input_ids=tokens)
            result.append(target.logits(states[0, -1]))
    return torch.stack(result)


@pytest.mark.parametrize("depth", [2, 4])
def test_training_says_what_transformers_modules_say(tmp_path, depth: int) -> None:
    target = without_embedding(load_tiny(tmp_path), 9)
    head = make_head(target, depth=depth)
    model = as_transformers(target, head)
    ids = [[11, 9, *range(20, 28)], [12, 9, 30, 31, 40]]
    features = features_of(target, [(one, [True] * len(one)) for one in ids], ())
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, depth)
    logits = head.logits(head.unroll(features, starts, depth))
    assert starts[0] == 0 and valid[-1].any()
    for n, start in enumerate(starts.tolist()):
        first, count = first_slot(features, start), int(valid[:, n].sum())
        own = ids[0] if first == 0 else ids[1]
        theirs = theirs_of_a_round(model, target, own, features.last_TD[first:], start - first)
        torch.testing.assert_close(logits[:count, n], theirs[:count], rtol=1e-5, atol=1e-5)


def test_it_drafts_what_transformers_modules_draft(tmp_path) -> None:
    """After accepted and rejected drafts, by transformers' own drafting loop on the text alone."""
    target = without_embedding(load_tiny(tmp_path), 9)
    head = make_head(target)
    model = as_transformers(target, head)
    prompts = [(11, 9), (13, 9, 44), (12, 9, 33, 41, 22)]
    requests = [Request(f"r{n}", "all", prompt) for n, prompt in enumerate(prompts)]
    truth = [trace.tokens for trace in decode(target, requests, None, DecodeSettings(max_new_tokens=16, rows=3))]
    watched = Watched(head, truth)
    for proposer in (watched, head, TreeDrafter(head, DynamicTree(top_k=3, nodes=9))):
        traces = decode(target, requests, proposer, DecodeSettings(gamma=4, max_new_tokens=16, rows=3))
        assert [trace.tokens for trace in traces] == truth
    assert len(watched.seen) >= 9
    for text, drafted in watched.seen:
        last_1TD = target.forward(torch.tensor([text[:-1]])).last_BTD.clone()
        with torch.no_grad():
            theirs, _, _ = model(
                torch.tensor([text[1:]]),
                last_1TD,
                None,
                torch.arange(1, len(text))[None],
                MtpCache(config=model.config),
            )
        assert theirs[0].tolist() == drafted


def test_trained_graph_is_served_graph(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=40, depth=3)
    check_trained_is_served(head, features_of(target, from_the_first_token(), ()), 3)


def test_control_a_module_that_sees_its_empty_columns_is_noticed(tmp_path, monkeypatch) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, depth=3)
    monkeypatch.setattr("heads.mtp_blocks._without_first", lambda k, block, width: block.allowed_BNC)
    with pytest.raises(AssertionError):
        check_trained_is_served(head, features_of(target, from_the_first_token(), ()), 3)


def test_nothing_leaks_between_documents_and_from_later_tokens(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=40)
    check_packed_is_alone(head, target)
    check_causal(head, target, 4)


def test_documents_too_short_for_the_later_modules_are_learnt_by_the_first(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target)
    sums = head(features_of(target, [([9, 10, 11], [True] * 3), ([12, 13], [True] * 2)], ()))
    sums.loss.backward()
    assert sums.metrics["loss"][1].tolist() == [1, 0, 0, 0] and sums.loss > 0
    assert not head.blocks[3].proj.weight.grad.any() and head.blocks[0].proj.weight.grad.any()


def test_every_module_has_weights_of_its_own(tmp_path) -> None:
    """Each starts as the target's last layer, and what one learns moves no other's."""
    target = load_tiny(tmp_path)
    head = make_head(target)
    head.initialise(target)
    norms = [block.norm.weight for block in head.blocks]
    assert len({weight.data_ptr() for weight in head.parameters()}) == len(list(head.parameters()))
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    head(features_of(target, from_the_first_token(), ())).loss.backward()
    grads = [block.proj.weight.grad for block in head.blocks]
    assert all(grad.any() for grad in grads) and not torch.equal(grads[1], grads[2])
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_saved_and_loaded_bit_for_bit(tmp_path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=40, loss="tv", decay=0.5)
    save_head(head, tmp_path / "head", target_fingerprint=target.fingerprint)
    again = load_head(tmp_path / "head", target=target)
    again.attach(target.weights)
    features = features_of(target, from_the_first_token(), ())
    assert again.arguments == head.arguments and torch.equal(again(features).loss, head(features).loss)


def test_it_drafts_no_deeper_than_it_has_modules(tmp_path) -> None:
    head = make_head(load_tiny(tmp_path), depth=2)
    head.check_depth(2)
    with pytest.raises(UserError, match=r"eval.gamma=3 is beyond the 2 tokens"):
        head.check_depth(3)
