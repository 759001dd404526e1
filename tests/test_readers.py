"""Every format and packing gives the same conversations, and tools stand in the prompts as a server shows them."""

from __future__ import annotations

import glob
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import HfApi, constants

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from scripts.prompts import first_turns
from tests import e2e
from tests.tiny import load_tiny, save_tiny, tiny_tokenizer
from tests.traffic_rows import (
    ASKED,
    CALL,
    CONTAINERS,
    ITEMS,
    LINES,
    PARSED,
    RESULT,
    ROWS,
    TOOL,
    assistant,
    human,
    prompts_of,
    user,
    written,
)
from training.collect import collect
from training.formats import SHAREGPT_ROLES, format_of
from training.messages import RowError
from training.readers import parse_row, read_files
from training.regenerate import Generation
from training.store import FeatureStore
from training.traffic import Conversation

# Formats


@pytest.mark.parametrize("what", ROWS)
def test_every_format_is_recognised_and_gives_what_was_asked(tmp_path: Path, what: str, caplog: Any) -> None:
    form, row = ROWS[what]
    with caplog.at_level(logging.INFO):
        reading = read_files(written(tmp_path / "a.jsonl", [row]))
    assert f"is read as {form} (traffic.format=auto)" in caplog.text
    assert reading.arguments["formats"] == {form: 1} and format_of(row) == form
    assert prompts_of(reading) == [ASKED] and len(reading.conversations[0].turns) == 2
    assert prompts_of(read_files(written(tmp_path / "a.jsonl", [row]), format=form)) == [ASKED]


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({"prompt": "hi"}, "prompts", ["hi"]),
        ({"prompt": "hi", "system": "be kind"}, "prompts", ["be kind", "hi"]),
        ({"prompt": "hi", "completion": "ho"}, "completion", ["hi"]),
        ({"instruction": "add", "input": "1 2", "output": "3"}, "completion", ["add\n\n1 2"]),
        ("hi", "prompts", ["hi"]),
        ({"system": "s", "conversations": [human("hi")]}, "sharegpt", ["s", "hi"]),
        ({"conversations": [user("hi"), assistant("x")]}, "sharegpt", ["hi"]),
        ({"conversations": [{"from": "gpt", "value": "Hello!"}, human("hi")]}, "sharegpt", ["Hello!", "hi"]),
    ],
)
def test_formats_of_one_turn(row: Any, form: str, said: list[str]) -> None:
    assert format_of(row) == form
    assert [message["content"] for message in parse_row(row).turns[0]] == said


@pytest.mark.parametrize("name", sorted(SHAREGPT_ROLES))
def test_all_spellings_of_sharegpt_s_roles(name: str) -> None:
    value = '{"name": "weather", "arguments": {}}' if SHAREGPT_ROLES[name] == "call" else "text"
    said = [human("hi"), {"from": f" {name.upper()}", "value": value}, human("more")]
    turns = [[message["role"] for message in turn] for turn in parse_row({"conversations": said}).turns]
    answered = SHAREGPT_ROLES[name] in ("assistant", "call")
    assert turns == ([["user"], ["user"]] if answered else [["user", SHAREGPT_ROLES[name], "user"]])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "content has parts that are not text"),  # type: ignore[arg-type]
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "token ids, which only collect.answers=logged can use"),
        ({"request": {"prompt": "raw"}}, "a request without chat template"),
        ({"request": {"model": "m"}}, "no messages in the request"),
        ({"request": {"messages": [user("hi")]}, "response": {"error": {"code": 400}}}, "the request failed"),
        ({"body": {"messages": [user("hi")]}, "response": {"status_code": 500, "body": {}}}, "the request failed"),
        ({"conversations": [{"from": "wizard", "value": "hi"}]}, "unknown role"),
        ({"conversations": [human("hi"), {"from": "function_call", "value": "w("}]}, "a tool call is not JSON"),
        ({"conversations": "hi"}, "conversations is not a list"),
        ({"prompt": 3}, "content is not text"),
        ({"turns": ["hi"], "tools": "nothing"}, "tools are not a list of JSON schemas"),
        ({"turns": ["hi"], "tools": [{"function": {"name": "\ud83d"}}]}, "text is not valid Unicode"),
        ({"messages": [user("hi"), assistant(None, tool_calls=[{}])]}, "a tool call has no function with a name"),
        (
            {"messages": [user("hi"), assistant(None, function_call={"name": "f", "arguments": "[1]"})]},
            "the arguments of a tool call are not an object",
        ),
    ],
)
def test_rows_that_a_format_cannot_use(row: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_row(row)


def test_a_row_of_another_format_is_set_aside_and_a_format_can_be_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"turns": ["c"]}])
    reading = read_files(path)
    assert prompts_of(reading) == [["a"], ["b"]] and [item.reason for item in reading.rejected] == ["no prompt"]
    other = read_files(path, format="messages")
    assert prompts_of(other) == [["c"]] and {item.reason for item in other.rejected} == {"no messages"}
    with pytest.raises(UserError, match=r"traffic\.format=csv is unknown; choose auto or one of messages"):
        read_files(path, format="csv")
    with pytest.raises(UserError, match=r"holds token ids, which .* anew; set collect\.answers=logged"):
        read_files(written(tmp_path / "b.jsonl", [{"input_ids": [1]}]))


# Tools


def test_tools_calls_and_results_stand_in_the_prompts_as_a_server_shows_them() -> None:
    messages = [user("how is it?"), assistant(None, tool_calls=[CALL]), RESULT, assistant("fine"), user("thanks")]
    conversation = parse_row({"messages": messages, "tools": [TOOL]})
    assert conversation.tools == (TOOL,) and len(conversation.turns) == 3
    called = {"role": "assistant", "content": "", "tool_calls": [PARSED]}
    assert conversation.messages() == [user("how is it?")]
    assert conversation.messages(["mine"]) == [user("how is it?"), called, RESULT]
    assert conversation.messages(["mine", "two"])[3:] == [assistant("two"), user("thanks")]
    again = json.loads(json.dumps(conversation.to_row()))
    assert parse_row(again) == conversation == Conversation.from_row(again)


def test_calls_without_results_give_way_to_the_target_s_own_answer() -> None:
    conversation = parse_row({"messages": [user("a"), assistant(None, tool_calls=[CALL]), user("b")]})
    assert conversation.messages(["mine"]) == [user("a"), assistant("mine"), user("b")]


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["a"], "tools": [TOOL["function"]]},
        {"turns": ["a"], "tools": json.dumps([TOOL])},
        {"messages": [user("a")], "functions": [TOOL["function"]]},
        {"request": {"messages": [user("a")], "tools": [TOOL]}},
        {"prompt": "a", "tools": [TOOL]},
        {"conversations": [human("a")], "tools": json.dumps([TOOL["function"]])},
    ],
)
def test_every_spelling_of_tools(row: Any) -> None:
    assert parse_row(row).tools == (TOOL,)


def test_the_old_spelling_of_calls() -> None:
    calls = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [user("a"), assistant(None, function_call=calls), {"role": "function", "name": "weather", "content": ""}]
    call, result = parse_row({"messages": messages}).turns[1]
    assert call["tool_calls"] == [{"type": "function", "function": PARSED["function"]}]
    assert result == {"role": "tool", "content": "", "name": "weather"}


SHOWS_TOOLS = (
    "{% for tool in tools or [] %}<|system|> w{{ tool.function.name | length }} {% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} "
    "{% for call in message.tool_calls or [] %}w{{ call.function.arguments.city | length }} {% endfor %}<|end|> "
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def test_the_target_sees_tools_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: FrozenTarget = load_tiny(tmp_path)
    monkeypatch.setattr(target.tokenizer, "chat_template", SHOWS_TOOLS)
    row = {"messages": [user("w1"), assistant("", tool_calls=[CALL]), {**RESULT, "content": "w2"}], "tools": [TOOL]}
    conversation = parse_row({**row, "id": "c"})
    collect(
        target=target,
        conversations=[conversation],
        folder=tmp_path / "f",
        needs=FeatureNeeds((1,), True),
        generation=Generation(max_new_tokens=4),
    )
    store = FeatureStore.open(tmp_path / "f")
    first, second = sorted(store.documents, key=lambda document: document.id)
    texts = [target.tokenizer.decode(store.read(ref).ids_T[: ref.answer_start]) for ref in (first, second)]
    shown = "<|system|> w7 <|user|> w1 <|end|>"
    assert texts == [
        f"{shown} <|assistant|>",
        f"{shown} <|assistant|> w4 <|end|> <|tool|> w2 <|end|> <|assistant|>",
    ]


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SHOWS_TOOLS


def test_an_evaluation_shows_tools_and_leaves_out_what_the_template_refuses(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    tiny_tokenizer(REFUSES_SYSTEM).save_pretrained(folder)
    system = parse_row({"id": "s", "messages": [{"role": "system", "content": "w9"}, user("w1")]})
    tools = parse_row({"id": "t", "turns": ["w1"], "tools": [TOOL]})
    cfg = e2e.config("target=custom", f"target.path={folder}")
    (request,) = first_turns(cfg, [system, tools])
    assert request.request_id == "t" and len(request.prompt) == 6, (
        "two for the tool, three for the message, one for the answer"
    )
    with pytest.raises(UserError, match="refuses a conversation with the roles system, user"):
        first_turns(cfg, [system])


# Where rows come from


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTAINERS[name])
    reading = read_files(str(tmp_path / name))
    assert [item.id for item in reading.conversations] == [row["id"] for row in ITEMS] and not reading.rejected


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("be good\n\nand fair \n")
    assert prompts_of(read_files(str(tmp_path / "LICENSE.txt"))) == [["be good"], ["and fair"]]
    with pytest.raises(UserError, match="holds no file ending in"):
        read_files(str(tmp_path))
    assert len(read_files(str(tmp_path), format="prompts").conversations) == 2


def test_folders_and_globs(tmp_path: Path) -> None:
    for place, rows in (("b/x.jsonl", ITEMS[:3]), ("a.json", ITEMS[3:5]), (".hidden/y.jsonl", ITEMS[5:])):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        written(tmp_path / place, rows)
    (tmp_path / "notes.md").write_text("nothing")
    read = read_files(str(tmp_path))
    assert [item.id for item in read.conversations] == ["c3", "c4", "c0", "c1", "c2"]
    assert read.arguments["formats"] == {"messages": 2}
    assert len(read_files(str(tmp_path / "**/*.jsonl")).conversations) == 3
    assert len(read_files(str(tmp_path), rows=4).conversations) == 4
    with pytest.raises(UserError, match=r"\*\.csv does not exist; set traffic\.path="):
        read_files(str(tmp_path / "*.csv"))
    with pytest.raises(UserError, match=r"traffic\.rows=0 is not possible"):
        read_files(str(tmp_path), rows=0)


def test_parquet_and_its_damage(tmp_path: Path, caplog: Any) -> None:
    rows = [{"messages": [user("a"), assistant("", tool_calls=[CALL]), RESULT]}, {"messages": [user("b")]}]
    path = tmp_path / "a [1].parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    reading = read_files(str(tmp_path))
    assert [item.messages() for item in reading.conversations] == [[user("a")], [user("b")]]
    assert reading.conversations[0].turns[1][1] == RESULT
    (tmp_path / "b.jsonl").write_bytes(LINES)
    path.write_bytes(path.read_bytes()[:-20])
    damaged = read_files(str(tmp_path))
    assert [item.reason for item in damaged.rejected] == ["the Parquet file is damaged from here on"]
    assert len(damaged.conversations) == len(ITEMS) and "a [1].parquet" in caplog.text


def test_a_data_set_on_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (name, config, split, streaming) == ("org/name", "small", "test", True)
        for index in range(1000):
            taken.append(index)
            yield {"prompt": f"question {index}", "messages": None}

    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    reading = read_files("hf://datasets/org/name", hub_config="small", hub_split="test", rows=7)
    assert len(reading.conversations) == 7 and len(taken) < 10
    assert reading.arguments["hub_split"] == "test" and reading.arguments["formats"] == {"prompts": 1}


def test_a_data_set_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: Any, **how: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"after 0 rows \(no network\); correct traffic\.path="):
        read_files("hf://datasets/org/name")


@pytest.mark.parametrize(
    ("offline", "words"),
    [(True, r"HF_HUB_OFFLINE=1 is set.*unset HF_HUB_OFFLINE"), (False, r"cannot be reached \(.*traffic\.path=")],
)
def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, offline: bool, words: str) -> None:
    """The library itself would try for half a minute."""

    def load(*names: Any, **how: Any) -> Any:
        raise AssertionError("it was asked again")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(UserError, match=words):
        read_files("hf://datasets/org/name")


def test_the_names_of_damaged_files_are_taken_as_they_are(tmp_path: Path) -> None:
    """A file whose name looks like a glob is that file."""
    path = written(tmp_path / "a[0-9]*.jsonl", ITEMS)
    assert glob.escape(path) != path and len(read_files(path).conversations) == len(ITEMS)
