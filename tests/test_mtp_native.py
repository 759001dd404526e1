"""A target's own MTP module: read from its checkpoint, equal to transformers' MtpModel, trained as it is served."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.base import Committed, TargetFeatures
from heads.checkpoint import load_head, save_head
from heads.mtp_native import NativeMTPHead
from heads.pairs import supervised_pairs
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, TreeDrafter
from heads.vocab import DraftVocabulary
from tests.recurrent_cases import check_causal, check_packed_is_alone, check_trained_is_served, first_slot
from tests.test_mtp import Watched
from tests.tiny import SIZES, features_of, load_tiny, tiny_tokenizer

SMALL = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 8}
# What decodes here must have a cache that can be cut: of the hybrids only layers of full attention.
FULL = {"layer_types": ["full_attention"] * 2}
FAMILIES = {
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **EXPERTS, **LATENT, n_routed_experts=4, n_group=1, topk_group=1
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**SMALL, **EXPERTS, n_routed_experts=4),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL, **FULL),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SMALL, **EXPERTS, **FULL, num_experts=4, shared_expert_intermediate_size=16
    ),
}


def published(weights: dict[str, Tensor], layers: int, qwen: bool) -> dict[str, Tensor]:
    """The weights of an MtpLayer under the names and in the pieces of published checkpoints."""
    outer = (
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "post_norm": "mtp.norm",
        }
        if qwen
        else {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
    )
    block = "mtp.layers.0." if qwen else f"model.layers.{layers}."
    result = {}
    for name, weight in weights.items():
        first, _, rest = name.partition(".")
        if first in outer:
            result[("" if qwen else block) + f"{outer[first]}.{rest}"] = weight
        elif rest.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    result[f"{block}mlp.experts.{expert}.{part}.weight"] = half
        elif rest.endswith("experts.down_proj"):
            result |= {f"{block}mlp.experts.{expert}.down_proj.weight": own for expert, own in enumerate(weight)}
        else:
            result[f"{block}{rest}"] = weight
    return {name: weight.contiguous().clone() for name, weight in result.items()}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory):
    """`native(family)`: the folder of a tiny target with a module, the target in fp64, transformers' own module."""
    made: dict[str, tuple[Path, FrozenTarget, MtpModel]] = {}

    def get(family: str) -> tuple[Path, FrozenTarget, MtpModel]:
        if family not in made:
            made[family] = build(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def build(folder: Path, family: str) -> tuple[Path, FrozenTarget, MtpModel]:
    _, module = with_module(folder, FAMILIES[family](), family)
    return folder, FrozenTarget.load(folder, dtype="float64"), module.double()


def with_module(folder: Path, config: PreTrainedConfig, family: str) -> tuple[PreTrainedModel, MtpModel]:
    """A random model of transformers with an MtpModel on it, both written to a folder as one checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    own = deepcopy(config)
    if family.startswith("qwen"):  # these do not say so in their config
        own.num_mtp_layers, own.mtp_layer_types = 1, ["full_attention"]
        own.layer_types = ["full_attention"] * own.num_hidden_layers
    own._experts_implementation = "eager"
    model.config = own
    module = MtpModel(model, 1)
    model.config = config
    with torch.no_grad():
        for parameter in [*model.parameters(), *module.layers.parameters()]:
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2) + (parameter.dim() == 1)
            )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    extra = published(module.layers[0].state_dict(), config.num_hidden_layers, family.startswith("qwen"))
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
    return model, module


def make_head(target: FrozenTarget, **flags) -> NativeMTPHead:
    torch.manual_seed(1)
    head = NativeMTPHead(
        sizes=NativeMTPHead.sizes_of(target), vocab=DraftVocabulary.identity(target.vocab_size), depth=3, **flags
    )
    head.initialise(target)
    head.attach(target.weights)
    return head.to(target.dtype)


def documents() -> list[tuple[list[int], list[bool]]]:
    generator = torch.Generator().manual_seed(3)
    result = []
    for prompt, answer in ((0, 7), (3, 5)):
        ids = torch.randint(8, 40, (prompt + answer,), generator=generator).tolist()
        result.append((ids, [False] * prompt + [True] * answer))
    return result


def reference(module: MtpModel, ids: list[int], last_TD: Tensor, start: int, depth: int) -> Tensor:
    """Logits [depth, V] of one round by transformers: its own layer, masks and cache, fed its own outcome."""
    cache, states, result = MtpCache(config=module.config), last_TD[None, : start + 1], []
    tokens, positions = torch.tensor([ids[1 : start + 2]]), torch.arange(1, start + 2)[None]
    for _ in range(depth):
        states = module.forward_layer(0, states, positions, cache, input_ids=tokens)[:, -1:]
        result.append(module._project_to_logits(states)[0, 0])
        positions = positions[:, -1:] + 1
        tokens = torch.tensor([ids[int(positions) : int(positions) + 1]])
    return torch.stack(result)


def trained(head: NativeMTPHead, features: TargetFeatures) -> list[tuple[int, int, Tensor]]:
    """(start, valid passes, logits [K, V] of the unrolled training) of every round."""
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, head.depth)
    logits = head.logits(head.unroll(features, starts, head.depth))
    return [(start, int(valid[:, n].sum()), logits[:, n]) for n, start in enumerate(starts.tolist())]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_transformers_own_module(native, family: str) -> None:
    """The weights are found in the checkpoint, and every pass of the training says what MtpModel says."""
    _, target, module = native(family)
    head = make_head(target)
    for name, weight in module.layers[0].state_dict().items():
        torch.testing.assert_close(head.module.state_dict()[name], weight, rtol=0, atol=1e-6)
    features = features_of(target, documents(), ())
    with torch.no_grad():
        for start, depth, logits in trained(head, features):
            first = first_slot(features, start)
            ids = features.ids_T[first:].tolist()
            theirs = reference(module, ids, features.last_TD[first:], start - first, depth)
            torch.testing.assert_close(logits[:depth], theirs, rtol=1e-5, atol=1e-5)


def test_the_layer_of_a_hybrid_is_one_of_full_attention(tmp_path) -> None:
    """Qwen3.5 mixes two kinds of layers, and here its last one is of the other kind."""
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = Qwen3_5TextConfig(**{**SMALL, "num_hidden_layers": 3}, **linear, linear_value_head_dim=8)
    assert config.layer_types[-1] == "linear_attention"
    model, module = with_module(tmp_path, config, "qwen3_5")
    model.config.name_or_path = str(tmp_path)
    target = SimpleNamespace(config=config, model=model, num_layers=3, path=tmp_path)
    head = NativeMTPHead(sizes=NativeMTPHead.sizes_of(target), vocab=DraftVocabulary.identity(96))
    head.initialise(target)
    assert type(head.module.post_norm) is type(model.model.norm)
    for name, weight in module.layers[0].state_dict().items():
        torch.testing.assert_close(head.module.state_dict()[name], weight)


def test_of_several_modules_the_first_is_taken(native, tmp_path) -> None:
    """DeepSeek's num_nextn_predict_layers above 1: layer L, then L + 1, which this head leaves alone."""
    folder, _, module = native("deepseek_v3")
    shutil.copytree(folder, tmp_path / "two")
    weights = load_file(folder / "model.safetensors")
    second = {name.replace("layers.2.", "layers.3."): 2 * one for name, one in weights.items() if "layers.2." in name}
    save_file(weights | second, tmp_path / "two/model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (tmp_path / "two/config.json").write_text(json.dumps(config))
    head = make_head(FrozenTarget.load(tmp_path / "two", dtype="float64"))
    assert second
    for name, weight in module.layers[0].state_dict().items():
        torch.testing.assert_close(head.module.state_dict()[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flags", [{}, {"norm_output": False, "zero_first": True}], ids=["own", "as vllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_graph_is_served_graph(native, family: str, flags: dict) -> None:
    _, target, _ = native(family)
    head = make_head(target, **flags)
    # DeepSeek and GLM weigh their experts in fp32, whose sums depend on how many rows are multiplied at once.
    close = 1e-9 if family.startswith("qwen") else 1e-5
    with torch.no_grad():
        check_trained_is_served(head, features_of(target, documents(), ()), head.depth, close)


def test_a_document_whose_masks_are_too_large_is_refused(native, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target, _ = native("glm4_moe")
    features = features_of(target, documents(), ())
    longest = max(features.lengths)
    monkeypatch.setattr("heads.mtp_native.LONGEST", longest - 1)
    with pytest.raises(UserError, match=f"{longest} positions .* set train.max_length={longest - 1} or less"):
        make_head(target)(features)


def test_control_each_flag_changes_what_is_said(native) -> None:
    """What is fed back is looked at from pass 1 on; the zeroed embedding by every pass that sees position 0."""
    _, target, _ = native("glm4_moe")
    features = features_of(target, documents()[1:], ())
    with torch.no_grad():
        plain, raw, zero = (
            torch.stack([logits for *_, logits in trained(make_head(target, **flags), features)])
            for flags in ({}, {"norm_output": False}, {"zero_first": True})
        )
    assert torch.equal(raw[:, 0], plain[:, 0]) and ((raw - plain)[:, 1:].abs().amax(-1) > 1e-6).all()
    assert ((zero - plain).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_learns_and_nothing_of_the_target_does(native, family: str) -> None:
    _, target, _ = native(family)
    head = make_head(target)
    features = features_of(target, documents(), ())
    head(features).loss.backward()
    assert [name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []
    assert all(parameter.grad is None for parameter in target.model.parameters())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_nothing_leaks_between_documents_and_from_later_tokens(native, family: str) -> None:
    _, target, _ = native(family)
    head = make_head(target)
    check_packed_is_alone(head, target)
    check_causal(head, target, head.depth, 1e-12 if family == "qwen3_5" else 1e-5)


def test_fine_tuning_lowers_the_loss(native) -> None:
    _, target, _ = native("deepseek_v3")
    head, features = make_head(target), features_of(target, documents(), ())
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        sums = head(features)
        sums.loss.backward()
        optimizer.step()
        losses.append(sums.loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_gives_the_targets_own_text_and_the_drafts_of_a_fresh_start(native, family: str) -> None:
    """Rows of different speed, accepted and rejected drafts, a cache whose keys and values may differ in width."""
    _, target, _ = native(family)
    head = make_head(target)
    requests = [Request(f"r{n}", "all", tuple(range(9 + n, 12 + 3 * n))) for n in range(3)]
    truth = []
    for request in requests:
        ids = torch.tensor([request.prompt])
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        truth.append(output[0, len(request.prompt) :].tolist())
    watched = Watched(head, truth)
    for proposer in (watched, head, TreeDrafter(head, DynamicTree(top_k=3, nodes=9))):
        traces = decode(target, requests, proposer, DecodeSettings(gamma=3, max_new_tokens=10, rows=3))
        assert [trace.tokens for trace in traces] == truth
    assert len(watched.seen) >= 6
    for text, drafted in watched.seen:
        state, last = head.start([text]), target.forward(torch.tensor([text[:-1]])).last_BTD
        count = torch.tensor([len(text) - 1])
        head.commit(state, Committed(torch.tensor([text[1:]]), last[..., :0], last, count))
        fresh = head.propose(state, 3, lambda logits, **_: (logits.argmax(-1), None))
        assert fresh.tokens_BN[0].tolist() == drafted


def test_saved_and_loaded_bit_for_bit_in_its_own_rotary_precision(native, tmp_path) -> None:
    _, target, _ = native("qwen3_next")
    head = make_head(target, zero_first=True)
    save_head(head, tmp_path, target_fingerprint=target.fingerprint)
    again = load_head(tmp_path, target=target)
    again.attach(target.weights)
    features = features_of(target, documents(), ())
    assert again.arguments == head.arguments and torch.equal(again(features).loss, head(features).loss)
    before = dict(head.rotary.named_buffers())["tables.inv_freq"].clone()
    after = dict(head.to(torch.bfloat16).rotary.named_buffers())["tables.inv_freq"]
    assert head.module.eh_proj.weight.dtype is torch.bfloat16
    assert after.dtype is torch.float32 and torch.equal(after, before)


def test_targets_without_a_module_and_unknown_families_are_refused(native, tmp_path) -> None:
    target = load_tiny(tmp_path)
    with pytest.raises(UserError, match="head=mtp"):
        make_head(target)
    sizes = NativeMTPHead.sizes_of(target)
    for wrong in ({"sizes": {**sizes, "model_type": "nonsense"}}, {"depth": 0}, {"loss": "mse"}):
        with pytest.raises(UserError):
            NativeMTPHead(**{"sizes": sizes, "vocab": DraftVocabulary.identity(96), **wrong})
