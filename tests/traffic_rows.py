"""Rows of traffic in every format and files of every packing, for the tests of the readers. Not a test."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import zstandard

from training.traffic import Reading

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


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
PARSED = {**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


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
