"""Chat to ids and mask: answers that were logged, as the server that wrote them saw them.

A document is one turn of the assistant: the prompt as the target's own template renders it, the answer, and the token
that ends the turn. The answer with its end token is supervised, nothing else is: not the newline that templates write
after the end, not marks that stand in the prompt already. A template may rewrite earlier turns (Qwen3 drops their
thoughts), because every turn is rendered as it was when it was asked.

Nothing is taken on trust. The rendering up to the turn must be a prefix of the rendering with it; where the template
has `{% generation %}` marks, the marked text must begin at the same place and hold the end token or stop just before
it; and the supervised tokens must decode to the answer. What cannot be proven is refused.

The module knows neither files nor states. Answers that the target writes anew need none of it: their ids and mask come
from the generation itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from heads.artifact import UserError
from heads.target import TEMPLATE_FAULTS, FrozenTarget, render
from training.messages import THOUGHTS

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLAIN = ({"content": "Blue."}, {"content": "Red."})
_THINKING = (
    {"content": "Blue.", "reasoning_content": "It is clear."},
    {"content": "Red.", "reasoning_content": "The sun sets."},
)
_QUESTIONS = ("What colour is the sky?", "And in the evening?")


class MaskError(ValueError):
    """An answer whose tokens cannot be told from the template's; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Encoded:
    """Token ids and which of them the target wrote, of the same length."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]

    @property
    def answer_start(self) -> int:
        """The first supervised position."""
        return self.supervised.index(True)


class ChatEncoder:
    """Encodes conversations with answers for one target. Making one proves that its template can be masked.

    end_ids: the ids that end an answer when the target is served; template: what the template is given beside the
    messages. `thoughts` says whether an answer must come with its thoughts (as `reasoning_content`, or in front of
    `</think>`), `marked` whether the template marks answers, `keeps_turns` whether it leaves earlier turns alone,
    `end_id` which token it ends a turn with.
    Raises UserError, naming the template and what to add, when it cannot be masked.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int], template: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._end_ids, self._template = tokenizer, frozenset(end_ids), dict(template or {})
        text = tokenizer.get_chat_template() if tokenizer.chat_template is not None else ""
        self.marked = tokenizer.is_fast and _MARK.search(text) is not None
        proven, self.thoughts = self._prove()
        self.keeps_turns = joined(proven) is not None
        self.end_id = proven[0].ids[-1]

    @classmethod
    def of(cls, target: FrozenTarget) -> ChatEncoder:
        """The encoder of a target, as it is served."""
        return cls(target.tokenizer, end_ids=target.eos_token_ids, template=target.template)

    def _prove(self) -> tuple[list[Encoded], bool]:
        """A conversation of two turns, encoded, and whether its answers had to bring thoughts."""
        reasons: list[str] = []
        for answers, thoughts in ((_PLAIN, False), (_THINKING, True)):
            messages: list[dict[str, Any]] = []
            for question, answer in zip(_QUESTIONS, answers, strict=True):
                messages += [{"role": "user", "content": question}, {"role": "assistant", **answer}]
            try:
                return self.turns(messages), thoughts
            except MaskError as error:
                reasons.append(str(error))
        raise UserError(
            f"The chat template of {self._tokenizer.name_or_path or 'the target'} cannot be masked ({reasons[0]}); let "
            f"its chat_template.jinja write an assistant's turn as the prompt for it, the answer and one of the "
            f"target's end tokens {self._names()}, with {{% generation %}} … {{% endgeneration %}} around these two, "
            f"or set target.template= as the server has it; answers that the target writes anew need no such mask."
        )

    def turns(self, messages: Messages, *, tools: Tools = None) -> list[Encoded]:
        """One document for each answer that somebody asked for; an assistant's greeting stays unsupervised.

        An answer with `finish_reason: length` was cut off and gets no end token. Raises MaskError when one of the
        answers cannot be proven.
        """
        return [self._turn(messages[: index + 1], tools) for index in _answers(messages)]

    def attempts(self, messages: Messages, *, tools: Tools = None) -> list[Encoded | str]:
        """As `turns`, with the reason in place of each answer that cannot be proven; where the assistant speaks twice
        in a row the rest is left out."""
        found: list[Encoded | str] = []
        try:
            for index in _answers(messages):
                try:
                    found.append(self._turn(messages[: index + 1], tools))
                except MaskError as error:
                    found.append(str(error))
        except MaskError as error:
            found.append(str(error))
        return found

    def _turn(self, messages: Messages, tools: Tools) -> Encoded:
        answer = messages[-1]
        try:
            prompt = render(self._tokenizer, messages[:-1], tools=tools, template=self._template)
        except UserError as error:
            raise MaskError("the template refuses its prompt") from error
        ids, marks = self._whole(messages, tools)
        start = len(prompt)
        if ids[:start] != prompt:
            raise MaskError(
                "the prompt for a turn is not how the template begins once the turn is there, so where the answer "
                "starts is unknown"
            )
        end = next((place for place in range(start, len(ids)) if ids[place] in self._end_ids), None)
        if end is None:
            raise MaskError("no end token of the target after an answer")
        if marks is not None:
            _check_marks(marks, start, end)
        self._check_text(ids[start:end], answer)
        if end == start:
            raise MaskError("the answer is empty")
        kept = end if answer.get("finish_reason") == "length" else end + 1
        return Encoded(tuple(ids[:kept]), tuple(place >= start for place in range(kept)))

    def _whole(self, messages: Messages, tools: Tools) -> tuple[list[int], list[int] | None]:
        """Ids of a conversation that ends with an answer, and the template's own marks where it has any."""
        try:
            result = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                return_dict=True,
                return_assistant_tokens_mask=self.marked,
                **self._template,
            )
        except TEMPLATE_FAULTS as error:
            raise MaskError("the template refuses the answer") from error
        ids = [int(index) for index in result["input_ids"]]
        return ids, list(result["assistant_masks"]) if self.marked else None

    def _check_text(self, ids: Sequence[int], answer: Mapping[str, Any]) -> None:
        """The supervised tokens must say what the log says, white space at the ends aside."""
        said, text = _squashed(self._tokenizer.decode(ids)), answer.get("content") or ""
        if not isinstance(text, str):
            raise MaskError("the content of an answer is not text")
        content = self._through(text)
        calls = [call["function"]["name"] for call in answer.get("tool_calls") or ()]
        thoughts = next((self._through(answer[name]) for name in THOUGHTS if answer.get(name)), "")
        if calls:
            good = content in said and all(self._through(name) in said for name in calls)
        elif thoughts:
            good = said.endswith(content) and thoughts in said
        else:
            good = said == content
        if not good:
            raise MaskError("the template writes something else than the answer between the prompt and the end token")

    def _through(self, text: str) -> str:
        """A text as it comes out of the tokenizer again, so that what a tokenizer cannot say is no difference."""
        return _squashed(self._tokenizer.decode(self._tokenizer.encode(text, add_special_tokens=False)))

    def _names(self) -> list[str]:
        return [str(self._tokenizer.convert_ids_to_tokens(index)) for index in sorted(self._end_ids)]


def joined(documents: Sequence[Encoded]) -> Encoded | None:
    """All turns of a conversation as one document, if each begins with the whole one before it; else None."""
    for before, after in zip(documents, documents[1:], strict=False):
        if after.ids[: len(before.ids)] != before.ids:
            return None
    last = documents[-1]
    supervised = [False] * len(last.ids)
    for document in documents:
        for place, flag in enumerate(document.supervised):
            supervised[place] |= flag
    return Encoded(last.ids, tuple(supervised))


def _answers(messages: Messages) -> Iterator[int]:
    """Where the answers are that somebody asked for."""
    asked = False
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            asked = asked or message["role"] in ("user", "tool")
        elif asked and messages[index - 1]["role"] == "assistant":
            raise MaskError("two messages of the assistant in a row")
        elif asked:
            yield index


def _check_marks(marks: Sequence[int], start: int, end: int) -> None:
    """The last marked run must begin where the prompt ends and reach the end token, or stop just before it."""
    last = max((place for place, mark in enumerate(marks) if mark), default=-1)
    first = last
    while first > 0 and marks[first - 1]:
        first -= 1
    if first != start or last < end - 1:
        raise MaskError("the template's {% generation %} marks are not around the answer")


def _squashed(text: str) -> str:
    return " ".join(text.split())
