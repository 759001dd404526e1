"""What a collection is asked for: requests in waves, and the answers to some of them with the target's states.

`Written` is the source in which the target writes every answer anew; `training.logged` has the one that takes them
from the logs. Neither knows files, shards or processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.chat import Encoded
from training.regenerate import Generation, answer_batch
from training.states import Answer
from training.store import document_id
from training.traffic import Conversation


@dataclass(frozen=True, slots=True)
class Known:
    """A document that waits, in 4 bytes a token: a log has millions of them. All from `start` on is the answer."""

    ids: array[int]
    start: int

    @classmethod
    def of(cls, document: Encoded) -> Known:
        assert all(document.supervised[document.answer_start :])
        return cls(array("i", document.ids), document.answer_start)

    def encoded(self) -> Encoded:
        """As it was."""
        return Encoded(tuple(self.ids), tuple(place >= self.start for place in range(len(self.ids))))


@dataclass(frozen=True, slots=True)
class Request:
    """One answer waiting for its states: ids is the rendered prompt, `known` instead the whole document where its
    answer is there already. answer: its number, where a turn gets several."""

    conversation: Conversation
    turn: int
    ids: tuple[int, ...] = ()
    known: Known | None = None
    answer: int | None = None

    @property
    def id(self) -> str:
        """The id its document will have."""
        return document_id(self.conversation.id, self.turn, self.answer)

    @property
    def length(self) -> int:
        """Positions that are known beforehand."""
        return len(self.ids) if self.known is None else len(self.known.ids)

    @property
    def prompt_tokens(self) -> int:
        """Positions of the prompt."""
        return len(self.ids) if self.known is None else self.known.start


@dataclass(frozen=True)
class Refusal:
    """A request that gives no document, why, and how many turns of its conversation are lost with it."""

    request: Request
    reason: str
    turns_lost: int

    def to_row(self) -> dict[str, Any]:
        """The row that the store's quarantine holds."""
        request = self.request
        return {
            "id": request.id,
            "conversation": request.conversation.id,
            "turn": request.turn,
            "reason": self.reason,
            "prompt_tokens": request.prompt_tokens,
            "turns_lost": self.turns_lost,
        }


class RequestSource(Protocol):
    """Requests in waves; wave w may need the answers of the waves before it.

    turns: of each conversation; answers: to each turn; label: what is done, for the progress; remedy: what to change
    when nothing is left.
    """

    @property
    def turns(self) -> Sequence[int]: ...

    @property
    def answers(self) -> int: ...

    @property
    def waves(self) -> int: ...

    @property
    def label(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    def most_tokens(self) -> int:
        """Positions that all documents have together at most."""

    def wave(self, number: int, answers: Mapping[str, Sequence[str]]) -> tuple[list[Request], list[Refusal]]:
        """The requests of a wave, given the answers to each conversation so far, and what cannot be asked."""

    def failed(self, request: Request, reason: str) -> Refusal:
        """What is lost where the model fails on a request."""

    def expect(self, requests: Sequence[Request]) -> None:
        """Told what this process will be asked for in a wave, in that order, before the first batch of it."""

    def answer(self, batch: Sequence[Request], seed: int) -> Sequence[Answer | str]:
        """Answers with states in the batch's order, or why there is none; raises what the model raises."""


class Written:
    """The target answers every turn anew, each after its own earlier answers: turn w of all conversations is wave w. Of
    several answers to a turn the conversation goes on with the first."""

    label = "regenerate"
    remedy = "raise generation.max_prompt_tokens, lower generation.max_new_tokens, or choose another traffic="

    def __init__(
        self,
        target: FrozenTarget,
        conversations: Sequence[Conversation],
        *,
        generation: Generation,
        taps: Sequence[int],
    ) -> None:
        self._target, self._conversations, self._generation, self._taps = target, conversations, generation, taps
        self.turns = [len(conversation.turns) for conversation in conversations]
        self.waves, self.answers = max(self.turns, default=0), generation.answers

    def most_tokens(self) -> int:
        """Positions, taking every answer at its longest."""
        tokens, how = 0, self._generation
        for conversation in self._conversations:
            for turn in range(len(conversation.turns)):
                prompt = self._render(conversation, [""] * turn)
                if isinstance(prompt, str) or len(prompt) > how.max_prompt_tokens:
                    break
                longest = len(prompt) + turn * how.max_new_tokens
                tokens += (min(longest, how.max_prompt_tokens) + how.max_new_tokens) * how.answers
        return tokens

    def wave(self, number: int, answers: Mapping[str, Sequence[str]]) -> tuple[list[Request], list[Refusal]]:
        """The turns of this number whose earlier turns all have an answer."""
        requests: list[Request] = []
        refused: list[Refusal] = []
        for conversation in self._conversations:
            earlier = answers[conversation.id]
            if len(conversation.turns) <= number or len(earlier) < number:
                continue
            prompt = self._render(conversation, earlier)
            reason = prompt if isinstance(prompt, str) else self._unfit(prompt)
            request = Request(conversation, number, () if isinstance(prompt, str) else tuple(prompt))
            if reason is not None:
                refused.append(self.failed(request, reason))
            elif self.answers == 1:
                requests.append(request)
            else:
                requests += [replace(request, answer=answer) for answer in range(self.answers)]
        return requests, refused

    def failed(self, request: Request, reason: str) -> Refusal:
        """The later turns are lost too, as they would follow an answer that there is not; none is with a turn's further
        answers."""
        later = len(request.conversation.turns) - request.turn
        return Refusal(request, reason, turns_lost=0 if request.answer else later)

    def expect(self, requests: Sequence[Request]) -> None:
        """Nothing is done ahead."""

    def answer(self, batch: Sequence[Request], seed: int) -> Sequence[Answer | str]:
        """The target's own answers."""
        prompts = [request.ids for request in batch]
        return answer_batch(self._target, prompts, taps=self._taps, generation=self._generation, seed=seed)

    def _render(self, conversation: Conversation, answers: Sequence[str]) -> list[int] | str:
        """The prompt's token ids, or why there are none."""
        try:
            return self._target.render(conversation.messages(answers), tools=conversation.tools)
        except UserError as error:
            return str(error)

    def _unfit(self, ids: Sequence[int]) -> str | None:
        """Why the target cannot be asked this, if it cannot."""
        how, length = self._generation, len(ids)
        if not 0 <= min(ids, default=-1) <= max(ids, default=-1) < self._target.vocab_size:
            return "no tokens, or tokens outside the target's vocabulary"
        if length > how.max_prompt_tokens:
            return f"longer than max_prompt_tokens={how.max_prompt_tokens}"
        if length + how.max_new_tokens > self._target.max_length:
            return f"no room for max_new_tokens in the context of {self._target.max_length} tokens"
        return None
