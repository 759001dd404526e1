"""What a server's completion says, as tokens, and whether the server answers like the target.

It does not know how servers are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.journal import Reply
from training.regenerate import Generation
from training.states import Answer

_ENOUGH = 64  # tokens to judge a server by
_OWN = 0.8  # share of greedy tokens that must be the target's own choice; bf16 kernels differ in about one of a hundred
_SURPRISE = 1.5  # nats per token beyond the target's own entropy that sampled tokens may come to


def read_reply(payload: Any, prompt: Sequence[int], target: FrozenTarget, generation: Generation) -> Reply | str:
    """A completion as tokens, or why it cannot be used.

    The answer ends with its first end token. A server that keeps end tokens to itself gets the one that is meant.
    """
    try:
        choice = payload["choices"][0]
        finish, text, ids = choice["finish_reason"], choice["text"], choice.get("token_ids")
    except (KeyError, IndexError, TypeError):
        return "the server's answer is no completion"
    if finish not in ("stop", "length"):
        return f"the server ended it with finish_reason={finish}"
    if choice.get("prompt_token_ids") not in (None, list(prompt)):
        return "the server read other tokens than it was sent"
    if ids is None:
        counted = (payload.get("usage") or {}).get("completion_tokens")
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        if target.tokenizer.decode(ids) != text or counted not in (None, len(ids), len(ids) + (finish == "stop")):
            return "its text does not tokenise back to the tokens that the server generated"
    if not all(isinstance(token, int) and 0 <= token < target.vocab_size for token in ids):
        return "the server generated tokens outside the target's vocabulary"
    ends = target.eos_token_ids
    first = next((index for index, token in enumerate(ids) if token in ends), None)
    if first is not None:
        return Reply(tuple(ids[: first + 1]), "stop")
    if finish == "stop":
        end = choice.get("stop_reason")
        end = end if end in ends else target.tokenizer.eos_token_id
        if end not in ends:
            return "the server stopped for a reason that is no end token of the target"
        ids = [*ids, end]
    return Reply(tuple(ids), finish) if ids else "the server generated no tokens"


class SameTarget:
    """Whether a server answers like the target: greedily with the target's own choices but for near ties, sampled with
    about as much surprise as the target's distribution has. It judges once, when it has seen enough tokens."""

    def __init__(self, target: FrozenTarget, generation: Generation, url: str) -> None:
        self._target, self._generation, self._url = target, generation, url
        self._own, self._surprise, self._count, self._judged = 0.0, 0.0, 0, False

    def see(self, answers: Sequence[Answer]) -> None:
        """Raises UserError when the server is another model."""
        for answer in answers:
            if not self._judged:
                self._add(answer)
                self._judge()

    @torch.inference_mode()
    def _add(self, answer: Answer) -> None:
        states_SD = answer.last_TD[answer.answer_start - 1 : -1].to(self._target.device)
        new_S = answer.ids_T[answer.answer_start :].to(self._target.device)
        logits_SV = self._target.logits(states_SD).float() / (self._generation.temperature or 1.0)
        log_SV = logits_SV.log_softmax(-1)
        entropy = -(log_SV.exp() * log_SV).sum().item()
        self._own += (logits_SV.argmax(-1) == new_S).sum().item()
        self._surprise += -log_SV.gather(-1, new_S[:, None]).sum().item() - entropy
        self._count += len(new_S)

    def _judge(self) -> None:
        if self._count < _ENOUGH:
            return
        self._judged = True
        own, surprise = self._own / self._count, self._surprise / self._count
        if self._generation.temperature == 0 and own < _OWN:
            seen = f"only {own:.0%} of its tokens are the target's own choice"
        elif self._generation.temperature > 0 and surprise > _SURPRISE:
            seen = f"its tokens surprise the target by {surprise:.1f} nats each more than its own would"
        else:
            return
        raise UserError(
            f"The server at {self._url} does not serve the target: {seen}, over {self._count} tokens; serve the model "
            f"of target.path= as it is."
        )
