"""Answers as they were logged: whatever wrote them, their ids and mask, and the target's states of them.

A document is one answered turn, as for answers that the target writes, with ids and mask by `training.chat`; or, of
traffic that is token ids with a mask already, one supervised stretch after all that stands before it. What
cannot be masked is refused with its reason, and costs no other turn: the log says how it went on. Learning from them is
off-policy where something else than the target as it is served now wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from heads.target import FrozenTarget
from training.chat import ChatEncoder, Encoded
from training.logged_ids import Header, Plausible, documents_of_ids
from training.regenerate import Generation
from training.requests import Known, Refusal, Request
from training.states import Answer, StatesReader, known_states
from training.traffic import Conversation

_TOGETHER = 1 << 14  # positions of one forward, padding counted


class Logged:
    """All answers of the logs, in one wave. Raises UserError when the target's chat template cannot be masked."""

    label = "collect"
    remedy = "set collect.answers=regenerate, raise generation.max_prompt_tokens, or choose another traffic="
    waves, answers = 1, 1

    def __init__(
        self,
        target: FrozenTarget,
        conversations: Sequence[Conversation],
        *,
        generation: Generation,
        taps: Sequence[int],
        states: StatesReader = known_states,
    ) -> None:
        self._target, self._taps, self._longest = target, taps, generation.max_prompt_tokens
        self._states = states
        self.settings = {"max_prompt_tokens": generation.max_prompt_tokens, "batch_size": generation.batch_size}
        self.turns = [conversation.count for conversation in conversations]
        encoder = ChatEncoder.of(target) if not all(one.ids for one in conversations) else None
        self._header, self._plausible = Header(target), Plausible(target)
        self._requests: list[Request] = []
        self._refused: list[Refusal] = []
        for conversation in conversations:
            self._take(conversation, encoder)

    def _take(self, conversation: Conversation, encoder: ChatEncoder | None) -> None:
        if conversation.ids or encoder is None:
            documents = documents_of_ids(self._target, self._header, conversation)
        else:
            documents = encoder.attempts(conversation.logged, tools=conversation.tools)
        for turn, document in enumerate(documents):
            reason = document if isinstance(document, str) else self._unfit(document)
            if isinstance(document, str):
                self._refused.append(self.failed(Request(conversation, turn), document))
                continue
            request = Request(conversation, turn, known=Known.of(document))
            if reason is None:
                self._requests.append(request)
            else:
                self._refused.append(self.failed(request, reason))
        if (missing := conversation.count - len(documents)) > 0:
            request = Request(conversation, len(documents))
            self._refused.append(Refusal(request, "no answer in the log", turns_lost=missing))

    def _unfit(self, document: Encoded) -> str | None:
        """Why the target cannot be given this, if it cannot."""
        if not 0 <= min(document.ids) <= max(document.ids) < self._target.vocab_size:
            return "tokens outside the target's vocabulary"
        if document.answer_start > self._longest:
            return f"longer than max_prompt_tokens={self._longest}"
        if len(document.ids) > self._target.max_length:
            return f"longer than the context of {self._target.max_length} tokens"
        return None

    def most_tokens(self) -> int:
        """Positions of all documents."""
        return sum(request.length for request in self._requests)

    def wave(self, number: int, answers: Mapping[str, Sequence[str]]) -> tuple[list[Request], list[Refusal]]:
        """Everything at once: the answers are there."""
        return list(self._requests), list(self._refused)

    def failed(self, request: Request, reason: str) -> Refusal:
        """Only the turn itself is lost."""
        return Refusal(request, reason, turns_lost=1)

    def expect(self, requests: Sequence[Request]) -> None:
        """Nothing is done ahead."""

    def answer(self, batch: Sequence[Request], seed: int) -> list[Answer]:
        """The logged answers with the target's states."""
        documents = [request.known.encoded() for request in batch if request.known is not None]
        answers = [
            answer for together in _cut(documents) for answer in self._states(self._target, together, taps=self._taps)
        ]
        self._plausible.see(
            [answer for request, answer in zip(batch, answers, strict=True) if request.conversation.ids]
        )
        return answers


def _cut(documents: Sequence[Encoded]) -> Iterator[list[Encoded]]:
    """Groups in their order of at most `_TOGETHER` positions with padding, or of one document."""
    group: list[Encoded] = []
    for document in documents:
        longest = max(len(one.ids) for one in [*group, document])
        if group and longest * (len(group) + 1) > _TOGETHER:
            yield group
            group = []
        group.append(document)
    yield group
