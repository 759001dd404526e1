"""Traffic since a run: nothing leaks between the sides; the better head is kept, and the last one in doubt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from eval.report import Run
from eval.succession import succession, to_markdown
from eval.trace import RequestTrace, Round
from heads.artifact import UserError
from heads.checkpoint import TENSORS, load_head, read_facts
from scripts import collect, export, refresh, train
from tests import e2e
from tests.tiny import save_tiny
from training.new_traffic import content_hash, since
from training.traffic import Conversation, Reading, load_traffic, write_traffic

# ---- the decision -----------------------------------------------------------------------------------------------


def decoded(accepted: list[int], requests: int = 12) -> Run:
    """A run whose request number r accepts accepted[r % len] of 3 drafts in each of four rounds."""
    traces = []
    for number in range(requests):
        rounds = [Round(3, accepted[number % len(accepted)]) for _ in range(4)]
        tokens = list(range(1 + sum(one.emitted for one in rounds)))
        traces.append(RequestTrace(f"r{number}", "chat", 5, tokens, rounds, finish="length", seconds=1.0))
    return Run("eagle3", "float32", 0.0, 3, traces)


@pytest.mark.parametrize(
    ("last", "new", "requests", "kept", "words"),
    [
        ([0, 1], [1, 2], 12, "candidate", "The new head is kept: 1.000 [1.000, 1.000] tokens a round"),
        ([1, 2], [0, 1], 12, "previous", "The last head stays, as the new one is worse: -1.000"),
        ([0, 1, 2], [1, 2, 0], 12, "previous", "The last head stays, as the interval includes zero: 0.000 ["),
        (
            [0, 0],
            [3, 3],
            6,
            "previous",
            "6 held-out requests tell nothing for certain, as an interval takes at",
        ),
    ],
)
def test_the_last_head_stays_unless_the_new_one_is_surely_better(
    last: list[int], new: list[int], requests: int, kept: str, words: str
) -> None:
    outcome = succession(decoded(last, requests), decoded(new, requests), {"r0", "r1"}, resamples=200)
    assert outcome["kept"] == kept and words in outcome["verdict"]
    assert [part["difference"]["requests"] for part in outcome["parts"].values()] == [requests, requests - 2, 2]
    assert outcome["verdict"] in to_markdown(outcome)


def test_other_requests_are_refused() -> None:
    with pytest.raises(UserError, match="the same requests"):
        succession(decoded([1], 12), decoded([1], 13), set())


# ---- the traffic ------------------------------------------------------------------------------------------------


def reading(texts: list[str], held_out: float = 0.4, **arguments: Any) -> Reading:
    made = [Conversation(f"id{n}", "chat", (({"role": "user", "content": text},),)) for n, text in enumerate(texts)]
    return Reading(tuple(made), (), 0, held_out, {"reader": "files", **arguments})


def test_nothing_crosses_the_split(tmp_path: Path) -> None:
    """A log that has grown: what was learned from or held out is known whatever its id, the old held-out ones come
    along, ids stay apart, and no text is on both sides of any two runs."""
    write_traffic(tmp_path / "old/traffic", reading([f"text {n}" for n in range(40)]))
    old = load_traffic(tmp_path / "old/traffic")
    grown = since(tmp_path / "old", reading([f"text {n}" for n in range(30, 90)]))
    assert grown.learned_before + grown.held_out_before == 10
    write_traffic(tmp_path / "new/traffic", grown.reading)
    new = load_traffic(tmp_path / "new/traffic")
    assert {one.id for one in old.held_out} <= {one.id for one in new.held_out}
    assert len({one.id for one in new.held_out}) == len(new.held_out)
    learned = {content_hash(one) for one in (*old.train, *new.train)}
    assert not learned & {content_hash(one) for one in (*old.held_out, *new.held_out)}
    assert len(new.train) + len(new.held_out) - len(old.held_out) == 50
    first = replace(old.train[0], turns=(*old.train[0].turns, ({"role": "user", "content": "more"},)))
    longer = since(tmp_path / "old", replace(reading(["another"]), conversations=(first,)))
    assert longer.learned_before == 0 and first in longer.reading.conversations, "one turn more is new"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (reading(["new"], held_out=0.5), "set traffic.held_out=0.4"),
        (reading(["new"], redact=["emails"]), r"traffic.redact=\['emails'\] differs from the None of"),
        (reading([f"text {n}" for n in range(40)]), "None of the 40 conversations that were read is new to train on"),
    ],
)
def test_traffic_that_would_leak_or_brings_nothing_is_one_sentence(
    tmp_path: Path, given: Reading, sentence: str
) -> None:
    write_traffic(tmp_path / "old/traffic", reading([f"text {n}" for n in range(40)]))
    with pytest.raises(UserError, match=sentence):
        since(tmp_path / "old", given)


# ---- end to end -------------------------------------------------------------------------------------------------

QUICK = (
    *("target.dtype=float32", "traffic.held_out=0.4", "generation.max_new_tokens=8", "rival=[]"),
    *("head.taps=[1,3,6]", "head.draft_vocab_size=64", "train.max_steps=2", "train.global_batch_tokens=128"),
    *("train.log_every=1", "train.mixed_precision=no", "eval.dtypes=[float32]", "eval.gammas=[]"),
    *("eval.temperatures=[0.0]", "eval.max_new_tokens=6", "eval.timed_requests=0"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A run over the first 20 conversations of a log."""
    folder = tmp_path_factory.mktemp("refresh")
    place = e2e.Place(save_tiny(folder / "tiny"), e2e.write_rows(folder / "1.jsonl", e2e.conversations(20)), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in (collect, train):
            stage.run(cfg(place, "name=week1", name="config"))
    return place


def cfg(place: e2e.Place, *more: str, rows: int | None = None, name: str = "refresh") -> DictConfig:
    path = place.traffic if rows is None else e2e.write_rows(place.cwd / f"{rows}.jsonl", e2e.conversations(rows))
    return e2e.config(*e2e.uses(place.target, path), *QUICK, *more, name=name)


def outcome_of(place: e2e.Place, name: str) -> dict[str, Any]:
    return dict(json.loads((place.cwd / f"runs/{name}/refresh.json").read_text()))


@pytest.mark.slow
def test_a_log_that_grows_week_by_week(
    place: e2e.Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.cwd)
    asked = cfg(place, "name=week2", "from=runs/week1", rows=36)
    refresh.run(asked)
    said = capsys.readouterr().out
    one, run = outcome_of(place, "week2"), place.cwd / "runs/week2"
    assert "of 36 read, " in said and one["verdict"] in said
    assert one["heads"]["previous"] == read_facts("runs/week1/head")["sha256"]
    assert read_facts(run / "head")["sha256"] == one["heads"][one["kept"]]
    report = json.loads((run / "report/report.json").read_text())
    assert report["head"]["sha256"] == one["heads"][one["kept"]]
    parts = one["parts"]
    old, new = load_traffic("runs/week1/traffic"), load_traffic(run / "traffic")
    assert parts["before"]["difference"]["requests"] == len(old.held_out)
    assert parts["all"]["difference"]["requests"] == len(new.held_out) > len(old.held_out)
    assert not {content_hash(c) for c in new.train} & {content_hash(c) for c in (*old.train, *old.held_out)}

    kept = {name: e2e.stamps(run / name) for name in ("features", "candidate/head", "head")}
    for name in ("candidate/report", "comparison.html"):  # stopped in between
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    refresh.run(asked)
    assert {name: e2e.stamps(run / name) for name in kept} == kept, "nothing is learned or collected twice"
    again = outcome_of(place, "week2")
    assert {**again, "provenance": 0} == {**one, "provenance": 0} and (run / "comparison.html").is_file()

    export.run(cfg(place, "name=week2", name="config"))
    assert (run / "export/vllm/model.safetensors").is_file()

    capsys.readouterr()
    lora = "train.lora={rank: 2, alpha: 4}"
    refresh.run(cfg(place, "name=week3", "from=runs/week2", lora, "optim.lr=0.05", rows=48))
    counted = json.loads((place.cwd / "runs/week3/traffic/manifest.json").read_text())["reader"]
    assert counted["learned_before"] == len(old.train) + len(new.train), "what week 1 learned from is known in week 3"
    assert counted["held_out_before"] == len(new.held_out)
    assert ".lora_" in str((place.cwd / "runs/week3/candidate/head" / TENSORS).read_bytes()[:2000])
    load_head(place.cwd / "runs/week3/head")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["name=x"], "refresh needs from="),
        (["name=week1", "from=runs/week1"], "is the run that is refreshed"),
        (["name=x", "from=runs/nowhere"], "runs/nowhere/head holds no trained head"),
        (["name=x", "from=runs/week1", "train.init_from=runs/y/head"], "leave it out"),
        (["name=x", "from=runs/week1", "traffic.held_out=0.3"], "set traffic.held_out=0.4"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    place: e2e.Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(place.cwd)
    assert sentence in e2e.sentence(refresh.run, cfg(place, *more), capsys)
    assert not (place.cwd / "runs/x").exists()
