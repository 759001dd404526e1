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


@torch.inference_mode()
def check_same_target(target: FrozenTarget, answers: Sequence[Answer], generation: Generation, url: str) -> bool:
    """Whether there was enough to see that the server answers like the target: greedily with the target's own choices
    but for near ties, sampled with as much surprise as the target's distribution has. Raises UserError if it does not.
    """
    if sum(len(answer.ids_T) - answer.answer_start for answer in answers) < _ENOUGH:
        return False
    own, surprise = 0.0, 0.0
    count = 0
    for answer in answers:
        states_SD = answer.last_TD[answer.answer_start - 1 : -1].to(target.device)
        logits_SV = target.logits(states_SD).float() / (generation.temperature or 1.0)
        new_S = answer.ids_T[answer.answer_start :].to(target.device)
        log_SV = logits_SV.log_softmax(-1)
        own += (logits_SV.argmax(-1) == new_S).sum().item()
        surprise += -(log_SV.gather(-1, new_S[:, None]).sum() - (log_SV.exp() * log_SV).sum()).item()
        count += len(new_S)
    own, surprise = own / count, surprise / count
    if (own < _OWN) if generation.temperature == 0 else (surprise > _SURPRISE):
        greedy = f"only {own:.0%} of its tokens are the target's own choice"
        sampled = f"its tokens surprise the target by {surprise:.1f} nats each more than its own would"
        seen = greedy if generation.temperature == 0 else sampled
        raise UserError(
            f"The server at {url} does not serve the target: {seen}, over {count} tokens; serve the model of "
            f"target.path= as it is."
        )
    return True
