"""The rivals: found in conf/rival, exact through the decoder for every family, with states that survive rejection."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.exactness import LawSettings, law_after
from eval.proposers.draft_model import draft_model
from eval.proposers.early_exit import early_exit, truncated
from eval.proposers.translated_draft import TranslatedDraft
from eval.sampling import Sampling
from eval.trace import RequestTrace
from heads.artifact import UserError
from heads.base import Committed
from heads.target import FrozenTarget
from scripts import evaluate
from scripts.rivals import build_rivals, rivals_identity
from tests import e2e
from tests.test_decode import NEW, generated, requests
from tests.tiny import FAMILIES, VOCABULARY, load_tiny, save_tiny

RIVALS = sorted(path.stem for path in (e2e.ROOT / "conf/rival").glob("*.yaml"))
TEXT_ONLY = ("prompt_lookup", "draft_model", "early_exit", "given_prediction")
"""Rivals that look at nothing but the text; the others remember what the target said of rejected ones."""


def test_all_rivals_are_found() -> None:
    """A file that is added or lost changes this number, and must be looked at here."""
    assert len(RIVALS) == 6


@dataclass(frozen=True)
class Scene:
    """A target with what `generate` writes, a draft model near to it, and predictions that are wrong in places."""

    target: FrozenTarget
    truths: list[list[int]]
    draft: Path
    predictions: Path

    def rival(self, name: str, *more: str) -> Proposer:
        """A rival as the script builds it."""
        paths = {"draft_model": self.draft, "given_prediction": self.predictions}
        path = [f"rivals.{name}.path={paths[name]}"] if name in paths else []
        cfg = e2e.config(f"rival=[{name}]", *path, *more)
        return build_rivals(cfg, self.target, requests())[name]


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield make_scene(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("one"), "llama")


def make_scene(folder: Path, family: str) -> Scene:
    target = load_tiny(folder, family)
    truths = [generated(target, one) for one in requests()]
    draft = near(folder / f"{family}0", folder / "draft")
    predictions = folder / "predictions.jsonl"
    rows = []
    for one, truth in zip(requests(), truths, strict=True):
        tokens = truth[:5] + [33] + truth[6:9] + truth[11:]  # one token replaced, two left out
        rows.append({"id": one.request_id, "prediction": target.tokenizer.decode(tokens)})
    e2e.write_rows(predictions, rows)
    return Scene(target, truths, draft, predictions)


def near(source: Path, goal: Path) -> Path:
    """A copy of a tiny target with a little noise on its weights: right often, but not always."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.005 * torch.randn_like(parameter))
    model.save_pretrained(goal)
    for file in source.glob("token*"):
        (goal / file.name).write_bytes(file.read_bytes())
    return goal


def tokens_per_round(traces: list[RequestTrace]) -> float:
    return sum(len(trace.tokens) - 1 for trace in traces) / sum(len(trace.rounds) for trace in traces)


# ---- exact, whatever is proposed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIVALS)
def test_greedy_text_is_the_targets_own(scene: Scene, name: str) -> None:
    """In fp64, alone and four together; and the neighbours in a batch change no round."""
    rival = scene.rival(name)
    runs = [
        decode(scene.target, requests(), rival, DecodeSettings(4, max_new_tokens=NEW, rows=rows)) for rows in (1, 4)
    ]
    for traces in runs:
        assert [trace.tokens for trace in traces] == scene.truths
    assert [trace.rounds for trace in runs[0]] == [trace.rounds for trace in runs[1]]


@pytest.mark.parametrize("gamma", [1, 2, 7])
@pytest.mark.parametrize("name", RIVALS)
def test_every_draft_length_is_exact(llama: Scene, name: str, gamma: int) -> None:
    traces = decode(llama.target, requests(), llama.rival(name), DecodeSettings(gamma, max_new_tokens=NEW, rows=5))
    assert [trace.tokens for trace in traces] == llama.truths
    assert max(one.proposed for trace in traces for one in trace.rounds) <= gamma


@pytest.mark.parametrize("name", RIVALS)
def test_sampled_tokens_follow_the_target(llama: Scene, name: str) -> None:
    """Three tokens after a fixed prompt: χ² of the frequencies against the target's exact probabilities."""
    settings = LawSettings(Sampling(0.7, top_k=3), copies=1200, length=3, gamma=3, seed=7)
    outcome = law_after(llama.target, requests()[1].prompt, llama.rival(name), settings)
    assert outcome.impossible == 0 and outcome.cells > 5 and outcome.p_value > 1e-4, outcome


def test_a_draft_that_is_the_target_is_accepted_whole(llama: Scene) -> None:
    """Greedy and sampled: p = q leaves nothing to reject."""
    same = draft_model(target=llama.target, path=llama.target.path)
    for sampling in (Sampling(), Sampling(1.0, top_p=0.9)):
        traces = decode(llama.target, requests(), same, DecodeSettings(4, sampling, max_new_tokens=NEW, rows=2))
        assert all(one.accepted == 4 for trace in traces for one in trace.rounds[:-1])


def test_rivals_gain_what_they_should(llama: Scene) -> None:
    """Those that know the text, or were made near the target, propose much that stands."""
    settings = DecodeSettings(4, max_new_tokens=NEW, rows=5)
    for name, least in (("draft_model", 1.5), ("given_prediction", 2.0)):
        assert tokens_per_round(decode(llama.target, requests(), llama.rival(name), settings)) > least


# ---- states survive rejection -----------------------------------------------------------------------------------


def committed(rows: list[list[int]]) -> Committed:
    """What the decoder hands on when these tokens have been settled; no rival here looks at states."""
    longest, nothing = max(map(len, rows)), torch.zeros(len(rows), 0, 0)
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    return Committed(torch.tensor(padded), nothing, nothing, torch.tensor([len(row) for row in rows]))


def spoken(logits_BW: Tensor, **unused: Any) -> tuple[Tensor, Tensor]:
    """The argmax, and the whole distribution, so that both can be compared."""
    return logits_BW.argmax(-1), logits_BW.softmax(-1)


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_the_state_after_rejections_is_that_of_the_text(llama: Scene, name: str) -> None:
    """After any accepted and rejected drafts, the next proposal is the one of a fresh state on the same text."""
    rival, dice = llama.rival(name), random.Random(3)
    prompts = [list(one.prompt) for one in requests()[:3]]
    texts = [truth[:1] for truth in llama.truths[:3]]
    state = rival.start(prompts)
    new = [prompt[1:] + text for prompt, text in zip(prompts, texts, strict=True)]
    for _ in range(12):
        rival.commit(state, committed(new))
        proposal = rival.propose(state, 4, spoken)
        fresh = rival.start(prompts)
        rival.commit(fresh, committed([prompt[1:] + text for prompt, text in zip(prompts, texts, strict=True)]))
        again = rival.propose(fresh, 4, spoken)
        assert torch.equal(proposal.tokens_BN, again.tokens_BN) and torch.equal(proposal.count_B, again.count_B)
        if proposal.probs_BNV is not None and again.probs_BNV is not None:
            assert torch.allclose(proposal.probs_BNV, again.probs_BNV, rtol=1e-9, atol=1e-12)
        drafted = zip(proposal.tokens_BN.tolist(), proposal.count_B.tolist(), strict=True)
        new = [tokens[: dice.randint(0, count)] + [dice.randrange(8, 40)] for tokens, count in drafted]
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]


def test_texts_beyond_the_drafts_context_are_decoded_plainly(llama: Scene) -> None:
    """A draft with room for 16 positions stops proposing there, each row for itself."""
    draft = draft_model(target=llama.target, path=str(llama.draft))
    draft.model.max_length = 16
    traces = decode(llama.target, requests(), draft, DecodeSettings(4, max_new_tokens=NEW, rows=5))
    assert [trace.tokens for trace in traces] == llama.truths
    assert all(trace.rounds[-1].proposed == 0 for trace in traces if len(trace.tokens) == NEW)
    assert traces[0].rounds[0].proposed == 4 and traces[4].rounds[0].proposed == 0  # prompts of 3 and of 17


# ---- particular rivals ------------------------------------------------------------------------------------------


def test_early_exit_shares_the_targets_modules(llama: Scene) -> None:
    """No weight is copied, the target keeps all its layers, and the states are those of its boundary."""
    target = llama.target
    view = truncated(target, 3)
    assert {id(one) for one in view.model.parameters()} == {id(one) for one in target.model.parameters()}
    ids = torch.tensor([[8, 9, 10, 11]])
    boundary = target.forward(ids, taps=(3,)).taps_BTE
    assert torch.equal(view.forward(ids).last_BTD, target.model.base_model.norm(boundary))
    assert target.model.config.num_hidden_layers == target.num_layers == 8


def other_tokenizer(source: Path, goal: Path) -> Path:
    """The same model with its vocabulary in another order: another tokenizer, the same text."""
    order = torch.arange(VOCABULARY).flip(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight[order])
    model.save_pretrained(goal)
    known = {word: VOCABULARY - 1 - index for word, index in load_words(source).items()}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(goal)
    return goal


def load_words(folder: Path) -> dict[str, int]:
    return dict(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])


def test_a_draft_with_another_tokenizer_is_translated(llama: Scene, tmp_path: Path) -> None:
    """Exact alone and in a batch, and worth something: the draft is the target in other ids."""
    path = other_tokenizer(Path(llama.target.path), tmp_path / "other")
    rival = draft_model(target=llama.target, path=str(path))
    assert isinstance(rival, TranslatedDraft)
    for rows in (1, 4):
        traces = decode(llama.target, requests(), rival, DecodeSettings(4, max_new_tokens=NEW, rows=rows))
        assert [trace.tokens for trace in traces] == llama.truths
        assert tokens_per_round(traces) > 1.5


def test_a_prediction_finds_its_place_again(llama: Scene, tmp_path: Path) -> None:
    """After replaced, added and missing tokens, and a jump back."""
    text = list(range(10, 40))
    path = e2e.write_rows(tmp_path / "p.jsonl", [{"id": "r0", "prediction": llama.target.tokenizer.decode(text)}])
    rival = llama.rival("given_prediction", f"rivals.given_prediction.path={path}")
    prompt = list(requests()[0].prompt)
    for answer, follows in (
        ([10], [11, 12, 13]),
        ([10, 11, 60], [13, 14, 15]),  # 60 instead of 12
        ([10, 11, 15], [16, 17, 18]),  # 12 to 14 missing
        ([10, 11, 12, 60, 61, 13, 14], [15, 16, 17]),  # two added
        ([20, 21, 22, 12, 13], [14, 15, 16]),  # back again
        ([39], []),
    ):
        state = rival.start([prompt])
        rival.commit(state, committed([prompt[1:] + answer]))
        proposal = rival.propose(state, 3, spoken)
        assert proposal.tokens_BN[0, : proposal.count_B[0]].tolist() == follows, answer


def test_every_rival_has_its_rows_in_the_report(
    finished: e2e.Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m scripts.evaluate` writes them, greedy and sampled, identical to the target's own texts."""
    place = finished.place.at(tmp_path)
    for stage in ("traffic", "head"):
        shutil.copytree(finished.place.run / stage, place.run / stage)
    monkeypatch.chdir(tmp_path)
    held_out = map(json.loads, (place.run / "traffic/held_out.jsonl").read_text().splitlines())
    predictions = e2e.write_rows(tmp_path / "p.jsonl", [{"id": row["id"], "prediction": "w1 w2"} for row in held_out])
    evaluate.run(
        e2e.config(
            *place.overrides,
            f"rival=[{','.join(RIVALS)}]",
            f"rivals.draft_model.path={place.target}",
            f"rivals.given_prediction.path={predictions}",
            *("eval.dtypes=[float32]", "eval.gammas=[]", "eval.max_new_tokens=8", "eval.timed_requests=2"),
        )
    )
    rows = [row for row in e2e.report(place)["results"] if row["slice"] == "all"]
    assert {row["proposer"] for row in rows} == {"eagle3", "none", *RIVALS}
    assert len(rows) == 2 * (1 + len(RIVALS)) + 1  # plain decoding at T = 0 only
    assert all(row["identical_requests"] == row["requests"] for row in rows if row["temperature"] == 0)
    by_name = {row["proposer"]: row for row in rows if row["temperature"] == 0}
    assert by_name["draft_model"]["alpha"]["value"] == 1  # it is the target


# ---- settings and mistakes --------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, str]] = {
    "prompt_lookup": {"max_ngram": "1"},
    "draft_model": {"path": "{target}"},
    "early_exit": {"exit_layer": "7"},
    "jacobi": {},
    "lookahead": {"window": "2", "candidates": "1"},
    "given_prediction": {"path": "{few}", "max_ngram": "1"},
}


@pytest.mark.parametrize("name", RIVALS)
def test_every_setting_does_something(llama: Scene, tmp_path: Path, name: str) -> None:
    """Each one changes some round, and what identifies the rivals; none is left out here."""
    from omegaconf import OmegaConf

    documented = set(OmegaConf.load(e2e.ROOT / f"conf/rival/{name}.yaml")) - {"_target_"}
    assert documented == set(SETTINGS[name])
    few = e2e.write_rows(tmp_path / "few.jsonl", [{"id": "r1", "prediction": "w1 w2 w3"}])
    batch = [*requests(), Request("loop", "all", (9, 12, 11, 9, 13, 9, 12, 14) * 3)]
    settings = DecodeSettings(4, max_new_tokens=NEW, rows=6)
    before = [trace.rounds for trace in decode(llama.target, batch, llama.rival(name), settings)]
    for setting, value in SETTINGS[name].items():
        more = f"rivals.{name}.{setting}={value.format(target=llama.target.path, few=few)}"
        assert [t.rounds for t in decode(llama.target, batch, llama.rival(name, more), settings)] != before, setting
        same, changed, again = (e2e.config(f"rival=[{name}]", *one) for one in ([], [more], []))
        assert rivals_identity(same) == rivals_identity(again) != rivals_identity(changed)


def test_a_changed_file_is_another_rival(tmp_path: Path) -> None:
    path = e2e.write_rows(tmp_path / "p.jsonl", [{"id": "r1", "prediction": "a"}])
    cfg = e2e.config("rival=[given_prediction]", f"rivals.given_prediction.path={path}")
    before = rivals_identity(cfg)
    e2e.write_rows(path, [{"id": "r1", "prediction": "other"}])
    assert rivals_identity(cfg) != before


MISTAKES: list[tuple[str, list[str], str]] = [
    ("prompt_lookup", ["rivals.prompt_lookup.max_ngram=0"], "max_ngram=0 must be at least 1"),
    ("prompt_lookup", ["rivals.prompt_lookup.max_ngram=many"], "give a whole number"),
    ("draft_model", ["rivals.draft_model.path=???"], "needs rivals.draft_model.path="),
    ("draft_model", ["rivals.draft_model.path=./nowhere"], "path=./nowhere is no draft model"),
    ("early_exit", ["rivals.early_exit.exit_layer=8"], "exit_layer=8 must be between 1 and 7"),
    ("early_exit", ["rivals.early_exit.exit_layer=0"], "exit_layer=0 must be between 1 and 7"),
    ("lookahead", ["rivals.lookahead.window=0"], "window=0"),
    ("lookahead", ["rivals.lookahead.candidates=0"], "candidates=0"),
    ("given_prediction", ["rivals.given_prediction.path=???"], "needs rivals.given_prediction.path="),
    ("given_prediction", ["rivals.given_prediction.path=./nowhere"], "path=./nowhere cannot be read"),
    ("given_prediction", ["rivals.given_prediction.max_ngram=0"], "max_ngram=0 must be at least 1"),
]


@pytest.mark.parametrize(("name", "overrides", "words"), MISTAKES)
def test_mistakes_are_one_sentence(llama: Scene, name: str, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        llama.rival(name, *overrides)
    assert words in str(caught.value) and str(caught.value).endswith(".")


LINES: list[tuple[list[Any], str]] = [
    (["no json"], "Line 1 of"),
    ([{"id": "r0", "prediction": "w1"}, {"id": "r1"}], "Line 2 of"),
    ([{"id": "r0", "prediction": 3}], "Line 1 of"),
    ([{"id": "unknown", "prediction": "w1"}], "no prediction for any of the 5 requests"),
    ([], "no prediction for any of the 5 requests"),
]


@pytest.mark.parametrize(("rows", "words"), LINES)
def test_predictions_that_cannot_be_used(llama: Scene, tmp_path: Path, rows: list[Any], words: str) -> None:
    path = e2e.write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(UserError, match=words):
        llama.rival("given_prediction", f"rivals.given_prediction.path={path}")


def test_one_prompt_has_one_prediction(llama: Scene, tmp_path: Path) -> None:
    path = e2e.write_rows(tmp_path / "p.jsonl", [{"id": n, "prediction": f"w{n}"} for n in (1, 2)])
    cfg = e2e.config("rival=[given_prediction]", f"rivals.given_prediction.path={path}")
    with pytest.raises(UserError, match="different answers to the same prompt"):
        build_rivals(cfg, llama.target, [Request(n, "all", (9, 10)) for n in ("1", "2")])


def test_a_draft_that_cannot_read_the_target_is_refused(llama: Scene, tmp_path: Path) -> None:
    """Another tokenizer for which the target's whole text is unknown."""
    path = save_tiny(tmp_path / "strange")
    words = {"<unk>": 0, **{f"z{index}": index for index in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    with pytest.raises(UserError, match="cannot draft for"):
        draft_model(target=llama.target, path=str(path))


def test_early_exit_takes_half_of_the_layers_by_default(llama: Scene) -> None:
    assert early_exit(target=llama.target).model.num_layers == 4


def test_a_target_that_cannot_exit_early_is_refused(llama: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families run all of their layers whatever their config says; such a draft would be the whole target."""
    monkeypatch.setattr("eval.proposers.early_exit.truncated", lambda target, layers: target)
    with pytest.raises(UserError, match="cannot exit early"):
        early_exit(target=llama.target, exit_layer=2)
