"""Teacher-forced against decoder acceptance, and the draft vocabulary as a ceiling, on the texts that were decoded.

Teacher-forced: the head is run as in training over a finished greedy text, from every place in it and always on true
tokens. The decoder meets the head only where rounds happen to start, which are harder places than the average, and
on the target's cache. Both are conditional acceptances by depth, so their difference needs no model. Coverage is the
target's probability on tokens that the draft can propose at all: no α can be above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.bootstrap import RESAMPLES, FloatArray
from eval.decode import Request
from eval.tally import Estimate, estimates, numbers, tally, weigh
from eval.trace import RequestTrace
from heads.base import DraftHead, TargetFeatures, wide
from heads.target import FrozenTarget

CHUNK = 256  # places whose logits are held at once


@dataclass(frozen=True)
class TeacherCounts:
    """Of one request. right and reached: starts whose drafts were right up to depth k, and those that had been right
    before it; covered: Σ of the target's probability on draftable tokens; inside: tokens of the text that are
    draftable; places: positions that both are summed over."""

    request_id: str
    right: tuple[float, ...]
    reached: tuple[float, ...]
    covered: float
    inside: int
    places: int


@dataclass(frozen=True)
class TeacherGap:
    """By depth: teacher-forced, the decoder's α_k, and the decoder's minus teacher-forced, resampled in pairs.

    coverage: E[Σ p(x)] over draftable x; coverage_of_text: share of the text's tokens that are draftable, which is the
    ceiling for greedy decoding.
    """

    teacher: tuple[Estimate, ...]
    decoder: tuple[Estimate, ...]
    gap: tuple[Estimate, ...]
    coverage: Estimate
    coverage_of_text: Estimate

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def count_teacher_forced(
    target: FrozenTarget,
    head: DraftHead,
    requests: Sequence[Request],
    traces: Sequence[RequestTrace],
    on_done: Callable[[RequestTrace], None] = lambda trace: None,
) -> list[TeacherCounts]:
    """One forward of target and head over each decoded text; the head is attached and of the target's number format."""
    prompts = {request.request_id: request.prompt for request in requests}
    counts = []
    for trace in traces:
        counts.append(_count(target, head, prompts[trace.request_id], trace))
        on_done(trace)
    return counts


def _count(target: FrozenTarget, head: DraftHead, prompt: Sequence[int], trace: RequestTrace) -> TeacherCounts:
    ids_T = torch.tensor([*prompt, *trace.tokens], device=target.device)
    output = target.forward(ids_T[None], taps=head.needs.taps)
    last_TD, taps_TE = output.last_BTD[0], output.taps_BTE[0]
    supervised_T = torch.arange(len(ids_T), device=target.device) >= len(prompt)
    draftable_V = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
    draftable_V[head.vocab.ids_W.to(target.device)] = True
    lse_T = torch.zeros(len(ids_T), device=target.device)
    lse_T[len(prompt) - 1 :], covered_T = _said(target, last_TD[len(prompt) - 1 :], draftable_V)
    covered_T = covered_T[1:-1]  # the answer's first token is nobody's draft, and behind its last comes nothing
    features = TargetFeatures(ids_T, supervised_T, (len(ids_T),), taps_TE, last_TD, lse_T)
    right, reached = _acceptance(head, features)
    return TeacherCounts(
        request_id=trace.request_id,
        right=right,
        reached=reached,
        covered=float(covered_T.sum()),
        inside=int(draftable_V[ids_T[len(prompt) + 1 :]].sum()),
        places=len(covered_T),
    )


def _said(target: FrozenTarget, last_TD: Tensor, draftable_V: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp of the logits and the probability on draftable tokens, [T] each, of CHUNK places at a time: all logits
    of a long answer at once may not fit into memory."""
    parts = []
    for part_TD in last_TD.split(CHUNK):
        logits_TV = wide(target.logits(part_TD))
        inside_V = draftable_V[: logits_TV.shape[1]]
        parts.append((logits_TV.logsumexp(-1).float(), (logits_TV.softmax(-1) * inside_V).sum(-1)))
    lse, covered = zip(*parts, strict=True)
    return torch.cat(lse), torch.cat(covered)


def _acceptance(head: DraftHead, features: TargetFeatures) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nothing where the text is too short for a pair."""
    found: Mapping[str, tuple[Tensor, Tensor]] = head.loss(features).metrics
    if "acceptance" not in found:
        return (), ()
    right_K, reached_K = found["acceptance"]
    return tuple(right_K.tolist()), tuple(reached_K.tolist())


def teacher_gap(
    counts: Sequence[TeacherCounts],
    traces: Sequence[RequestTrace],
    *,
    gamma: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> TeacherGap:
    """counts and traces: of the same requests; the depths are those that both have."""
    own = {trace.request_id: trace for trace in traces}
    sums = tally([own[one.request_id] for one in counts], {}, gamma)
    depth = min(gamma, max(len(one.right) for one in counts))

    def padded(values: Sequence[float]) -> list[float]:
        return [*values, *[0.0] * depth][:depth]

    right_RK, reached_RK = (
        np.array([padded(one) for one in column])
        for column in ([one.right for one in counts], [one.reached for one in counts])
    )
    covered_R3 = np.array([[one.covered, one.inside, one.places] for one in counts], dtype=float)

    def statistic(weights_BR: FloatArray) -> dict[str, FloatArray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            teacher_BK = (weights_BR @ right_RK) / (weights_BR @ reached_RK)
            covered_B3 = weights_BR @ covered_R3
            coverage_B2 = covered_B3[:, :2] / covered_B3[:, 2:]
        decoder_BK = numbers(weigh(sums, weights_BR))["alpha_by_position"][:, :depth]
        return {
            "teacher": teacher_BK,
            "decoder": decoder_BK,
            "gap": decoder_BK - teacher_BK,
            "coverage": coverage_B2[:, :1],
            "coverage_of_text": coverage_B2[:, 1:],
        }

    found = estimates(statistic, clusters=len(counts), resamples=resamples, seed=seed)
    return TeacherGap(
        teacher=tuple(found["teacher"]),
        decoder=tuple(found["decoder"]),
        gap=tuple(found["gap"]),
        coverage=found["coverage"][0],
        coverage_of_text=found["coverage_of_text"][0],
    )
