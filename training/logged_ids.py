"""Logged answers that come as token ids with a mask: documents of them, and whether they are of the target's tokenizer.

A document is one supervised stretch and all that stands before it. It ends with the first end token in the stretch, or
the one right behind it, as some masks stop just before that; what templates write after the end (a line break) is no
part of it. An answer without an end token counts as cut off. A mask that reaches into what the target's template writes
before an answer (`<|im_start|>assistant`) is refused: the server writes that, so no head is ever asked for it.

Ids do not say which tokenizer they are of. What can be checked is: none may lie outside the vocabulary, and those of
another tokenizer surprise the target more than blind guessing would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heads.artifact import UserError
from heads.target import TEMPLATE_FAULTS, FrozenTarget, render
from training.chat import Encoded
from training.states import Answer
from training.traffic import Conversation

_ENOUGH = 64  # supervised tokens to judge by


class Header:
    """What the target's chat template writes between a question and its answer; without one, or where it cannot be told
    apart, nothing. It says whether a mask takes it for the answer."""

    def __init__(self, target: FrozenTarget) -> None:
        tokenizer, asked = target.tokenizer, [{"role": "user", "content": "Hello"}]
        self._ids: list[int] = []
        if tokenizer.chat_template is None:
            return
        try:
            whole = render(tokenizer, asked, template=target.template)
            bare = tokenizer.apply_chat_template(
                asked, add_generation_prompt=False, return_dict=False, **target.template
            )
        except (UserError, *TEMPLATE_FAULTS):
            return
        if whole[: len(bare)] == bare:
            self._ids = whole[len(bare) :]
        # Plain words can stand in an answer too.
        self._unmistakable = not set(self._ids).isdisjoint(tokenizer.added_tokens_decoder)

    def covered(self, ids: Sequence[int], begin: int, end: int) -> bool:
        """Whether the supervised stretch from begin to end holds some of a header."""
        header = self._ids
        if not header:
            return False

        def stands(place: int) -> bool:
            return place >= 0 and list(ids[place : place + len(header)]) == header

        if stands(begin - len(header)):
            return False
        if any(stands(begin - before) for before in range(len(header))):
            return True
        return self._unmistakable and any(stands(place) for place in range(begin, end - len(header) + 1))


def documents_of_ids(target: FrozenTarget, header: Header, conversation: Conversation) -> list[Encoded | str]:
    """One document for each answer in the ids, or the reason why it gives none."""
    return [_document(target, header, conversation.ids, begin, end) for begin, end in conversation.answers]


def _document(target: FrozenTarget, header: Header, ids: Sequence[int], begin: int, end: int) -> Encoded | str:
    if not 0 <= min(ids[:end]) <= max(ids[:end]) < target.vocab_size:
        return "tokens outside the target's vocabulary"
    if header.covered(ids, begin, end):
        return "supervised text holds the template's header of an answer, which the mask must leave out"
    ends = target.eos_token_ids
    stop = next((place for place in range(begin, min(end + 1, len(ids))) if ids[place] in ends), None)
    if stop is not None and target.tokenizer.decode(ids[stop + 1 : end], skip_special_tokens=True).strip():
        return "supervised text behind the end token of an answer"
    kept = end if stop is None else stop + 1
    return Encoded(tuple(ids[:kept]), tuple(place >= begin for place in range(kept)))


class Plausible:
    """Whether ids are of the target's tokenizer; it judges once, when it has seen enough of them."""

    def __init__(self, target: FrozenTarget) -> None:
        self._target, self._nats, self._count, self._judged = target, 0.0, 0, False

    @torch.inference_mode()
    def see(self, answers: Sequence[Answer]) -> None:
        """Raises UserError when the target would have guessed them better blindly."""
        if self._judged:
            return
        for answer in answers:
            states_SD = answer.last_TD[answer.answer_start - 1 : -1].to(self._target.device)
            new_S = answer.ids_T[answer.answer_start :].to(self._target.device)
            log_SV = self._target.logits(states_SD).float().log_softmax(-1)
            self._nats -= log_SV.gather(-1, new_S[:, None]).sum().item()
            self._count += len(new_S)
            if self._count >= _ENOUGH:
                break
        self._judged = self._count >= _ENOUGH
        blind = math.log(self._target.vocab_size)
        if self._judged and self._nats > blind * self._count:
            raise UserError(
                f"The token ids of traffic.path= cannot be of the target's tokenizer: each surprises the target by "
                f"{self._nats / self._count:.1f} nats, and guessing blindly among its {self._target.vocab_size} tokens "
                f"by {blind:.1f}; give ids that this tokenizer made, or the messages that they were made of."
            )
