"""Targets with layers that carry a state (Qwen3.5, Qwen3-Next): they answer and teach, but take no drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.checkpoint import load_head
from heads.target import FrozenTarget
from scripts import collect, train
from tests import e2e
from tests.tiny import SIZES, tiny_tokenizer
from training.regenerate import Generation, answer_batch
from training.states import as_features

STATE = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SMALL = {**SIZES, **STATE, "num_hidden_layers": 4, "tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
FAMILIES = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL),
    "qwen3_next": lambda: Qwen3NextConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
}


def save_recurrent(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3 if "lm_head" in name or "embed" in name else 0.1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = save_recurrent(tmp_path_factory.mktemp("recurrent"), request.param)
    return FrozenTarget.load(folder, dtype="float32")


def test_the_states_of_an_answer_are_those_of_its_text(target: FrozenTarget) -> None:
    """Written token by token, in a batch of left-padded prompts, against one pass over each text alone."""
    assert target.recurrent == ("linear_attention",)
    prompts = [list(range(9, 9 + length)) for length in (4, 9)]
    answers = answer_batch(target, prompts, taps=(1, 3), generation=Generation(max_new_tokens=8), seed=0)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.ids_T[: len(prompt)].tolist() == prompt
        whole = target.forward(answer.ids_T[None, :-1], taps=(1, 3))
        features = as_features(answer)
        torch.testing.assert_close(features.last_TD[:-1], whole.last_BTD[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(features.taps_TE[:-1], whole.taps_BTE[0], rtol=1e-3, atol=1e-4)
        chosen = target.logits(whole.last_BTD[0, len(prompt) - 1 :]).argmax(-1)
        assert chosen.tolist() == answer.ids_T[len(prompt) :].tolist()


def test_decoding_with_drafts_is_refused_in_one_sentence(target: FrozenTarget) -> None:
    with pytest.raises(UserError, match=r"layers of linear_attention, whose state cannot go back .* in its server"):
        decode(target, [Request("a", "all", (9, 10, 11))], None, DecodeSettings(max_new_tokens=4))


def test_a_head_is_collected_for_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what would decode is refused before anything is answered."""
    folder = save_recurrent(tmp_path / "tiny", "qwen3_5")
    place = e2e.Place(folder, e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(8)), tmp_path).at(tmp_path)
    monkeypatch.chdir(tmp_path)

    def cfg(*more: str, head: str = "eagle3"):
        quick = ["name=t", f"head={head}", *(["head.taps=[1,2,3]"] if head == "eagle3" else [])]
        quick += ["generation.max_new_tokens=8", "train.max_steps=2", "rival=[]"]
        quick += ["train.mixed_precision=no", "head.draft_vocab_size=64", "traffic.held_out=0.25"]
        return e2e.config(*e2e.uses(place.target, place.traffic), *quick, *more)

    assert "stages=[collect,train,export]" in e2e.sentence(collect.run, cfg(), capsys)
    assert not (tmp_path / "runs/t/features").exists()
    stages = "stages=[collect,train,export]"
    collect.run(cfg(stages))
    asked = cfg(stages, "train.eval_every=1", "run_dir=runs/no", "features_dir=runs/t/features")
    assert "train.eval_every=null" in e2e.sentence(train.run, asked, capsys)
    for head in ("eagle3", "mtp_blocks"):
        places = ("traffic_dir=runs/t/traffic", "features_dir=runs/t/features", f"run_dir=runs/{head}")
        train.run(cfg(stages, *places, head=head))
        assert load_head(tmp_path / f"runs/{head}/head", target=FrozenTarget.load(folder, dtype="bfloat16"))
