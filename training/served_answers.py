"""Every turn is answered by a server that serves the target; the states come from reading what it said.

All requests of a wave are under way while the states of the first batches are computed. It does not know shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from heads.target import FrozenTarget
from training.chat import Encoded
from training.journal import Reply
from training.regenerate import Generation
from training.replies import SameTarget
from training.requests import Request, Written
from training.served import AnswerServer
from training.states import Answer, StatesReader, known_states
from training.traffic import Conversation


class Served(Written):
    """As `Written`, with another hand: turn w of all conversations is wave w."""

    def __init__(
        self,
        target: FrozenTarget,
        conversations: Sequence[Conversation],
        *,
        generation: Generation,
        taps: Sequence[int],
        server: AnswerServer,
        states: StatesReader = known_states,
    ) -> None:
        super().__init__(target, conversations, generation=generation, taps=taps)
        self._server, self._states = server, states
        self._asked: dict[str, Future[Reply | str]] = {}
        self._same = SameTarget(target, generation, server.settings.url)

    def expect(self, requests: Sequence[Request]) -> None:
        """Ask for all of them."""
        self._asked = self._server.ask({request.id: request.ids for request in requests})

    def answer(self, batch: Sequence[Request], seed: int) -> Sequence[Answer | str]:
        """What the server answered, with its states. Raises UserError when the server has died or is another model."""
        if missing := {request.id: request.ids for request in batch if request.id not in self._asked}:
            self._asked |= self._server.ask(missing)  # of a shard that was there, but damaged
        replies = [self._asked[request.id].result() for request in batch]
        known = [
            Encoded(request.ids + reply.ids, (False,) * len(request.ids) + (True,) * len(reply.ids))
            for request, reply in zip(batch, replies, strict=True)
            if isinstance(reply, Reply)
        ]
        answers = self._states(self._target, known, taps=self._taps) if known else []
        self._same.see(answers)
        found = iter(answers)
        return [next(found) if isinstance(reply, Reply) else reply for reply in replies]
