"""Formats: what one row of traffic looks like, how to recognise it, and how it becomes messages and tools.

* messages: `{"messages": [{"role", "content"}, …]}`, or `{"turns": […]}` where a turn is a user's text or a list of
  messages (what a traffic folder holds); `tools` beside them.
* requests: one request to an OpenAI-compatible server and its answer: `{"request": {"messages", "tools", …},
  "response": {"choices": […]}}`; also the lines of a batch (`body` instead of `request`), and a request whose answer,
  as `response` or `choices`, stands beside its messages. The chunks of a stream are joined beforehand.
* sharegpt: `{"conversations": [{"from": "human", "value": "…"}, …]}` with `system` and `tools` beside them.
* prompts: `{"prompt": "…"}`, `{"prompt": [messages]}`, or just a text, such as the lines of a .txt file.
* completion: a prompt and its answer, `{"prompt", "completion"}`; also response, and instruction, input and output.
* tokens: ids with a mask. They cannot be used: see `_tokens`.

The module knows neither files nor what comes of the messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from training.messages import RowError, flatten

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
_IDS = ("input_ids", "token_ids", "prompt_token_ids")


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
        "tokens": any(key in row for key in _IDS),
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


def _tokens(row: Mapping[str, Any]) -> Chat:
    """The target answers anew after its own template, and the split goes by what the user said first: ids have neither
    roles nor turns to do that with, and they do not say which tokenizer they are of."""
    if not any(key in row for key in _IDS):
        raise RowError("no token ids")
    raise RowError("token ids without the text; give the messages that they were made of")


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
    "tokens": _tokens,
}
