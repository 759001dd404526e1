"""Formats: what one row of traffic looks like, how to recognise it, and how it becomes messages and tools.

* messages: `{"messages": [{"role", "content"}, …]}`, or `{"turns": […]}` where a turn is a user's text or a list of
  messages (what a traffic folder holds); `tools` beside them.
* requests: one request to an OpenAI-compatible server and its answer: `{"request": {"messages", "tools", …},
  "response": {"choices": […]}}`; also the lines of a batch (`body` instead of `request`), and a request whose answer,
  as `response` or `choices`, stands beside its messages. The chunks of a stream are joined beforehand.
* sharegpt: `{"conversations": [{"from": "human", "value": "…"}, …]}` with `system` and `tools` beside them.
* prompts: `{"prompt": "…"}`, `{"prompt": [messages]}`, or just a text, such as the lines of a .txt file.
* completion: a prompt and its answer, `{"prompt", "completion"}`; also response, and instruction, input and output.
* tokens: ids with a mask, `{"input_ids": […], "loss_mask": […]}`; also labels (-100 where nothing is supervised),
  assistant_masks and completion_mask; positions whose attention_mask is 0 are padding. They become no messages.

The module knows neither files nor what comes of the messages.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from training.messages import RowError, flatten
from training.traffic import stretches

Chat = tuple[list[Any], Any]
"""(messages as they were logged, the tools that were offered)."""

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model", "claude", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
_ANSWERS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
_REQUEST, _RESPONSE = ("request", "body"), ("response", "choices")
TOKENS = "tokens"
_IDS = ("input_ids", "token_ids", "prompt_token_ids")
_MASKS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
_UNSUPERVISED = -100  # as a label


NOT_RECOGNISED = ("no messages", "no conversations", "no prompt", "not an object", "no token ids")
"""How the reasons begin with which a row is refused that has nothing of its format."""
NEEDED = "messages, turns, conversations, prompt, instruction with output, request with response, or input_ids"
"""The fields by which a row is recognised, in words."""


def fields_of(text: str) -> list[str]:
    """The fields of a row, out of its text; none where it is no object."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [str(key)[:40] for key in row][:12] if isinstance(row, dict) else []


def format_of(row: Any) -> str | None:
    """The format that a row has, None where it has none of them."""
    if isinstance(row, str):
        return "prompts"
    if not isinstance(row, dict):
        return None
    logged = any(isinstance(row.get(key), dict) for key in _REQUEST)
    tests = {
        "requests": logged or ("messages" in row and any(key in row for key in _RESPONSE)),
        "messages": "messages" in row or "turns" in row,
        "sharegpt": "conversations" in row or "conversation" in row,
        "completion": any(prompt in row and answer in row for prompt, answer in _ANSWERS),
        "prompts": "prompt" in row,
        TOKENS: any(key in row for key in _IDS),
    }
    return next((name for name, found in tests.items() if found), None)


def choose_format(rows: Iterable[Any]) -> str:
    """The format that most of the rows have; messages where none has any, whose reasons then say what is missing."""
    found = Counter(name for name in map(format_of, rows) if name is not None)
    return found.most_common(1)[0][0] if found else "messages"


def chat_of(row: Any, form: str) -> Chat:
    """The messages and tools of a row. Raises RowError where it does not have the format."""
    if form == "prompts" and isinstance(row, str):
        return [{"role": "user", "content": row}], None
    if not isinstance(row, dict):
        raise RowError("not an object")
    return FORMATS[form](row)


def _messages(row: Mapping[str, Any]) -> Chat:
    if "messages" in row:
        return _listed(row["messages"], "messages"), row.get("tools") or row.get("functions")
    if "turns" in row:
        return flatten(row["turns"]), row.get("tools")
    raise RowError("no messages")


def _requests(row: Mapping[str, Any]) -> Chat:
    request = next((row[key] for key in _REQUEST if isinstance(row.get(key), dict)), row)
    request = request["body"] if isinstance(request.get("body"), dict) else request
    if "messages" not in request:
        raise RowError("no messages in the request" if "prompt" not in request else "a request without chat template")
    messages, tools = _messages(request)
    if row.get("error"):
        raise RowError("the request failed")
    return [*messages, *_answer(row.get("response", row.get("choices")))], tools


def _answer(response: Any) -> list[Any]:
    """The logged answer as a message, if there is one. Raises RowError where the server refused."""
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    if isinstance(response, dict):
        status = response.get("status_code")
        if response.get("error") or (isinstance(status, int) and status >= 400):
            raise RowError("the request failed")
        if "body" in response:
            return _answer(response["body"])
        response = response.get("choices")
    if not isinstance(response, list) or not response or not isinstance(response[0], dict):
        return []
    message = response[0].get("message") or response[0].get("delta")
    ended = {"finish_reason": reason} if isinstance(reason := response[0].get("finish_reason"), str) else {}
    return [{**ended, **message, "role": "assistant"}] if isinstance(message, dict) else []


def _sharegpt(row: Mapping[str, Any]) -> Chat:
    said = row.get("conversations", row.get("conversation"))
    if said is None:
        raise RowError("no conversations")
    messages = [_from_value(message) for message in _listed(said, "conversations")]
    return [*_system(row), *messages], row.get("tools")


def _from_value(message: Any) -> dict[str, Any]:
    """One message of ShareGPT; some data sets call its fields role and content."""
    if not isinstance(message, dict):
        raise RowError("a message is not an object")
    name, value = message.get("from", message.get("role")), message.get("value", message.get("content"))
    role = SHAREGPT_ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError("unknown role")
    if role != "call":
        return {"role": role, "content": value}
    try:
        call = json.loads(str(value))
    except (ValueError, RecursionError) as error:
        raise RowError("a tool call is not JSON") from error
    return {
        "role": "assistant",
        "tool_calls": [{"function": one} for one in (call if isinstance(call, list) else [call])],
    }


def _prompts(row: Mapping[str, Any]) -> Chat:
    if "prompt" not in row:
        raise RowError("no prompt")
    prompt = row["prompt"]
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return [*_system(row), *asked], row.get("tools")


def _completion(row: Mapping[str, Any]) -> Chat:
    pair = next((pair for pair in _ANSWERS if pair[0] in row and pair[1] in row), None)
    if pair is None:
        raise RowError("no prompt with a completion")
    asked, answer = row[pair[0]], row[pair[1]]
    if pair[0] == "instruction" and isinstance(asked, str) and isinstance(row.get("input"), str) and row["input"]:
        asked = f"{asked}\n\n{row['input']}"
    answered = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return [*_prompts({**row, "prompt": asked})[0], *answered], row.get("tools")


def tokens_of(row: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The ids of a row, padding left out, and where in them each answer begins and ends. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("not an object")
    ids = next((row[key] for key in _IDS if key in row), None)
    mask = next((key for key in _MASKS if row.get(key) is not None), None)
    if ids is None:
        raise RowError("no token ids")
    if mask is None:
        raise RowError(f"token ids without a mask ({', '.join(_MASKS)})")
    if not _are_whole(ids) or min(ids, default=-1) < 0:
        raise RowError("token ids are not whole numbers from 0")
    given = {key: row[key] for key in (mask, "attention_mask", "position_ids") if row.get(key) is not None}
    for key, values in given.items():
        if not isinstance(values, list) or len(values) != len(ids):
            raise RowError(f"{key} is not as long as the token ids")
    supervised = _labelled(ids, given[mask]) if mask == "labels" else _flags(given[mask], mask)
    real = _flags(given.get("attention_mask", [1] * len(ids)), "attention_mask")
    places = [place for place, flag in enumerate(real) if flag]
    order = given.get("position_ids", list(range(len(ids))))
    if not _are_whole(order) or any(order[a] >= order[b] for a, b in itertools.pairwise(places)):
        raise RowError("position_ids begin anew within the row; give each conversation a row of its own")
    answers = stretches(supervised[place] for place in places)
    if not answers:
        raise RowError("nothing is supervised")
    if answers[0][0] == 0:
        raise RowError("no prompt before the first supervised token")
    return tuple(ids[place] for place in places), answers


def _labelled(ids: list[int], labels: list[Any]) -> list[bool]:
    if any(label not in (_UNSUPERVISED, index) for label, index in zip(labels, ids, strict=True)):
        raise RowError(f"labels are neither {_UNSUPERVISED} nor the token id at their place")
    return [label != _UNSUPERVISED for label in labels]


def _flags(mask: list[Any], name: str) -> list[bool]:
    if any(flag not in (0, 1) for flag in mask):
        raise RowError(f"{name} holds something else than 0 and 1")
    return [flag == 1 for flag in mask]


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in values)


def _system(row: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(f"{name} is not a list")
    return value


FORMATS: dict[str, Callable[[Mapping[str, Any]], Chat]] = {
    "messages": _messages,
    "requests": _requests,
    "sharegpt": _sharegpt,
    "prompts": _prompts,
    "completion": _completion,
}
