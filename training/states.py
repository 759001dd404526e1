"""The target's states of one document each: of answers as they are written, and of ids that are known already.

`known_states` runs the target once over documents whose tokens are there, such as logged answers; `answer_batch` of
`training.regenerate` gives the same for answers that the target writes. The state of a document's last position is
zero: nothing is predicted from it (slot t of a head joins state t with token t+1 and predicts token t+2).

The module knows documents as token ids. It does not know conversations, files, or which state a head wants and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.base import TargetFeatures
from heads.target import FrozenTarget
from training.chat import Encoded

_CPU_POSITIONS = 2048  # of one forward: those of more leave the processor's caches, and padding is computed for nothing
_LOGITS_CHUNK = 1024  # positions whose logits over the whole vocabulary exist at the same time


@dataclass(frozen=True)
class Answer:
    """One answered prompt with its states: ids_T is prompt + answer, the last row of states is zero.

    finish_reason: "stop" when the answer ended itself (its end token is the last id), else "length". lse_T is
    valid at the generated positions and the one before them.
    """

    ids_T: Tensor
    answer_start: int
    finish_reason: str
    taps_TE: Tensor
    last_TD: Tensor
    lse_T: Tensor


class StatesReader(Protocol):
    """What gives the states of documents whose ids are known: `known_states`, or a server in its place."""

    def __call__(self, target: FrozenTarget, documents: Sequence[Encoded], *, taps: Sequence[int]) -> list[Answer]: ...


@torch.inference_mode()
def known_states(target: FrozenTarget, documents: Sequence[Encoded], *, taps: Sequence[int]) -> list[Answer]:
    """States of documents whose ids are known; each row comes back as if it had been alone (up to rounding).

    In a document everything from its first supervised position on is supervised. On a GPU
    memory grows with their number times the longest of them.
    Raises what the model raises on ids that it cannot take, and RuntimeError when states are not finite.
    """
    states = forward_states(target, [torch.tensor(document.ids) for document in documents], taps=taps)
    return with_states(target, documents, states)


@torch.inference_mode()
def with_states(
    target: FrozenTarget, documents: Sequence[Encoded], states: Sequence[tuple[Tensor, Tensor]]
) -> list[Answer]:
    """Documents joined with their states, tapped [T, E] and last [T, D], wherever these come from; those of the last
    position may be missing. Raises RuntimeError when states are not finite."""
    assert all(document.ids and all(document.supervised[document.answer_start :]) for document in documents)
    answers: list[Answer] = []
    for document, (taps_TE, last_TD) in zip(documents, states, strict=True):
        end, start = len(document.ids) - 1, document.answer_start
        answers.append(
            Answer(
                ids_T=torch.tensor(document.ids),
                answer_start=start,
                finish_reason="stop" if document.ids[-1] in target.eos_token_ids else "length",
                taps_TE=with_zero_row(taps_TE[:end]),
                last_TD=with_zero_row(last_TD[:end]),
                lse_T=log_sum_exp(target, last_TD[:end], start=max(0, start - 1)),
            )
        )
    return check_finite(answers)


@torch.no_grad()
def forward_states(target: FrozenTarget, rows: Sequence[Tensor], *, taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Tapped [T, E] and last states [T, D] of each row of ids, in a few forwards over those of like length.

    Nothing of the target is changed meanwhile, so that it may decode in another thread.
    """
    states: dict[int, tuple[Tensor, Tensor]] = {}
    for group in alike([len(ids_T) for ids_T in rows], at_once(target)):
        # Padding on the right needs no mask: attention is causal, so no position of a row sees it.
        ids_BT = pad_sequence([rows[index] for index in group], batch_first=True).to(target.device)
        output: Any = target.model.base_model(input_ids=ids_BT, use_cache=False, output_hidden_states=bool(taps))
        last_BTD = output.last_hidden_state
        taps_BTE = torch.cat([output.hidden_states[tap] for tap in taps], -1) if taps else last_BTD[..., :0]
        for row, index in enumerate(group):
            length = len(rows[index])
            states[index] = taps_BTE[row, :length], last_BTD[row, :length]
    return [states[index] for index in range(len(rows))]


def at_once(target: FrozenTarget) -> float:
    """The most positions of one forward."""
    return _CPU_POSITIONS if target.device.type == "cpu" else math.inf


def alike(lengths: Sequence[int], most: float = math.inf) -> list[list[int]]:
    """Indices in groups, the longest first: padding stays below a half of each, and none has more than `most` positions
    with it, but where one row has."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups and 2 * lengths[index] >= longest and (len(groups[-1]) + 1) * longest <= most:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def check_finite(answers: list[Answer]) -> list[Answer]:
    """The same answers. Raises RuntimeError when states of one of them are not finite."""
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


@contextmanager
def thinned(target: FrozenTarget, taps: Sequence[int]) -> Iterator[None]:
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


def with_zero_row(states: Tensor) -> Tensor:
    """A document's states on the CPU, with zeros for its last position."""
    return torch.cat([states, states.new_zeros(1, states.shape[1])]).cpu()


def log_sum_exp(target: FrozenTarget, last_SD: Tensor, *, start: int) -> Tensor:
    """fp32 log-sum-exp of the target's logits at positions from `start` on; zeros before, and one more at the
    end."""
    lse_T = torch.zeros(len(last_SD) + 1, dtype=torch.float32)
    for begin in range(start, len(last_SD), _LOGITS_CHUNK):
        chunk = last_SD[begin : begin + _LOGITS_CHUNK]
        lse_T[begin : begin + len(chunk)] = target.logits(chunk).float().logsumexp(dim=-1).cpu()
    return lse_T
