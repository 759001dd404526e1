"""A collection whose answers come from a server is the one that the target makes here, and survives like it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from scripts import collect as script
from tests import e2e
from tests.answering import Answering, answering
from tests.tiny import load_tiny, save_tiny
from training.chat import Encoded
from training.collect import collect
from training.regenerate import Generation, answer_batch
from training.replies import SameTarget
from training.served import AnswerServer, ServerSettings
from training.states import Answer, known_states
from training.store import FeatureStore
from training.traffic import Conversation

GREEDY = Generation(batch_size=4, max_new_tokens=8)
TALK = [
    Conversation(
        f"c{n}", "a", tuple(({"role": "user", "content": f"w{n} w{7 * n % 60} w{turn}"},) for turn in range(2))
    )
    for n in range(7)
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    return FrozenTarget.load(folder, dtype="float64")


@pytest.fixture(scope="module")
def served(folder: Path) -> FrozenTarget:
    """The same model for the server: hooks of two users on one would meet."""
    return FrozenTarget.load(folder, dtype="float64")


@pytest.fixture(scope="module")
def here(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the target makes alone."""
    place = tmp_path_factory.mktemp("here") / "f"
    gather(target, place)
    return place


def gather(target: FrozenTarget, place: Path, server: Answering | None = None, **how: Any) -> dict[str, Any]:
    given = {"url": server.url, "concurrency": 3, "tries": 2, "timeout": 60.0, "pause": 0.01} if server else {}
    asked = None
    if server is not None:
        asked = AnswerServer(
            ServerSettings(**given), target=target, generation=GREEDY, journal=place / "replies-000.jsonl"
        )
    needs = FeatureNeeds((2, 4), True)
    return collect(target=target, conversations=TALK, folder=place, needs=needs, generation=GREEDY, server=asked, **how)


def same_stores(one: Path, other: Path) -> None:
    """The same documents and states; rounding apart, as one pass is by steps and the other is whole."""
    first, second = FeatureStore.open(one), FeatureStore.open(other)
    second.verify()
    assert first.documents == second.documents
    assert (one / "answers.jsonl").read_bytes() == (other / "answers.jsonl").read_bytes()
    for ref in first.documents:
        a, b = first.read(ref), second.read(ref)
        assert torch.equal(a.ids_T, b.ids_T) and torch.equal(a.supervised_T, b.supervised_T)
        for left, right in ((a.taps_TE, b.taps_TE), (a.last_TD, b.last_TD)):
            assert torch.allclose(left, right, atol=1e-8)
        assert torch.allclose(a.lse_T, b.lse_T, atol=1e-4)


def test_a_server_s_collection_is_the_target_s_own(
    target: FrozenTarget, served: FrozenTarget, here: Path, tmp_path: Path
) -> None:
    """Every turn after the earlier answers; finished, it needs no server any more."""
    with answering(served, lambda attempt, prompt: 500 if attempt == 1 and len(prompt) % 3 == 0 else None) as server:
        manifest = gather(target, tmp_path / "f", server)
        assert set(server.finished.values()) == {1} and len(server.finished) == 14
    same_stores(here, tmp_path / "f")
    assert gather(target, tmp_path / "f", server) == manifest and manifest["engine"] == "openai"
    with pytest.raises(UserError, match=r"with engine=openai, but engine=None is asked for now; choose another name="):
        gather(target, tmp_path / "f")


def test_a_bad_prompt_is_set_aside_with_its_later_turns(
    target: FrozenTarget, served: FrozenTarget, here: Path, tmp_path: Path
) -> None:
    bad = tuple(target.render(TALK[3].messages([])))
    with answering(served, lambda attempt, prompt: 500 if tuple(prompt) == bad else None) as server:
        manifest = gather(target, tmp_path / "f", server)
    (row,) = [json.loads(line) for line in (tmp_path / "f/quarantine.jsonl").read_text().splitlines()]
    assert (row["id"], row["turns_lost"]) == ("c3#0", 2)
    assert manifest["quarantined"] == {"the server fails on it: status 500": 1} and manifest["documents"] == 12


def test_a_dead_server_ends_it_and_the_same_command_goes_on(
    target: FrozenTarget, served: FrozenTarget, here: Path, tmp_path: Path
) -> None:
    with answering(served, lambda attempt, prompt: 503 if len(server.finished) >= 9 else None) as server:
        with pytest.raises(UserError, match="does not answer .* goes on with the 9 answers|goes on with the 1"):
            gather(target, tmp_path / "f", server)
        server.fault = lambda attempt, prompt: None
        gather(target, tmp_path / "f", server)
        assert set(server.finished.values()) == {1}, "nothing is answered twice"
    same_stores(here, tmp_path / "f")


def test_another_model_than_the_target_is_noticed(target: FrozenTarget, tmp_path: Path) -> None:
    with answering(load_tiny(tmp_path, seed=1)) as server:
        with pytest.raises(UserError, match=r"does not serve the target: only \d+% of its tokens"):
            gather(target, tmp_path / "f", server)


def test_sampled_answers_are_judged_by_their_surprise(target: FrozenTarget, tmp_path: Path) -> None:
    """Those of the target pass, those of another model do not."""
    how = Generation(temperature=1.0, max_new_tokens=20)
    for model in (target, load_tiny(tmp_path, seed=1)):
        said = answer_batch(model, [[8 + n] for n in range(20)], taps=(), generation=how, seed=0)
        known = known_states(target, [Encoded(tuple(one.ids_T.tolist()), as_tuple(one)) for one in said], taps=())
        judge = SameTarget(target, how, "here")
        if model is target:
            judge.see(known)
            continue
        with pytest.raises(UserError, match=r"its tokens surprise the target by \d+\.\d nats"):
            judge.see(known)


def as_tuple(answer: Answer) -> tuple[bool, ...]:
    """Which positions were generated."""
    return tuple(position >= answer.answer_start for position in range(len(answer.ids_T)))


@pytest.mark.slow
def test_killed_while_it_is_answered_nothing_is_lost_or_asked_twice(
    folder: Path, served: FrozenTarget, here: Path, tmp_path: Path
) -> None:
    """SIGKILL when so many answers have gone out, again and again; then the same command ends it."""
    place = tmp_path / "f"
    with answering(served) as server:
        command = [sys.executable, "-m", "tests.test_served_collect", str(folder), str(place), server.url]
        running: list[subprocess.Popen[str]] = []

        def fault(attempt: int, prompt: list[int]) -> None:
            if len(server.finished) >= stop and running and running[0].poll() is None:
                os.kill(running[0].pid, signal.SIGKILL)

        server.fault = fault
        for stop in (3, 99):
            running[:] = [subprocess.Popen(command, cwd=e2e.ROOT, stderr=subprocess.PIPE, text=True)]
            error = running[0].communicate(timeout=250)[1]
            assert running[0].returncode == (0 if stop == 99 else -signal.SIGKILL), error
        journal = [json.loads(line)["id"] for line in (place / "replies-000.jsonl").read_text().splitlines()]
        assert len(journal) == len(set(journal)) == 14
        asked_again = sum(count > 1 for count in server.finished.values())
        assert asked_again <= 3, "only what was under way when the process was killed"
    same_stores(here, place)


def test_what_the_config_says_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*more: str) -> str:
        return e2e.sentence(script.run, e2e.config(f"run_dir={tmp_path}/r", *more), capsys)

    url = "collect.url=http://127.0.0.1:9/v1"
    assert "collect.engine=other is unknown; choose transformers or openai" in refuse("collect.engine=other")
    assert "needs collect.url=" in refuse("collect.engine=openai")
    assert "asks none; set it to openai" in refuse(url)
    assert "collect.tries='x' is of the wrong type" in refuse("collect.engine=openai", url, "collect.tries=x")
    assert not list(tmp_path.iterdir())


def test_the_command_prints_what_was_asked_and_tried_again(
    folder: Path, served: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """collect.url, model, concurrency, tries and timeout reach the server."""
    monkeypatch.chdir(tmp_path)
    traffic = e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(9))
    more = ["head.taps=[1,3,6]", "head.draft_vocab_size=64", "traffic.held_out=0.3", "target.dtype=float64"]
    more += ["generation.max_new_tokens=4", "generation.batch_size=4", "collect.engine=openai", "name=t"]
    with answering(served, lambda attempt, prompt: 429 if attempt == 1 else None) as server:
        how = [f"collect.url={server.url}", "collect.model=tiny", "collect.concurrency=2", "collect.tries=3"]
        script.run(e2e.config(*e2e.uses(folder, traffic), *more, *how, "collect.timeout=50"))
        assert server.at_once <= 2
    printed, count = " ".join(capsys.readouterr().out.split()), len(server.finished)
    assert f"features {server.url} answers" in printed
    assert f"answered: {count}" in printed and f"tried again after status 429: {count}" in printed


if __name__ == "__main__":  # the child of the test that kills it
    torch.set_num_threads(1)
    child = FrozenTarget.load(sys.argv[1], dtype="float64")
    how = ServerSettings(url=sys.argv[3], concurrency=3, tries=2, timeout=60.0, pause=0.01)
    kept = Path(sys.argv[2]) / "replies-000.jsonl"
    collect(
        target=child,
        conversations=TALK,
        folder=sys.argv[2],
        needs=FeatureNeeds((2, 4), True),
        generation=GREEDY,
        server=AnswerServer(how, target=child, generation=GREEDY, journal=kept),
    )
