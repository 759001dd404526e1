"""Answers and states of one pass are those of a plain forward, and a collection accounts for every prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from tests.tiny import FAMILIES, load_tiny
from training import store
from training.collect import collect
from training.regenerate import Generation, answer_batch
from training.states import Answer
from training.store import FeatureStore
from training.traffic import Conversation

TAPS = (0, 2, 5)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # rounding only: padded rows are computed with other block sizes


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(8, 90) for _ in range(dice.randrange(1, 20))] for _ in range(count)]


def ask(target: FrozenTarget, given: Sequence[Sequence[int]], seed: int = 0, **how: Any) -> list[Answer]:
    generation = replace(Generation(max_new_tokens=20), **how)
    return answer_batch(target, given, taps=TAPS, generation=generation, seed=seed)


# One batch


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_a_plain_forward(tmp_path: Path, family: str, dtype: str) -> None:
    """Position by position, for rows of different lengths: states, the token each predicts, and the log-sum-exp."""
    target, bound = load_tiny(tmp_path, family, dtype), TOLERANCE[dtype]
    given = prompts(9)
    answers = ask(target, given)
    assert len({len(answer.ids_T) for answer in answers}) > 3 and {len(prompt) for prompt in given} != {1}
    for prompt, answer in zip(given, answers, strict=True):
        length, start = len(answer.ids_T), answer.answer_start
        assert answer.ids_T[:start].tolist() == prompt
        plain = target.forward(answer.ids_T[None], taps=TAPS)
        for got, want in ((answer.taps_TE, plain.taps_BTE[0]), (answer.last_TD, plain.last_BTD[0])):
            assert len(got) == length and not got[-1].any()
            scale = max(1.0, want.abs().max().item())
            assert (got[:-1] - want[:-1]).abs().max().item() < bound * scale
        predicting = slice(start - 1, length - 1)  # the positions whose next token was generated
        logits = target.logits(answer.last_TD[predicting])
        assert torch.equal(logits.argmax(-1), answer.ids_T[start:])
        whole = target.model(input_ids=answer.ids_T[None]).logits[0, predicting]
        assert torch.allclose(answer.lse_T[predicting], whole.logsumexp(-1).float(), atol=1e-4, rtol=1e-5)


def test_an_answer_ends_with_its_end_token_or_at_the_limit(target: FrozenTarget) -> None:
    answers = ask(target, prompts(30))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        new = answer.ids_T[answer.answer_start :].tolist()
        ended = answer.finish_reason == "stop"
        assert (new[-1] in target.eos_token_ids) == ended and len(new) <= 20
        assert not set(new[:-1]) & set(target.eos_token_ids) and (ended or len(new) == 20)


def test_greedy_answers_are_those_of_the_target_alone(target: FrozenTarget) -> None:
    """A row of a batch = a batch of one = transformers' own generate."""
    given = prompts(12, seed=1)
    for prompt, answer in zip(given, ask(target, given), strict=True):
        alone = ask(target, [prompt])[0]
        ids = torch.tensor([prompt])
        plain = target.model.generate(inputs=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
        assert answer.ids_T.tolist() == alone.ids_T.tolist() == plain[0].tolist()
        assert torch.allclose(answer.taps_TE, alone.taps_TE, atol=1e-9)


def test_nothing_of_the_target_s_own_generation_settings_applies(target: FrozenTarget) -> None:
    given = prompts(6)
    before = [answer.ids_T.tolist() for answer in ask(target, given)]
    own = target.model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.max_length = 5.0, 1, 7
    try:
        assert [answer.ids_T.tolist() for answer in ask(target, given)] == before
        assert target.model.generation_config is own
    finally:
        own.repetition_penalty, own.no_repeat_ngram_size, own.max_length = 1.0, 0, 20
    output = target.model(input_ids=torch.tensor([given[0]]), output_hidden_states=True)
    assert len(output.hidden_states) == target.num_layers + 1, "the hook is gone"


def test_sampling_follows_its_seed_and_leaves_the_global_one_alone(target: FrozenTarget) -> None:
    given = prompts(8)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    texts = [[answer.ids_T.tolist() for answer in ask(target, given, seed, temperature=1.0)] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.rand(1), expected)
    greedy = [answer.ids_T.tolist() for answer in ask(target, given)]
    narrow = [answer.ids_T.tolist() for answer in ask(target, given, temperature=1.0, top_p=1e-6)]
    assert narrow == greedy != texts[0]


def test_first_tokens_follow_the_target_s_distribution(target: FrozenTarget) -> None:
    """No truncation that nobody asked for (transformers' default keeps 50 tokens)."""
    prompt = prompts(1)[0]
    logits = target.logits(target.forward(torch.tensor([prompt])).last_BTD[0, -1]) / 4.0
    answers = ask(target, [prompt] * 4000, temperature=4.0, max_new_tokens=1)
    counts = torch.bincount(torch.tensor([int(answer.ids_T[-1]) for answer in answers]), minlength=96)
    expected = logits.softmax(-1) * 4000
    common = expected > 8
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    assert statistic < common.sum().item() + 5 * (2 * common.sum().item()) ** 0.5
    assert int((counts > 0).sum()) > 60


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"batch_size": 0}, {"top_p": 1.5}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"generation\.{next(iter(wrong))}="):
        Generation(**wrong)


# A collection


def traffic(count: int, seed: int = 0) -> list[Conversation]:
    dice = random.Random(seed)

    def text() -> str:
        return " ".join(f"w{dice.randrange(80)}" for _ in range(dice.randrange(1, 12)))

    return [
        Conversation(
            f"c{index}", "ab"[index % 2], tuple(({"role": "user", "content": text()},) for _ in range(1 + index % 3))
        )
        for index in range(count)
    ]


def gather(target: FrozenTarget, conversations: Sequence[Conversation], folder: Path, **how: Any) -> dict[str, Any]:
    return collect(
        target=target,
        conversations=conversations,
        folder=folder,
        needs=FeatureNeeds(how.pop("taps", (2, 4)), True),
        **{name: how.pop(name) for name in ("answers", "verified") if name in how},
        generation=replace(Generation(batch_size=4, max_new_tokens=12), **how),
    )


def answers_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {row["id"]: row for row in rows}


def quarantine_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def test_every_turn_is_a_document_after_the_target_s_own_answers(target: FrozenTarget, tmp_path: Path) -> None:
    conversations = traffic(11)
    manifest = gather(target, conversations, tmp_path / "f")
    opened, answers = FeatureStore.open(tmp_path / "f"), answers_of(tmp_path / "f")
    opened.verify()
    assert manifest["documents"] == len(opened.documents) == sum(len(item.turns) for item in conversations)
    refs = {ref.id: ref for ref in opened.documents}
    for conversation in conversations:
        earlier: list[str] = []
        for turn in range(len(conversation.turns)):
            ref = refs[f"{conversation.id}#{turn}"]
            read, answer = opened.read(ref), answers[ref.id]
            prompt = target.render(conversation.messages(earlier))
            assert read.ids_T[: ref.answer_start].tolist() == prompt
            new = read.ids_T[read.supervised_T]
            assert len(new) == answer["tokens"] == ref.length - ref.answer_start
            assert target.tokenizer.decode(new, skip_special_tokens=True) == answer["text"]
            assert (ref.finish_reason == "stop") == (int(new[-1]) in target.eos_token_ids)
            plain = target.forward(read.ids_T[None], taps=(2, 4))
            assert torch.allclose(read.taps_TE[:-1], plain.taps_BTE[0, :-1], atol=1e-8)
            assert torch.allclose(read.last_TD[:-1], plain.last_BTD[0, :-1], atol=1e-8)
            earlier.append(answer["text"])


def test_a_finished_store_is_used_as_it_is(target: FrozenTarget, tmp_path: Path, monkeypatch: Any) -> None:
    conversations = traffic(5)
    first = gather(target, conversations, tmp_path / "f")
    monkeypatch.setattr(target.model, "generate", None)
    assert gather(target, conversations, tmp_path / "f") == first


def test_a_collection_for_several_heads_goes_on_for_one_that_needs_less(target: FrozenTarget, tmp_path: Path) -> None:
    gather(target, traffic(3), tmp_path / "f")
    whole = (tmp_path / "f/shard-00000.safetensors").read_bytes()
    for name in ("manifest.json", "shard-00000.json", "shard-00000.safetensors"):
        (tmp_path / "f" / name).unlink()
    assert gather(target, traffic(3), tmp_path / "f", taps=(4,))["needs"]["taps"] == [2, 4]
    assert (tmp_path / "f/shard-00000.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"seed": 1}, r"generation\.seed=0, but generation\.seed=1"),
        ({"max_new_tokens": 13}, r"generation\.max_new_tokens=12, but"),
        ({"taps": (2, 5)}, r"the taps \[2, 4\], but \[5\] are asked for too"),
    ],
)
def test_other_settings_are_refused(target: FrozenTarget, tmp_path: Path, change: dict[str, Any], phrase: str) -> None:
    gather(target, traffic(3), tmp_path / "f")
    with pytest.raises(UserError, match=phrase + r".* choose another name= or delete"):
        gather(target, traffic(3), tmp_path / "f", **change)


def test_other_traffic_and_another_target_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    gather(target, traffic(3), tmp_path / "f")
    with pytest.raises(UserError, match=r"traffic\.fingerprint="):
        gather(target, traffic(4), tmp_path / "f")
    with pytest.raises(UserError, match=r"target\.weights="):
        gather(load_tiny(tmp_path, seed=1), traffic(3), tmp_path / "f")


def test_bad_prompts_are_set_aside_and_nothing_stops(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long for the limit, too long for the context, or one that the model fails on: alone it goes."""

    def say(name: str, *texts: str) -> Conversation:
        return Conversation(name, "a", tuple(({"role": "user", "content": text},) for text in texts))

    long, endless, poison = "w1 " * 40, "w1 " * 250, "w77 w77 w77"
    conversations = [*traffic(5), say("long", long, "w1"), say("endless", endless), say("poison", poison, "w2")]
    whole = target.model.generate

    def generate(inputs: torch.Tensor, **options: Any) -> Any:
        if (inputs == target.tokenizer.convert_tokens_to_ids("w77")).sum() >= 3:
            raise RuntimeError("a bad prompt\nwith a long explanation")
        return whole(inputs=inputs, **options)

    monkeypatch.setattr(target.model, "generate", generate)
    manifest = gather(target, conversations, tmp_path / "f", max_prompt_tokens=250)
    refused = {row["conversation"]: row for row in quarantine_of(tmp_path / "f")}
    assert refused["endless"]["reason"] == "longer than max_prompt_tokens=250"
    assert refused["poison"]["reason"] == "the model fails on it: a bad prompt"
    assert (refused["poison"]["turn"], refused["poison"]["turns_lost"]) == (0, 2)
    assert set(refused) == {"endless", "poison"}
    assert manifest["quarantined"] == {row["reason"]: 1 for row in refused.values()}
    calm = gather(target, [*traffic(5), conversations[5]], tmp_path / "calm", max_prompt_tokens=250)
    assert manifest["documents"] == calm["documents"]
    assert {key: row["text"] for key, row in answers_of(tmp_path / "f").items()} == {
        key: row["text"] for key, row in answers_of(tmp_path / "calm").items()
    }
    gather(target, conversations, tmp_path / "g", max_prompt_tokens=1000)
    reasons = {row["conversation"]: row["reason"] for row in quarantine_of(tmp_path / "g")}
    assert reasons["endless"] == "no room for max_new_tokens in the context of 256 tokens"
    gather(target, conversations, tmp_path / "h", max_prompt_tokens=30)
    assert {row["id"] for row in quarantine_of(tmp_path / "h")} >= {"long#0", "endless#0"}


def test_states_that_are_not_finite_are_set_aside(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "logits", lambda last: torch.full((len(last), 96), torch.nan))
    with pytest.raises(UserError, match=r"None of the 2 conversations .* states are not finite: 2"):
        gather(target, traffic(2), tmp_path / "f")


def test_a_template_that_refuses_a_conversation_sets_it_aside(tmp_path: Path) -> None:
    target = load_tiny(tmp_path)
    marks = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    target.tokenizer.chat_template = marks + str(target.tokenizer.chat_template)
    system = Conversation("s", "a", (({"role": "system", "content": "w1"}, {"role": "user", "content": "w1"}),))
    manifest = gather(target, [*traffic(3), system], tmp_path / "f")
    assert manifest["documents"] == 6
    (row,) = quarantine_of(tmp_path / "f")
    assert row["id"] == "s#0" and "no system messages" in row["reason"]


def test_a_tokenizer_without_a_template_is_one_sentence(tmp_path: Path) -> None:
    target = load_tiny(tmp_path)
    target.tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        gather(target, traffic(2), tmp_path / "f")


def test_a_small_disk_is_refused_before_anything_is_made(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = store.shutil.disk_usage(tmp_path)._replace(free=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(store.shutil, "disk_usage", lambda place: free)
        with pytest.raises(UserError, match=r"need up to [\d.]+ MB, but only 0\.1 MB are free"):
            gather(target, traffic(9), tmp_path / "f")
    assert not list((tmp_path / "f").glob("shard*"))
    gather(target, traffic(9), tmp_path / "f", max_new_tokens=3)  # the remedy: shorter answers, same folder


def test_the_estimate_is_an_upper_bound_and_not_a_wild_one(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("training.collect.check_disk", lambda folder, needed: asked.append(needed))
    manifest = gather(target, traffic(12), tmp_path / "f")
    stored = sum(shard["bytes"] for shard in manifest["shards"])
    headers = 600 * len(manifest["shards"])
    assert stored - headers <= asked[0] <= 2 * stored


def test_progress_goes_to_standard_error_in_few_lines(
    target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gather(target, traffic(12), tmp_path / "f")
    shown = capsys.readouterr()
    lines = shown.err.strip().splitlines()
    assert not shown.out and len(lines) == 1, "a short run shows its end only"
    assert lines[0].endswith("done") and "regenerate 24/24" in lines[0]
