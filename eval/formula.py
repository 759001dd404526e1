"""The formula (1 - α^(γ+1)) / (1 - α) against the decoder, for every γ, and what makes them differ.

The formula takes acceptances for independent and alike at all depths. Measured here: *autocorrelation*, how much a
first draft's acceptance says about that of another round (places are hard or easy, and so are requests), which depth
cannot cause; and *drift*, conditional acceptance at depth k against the pooled α, in which both work: drafts far ahead
know less, and who comes far stands in an easy place. Drift without autocorrelation is depth's alone. 1 + S(1) + … +
S(γ) stands beside them and assumes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eval.bootstrap import RESAMPLES, FloatArray
from eval.tally import Estimate, Tally, estimates, numbers, tally, weigh
from eval.trace import RequestTrace

LONGEST = 16
LAGS = (1, 2, 3, 4, 6, 8, 12, 16)
_ONE, _NONE = Estimate(1.0, 1.0, 1.0), Estimate(0.0, 0.0, 0.0)  # without a draft


@dataclass(frozen=True)
class FormulaRow:
    """One γ. formula: at the pooled α; at_first: at α of depth 1; measured and gap (formula / measured - 1): of the run
    with this γ; from_survival: 1 + S(1) + … + S(γ) of the longest run. None: not measured."""

    gamma: int
    formula: Estimate
    at_first: Estimate
    measured: Estimate | None
    gap: Estimate | None
    from_survival: Estimate | None


@dataclass(frozen=True)
class Lag:
    """Correlation of the first drafts' outcomes `lag` rounds apart, over `pairs` pairs of rounds."""

    lag: int
    pairs: int
    correlation: Estimate


@dataclass(frozen=True)
class FormulaCheck:
    """All of it for one draft. alpha, drift (α_k - α for k = 1 …) and autocorrelation: of its longest run, `gamma`."""

    gamma: int
    alpha: Estimate
    rows: tuple[FormulaRow, ...]
    drift: tuple[Estimate, ...]
    autocorrelation: tuple[Lag, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_formula(
    runs: Mapping[int, Sequence[RequestTrace]], *, resamples: int = RESAMPLES, seed: int = 0, lags: Sequence[int] = LAGS
) -> FormulaCheck:
    """runs: by γ ≥ 1 the traces of one draft that proposes chains of γ."""
    assert runs and all(runs.values()), "a draft without a run"
    assert not any(r.tree for traces in runs.values() for t in traces for r in t.rounds), "no formula for trees"
    deepest = max(runs)
    own = {gamma: _estimated(traces, gamma, resamples, seed) for gamma, traces in runs.items()}
    longest = own[deepest]
    rows = []
    for gamma in range(LONGEST + 1):
        source = own.get(gamma, longest)
        measured = source["tokens_per_round"][0] if gamma in own else _ONE if gamma == 0 else None
        rows.append(
            FormulaRow(
                gamma=gamma,
                formula=source["formula"][gamma],
                at_first=source["at_first"][gamma],
                measured=measured,
                gap=source["formula_gap"][0] if gamma in own else _NONE if gamma == 0 else None,
                from_survival=longest["from_survival"][gamma] if gamma <= deepest else None,
            )
        )
    return FormulaCheck(
        gamma=deepest,
        alpha=longest["alpha"][0],
        rows=tuple(rows),
        drift=tuple(longest["drift"]),
        autocorrelation=autocorrelation(runs[deepest], lags=lags, resamples=resamples, seed=seed),
    )


def _estimated(traces: Sequence[RequestTrace], gamma: int, resamples: int, seed: int) -> dict[str, list[Estimate]]:
    sums = tally(traces, {}, gamma)
    return estimates(
        lambda weights_BR: _statistic(weigh(sums, weights_BR)), clusters=len(traces), resamples=resamples, seed=seed
    )


def _statistic(sums: Tally) -> dict[str, FloatArray]:
    found = numbers(sums)
    survival_BK, alpha_B1, first_B1 = found["survival"], found["alpha"], found["alpha_by_position"][:, :1]
    return {
        "alpha": alpha_B1,
        "tokens_per_round": found["tokens_per_round"],
        "formula_gap": found["formula_gap"],
        "formula": np.cumsum(alpha_B1 ** np.arange(LONGEST + 1), -1),
        "at_first": np.cumsum(first_B1 ** np.arange(LONGEST + 1), -1),
        "from_survival": 1 + np.concatenate([np.zeros_like(alpha_B1), np.cumsum(survival_BK, -1)], -1),
        "drift": found["alpha_by_position"] - alpha_B1,
    }


def autocorrelation(
    traces: Sequence[RequestTrace], *, lags: Sequence[int] = LAGS, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Lag, ...]:
    """Correlation between the outcomes of first drafts, so many rounds of one text apart.

    First drafts alone, because the depth of a later one tells what came before it. Independent acceptances give 0 at
    every lag, whatever acceptance does with depth; what remains at long lags is the difference between requests.
    """
    texts = [_first_outcomes(trace) for trace in traces]
    seen = np.concatenate([text_T[np.isfinite(text_T)] for text_T in texts])
    centred = [text_T - (seen.mean() if len(seen) else 0.0) for text_T in texts]
    sums_R4L = np.array([[_products(text_T, lag) for lag in lags] for text_T in centred]).transpose(0, 2, 1)

    def correlations(weights_BR: FloatArray) -> dict[str, FloatArray]:
        both, early, late = (weights_BR @ sums_R4L[:, part] for part in range(3))
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"r": both / np.sqrt(early * late)}

    found = estimates(correlations, clusters=len(traces), resamples=resamples, seed=seed)["r"]
    pairs = sums_R4L[:, 3].sum(0).astype(int).tolist()
    return tuple(Lag(*one) for one in zip(lags, pairs, found, strict=True))


def _first_outcomes(trace: RequestTrace) -> FloatArray:
    """Of each round 1 where its first draft was accepted, 0 where not, NaN where nothing was proposed."""
    return np.array([float(one.accepted > 0) if one.examined else np.nan for one in trace.rounds])


def _products(text_T: FloatArray, lag: int) -> tuple[float, float, float, float]:
    """Σ xy, Σ x², Σ y² and the number of pairs of rounds x and y = x + lag that both have an outcome."""
    early, late = text_T[: max(len(text_T) - lag, 0)], text_T[lag:]
    both = np.isfinite(early) & np.isfinite(late)
    early, late = early[both], late[both]
    return float(early @ late), float(early @ early), float(late @ late), float(both.sum())
