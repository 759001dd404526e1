"""Cleaning sets aside what it is told to, each row with its reason, and blacks out what has the form of a secret."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from heads.artifact import UserError
from tests.traffic_rows import CALL, ITEMS, RESULT, assistant, prompts_of, user, written
from training.cleaning import KINDS, Cleaning, redacted
from training.readers import read_files
from training.traffic import write_traffic


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
    again = read_files(written(tmp_path / "b.jsonl", [*rows, {"id": "x", "turns": [near]}]), near_duplicates=0.9)
    assert again.rejected[-1].of == reading.rejected[0].of, "the pair is one that was kept"
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


@pytest.mark.parametrize("kind", KINDS)
def test_redaction_reaches_tools_ids_and_slices_and_keeps_what_joins_calls(tmp_path: Path, kind: str) -> None:
    """Every id and name that one message has for another stays, though it looks like a telephone number."""
    secret, other = SECRETS[kind][0], SECRETS[kind][-1] + ("x" if kind == "emails" else "")
    phone = "+1 (650) 253-0000"
    call = {"id": phone, "function": {"name": phone, "arguments": {"to": [secret], "n": 3}}}
    schema = {"type": "object", "properties": {phone: {"enum": [secret]}, "to": {"default": {"a": secret}}}}
    tool = {"name": phone, "description": f"ask {secret}", "parameters": {**schema, "required": [phone]}}
    said = [user(f"ask {secret}"), assistant(None, tool_calls=[call])]
    said += [{"role": "tool", "tool_call_id": phone, "name": phone, "content": f"asked {secret}"}]
    rows = [{"id": f"of {one}", "slice": f"from {one}", "messages": said, "tools": [tool]} for one in (secret, other)]
    path = written(tmp_path / "a.jsonl", [*rows, {"id": "plain", "turns": ["hi"]}])
    reading = read_files(path, redact=[kind])
    assert not reading.rejected
    first, second, plain = reading.conversations
    mark = {"emails": "[email]", "phones": "[phone]", "keys": "[key]"}[kind]
    assert plain.id == "plain" and first.id != second.id and first.id.startswith("redacted-")
    assert first.slice.startswith(f"from {mark}")
    assert [message["content"] for turn in first.turns for message in turn] == [f"ask {mark}", "", f"asked {mark}"]
    called, result = first.turns[1]
    assert called["tool_calls"] == [
        {"id": phone, "type": "function", "function": {"name": phone, "arguments": {"to": [mark], "n": 3}}}
    ]
    assert (result["tool_call_id"], result["name"]) == (phone, phone)
    function = first.tools[0]["function"]
    assert (function["name"], function["description"]) == (phone, f"ask {mark}")
    assert function["parameters"] == {
        "type": "object",
        "properties": {phone: {"enum": [mark]}, "to": {"default": {"a": mark}}},
        "required": [phone],
    }
    untouched = read_files(path).conversations[0]
    assert (untouched.id, untouched.slice, untouched.tools[0]["function"]) == (f"of {secret}", f"from {secret}", tool)


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
