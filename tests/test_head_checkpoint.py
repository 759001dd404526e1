"""Saving and loading a head: bit for bit, strict, for one target only, and never code from outside."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.artifact import UserError, sealed
from heads.checkpoint import FACTS, TENSORS, check_target, load_head, read_facts, save_head
from heads.eagle3 import Eagle3Head
from heads.layers import BlockSizes
from heads.vocab import DraftVocabulary
from tests.tiny import VOCABULARY, load_tiny

FINGERPRINT = {"name": "tiny", "weights": "a" * 64, "tokenizer": "b" * 64, "template": "c" * 64}
FLAGS = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"taps": [1, 2, 4, 6], "loss": "tv"},
    {"qk_norm": True},
]


def tiny_head(dtype: torch.dtype = torch.float32, draft_size: int = 40, **arguments) -> Eagle3Head:
    """A random head of the tiny targets' size; every weight is non-zero."""
    torch.manual_seed(1)
    sizes = BlockSizes(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        num_target_layers=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    counts = torch.arange(VOCABULARY).roll(17)
    head = Eagle3Head(sizes=sizes, vocab=DraftVocabulary.choose(counts, draft_size, [2]), **arguments)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head.to(dtype)


def saved(folder: Path, **arguments) -> Path:
    save_head(tiny_head(**arguments), folder, target_fingerprint=FINGERPRINT, extra={"steps": 3})
    return folder


def edit(path: Path, **changes) -> None:
    """As another version might have written it: with a checksum that holds."""
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}
    path.write_text(json.dumps(sealed({**facts, **changes})))


def spoil_size(path: Path) -> None:
    arguments = json.loads(path.read_text())["arguments"]
    edit(path, arguments={**arguments, "sizes": {**arguments["sizes"], "hidden_size": "a"}})


def test_a_head_from_before_there_was_a_checksum_is_read(tmp_path) -> None:
    folder = saved(tmp_path)
    facts = json.loads((folder / FACTS).read_text())
    assert facts.pop("digest")
    (folder / FACTS).write_text(json.dumps(facts))
    assert read_facts(folder) == facts and load_head(folder)


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("arguments", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_head_comes_back_bit_for_bit(tmp_path, arguments, dtype) -> None:
    head = tiny_head(dtype, **arguments)
    facts = save_head(head, tmp_path, target_fingerprint=FINGERPRINT)
    again = load_head(tmp_path)
    assert head.training and not any(module.training for module in again.modules()), "what is loaded drafts"
    assert type(again) is Eagle3Head and again.arguments == head.arguments and again.needs == head.needs
    state = again.state_dict()
    assert list(state) == list(head.state_dict())
    for name, tensor in head.state_dict().items():
        assert state[name].dtype == dtype and torch.equal(state[name], tensor), name
    assert torch.equal(again.vocab.ids_W, head.vocab.ids_W) and again.vocab.size == head.vocab.size
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert save_head(again, tmp_path / "again", target_fingerprint=FINGERPRINT) == facts
    assert (tmp_path / "again" / TENSORS).read_bytes() == (tmp_path / TENSORS).read_bytes()
    assert facts["name"] == "eagle3"


def test_it_lies_beside_other_files_and_replaces_only_its_own(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text("kept")
    saved(tmp_path)
    saved(tmp_path, fc_norm=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FACTS, TENSORS, "metrics.jsonl"]
    assert read_facts(tmp_path)["extra"] == {"steps": 3} and load_head(tmp_path).arguments["fc_norm"]


def test_only_its_own_target_will_do(tmp_path) -> None:
    target, other = load_tiny(tmp_path, "llama"), load_tiny(tmp_path, "llama", seed=1)
    save_head(tiny_head(), tmp_path / "head", target_fingerprint=target.fingerprint)
    load_head(tmp_path / "head", target=target)
    with pytest.raises(UserError, match=r"'llama0', but 'llama1' was given: they differ in weights \w+ against \w+;"):
        load_head(tmp_path / "head", target=other)


@pytest.mark.parametrize("part", ["weights", "tokenizer", "template"])
def test_the_differing_part_of_a_target_is_named(part) -> None:
    with pytest.raises(UserError, match=rf"'tiny'.*'tiny'.*differ in {part} \w+ against zzz;"):
        check_target(FINGERPRINT, {**FINGERPRINT, part: "zzz"}, what="The head")
    check_target(FINGERPRINT, {**FINGERPRINT, "name": "moved elsewhere"}, what="The head")


def test_what_does_not_belong_is_named(tmp_path) -> None:
    folder = saved(tmp_path)
    whole = load_file(folder / TENSORS)

    def stored(tensors) -> None:
        save_file(tensors, folder / TENSORS)
        edit(folder / FACTS, sha256=hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest())

    stored({name: tensor for name, tensor in whole.items() if name != "hidden_norm.weight"})
    with pytest.raises(UserError, match=r"lacks hidden_norm.weight \[32\]"):
        load_head(folder)
    stored(whole | {"fc.bias": torch.zeros(32)})
    with pytest.raises(UserError, match=r"has fc.bias, which the head has not"):
        load_head(folder)
    stored(whole | {"fc.weight": torch.zeros(32, 64)})
    with pytest.raises(UserError, match=r"has fc.weight \[32, 64\] where the head has \[32, 96\]"):
        load_head(folder)
    stored({name: tensor for name, tensor in whole.items() if name != "vocab.ids_W"})
    with pytest.raises(UserError, match="no draft vocabulary"):
        load_head(folder)
    stored(whole)
    load_head(folder)


@pytest.mark.parametrize(
    "class_path",
    [
        "os.system",
        "torch.nn.Linear",
        "headsx.eagle3.Eagle3Head",
        "heads.eagle3.Eagle3Head; import os",
        "heads..eagle3.Eagle3Head",
        "heads.eagle3.default_taps",
        "heads.eagle3.BlockSizes",
        "heads.base.DraftHeads",
        "heads.nothing.Head",
        None,
        ["heads.eagle3.Eagle3Head"],
    ],
)
def test_nothing_but_a_head_of_ours_is_loaded(tmp_path, class_path) -> None:
    folder = saved(tmp_path)
    edit(folder / FACTS, _target_=class_path)
    with pytest.raises(UserError, match="is no draft head under heads"):
        load_head(folder)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / FACTS).unlink(), "holds no trained head"),
        (lambda folder: (folder / FACTS).write_text('{"format": 1'), "is not valid JSON"),
        (lambda folder: (folder / FACTS).write_text("[]"), "is not a head of format 1"),
        (lambda folder: edit(folder / FACTS, format=2), "is not a head of format 1"),
        (lambda folder: edit(folder / FACTS, arguments={"nonsense": 1}), "does not fit heads.eagle3.Eagle3Head"),
        (lambda folder: swap(folder / FACTS, '"vocab_size": 96', '"vocab_size": 97'), "head.json changed after it was"),
        (lambda folder: swap(folder / FACTS, '"hidden_size": 32', '"hidden_size": "a"'), "head.json changed after it"),
        (lambda folder: spoil_size(folder / FACTS), "does not fit heads.eagle3.Eagle3Head"),
        (lambda folder: (folder / TENSORS).unlink(), f"has a {FACTS} but no {TENSORS}"),
        (lambda folder: (folder / TENSORS).write_bytes(b"\0" * 100), "changed or cut off"),
        (
            lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1]),
            "changed or cut off",
        ),
    ],
)
def test_a_spoilt_folder_is_one_sentence(tmp_path, spoil, sentence) -> None:
    folder = saved(tmp_path)
    spoil(folder)
    with pytest.raises(UserError, match=sentence):
        load_head(folder)


def test_a_weight_that_is_not_finite_is_not_saved(tmp_path) -> None:
    head = tiny_head()
    with torch.no_grad():
        head.norm.weight[3] = torch.nan
    with pytest.raises(UserError, match="norm.weight is not finite"):
        save_head(head, tmp_path, target_fingerprint=FINGERPRINT)
    assert not list(tmp_path.iterdir())
