"""Messages in the manner of OpenAI's chat interface, checked and cut into the turns of a conversation.

* Roles are system, user, assistant and tool; developer is read as system, function as tool.
* Content is text, or a list of parts: text parts are joined by line breaks, as servers do for text models; a row with
  other parts (images, audio, files) cannot be used.
* An assistant message only marks where an answer belongs; several in a row mark one place, and their content is not
  looked at, unless the logged answers are wanted (`logged_of`). One before the first user message is a greeting that
  nobody asked for: it stays as written.
* Tool results are replayed as written. Where the logged answer before them called tools, it is replayed with them, in
  place of the target's own answer: results belong to the calls that they answer, and strict templates insist on it.
* Arguments of calls are handed to the template as objects, the way a server does it.

The module knows neither files nor the other formats (`training.formats`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from training.traffic import Message

_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool"},
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which servers log them
_TEXT_PARTS = ("text", "input_text", "output_text")
_DEEPEST = 100  # levels of tool schemas and arguments, far below where Python's own JSON gives up


class RowError(ValueError):
    """A row that cannot be used; the message is the reason it is counted under."""


def turns_of(messages: Any) -> list[list[Message]]:
    """Cut a list of messages at the places where the assistant answers. Raises RowError."""
    if not isinstance(messages, list):
        raise RowError("messages is not a list")
    turns: list[list[Message]] = []
    current: list[Message] = []
    for message in messages:
        role = role_of(message)
        if role != "assistant":
            if role != "tool" and not _is_asked(current):  # calls without results: the target's own answer stands there
                current = [said for said in current if "tool_calls" not in said]
            current.append(_said(role, message))
            continue
        if asked := _is_asked(current):
            turns.append(current)
            current = []
        if calls := calls_of(message):
            content = content_of(message, may_be_empty=True) if message.get("content") is not None else ""
            current += [{"role": role, "content": content, "tool_calls": calls}] if turns else []
        elif not turns and not asked:
            current.append({"role": role, "content": content_of(message)})
    if _is_asked(current):
        turns.append(current)
    if not turns or not any(message["role"] == "user" for message in turns[0]):
        raise RowError("no user message")
    return turns


def logged_of(messages: Iterable[Any]) -> list[Message]:
    """The messages as a template takes them, logged answers with their thoughts and calls included. It ends before the
    first answer that was not logged. Raises RowError."""
    said: list[Message] = []
    for message in messages:
        role = role_of(message)
        if role != "assistant":
            said.append(_said(role, message))
            continue
        calls = calls_of(message)
        if message.get("content") is None and not calls:
            break
        content = content_of(message, may_be_empty=True) if message.get("content") is not None else ""
        answer: Message = {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}
        kept = (name for name in (*THOUGHTS, "finish_reason") if isinstance(message.get(name), str))
        said.append(answer | {name: text_of(message[name]) for name in kept})
    return said


def flatten(turns: Any) -> list[Any]:
    """A list of turns as messages, with an assistant's place after each. A turn is a user's text, or messages."""
    if not isinstance(turns, list):
        raise RowError("turns is not a list")
    messages: list[Any] = []
    for turn in turns:
        messages += turn if isinstance(turn, list) else [{"role": "user", "content": turn}]
        messages.append({"role": "assistant"})
    return messages


def has_empty_answer(messages: Iterable[Any]) -> bool:
    """Whether an assistant message was logged that says nothing and calls nothing."""
    for message in messages:
        if role_of(message) == "assistant" and "content" in message and not calls_of(message):
            content = message["content"]
            if content is None or not content_of(message, may_be_empty=True).strip():
                return True
    return False


def role_of(message: Any) -> str:
    """A message's role, in the spelling that is used here."""
    if not isinstance(message, dict):
        raise RowError("a message is not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RowError("unknown role")
    return _ROLES[role]


def content_of(message: Mapping[str, Any], *, may_be_empty: bool = False) -> str:
    """A message's text, its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(map(_part, content))
    if not isinstance(content, str):
        raise RowError("content is not text")
    if not may_be_empty and not content.strip():
        raise RowError("content is empty")
    return text_of(content)


def tools_of(tools: Any) -> tuple[dict[str, Any], ...]:
    """The tools that a row offers, as OpenAI's schemas: also a bare function, or all of it as JSON text."""
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools are not a list of JSON schemas")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools are not a list of JSON schemas")
    schemas = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    if not all(
        isinstance(tool["function"], dict) and isinstance(tool["function"].get("name"), str) for tool in schemas
    ):
        raise RowError("a tool has no function with a name")
    return tuple(plain(tool) for tool in schemas)


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that an assistant message calls, arguments as objects."""
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    if not isinstance(calls, list):
        raise RowError("tool calls are not a list")
    return [call_of(call) for call in calls]


def call_of(call: Any) -> dict[str, Any]:
    """One call of a function: its name, its arguments and, where it has one, its id."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "the arguments of a tool call are not an object")
    if not isinstance(arguments, dict):
        raise RowError("the arguments of a tool call are not an object")
    name = {"id": text_of(call["id"])} if isinstance(call.get("id"), str) else {}
    return {**name, "type": "function", "function": {"name": text_of(function["name"]), "arguments": plain(arguments)}}


def text_of(value: str) -> str:
    """The text itself, if it can be written at all (JSON may smuggle in half of a surrogate pair)."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError("text is not valid Unicode") from error
    return value


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value as it can be kept: texts that can be written, and not nested without end."""
    if depth > _DEEPEST:
        raise RowError("nested too deeply")
    if isinstance(value, dict):
        return {text_of(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, depth + 1) for item in value]
    if value is not None and not isinstance(value, (str, int, float)):
        raise RowError("a value that JSON does not know")
    return text_of(value) if isinstance(value, str) else value


def _said(role: str, message: Mapping[str, Any]) -> Message:
    """A message that is no answer; a tool's result keeps the name and the call that it belongs to."""
    said: Message = {"role": role, "content": content_of(message, may_be_empty=role != "user")}
    if role == "tool":
        said |= {key: text_of(message[key]) for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return said


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RowError("content has parts that are not text")
    return str(part["text"])


def _parsed(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(reason) from error


def _is_asked(messages: Iterable[Message]) -> bool:
    return any(message["role"] in ("user", "tool") for message in messages)
