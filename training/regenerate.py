"""The target answers a batch of prompts, and its states fall out of the same pass.

`generate` of transformers runs the target over left-padded prompts; what it returns per step already are the
states at every position but the last, which nothing is predicted from (slot t of a head joins state t with
token t+1 and predicts token t+2). So answers and features cost one pass. The last position gets zeros.

The module knows prompts as token ids. It does not know conversations, files, or which state a head wants and
why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from heads.artifact import UserError
from heads.base import TargetFeatures
from heads.target import FrozenTarget

_LOGITS_CHUNK = 1024  # positions whose logits over the whole vocabulary exist at the same time


@dataclass(frozen=True)
class Generation:
    """How answers are written.

    temperature 0 is greedy; top_p keeps the smallest set of tokens with that much probability; max_new_tokens
    ends an answer that does not end itself; longer prompts than max_prompt_tokens are set aside; batch_size
    prompts are answered together; seed decides the draws. Nothing else of the target's own generation
    settings applies (such as a repetition penalty), because the exact decoder knows nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature < math.inf, "≥ 0 and finite"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "≥ 1"),
            "max_prompt_tokens": (self.max_prompt_tokens >= 1, "≥ 1"),
            "batch_size": (self.batch_size >= 1, "≥ 1"),
        }
        for name, (good, rule) in allowed.items():
            if not good:
                raise UserError(f"generation.{name}={self.__dict__[name]} is not allowed; choose a value {rule}.")


@dataclass(frozen=True)
class Answer:
    """One answered prompt: ids_T is prompt + answer, its last row of states is zero.

    finish_reason: "stop" when the answer ended itself (its end token is the last id), else "length". lse_T is
    valid at the generated positions and the one before them.
    """

    ids_T: Tensor
    answer_start: int
    finish_reason: str
    taps_TE: Tensor
    last_TD: Tensor
    lse_T: Tensor


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
    with _thinned(target, taps), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        result: Any = target.model.generate(
            inputs=torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            generation_config=_config(target, generation),
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
                taps_TE=_with_zero_row(taps_BTE[row, left : end - 1]),
                last_TD=_with_zero_row(last_BTD[row, left : end - 1]),
                lse_T=_log_sum_exp(target, last_BTD[row, left : end - 1], start=longest - left - 1),
            )
        )
    if not all(bool(answer.lse_T.isfinite().all()) for answer in answers):
        raise RuntimeError("the target's states are not finite")
    return answers


def as_features(answer: Answer) -> TargetFeatures:
    """An answer as features of one document."""
    slot_T = torch.arange(len(answer.ids_T))
    return TargetFeatures(
        ids_T=answer.ids_T,
        supervised_T=slot_T >= answer.answer_start,
        lengths=(len(answer.ids_T),),
        taps_TE=answer.taps_TE,
        last_TD=answer.last_TD,
        lse_T=answer.lse_T,
    )


def _config(target: FrozenTarget, generation: Generation) -> GenerationConfig:
    sampled = generation.temperature > 0
    draws = {"temperature": generation.temperature, "top_p": generation.top_p, "top_k": 0} if sampled else {}
    eos = list(target.eos_token_ids)
    return GenerationConfig(
        do_sample=sampled,
        max_new_tokens=generation.max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_hidden_states=True,
        **draws,
    )


@contextmanager
def _thinned(target: FrozenTarget, taps: Sequence[int]) -> Iterator[None]:
    """Within, the target's forward hands on only the states that are wanted, as (taps_BTE, last_BTD), so that
    `generate` does not pile up those of all layers; and the generation settings that came with it are out of
    force."""

    def keep_wanted(_module: Any, _args: Any, output: Any) -> Any:
        last_BTD = output.last_hidden_state
        tapped = [output.hidden_states[tap] for tap in taps]
        output.hidden_states = (torch.cat(tapped, dim=-1) if tapped else last_BTD[..., :0], last_BTD)
        return output

    def lay_out(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The state of the last position is a slice of all of them; a product with such a slice would copy the
        # vocabulary projection once per row (torch 2.13 on CPU).
        return (args[0].contiguous(), *args[1:])

    hooks = [
        target.model.base_model.register_forward_hook(keep_wanted),
        target.model.get_output_embeddings().register_forward_pre_hook(lay_out),
    ]
    try:
        with target.settings_aside():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_zero_row(states: Tensor) -> Tensor:
    return torch.cat([states, states.new_zeros(1, states.shape[1])]).cpu()


def _log_sum_exp(target: FrozenTarget, last_SD: Tensor, *, start: int) -> Tensor:
    """fp32 log-sum-exp of the target's logits at positions from `start` on; zeros before, and one more at the
    end."""
    lse_T = torch.zeros(len(last_SD) + 1, dtype=torch.float32)
    for begin in range(start, len(last_SD), _LOGITS_CHUNK):
        chunk = last_SD[begin : begin + _LOGITS_CHUNK]
        lse_T[begin : begin + len(chunk)] = target.logits(chunk).float().logsumexp(dim=-1).cpu()
    return lse_T
