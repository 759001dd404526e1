"""The target answers a batch of prompts, and its states fall out of the same pass.

`generate` of transformers runs the target over left-padded prompts; what it returns per step already are the
states at every position but the last, which nothing is predicted from (slot t of a head joins state t with
token t+1 and predicts token t+2). So answers and features cost one pass. The last position gets zeros.

The module knows prompts as token ids. It does not know conversations, files, or which state a head wants and
why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.states import Answer, check_finite, log_sum_exp, thinned, with_zero_row


@dataclass(frozen=True)
class Generation:
    """How answers are written.

    temperature 0 is greedy; top_p keeps the smallest set of tokens with that much probability; answers is how many are
    drawn for each prompt; max_new_tokens ends an answer that does not end itself; longer prompts than max_prompt_tokens
    are set aside; batch_size answers are written together; seed decides the draws. Nothing else of the target's own
    generation settings applies (such as a repetition penalty), because the exact decoder knows nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    answers: int = 1
    max_new_tokens: int = 160
    max_prompt_tokens: int = 480
    batch_size: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature <= 100, "≥ 0 and finite, at most 100"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "answers": (1 <= self.answers <= 1000, "≥ 1 and at most 1000"),
            "max_new_tokens": (self.max_new_tokens >= 1, "≥ 1"),
            "max_prompt_tokens": (self.max_prompt_tokens >= 1, "≥ 1"),
            "batch_size": (self.batch_size >= 1, "≥ 1"),
        }
        for name, (good, rule) in allowed.items():
            if not good:
                raise UserError(f"generation.{name}={self.__dict__[name]} is not allowed; choose a value {rule}.")
        if self.answers > 1 and self.temperature == 0:
            raise UserError(
                f"generation.answers={self.answers} at generation.temperature=0 would be one answer {self.answers} "
                f"times; set generation.temperature= above 0, or generation.answers=1."
            )


def seed_of(seed: int, names: Sequence[str]) -> int:
    """A seed (48 bits) of their own for what is answered together, so that doing it again draws the same."""
    return int(hashlib.sha256("\n".join([str(seed), *names]).encode()).hexdigest()[:12], 16)


@torch.inference_mode()
def answer_batch(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    taps: Sequence[int],
    generation: Generation,
    seed: int,
) -> list[Answer]:
    """Answer some prompts together; each row comes back as if it had been alone (up to rounding).

    Raises what the model raises on a prompt that it cannot take, and RuntimeError when states are not finite.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * left + [1] * len(prompt) for left, prompt in zip(padding, prompts, strict=True)]
    devices = [target.device] if target.device.type == "cuda" else []
    with thinned(target, taps), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        result: Any = target.model.generate(
            inputs=torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            generation_config=generation_config(target, generation),
            cache=target.new_cache(),
        )
    # Per step: (tapped states, last state) of the positions of that step, the whole prompt in the first.
    taps_BTE = torch.cat([step[0] for step in result.hidden_states], dim=1)
    last_BTD = torch.cat([step[1] for step in result.hidden_states], dim=1)
    answers: list[Answer] = []
    for row, left in enumerate(padding):
        new = result.sequences[row, longest:].tolist()
        stop = next((index for index, token in enumerate(new) if token in target.eos_token_ids), None)
        end = longest + (len(new) if stop is None else stop + 1)
        answers.append(
            Answer(
                ids_T=result.sequences[row, left:end].cpu(),
                answer_start=longest - left,
                finish_reason="length" if stop is None else "stop",
                taps_TE=with_zero_row(taps_BTE[row, left : end - 1]),
                last_TD=with_zero_row(last_BTD[row, left : end - 1]),
                lse_T=log_sum_exp(target, last_BTD[row, left : end - 1], start=longest - left - 1),
            )
        )
    return check_finite(answers)


def generation_config(target: FrozenTarget, generation: Generation, *, states: bool = True) -> GenerationConfig:
    """What `generate` is told; states: whether it hands on those of all its steps."""
    sampled = generation.temperature > 0
    draws = {"temperature": generation.temperature, "top_p": generation.top_p, "top_k": 0} if sampled else {}
    eos = list(target.eos_token_ids)
    return GenerationConfig(
        do_sample=sampled,
        max_new_tokens=generation.max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_hidden_states=states,
        **draws,
    )
