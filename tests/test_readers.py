"""Every format and packing gives the same conversations, cleaning accounts for every row, nothing is lost to damage."""

from __future__ import annotations

import glob
import gzip
import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from tests import e2e
from tests.tiny import load_tiny
from training.cleaning import KINDS, Cleaning, redacted
from training.collect import collect
from training.formats import FORMATS, SHAREGPT_ROLES, format_of
from training.json_stream import split_values
from training.messages import RowError
from training.readers import parse_row, read_files
from training.regenerate import Generation
from training.store import FeatureStore
from training.traffic import Conversation, Reading, load_traffic, write_traffic

ASKED = ["question one", "and two?"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(reading: Reading) -> list[list[str]]:
    return [[message["content"] for turn in item.turns for message in turn] for item in reading.conversations]


# Formats

ROWS: dict[str, tuple[str, Any]] = {
    # what: (its format, a row whose user says what ASKED says)
    "messages": ("messages", {"messages": [user(ASKED[0]), assistant("x"), user(ASKED[1])]}),
    "turns": ("messages", {"turns": ASKED}),
    "parts": (
        "messages",
        {"messages": [user([{"type": "text", "text": ASKED[0]}]), assistant("x"), user([ASKED[1]])]},  # type: ignore[arg-type]
    ),
    "request": (
        "requests",
        {
            "request": {"model": "m", "messages": [user(ASKED[0]), assistant("x"), user(ASKED[1])], "stream": True},
            "response": {"choices": [{"message": assistant("y")}]},
        },
    ),
    "batch": (
        "requests",
        {
            "custom_id": "1",
            "method": "POST",
            "body": {"messages": [user(ASKED[0]), assistant("x"), user(ASKED[1])]},
            "response": {"status_code": 200, "body": {"choices": [{"message": assistant("y")}]}},
        },
    ),
    "flat log": ("requests", {"messages": [user(ASKED[0]), assistant("x"), user(ASKED[1])], "choices": []}),
    "joined chunks": (
        "requests",
        {"messages": [user(ASKED[0]), assistant("x"), user(ASKED[1])], "choices": [{"delta": assistant("y")}]},
    ),
    "sharegpt": (
        "sharegpt",
        {"id": "a_0", "conversations": [human(ASKED[0]), {"from": "gpt", "value": "x"}, human(ASKED[1])]},
    ),
    "prompt messages": ("prompts", {"prompt": [user(ASKED[0]), assistant("x"), user(ASKED[1])]}),
    "completion messages": (
        "completion",
        {"prompt": [user(ASKED[0]), assistant("x"), user(ASKED[1])], "completion": [assistant("y")]},
    ),
}


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
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "token ids without the text"),
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
    with pytest.raises(UserError, match=r"token ids without the text.*traffic\.format="):
        read_files(written(tmp_path / "b.jsonl", [{"input_ids": [1]}]))


# Tools


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
PARSED = {**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


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


# Where rows come from


ITEMS = [{"id": f"c{index}", "turns": [f"question {index}"]} for index in range(30)]
LINES = "".join(json.dumps(row) + "\n" for row in ITEMS).encode()
CONTAINERS: dict[str, bytes] = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ITEMS).encode(),
    "pretty.json": json.dumps(ITEMS, indent=4).encode(),
    "lines.json": LINES,
    "values.json": "\n".join(json.dumps(row, indent=1) for row in ITEMS).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ITEMS).encode(),
    "log": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.JSON.GZ": gzip.compress(json.dumps(ITEMS).encode()),
    "a.jsonl.zst": zstandard.compress(LINES[:500]) + zstandard.compress(LINES[500:]),
    "a.json.zst": zstandard.compress(json.dumps(ITEMS).encode()),
}


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

    monkeypatch.setattr(datasets, "load_dataset", load)
    reading = read_files("hf://datasets/org/name", hub_config="small", hub_split="test", rows=7)
    assert len(reading.conversations) == 7 and len(taken) < 10
    assert reading.arguments["hub_split"] == "test" and reading.arguments["formats"] == {"prompts": 1}


def test_a_data_set_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: Any, **how: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"after 0 rows \(no network\); correct traffic\.path="):
        read_files("hf://datasets/org/name")


# Files that are cut off or damaged


@pytest.mark.parametrize("indent", [None, 2])
def test_a_dump_that_is_cut_off_gives_its_whole_conversations(tmp_path: Path, caplog: Any, indent: int | None) -> None:
    whole = json.dumps(ITEMS, indent=indent).encode()
    begins = whole.index(b"{", whole.index(b"c19"))
    path = tmp_path / "dump.json"
    path.write_bytes(whole[: begins - 10])
    reading = read_files(str(path))
    kept, (cut,) = len(reading.conversations), reading.rejected
    assert [item.id for item in reading.conversations] == [f"c{index}" for index in range(kept)] and kept >= 19
    assert (cut.line, cut.reason) == (kept + 1, "the file is cut off")
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"cut off at byte {begins - 10}, in row {kept + 1}, which begins at byte" in warning


def test_a_broken_row_costs_itself_and_a_lost_bracket_the_rest(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"turns": ["a"]}, {"turns": nothing}, {"turns": ["b"]}] stray {"turns": ["c"]}')
    reading = read_files(str(path))
    assert prompts_of(reading) == [["a"], ["b"], ["c"]]
    assert [(item.line, item.reason, item.row) for item in reading.rejected] == [
        (2, "not JSON", '{"turns": nothing}'),
        (4, "not JSON", "stray"),
    ]
    path.write_text('[{"turns": ["a"]}, {"turns": ["b"}, {"turns": ["c"]}]')
    reading = read_files(str(path))
    assert prompts_of(reading) == [["a"]]
    assert [(item.line, item.reason) for item in reading.rejected] == [(2, "not JSON from here on")]
    assert "byte 33" in caplog.text


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name.lower().endswith((".gz", ".zst"))])
def test_damaged_packings_say_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTAINERS[name][:-7])
    try:
        reading = read_files(str(tmp_path / name))
    except UserError as error:  # so short a file may give no row at all
        assert "the compressed file is damaged from here on: 1" in str(error)
    else:
        assert "the compressed file is damaged from here on" in {item.reason for item in reading.rejected}


def test_values_do_not_depend_on_where_the_chunks_end() -> None:
    """Byte by byte, strings and escapes are cut anywhere; the reference is Python's own decoder."""
    values = [{"a": 'x"\\ [é', "b": [[], {}]}, [1, "]"], "plain, text", 5, None]
    raw = json.dumps(values, ensure_ascii=False, indent=1).encode()
    for size in (1, 3, len(raw)):
        left = [raw[begin : begin + size] for begin in range(0, len(raw), size)][::-1]
        pieces = list(split_values(lambda _, left=left: left.pop() if left else b""))  # type: ignore[misc]
        assert [json.loads(piece.raw) for piece in pieces] == values
        assert all(raw[piece.start : piece.start + len(piece.raw)] == piece.raw for piece in pieces)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A dump of 60 MB, cut off, with long answers; the peak is that of the process that reads it."""
    row = {"conversations": [human("question"), {"from": "gpt", "value": "word " * 20_000}]}
    text = json.dumps(row)
    with open(tmp_path / "dump.json", "w") as file:
        file.write("[")
        for index in range(600):
            file.write(text.replace("question", f"question {index}") + ",")
        file.write(text[:5000])
    code = (
        "import resource, sys; from training.readers import read_files; before = resource.getrusage("
        "resource.RUSAGE_SELF).ru_maxrss; read = read_files(sys.argv[1]); print(len(read.conversations), "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "dump.json")]
    answer = subprocess.run(line, env=e2e.environment(), capture_output=True, text=True, check=True)
    kept, kilobytes = map(int, answer.stdout.split())
    assert kept == 600 and kilobytes < 30_000


# Cleaning


def test_near_duplicates_are_set_aside_with_their_pair(tmp_path: Path) -> None:
    dice = random.Random(0)
    texts = [" ".join(f"word{dice.randrange(500)}" for _ in range(60)) for _ in range(20)]
    near = texts[3].replace("word", "word", 1) + " and more"
    rows = [{"id": str(index), "turns": [text]} for index, text in enumerate([*texts, near, texts[5].upper()])]
    path = written(tmp_path / "a.jsonl", rows)
    assert len(read_files(path).conversations) == 22
    reading = read_files(path, near_duplicates=0.9)
    assert [item.reason for item in reading.rejected] == ["near duplicate of an earlier row"] * 2
    assert [item.of.split()[0] for item in reading.rejected if item.of] == ["3", "5"]
    runs = [{text[at : at + 5] for at in range(len(text) - 4)} for text in (texts[3], near)]
    assert reading.rejected[0].of == f"3 ({len(runs[0] & runs[1]) / len(runs[0] | runs[1]):.3f})"
    assert [item.of for item in read_files(path, near_duplicates=1.0).rejected] == ["5 (1.000)"]
    write_traffic(tmp_path / "traffic", reading)
    kept = [json.loads(line) for line in (tmp_path / "traffic/quarantine.jsonl").read_text().splitlines()]
    assert kept[1]["of"] == "5 (1.000)"


def test_lengths_and_empty_answers(tmp_path: Path) -> None:
    rows = [
        {"turns": ["hi"]},
        {"turns": ["x" * 50]},
        {"messages": [user("empty"), assistant(" ")]},
        {"messages": [user("nothing"), assistant(None)]},
        {"messages": [user("calls"), assistant(None, tool_calls=[CALL])]},
        {"messages": [user("place"), {"role": "assistant"}]},
    ]
    path = written(tmp_path / "a.jsonl", rows)
    assert len(read_files(path).conversations) == 6
    reading = read_files(path, shortest=3, longest=49, empty_answers=False)
    assert prompts_of(reading) == [["calls"], ["place"]]
    assert [(item.line, item.reason) for item in reading.rejected] == [
        (1, "shorter than traffic.shortest=3 characters"),
        (2, "longer than traffic.longest=49 characters"),
        (3, "an answer is empty"),
        (4, "an answer is empty"),
    ]


SECRETS = {
    "emails": ["ann.b+c@mail.example.co.uk"],
    "phones": ["+44 20 7946 0958", "+1 (650) 253-0000"],
    "keys": [
        "sk-proj-" + "aB3" * 16,
        "ghp_" + "a1B2" * 9,
        "hf_" + "aBcD" * 8,
        "AKIA" + "Z7" * 8,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
}
HARMLESS = (
    "Order 66 of 2024-11-05, f(x)@y = 3.14159; user@localhost, $1,234,567.89, sk-learn, 10.0.0.1, commit 4f2a9c1e"
)


@pytest.mark.parametrize("kind", KINDS)
def test_redaction(tmp_path: Path, kind: str) -> None:
    told = [f"{HARMLESS}: {secret}, please" for secrets in SECRETS.values() for secret in secrets]
    calls = [{"function": {"name": "send", "arguments": {"to": SECRETS[kind]}}}]
    called = {"messages": [user("send it"), assistant(None, tool_calls=calls), RESULT]}
    broken = '{"turns": ["' + json.dumps(SECRETS[kind][0])[1:-1] + '"'
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*({"turns": [text]} for text in told), called]) + broken)
    reading = read_files(str(path), redact=[kind])
    write_traffic(tmp_path / "traffic", reading, config={})
    left = "".join(file.read_text() for file in (tmp_path / "traffic").glob("*.jsonl"))
    for other, secrets in SECRETS.items():
        for secret in secrets:
            assert (json.dumps(secret)[1:-1] in left) == (other != kind), secret
    # one for each conversation that is not a duplicate by now, and none in what is harmless
    assert all(item.turns[0][0]["content"].startswith((HARMLESS, "send it")) for item in reading.conversations)
    assert {item.reason for item in reading.rejected} <= {
        "duplicate of an earlier row",
        "not JSON (cut off in the last line)",
    }


def test_a_country_s_own_numbers() -> None:
    text = "call (650) 253-0000 now"
    for region, expected in ((None, text), ("US", "call [phone] now")):
        redact = Cleaning(redact=["phones"], phone_region=region).redactor()
        assert redact is not None and redacted({"a": [text, 3]}, redact) == {"a": [expected, 3]}


@pytest.mark.parametrize(
    ("wrong", "phrase"),
    [
        ({"near_duplicates": 0.0}, r"traffic\.near_duplicates=0\.0 is no similarity"),
        ({"near_duplicates": 90.0}, r"traffic\.near_duplicates=90\.0 is no similarity"),
        ({"redact": ["names"]}, r"traffic\.redact=\['names'\] is unknown; choose from emails, phones, keys"),
        ({"phone_region": "Rome"}, r"traffic\.phone_region=Rome is no country"),
    ],
)
def test_cleaning_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any], phrase: str) -> None:
    with pytest.raises(UserError, match=phrase):
        read_files(written(tmp_path / "a.jsonl", ITEMS), **wrong)


# Fuzz

SEEDS = [json.dumps(row) for _, row in ROWS.values()] + [
    *(
        '{"prompt": "hi"}',
        '"text"',
        '{"turns": ["a"], "tools": [{"name": "f"}]}',
        '{"input_ids": [1]}',
        "{}",
        "[]",
        "7",
    ),
    json.dumps({"messages": [user("a"), assistant(None, tool_calls=[CALL]), RESULT], "id": 3, "slice": "s"}),
    *('{"messages": [{"role": "user", "content": "\\ud83d"}]}', '{"id": [], "turns": ["x"]}', "[" * 3000, "9" * 5000),
]
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": zstandard.compress,
}


def mutated(data: bytes, draw: Callable[..., Any], most: int) -> bytes:
    content = bytearray(data)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, len(content)))
        content[place : place + draw(st.integers(0, 6))] = draw(
            st.one_of(st.binary(max_size=6), st.sampled_from([b'"', b"\\", b"{", b"]", b",", b"\n", b"null"]))
        )
    cut = draw(st.integers(0, 5)) == 5
    return bytes(content[: draw(st.integers(0, len(content)))] if cut else content)


def rows_within(name: str, content: bytes) -> int | None:
    """How many rows a file that is not packed has, counted another way; None where that is not known.

    Lines are easy. A JSON list is taken apart by Python's decoder; where that stops, only what it has seen is known.
    """
    if not name.endswith(".json"):
        return sum(1 for line in content.split(b"\n") if line.strip())
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    return len(value) if isinstance(value, list) else None


def test_mutated_files_lose_no_row(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is broken: rows in = rows kept + rows in quarantine, or one sentence. What cannot be read any further,
    because the file is cut off or damaged there, counts as one row."""
    monkeypatch.setattr("os.fsync", lambda handle: None)  # half of the time otherwise
    read: list[bool] = []

    @settings(max_examples=320, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def try_one(data: st.DataObject) -> None:
        read.append(survives(tmp_path_factory.mktemp("fuzz"), data.draw))

    try_one()
    assert len(read) >= 320 and sum(read) >= 160, "too few files gave anything to count"


def survives(folder: Path, draw: Callable[..., Any]) -> bool:
    """Read one mutated file and check that its rows are accounted for; says whether it gave conversations at all."""
    one = draw(st.sampled_from(sorted(ROWS)))
    chosen = [SEEDS[index] for index in draw(st.lists(st.integers(0, len(SEEDS) - 1), max_size=6))]
    chosen[len(chosen) // 2 : 0] = [json.dumps(ROWS[one][1] | {"id": f"{one} {index}"}) for index in range(3)]
    as_list = draw(st.booleans())
    plain = ("[" + ",".join(chosen) + "]" if as_list else "\n".join(chosen)).encode()
    content = mutated(plain, draw, 4)
    packing = draw(st.sampled_from(sorted(PACKINGS)))
    name = ("a.json" if as_list else draw(st.sampled_from(["a.jsonl", "a.txt"]))) + packing
    packed = PACKINGS[packing](content)
    damaged = mutated(packed, draw, 1) if packing and draw(st.integers(0, 3)) == 3 else packed
    (folder / name).write_bytes(damaged)
    form = draw(st.sampled_from([*["auto"] * 18, *FORMATS]))
    cleaning = draw(st.sampled_from([{}, {"empty_answers": False, "shortest": 2}, {"near_duplicates": 1.0}]))
    try:
        reading = read_files(str(folder / name), format=form, held_out=0.0, **cleaning)
    except UserError:
        return False
    rows = rows_within(name.removesuffix(packing), content) if damaged == packed else None
    found = len(reading.conversations) + len(reading.rejected)
    assert rows is None or found == rows
    assert [item.line for item in reading.rejected] == sorted({item.line for item in reading.rejected})
    manifest = write_traffic(folder / "traffic", reading)
    assert manifest["rows"] == {
        "read": found,
        "kept": len(reading.conversations),
        "quarantined": len(reading.rejected),
        "over_limit": 0,
    }
    assert len((folder / "traffic/quarantine.jsonl").read_bytes().splitlines()) == len(reading.rejected)
    assert load_traffic(folder / "traffic").train == reading.conversations
    return True


def test_the_names_of_damaged_files_are_taken_as_they_are(tmp_path: Path) -> None:
    """A file whose name looks like a glob is that file."""
    path = written(tmp_path / "a[0-9]*.jsonl", ITEMS)
    assert glob.escape(path) != path and len(read_files(path).conversations) == len(ITEMS)
