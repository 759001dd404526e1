"""A server's answers are those of the target, asked once each; whatever goes wrong is told, counted and survived."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads.artifact import UserError
from heads.target import FrozenTarget
from tests.answering import Answering, answering, learn
from tests.tiny import load_tiny
from training.journal import Journal, Reply
from training.regenerate import Generation
from training.replies import read_reply
from training.served import AnswerServer, ServerSettings

GREEDY = Generation(max_new_tokens=20)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    target = load_tiny(tmp_path_factory.mktemp("target"))
    learn(target, list(prompts(30).values()), GREEDY)  # all at once
    return target


def prompts(count: int, seed: int = 0) -> dict[str, list[int]]:
    dice = random.Random(seed)
    return {f"p{n}#0": [dice.randrange(8, 90) for _ in range(dice.randrange(2, 20))] for n in range(count)}


def settings(server: Answering, **how: Any) -> ServerSettings:
    return replace(ServerSettings(url=server.url, concurrency=4, tries=3, timeout=60.0, pause=0.01), **how)


def ask(
    server: Answering,
    target: FrozenTarget,
    given: dict[str, list[int]],
    path: Path,
    generation: Generation = GREEDY,
    **how: Any,
) -> tuple[dict[str, Reply | str], dict[str, int]]:
    """What became of each prompt, and the counts."""
    with AnswerServer(settings(server, **how), target=target, generation=generation, journal=path) as asked:
        futures = asked.ask(given)
        return {name: future.result(60) for name, future in futures.items()}, dict(asked.counts)


def expected(target: FrozenTarget, given: dict[str, list[int]]) -> dict[str, Reply]:
    """What the target answers in this process."""
    answers = learn(target, list(given.values()), GREEDY)
    return {
        name: Reply(tuple(answer.ids_T[answer.answer_start :].tolist()), answer.finish_reason)
        for name, answer in zip(given, answers, strict=True)
    }


def test_answers_are_the_target_s_own_and_asked_once(target: FrozenTarget, tmp_path: Path) -> None:
    given, path = prompts(28), tmp_path / "j.jsonl"
    four = threading.Barrier(4, timeout=60)  # so many are under way, or nothing is answered
    with answering(target, lambda attempt, prompt: None if attempt > 1 or four.wait() >= 0 else None) as server:
        found, counts = ask(server, target, given, path)
        assert found == expected(target, given) and counts == {"answered": 28}
        assert {reply.finish_reason for reply in found.values() if isinstance(reply, Reply)} == {"stop", "length"}
        assert server.at_once == 4
        again, counts = ask(server, target, given, path)
        assert again == found and counts == {"taken over": 28} and set(server.asked.values()) == {1}
        other = {name: [*ids, 9] for name, ids in given.items()}
        assert ask(server, target, other, path)[1] == {"answered": 28}, "an answer belongs to its prompt"


def test_the_request_says_how_to_generate_and_leaves_nothing_to_the_server(
    target: FrozenTarget, tmp_path: Path
) -> None:
    how = Generation(temperature=0.7, top_p=0.9, max_new_tokens=5, seed=3)
    with answering(target) as server:
        first, _ = ask(server, target, prompts(2), tmp_path / "a", how)
        second, _ = ask(server, target, prompts(2), tmp_path / "b", how)
        body, other = server.bodies[:2]
        assert first == second and body["seed"] != other["seed"]
        assert body | {"prompt": 0, "seed": 0} == {
            **{"model": "tiny", "prompt": 0, "seed": 0, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9},
            **{"stop_token_ids": [2], "return_token_ids": True, "top_k": -1, "min_p": 0.0},
            **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
        assert ask(server, target, prompts(2), tmp_path / "c", replace(how, seed=4))[0] != first


@pytest.mark.parametrize("fault", [500, 503, 429, "hang", "drop", "garble"])
def test_what_passes_is_tried_again_and_counted(target: FrozenTarget, tmp_path: Path, fault: Any) -> None:
    given = prompts(6)
    with answering(target, lambda attempt, prompt: fault if attempt == 1 and len(prompt) % 2 else None) as server:
        found, counts = ask(server, target, given, tmp_path / "j", timeout=2.0 if fault == "hang" else 60.0)
    odd = sum(len(ids) % 2 for ids in given.values())
    assert found == expected(target, given) and 0 < odd < 6
    again = {name: count for name, count in counts.items() if name.startswith("tried again after ")}
    assert counts["answered"] == 6 and (fault == "hang" or list(again.values()) == [odd]), again
    assert ("tried again after timeout" in again) == (fault == "hang")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (400, "the server refuses it: status 400, told to fail"),
        (500, "the server fails on it: status 500"),
        ("drop", "the server fails on it: no connection"),
    ],
)
def test_one_bad_prompt_is_set_aside(target: FrozenTarget, tmp_path: Path, fault: Any, reason: str) -> None:
    """Also the last one, with nothing else under way: a short question shows that the server lives."""
    given = prompts(5) | {"bad#0": [77, 77, 77]}
    with answering(target, lambda attempt, prompt: fault if prompt == [77, 77, 77] else None) as server:
        found, _ = ask(server, target, given, tmp_path / "j", concurrency=1)
        assert server.asked[77, 77, 77] == (1 if fault == 400 else 3)
    assert found.pop("bad#0") == reason and found == expected(target, prompts(5))


def test_a_server_that_dies_is_one_sentence_and_its_answers_stay(target: FrozenTarget, tmp_path: Path) -> None:
    given, path = prompts(20), tmp_path / "j.jsonl"
    with answering(target) as server:
        server.fault = lambda attempt, prompt: 503 if sum(server.finished.values()) >= 8 else None
        with pytest.raises(UserError, match=r"does not answer \(status 503, 3 tries\); start it again.* goes on with"):
            ask(server, target, given, path)
        there = len(path.read_text().splitlines())
        assert 8 <= there < 20
        server.fault = lambda attempt, prompt: None
        found, counts = ask(server, target, given, path)
        assert found == expected(target, given) and counts == {"taken over": there, "answered": 20 - there}
        assert set(server.finished[tuple(ids)] for ids in given.values()) == {1}


def test_a_server_that_is_not_there_or_not_the_right_one(target: FrozenTarget, tmp_path: Path) -> None:
    with answering(target) as server:
        url = server.url
        with pytest.raises(UserError, match=r"collect\.model=other is not served at .* which serves tiny"):
            ask(server, target, prompts(1), tmp_path / "j", model="other")
        with pytest.raises(UserError, match=r"answers /completions with status 401; correct collect\.url="):
            server.fault = lambda attempt, prompt: 401
            ask(server, target, prompts(1), tmp_path / "j")
    with pytest.raises(UserError, match=r"does not answer \(no connection, 3 tries\)"):
        ask(server, target, prompts(1), tmp_path / "j", url=url)


@pytest.mark.parametrize(
    "wrong", [{"url": "localhost:8000"}, {"url": "http://"}, {"concurrency": 0}, {"tries": 0}, {"timeout": 0.0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"collect\.{next(iter(wrong))}="):
        ServerSettings(**{"url": "http://localhost/v1", **wrong})


# What a completion says


def reply(target: FrozenTarget, counted: int | None = None, **choice: Any) -> Reply | str:
    usage = {} if counted is None else {"usage": {"completion_tokens": counted}}
    return read_reply({"choices": [{"text": "w1 w2", **choice}], **usage}, [8], target, GREEDY)


def test_without_token_ids_the_text_is_tokenised_and_must_come_back(target: FrozenTarget, tmp_path: Path) -> None:
    given = prompts(12)
    with answering(target, ids=False) as server:
        found, _ = ask(server, target, given, tmp_path / "j")
    for name, right in expected(target, given).items():
        special = any(token < 8 for token in right.ids[: -1 if right.finish_reason == "stop" else None])
        assert found[name] == ("its text does not tokenise back to the tokens that the server generated") or not special
        assert special or found[name] == right
    assert any(isinstance(one, Reply) for one in found.values())
    w1, w2 = target.tokenizer.convert_tokens_to_ids(["w1", "w2"])
    assert reply(target, 3, finish_reason="stop") == Reply((w1, w2, 2), "stop")
    assert reply(target, 2, finish_reason="length") == Reply((w1, w2), "length")
    for counted, text in ((5, "w1 w2"), (2, "w1  w2")):
        assert "does not tokenise back" in str(reply(target, counted, finish_reason="length", text=text))


def test_an_answer_ends_with_its_first_end_token(target: FrozenTarget) -> None:
    assert reply(target, finish_reason="stop", token_ids=[9, 2]) == Reply((9, 2), "stop")
    assert reply(target, finish_reason="stop", token_ids=[9]) == Reply((9, 2), "stop"), "kept to itself"
    assert reply(target, finish_reason="length", token_ids=[9, 2, 10]) == Reply((9, 2), "stop"), "stop ids not known"
    assert reply(target, finish_reason="length", token_ids=[9, 10]) == Reply((9, 10), "length")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"finish_reason": "abort", "token_ids": [9]}, "finish_reason=abort"),
        ({"finish_reason": "length", "token_ids": [9], "prompt_token_ids": [1, 8]}, "read other tokens"),
        ({"finish_reason": "length", "token_ids": [96]}, "outside the target's vocabulary"),
        ({"finish_reason": "length", "token_ids": []}, "generated no tokens"),
        ({"token_ids": [9]}, "is no completion"),
    ],
)
def test_a_completion_that_cannot_be_used_has_a_reason(
    target: FrozenTarget, choice: dict[str, Any], reason: str
) -> None:
    assert reason in str(reply(target, **choice))


# The journal


def test_a_line_cut_off_is_dropped_and_a_damaged_one_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    for name in "abc":
        journal.add(name, [1, 2], Reply((3,), "stop"))
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3, "on its way to the disk before it is used"
    path.write_bytes(whole[:-5])
    cut = Journal(path)
    assert (cut.find("b", [1, 2]), cut.find("c", [1, 2])) == (Reply((3,), "stop"), None)
    cut.add("c", [1, 2], Reply((3,), "stop"))
    assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b'"b"', b'"b', 1))
    with pytest.raises(UserError, match="is damaged in line 2; delete that line"):
        Journal(path)
