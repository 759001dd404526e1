"""Acceptances as additive counts per request, and every number of them: the definitions of `eval.acceptance` as
arithmetic.

Because the counts add up, a resample of requests is a weighted sum, which is what `eval.bootstrap` wants. This module
knows traces and numbers; what they are called and how they are reported is not its business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eval.bootstrap import FloatArray, cluster_intervals
from eval.trace import RequestTrace, Round


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval. `value` None: undefined; `low` and `high` None: no interval."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Tally(NamedTuple):
    """Additive counts. R: requests, or resamples of them. K: depths 1…γ. N: proposed lengths 0…γ."""

    accepted_RK: FloatArray  # rounds with at least k accepted
    examined_RK: FloatArray  # rounds with at least k examined
    at_risk_RK: FloatArray  # rounds with k − 1 accepted that were not cut there
    lengths_RN: FloatArray  # rounds that proposed n tokens
    beta_R2: FloatArray  # Σ β, positions with a β
    clock_R8: FloatArray  # with the draft, then without: tokens and seconds of decoding, of the whole request
    draft_R2: FloatArray  # with the draft: seconds of drafting, tokens drafted
    macro_R4: FloatArray  # α of the request (0 where undefined), 1 where defined; τ likewise


def weigh(sums: Tally, weights_BR: FloatArray) -> Tally:
    """The sums of each resample: rows [B] out of rows [R]."""
    return Tally(*(weights_BR @ column for column in sums))


def numbers(sums: Tally) -> dict[str, FloatArray]:
    """Every number of each row, [R, 1] or [R, K]; NaN where undefined. The definitions, as arithmetic."""
    with np.errstate(invalid="ignore", divide="ignore"):
        alpha = _total(sums.accepted_RK) / _total(sums.examined_RK)
        rounds = _total(sums.lengths_RN)
        survival = np.where(rounds > 0, _survival(sums.accepted_RK, sums.at_risk_RK), np.nan)
        tau = 1 + _total(survival)
        powers = np.nan_to_num(alpha) ** np.arange(sums.lengths_RN.shape[-1])
        formula = _total(sums.lengths_RN * np.cumsum(powers, axis=-1)) / rounds
        decoding, whole, plain_decoding, plain_whole = (
            sums.clock_R8[:, i : i + 1] / sums.clock_R8[:, i + 1 : i + 2] for i in range(0, 8, 2)
        )
        return {
            "alpha": alpha,
            "alpha_macro": sums.macro_R4[:, :1] / sums.macro_R4[:, 1:2],
            "alpha_expected": sums.beta_R2[:, :1] / sums.beta_R2[:, 1:],
            "alpha_by_position": sums.accepted_RK / sums.examined_RK,
            "survival": survival,
            "tokens_per_round": tau,
            "tokens_per_round_macro": sums.macro_R4[:, 2:3] / sums.macro_R4[:, 3:],
            "expected_tokens_per_round": formula,
            "formula_gap": np.where(np.isnan(alpha), np.nan, formula / tau - 1),
            "speedup": decoding / plain_decoding,
            "speedup_with_prompt": whole / plain_whole,
            "draft_cost": sums.draft_R2[:, :1] / sums.draft_R2[:, 1:] * plain_decoding,
        }


def _survival(accepted_RK: FloatArray, at_risk_RK: FloatArray) -> FloatArray:
    """The product-limit estimator. Nobody at risk at a depth: 0 where all had ended before it, and unknown (NaN) where
    those that had come so far were all cut there."""
    observed_RK = at_risk_RK > 0
    step_RK = np.divide(accepted_RK, at_risk_RK, out=np.ones_like(accepted_RK), where=observed_RK)
    survival_RK = np.cumprod(step_RK, axis=-1)
    unknown: FloatArray = np.where(observed_RK | (survival_RK == 0), survival_RK, np.nan)
    return unknown


def _total(values: FloatArray) -> FloatArray:
    total: FloatArray = np.sum(values, axis=-1, keepdims=True)
    return total


def _at_least(values: Sequence[int], gamma: int) -> FloatArray:
    """For k = 1…γ: how many of the values are ≥ k."""
    return np.array([sum(v >= k for v in values) for k in range(1, gamma + 1)], dtype=np.float64)


def _at_risk_until(round_: Round) -> int:
    """The deepest depth this round was at risk at: one past its acceptances, unless it was cut there.

    A cut round whose whole proposal was accepted had no more to lose: it ends there as any other.
    """
    return round_.accepted + int(not (round_.cut and round_.accepted < round_.proposed))


def tally(traces: Sequence[RequestTrace], pairs: Mapping[str, tuple[RequestTrace, RequestTrace]], gamma: int) -> Tally:
    """The counts of each request; pairs: by request id its timed trace with the draft and the one without.

    Raises ValueError where more than γ tokens were proposed.
    """
    rows = []
    for trace in traces:
        rounds = trace.rounds
        proposed = [r.proposed for r in rounds]
        if max(proposed, default=0) > gamma:
            raise ValueError(f"{trace.request_id}: {max(proposed)} tokens proposed, gamma={gamma}; raise gamma.")
        betas = [b for r in rounds for b in r.beta]
        pair = pairs.get(trace.request_id, ())
        clock = [n for t in pair for n in _clock(t)] or [0.0] * 8
        draft = [pair[0].draft_seconds, pair[0].drafted_tokens] if pair else [0.0] * 2
        columns = [
            _at_least([r.accepted for r in rounds], gamma),
            _at_least([r.examined for r in rounds], gamma),
            _at_least([_at_risk_until(r) for r in rounds], gamma),
            np.array([proposed.count(n) for n in range(gamma + 1)]),
            np.array([math.fsum(betas), len(betas)]),
            np.array(clock),
            np.array(draft),
            np.zeros(4),
        ]
        rows.append(columns)
    sums = Tally(*(np.stack(column).astype(np.float64) for column in zip(*rows, strict=True)))
    own = numbers(sums)
    alpha_R, tau_R = own["alpha"][:, 0], own["tokens_per_round"][:, 0]
    macro = [np.nan_to_num(alpha_R), ~np.isnan(alpha_R), np.nan_to_num(tau_R), ~np.isnan(tau_R)]
    return sums._replace(macro_R4=np.stack(macro, axis=1).astype(np.float64))


def _clock(trace: RequestTrace) -> tuple[float, float, float, float]:
    """Tokens and seconds of decoding, then of the whole request."""
    return trace.decoded_tokens, trace.decoding_seconds, len(trace.tokens), trace.seconds


Statistic = Callable[[FloatArray], Mapping[str, FloatArray]]
"""From weights [B, clusters] (how often each request was drawn) to numbers [B, M] by name, NaN where undefined."""


def estimates(statistic: Statistic, *, clusters: int, resamples: int, seed: int = 0) -> dict[str, list[Estimate]]:
    """Each number's estimates, M of them: its value over all requests and its interval over resamples of them."""
    point = {name: value[0] for name, value in statistic(np.ones((1, clusters))).items()}
    flat = np.concatenate(list(point.values()))
    unknown = np.full_like(flat, np.nan)
    low, high = cluster_intervals(
        lambda weights_BR: np.concatenate(list(statistic(weights_BR).values()), axis=-1),
        clusters=clusters,
        resamples=resamples,
        seed=seed,
    ) or (unknown, unknown)
    cells = iter(zip(flat, low, high, strict=True))
    return {name: [_known(*next(cells)) for _ in value] for name, value in point.items()}


def _known(value: float, low: float, high: float) -> Estimate:
    if math.isnan(value):
        return Estimate(None)
    if math.isnan(low) or math.isnan(high):
        return Estimate(float(value))
    return Estimate(float(value), float(low), float(high))


def nothing_known(gamma: int) -> dict[str, list[Estimate]]:
    """What is known when no request is left: every number undefined."""
    names = numbers(Tally(*(np.zeros((1, n)) for n in (gamma, gamma, gamma, gamma + 1, 2, 8, 2, 4))))
    return {name: [Estimate(None)] * value.shape[-1] for name, value in names.items()}
