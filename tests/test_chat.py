"""Chat to ids and mask: the supervised text is the answers with their end tokens, or there is none."""

from __future__ import annotations

from typing import Any

import pytest

from heads.artifact import UserError
from tests import chat_templates
from tests.chat_templates import FORMATS, Format
from training.chat import ChatEncoder, Encoded, MaskError, joined

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def encoder(form: Format, template: str | None = None, **given: Any) -> ChatEncoder:
    tokenizer = form.tokenizer(template)
    ends = tokenizer.convert_tokens_to_ids([form.end, tokenizer.eos_token])
    return ChatEncoder(tokenizer, end_ids=ends, template=given)


def chat(form: Format, answers: list[str], *, system: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if system else []
    for number, answer in enumerate(answers):
        thought = {"reasoning_content": f"Thought {number}."} if form.thoughts else {}
        messages += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": answer, **thought},
        ]
    return messages


def text(form: Format, document: Encoded, supervised: bool = True) -> str:
    ids = [index for index, flag in zip(document.ids, document.supervised, strict=True) if flag or not supervised]
    return str(form.tokenizer().decode(ids))


def written(form: Format, answer: str, number: int) -> str:
    """What the model of a format writes for an answer."""
    thought = f"<think>\nThought {number}.\n</think>\n\n" if form.thoughts else ""
    return form.before + thought + answer + form.end


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [False, True])
def test_the_supervised_text_is_the_answers_and_their_end(name: str, system: bool) -> None:
    form = FORMATS[name]
    answers = ["Yes, über 3 €.", "No.\n\nAnd a list:\n- one", "Done"]
    tokenizer = form.tokenizer()
    if system and not form.system:
        with pytest.raises(MaskError, match="refuses its prompt"):
            encoder(form).turns(chat(form, answers, system=True))
        return
    messages = chat(form, answers, system=system)
    documents = encoder(form).turns(messages)
    assert [text(form, document) for document in documents] == [
        written(form, answer, number) for number, answer in enumerate(answers)
    ]
    for number, document in enumerate(documents):  # what precedes it is the prompt that a server would have seen
        asked = messages[: len(messages) - 2 * (len(answers) - number) + 1]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert list(document.ids[: document.answer_start]) == prompt
        assert all(document.supervised[document.answer_start :])
    assert len(encoder(form).turns(chat(form, answers[:1]))) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_one_document_where_earlier_turns_stay(name: str) -> None:
    form, answers = FORMATS[name], ["One.", "Two."]
    made = encoder(form)
    assert made.keeps_turns == form.keeps_turns and made.thoughts == form.thoughts
    whole = joined(made.turns(chat(form, answers)))
    if not form.keeps_turns:
        assert whole is None
        return
    assert whole is not None
    assert text(form, whole) == "".join(written(form, answer, 0) for answer in answers)


def test_a_system_prompt_that_moves_on_leaves_no_common_document() -> None:
    """Mistral's stands in front of the last question; each turn alone is still as it was served."""
    form = FORMATS["mistral"]
    documents = encoder(form).turns(chat(form, ["One.", "Two."], system=True))
    assert joined(documents) is None
    assert text(form, documents[1], False).count("Be short.") == 1


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].tools])
def test_tool_calls_are_answers(name: str) -> None:
    form = FORMATS[name]
    thought = {"reasoning_content": "Ask."} if form.thoughts else {}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], **thought},
        {"role": "tool", "content": "rain", "tool_call_id": "123456789"},
        {"role": "assistant", "content": "It rains.", **thought},
    ]
    documents = encoder(form).turns(messages, tools=TOOLS)
    first, second = (text(form, document) for document in documents)
    assert first.endswith(form.end) and first.count(form.end) == 1
    assert "weather" in first and '"city": "Oslo"' in first and "rain" not in first and "object" not in first
    assert second.endswith("It rains." + form.end) and "weather" not in second
    offered = [document.ids[: document.answer_start] for document in documents]
    if name != "deepseek":  # whose template leaves the offer to the system prompt
        assert all('"object"' in form.tokenizer().decode(ids) for ids in offered)


# ---- marks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["MARKED", "MARKED_WITH_NEWLINE"])
def test_marks_are_used_and_a_marked_newline_is_left_out(template: str) -> None:
    form = FORMATS["chatml"]
    made = encoder(form, vars(chat_templates)[template])
    messages = chat(form, ["One.", "Two."], system=True)
    assert made.marked and not encoder(form).marked
    assert made.turns(messages) == encoder(form).turns(messages)


def test_marks_around_a_header_are_refused() -> None:
    with pytest.raises(UserError, match=r"marks are not around the answer"):
        encoder(FORMATS["chatml"], chat_templates.MARKED_WITH_HEADER)


# ---- modes -------------------------------------------------------------------------------------------------------


def test_the_template_is_given_what_the_server_gives_it() -> None:
    """Qwen3 without thinking: the empty tags belong to the prompt; with thinking they would be made up."""
    form = FORMATS["qwen3"]
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    quiet = encoder(form, enable_thinking=False)
    assert not quiet.thoughts
    (document,) = quiet.turns(plain)
    assert text(form, document) == "Hello.<|im_end|>"
    assert text(form, document, False).endswith("<think>\n\n</think>\n\nHello.<|im_end|>")
    with pytest.raises(MaskError, match="something else than the answer"):
        encoder(form).turns(plain)
    inline = [plain[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello."}]
    (document,) = encoder(form).turns(inline)
    assert text(form, document) == "<think>\nHm.\n</think>\n\nHello.<|im_end|>"


# ---- refusals ----------------------------------------------------------------------------------------------------

WITHOUT_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "template", "given", "reason"),
    [
        ("deepseek", None, {"thinking": True}, "where the answer starts is unknown"),
        ("chatml", WITHOUT_END + "{% if add_generation_prompt %}assistant: {% endif %}", {}, "no end token"),
        (
            "phi",
            chat_templates.PHI.replace("m.content", "(m.content if m.role == 'user' else 'x')"),
            {},
            "something else than the answer",
        ),
        ("gemma", "{{ raise_exception('no') }}", {}, "refuses its prompt"),
    ],
)
def test_a_template_without_a_usable_mask_is_refused(
    name: str, template: str | None, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        encoder(FORMATS[name], template, **given)
    told = str(refusal.value)
    assert "made-for-tests" in told and "{% generation %}" in told and "target.template=" in told and told[-1] == "."


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"content": "a<|im_end|>b"}, "something else"),
        ({"content": "\nleading newline that melts into the template's"}, "starts is unknown"),
        ({"content": ""}, "is empty"),
        ({"content": "", "finish_reason": "length"}, "is empty"),
        ({"content": ["parts"]}, "is not text"),
    ],
)
def test_an_answer_that_cannot_be_proven_is_set_aside(answer: dict[str, Any], reason: str) -> None:
    form = FORMATS["chatml"]
    with pytest.raises(MaskError, match=reason):
        encoder(form).turns([{"role": "user", "content": "Hi"}, {"role": "assistant", **answer}])


def test_what_is_an_answer() -> None:
    """A greeting that nobody asked for is prompt; an answer that was cut off does not teach to end."""
    form = FORMATS["chatml"]
    messages = [
        {"role": "assistant", "content": "Welcome!"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, and", "finish_reason": "length"},
        {"role": "user", "content": "Go on"},
    ]
    (document,) = encoder(form).turns(messages)
    assert text(form, document) == "Hello, and"
    with pytest.raises(MaskError, match="in a row"):
        encoder(form).turns([*messages[:3], {"role": "assistant", "content": "again"}])
