"""Several answers to each prompt: all are documents of their own, and conversations go on with the first."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from scripts import collect as script
from tests import e2e
from tests.answering import Answering, answering
from tests.test_regenerate import answers_of, quarantine_of, traffic
from tests.tiny import load_tiny
from training.collect import collect
from training.regenerate import Generation, seed_of
from training.served import AnswerServer, ServerSettings
from training.store import FeatureStore
from training.traffic import Conversation

SAMPLED = Generation(temperature=1.0, answers=3, max_new_tokens=6, batch_size=4)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def gather(
    target: FrozenTarget, conversations: list[Conversation], folder: Path, url: str | None = None, **how: Any
) -> dict[str, Any]:
    """A collection by the target, or by the server at the address."""
    generation, server = replace(SAMPLED, **how), None
    if url is not None:
        settings = ServerSettings(url=url, concurrency=3, tries=2, timeout=60.0, pause=0.01)
        journal = folder / "replies-000.jsonl"
        server = AnswerServer(settings, target=target, generation=generation, journal=journal)
    return collect(
        target=target,
        conversations=conversations,
        folder=folder,
        needs=FeatureNeeds((2, 4), True),
        generation=generation,
        server=server,
    )


def check_documents(target: FrozenTarget, conversations: list[Conversation], folder: Path) -> None:
    """Three for each turn, after the first answers to the turns before; they are not one answer thrice."""
    store, answers = FeatureStore.open(folder), answers_of(folder)
    store.verify()
    turns = [(one, turn) for one in conversations for turn in range(len(one.turns))]
    assert set(answers) == {f"{one.id}#{turn}.{answer}" for one, turn in turns for answer in range(3)}
    refs = {ref.id: ref for ref in store.documents}
    assert {ref.turn for ref in refs.values()} == {turn for _, turn in turns}
    same = 0
    for one, turn in turns:
        prompt = target.render(one.messages([answers[f"{one.id}#{earlier}.0"]["text"] for earlier in range(turn)]))
        said = set()
        for answer in range(3):
            ref = refs[f"{one.id}#{turn}.{answer}"]
            ids = store.read(ref).ids_T.tolist()
            assert ids[: ref.answer_start] == prompt and (ref.conversation, ref.turn) == (one.id, turn)
            said.add(tuple(ids[ref.answer_start :]))
        same += len(said) == 1
    assert same < len(turns) / 2, "the answers to a prompt are drawn with one seed"


def test_the_target_answers_several_times(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on where it was stopped with the same bytes; the estimate counts all of them."""
    conversations, folder, asked = traffic(6), tmp_path / "f", []
    monkeypatch.setattr("training.collect.check_disk", lambda folder, needed: asked.append(needed))
    manifest = gather(target, conversations, folder)
    assert manifest["generation"]["answers"] == 3 and manifest["documents"] == 36
    check_documents(target, conversations, folder)
    stored = sum(shard["bytes"] for shard in manifest["shards"])
    assert stored - 700 * len(manifest["shards"]) <= asked[0] < 3 * stored
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    for name in ("manifest.json", "shard-00001.json", "shard-00006.safetensors"):
        (folder / name).unlink()
    gather(target, conversations, folder)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_server_answers_several_times(target: FrozenTarget, tmp_path: Path) -> None:
    conversations, folder = traffic(4), tmp_path / "f"
    with answering(load_tiny(tmp_path)) as server:
        gather(target, conversations, folder, server.url)
        asked = [(tuple(body["prompt"]), body["seed"]) for body in server.bodies]
        assert len(asked) == 21 == len({seed for _, seed in asked}), "each has a seed of its own"
        check_documents(target, conversations, folder)
        shard = (folder / "shard-00000.safetensors").read_bytes()
        for name in ("manifest.json", "shard-00000.safetensors"):
            (folder / name).unlink()
        gather(target, conversations, folder, server.url)
        assert len(server.bodies) == 21, "nothing is asked for twice"
    assert (folder / "shard-00000.safetensors").read_bytes() == shard


def test_a_lost_answer_costs_turns_only_where_it_is_the_first(target: FrozenTarget, tmp_path: Path) -> None:
    conversations = [Conversation("c", "a", tuple(({"role": "user", "content": f"w{turn}"},) for turn in range(2)))]
    first = target.render(conversations[0].messages())
    for lost, turns, documents in ((0, 2, 2), (1, 0, 5)):
        with answering(load_tiny(tmp_path)) as server:
            bad = seed_of(SAMPLED.seed, [f"c#0.{lost}"])
            server.fault = partial(_refusing, server, first, bad)
            manifest = gather(target, conversations, tmp_path / str(lost), server.url)
        (row,) = quarantine_of(tmp_path / str(lost))
        assert (row["id"], row["turns_lost"], manifest["documents"]) == (f"c#0.{lost}", turns, documents)


def _refusing(server: Answering, first: list[int], bad: int, attempt: int, prompt: list[int]) -> int | None:
    """Refuse the request with this seed; nothing but the first prompt is asked before it."""
    return 400 if prompt == first and server.bodies[attempt - 1]["seed"] == bad else None


def test_what_is_refused(target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"answers=2 at generation\.temperature=0 would be one answer 2 times; set"):
        Generation(answers=2)
    with pytest.raises(UserError, match=r"generation\.answers=0 is not allowed"):
        Generation(answers=0, temperature=1.0)
    more = ("generation.temperature=1.0", "generation.answers=2", "collect.answers=logged", f"run_dir={tmp_path}/r")
    assert "collect.answers=logged has it write none" in e2e.sentence(script.run, e2e.config(*more), capsys)
    gather(target, traffic(2), tmp_path / "f", answers=1)
    settings = tmp_path / "f/settings.json"
    found = json.loads(settings.read_text())
    del found["generation"]["answers"]  # as before there was a choice
    settings.write_text(json.dumps(found))
    gather(target, traffic(2), tmp_path / "f", answers=1)
    with pytest.raises(UserError, match=r"generation\.answers=1, but generation\.answers=3 is asked for now"):
        gather(target, traffic(2), tmp_path / "f")
