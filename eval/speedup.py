"""Which γ to serve at a load: expected tokens per second out of measured acceptance and the costs of a round.

tokens per second = batch · (tokens per round) / (seconds of a plain step · cost of the round). Nothing is assumed about
independence: tokens per round are 1 + S(1) + … + S(γ), measured. Chains only. Intervals are those of the acceptance;
the costs are taken at their medians. This module knows neither files nor clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eval.acceptance import requests_for_width
from eval.bootstrap import RESAMPLES, FloatArray
from eval.cost_table import Costs
from eval.tally import Estimate, Tally, estimates, numbers, tally, weigh
from eval.trace import RequestTrace
from heads.artifact import UserError

TIE = 0.002  # of two draft lengths that differ by less the shorter one: it suffers less when the load grows
PRECISE = 0.05  # an interval this narrow, either way, decides between draft lengths
FROM_TRACES = "requests resampled"
FROM_REPORT = "the report's own intervals, added up over depths"


@dataclass(frozen=True)
class Yield:
    """Tokens per round by γ, from 0 on without a gap. source: where intervals come from; deepest: the longest measured
    γ; beyond it the last conditional acceptance is taken to go on; requests: how many all rests on."""

    by_gamma: tuple[Estimate, ...]
    source: str
    deepest: int
    requests: int

    @staticmethod
    def of_traces(runs: Mapping[int, Sequence[RequestTrace]], max_gamma: int, *, resamples: int = RESAMPLES) -> Yield:
        """runs: by γ ≥ 1 the traces of one draft over the same requests, in the same order.

        A γ without a run of its own is read off the next longer run.
        """
        ids = [[trace.request_id for trace in traces] for traces in runs.values()]
        if not ids or not ids[0] or any(one != ids[0] for one in ids):
            raise UserError("The runs of a draft must hold the same requests at every γ; evaluate it again.")
        counts = {gamma: tally(traces, {}, gamma) for gamma, traces in sorted(runs.items())}
        found = estimates(
            lambda weights_BR: {"tau": _taus(counts, weights_BR, max_gamma)}, clusters=len(ids[0]), resamples=resamples
        )
        return Yield(tuple(found["tau"]), FROM_TRACES, max(runs), len(ids[0]))

    @staticmethod
    def of_report(rows: Sequence[Mapping[str, Any]], max_gamma: int) -> Yield:
        """rows: of one draft at one temperature, one for each γ, as report.json has them."""
        by_gamma = {row["gamma"]: row for row in rows}
        if not by_gamma:
            raise UserError("The report has no run of that draft; evaluate it, or choose another proposer=.")
        taus = [Estimate(1.0, 1.0, 1.0)]
        for gamma in range(1, max_gamma + 1):
            if gamma in by_gamma:
                own = by_gamma[gamma]["tokens_per_round"]
                taus.append(Estimate(own["value"], own["low"], own["high"]))
                continue
            longer = min((g for g in by_gamma if g > gamma), default=max(by_gamma))
            taus.append(_summed(by_gamma[longer]["survival_interval"], gamma))
        return Yield(tuple(taus), FROM_REPORT, max(by_gamma), rows[0]["requests"])


def _taus(counts: Mapping[int, Tally], weights_BR: FloatArray, max_gamma: int) -> FloatArray:
    """Tokens per round [B, 1 + max_gamma] of each resample."""
    survival = {gamma: numbers(weigh(one, weights_BR))["survival"] for gamma, one in counts.items()}
    taus = [np.ones(len(weights_BR))]
    for gamma in range(1, max_gamma + 1):
        longer = min((g for g in survival if g >= gamma), default=max(survival))
        taus.append(1 + _extended(survival[longer], gamma).sum(-1))
    return np.stack(taus, -1)


def _extended(survival_BK: FloatArray, depth: int) -> FloatArray:
    """S(1) … S(depth): cut off, or continued with the last conditional acceptance."""
    known = survival_BK.shape[-1]
    if depth <= known:
        return survival_BK[..., :depth]
    last = survival_BK[..., -1:]
    before = survival_BK[..., -2:-1] if known > 1 else np.ones_like(last)
    step = np.divide(last, before, out=np.zeros_like(last), where=before > 0)
    return np.concatenate([survival_BK, last * step ** np.arange(1, depth - known + 1)], -1)


def _summed(survival: Sequence[Mapping[str, float | None]], gamma: int) -> Estimate:
    bounds: list[float | None] = []
    for name in ("value", "low", "high"):
        column = [one[name] for one in survival[:gamma]]
        known = [value for value in column if value is not None]
        whole = len(known) == len(column)
        bounds.append(1 + float(_extended(np.array([known]), gamma).sum()) if whole else None)
    value, low, high = bounds
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Expectation:
    """What one γ is expected to do at a load. tokens_per_second: of the whole batch."""

    gamma: int
    tokens_per_round: Estimate
    round_cost: float
    speedup: Estimate
    tokens_per_second: Estimate


@dataclass(frozen=True)
class Advice:
    """The γ with the most expected tokens per second at a load; 0: do not speculate there.

    dtype, temperature: of the acceptance; rows: every γ at the load; stops_paying: the smallest batch at this context
    from which on γ = 0 is best, up to `largest`, the largest batch looked at (None: not even there); table: the best γ
    at other batches and contexts.
    """

    batch: float
    context: float
    dtype: str
    temperature: float
    gamma: int
    speedup: Estimate
    tokens_per_second: Estimate
    rows: tuple[Expectation, ...]
    stops_paying: int | None
    largest: int
    table: tuple[BestAt, ...]
    intervals_from: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BestAt:
    """The best γ at one batch and context."""

    batch: int
    context: int
    gamma: int
    speedup: Estimate


def expect(costs: Costs, taus: Yield, batch: float, context: float) -> list[Expectation]:
    """Every γ at one load, from 0 on."""
    step = costs.step_seconds(batch, context)
    rows = []
    for gamma, tau in enumerate(taus.by_gamma):
        cost = costs.round_cost(batch, context, gamma)
        rows.append(Expectation(gamma, tau, cost, _scaled(tau, 1 / cost), _scaled(tau, batch / (step * cost))))
    return rows


def best(costs: Costs, taus: Yield, batch: float, context: float) -> Expectation:
    """The γ with the most expected tokens per second; of those within `TIE` of it the smallest."""
    return _best(expect(costs, taus, batch, context))


def _best(rows: Sequence[Expectation]) -> Expectation:
    fastest = max(row.speedup.value or 0.0 for row in rows)
    return next(row for row in rows if (row.speedup.value or 0.0) >= fastest * (1 - TIE))


def advise(
    costs: Costs,
    taus: Yield,
    *,
    batch: float,
    context: float,
    batches: Sequence[int],
    contexts: Sequence[int],
    dtype: str,
    temperature: float,
) -> Advice:
    """The advice for one load; batches and contexts: of the table, and how far the batch is followed; dtype and
    temperature: of the runs behind `taus`."""
    rows = expect(costs, taus, batch, context)
    chosen = _best(rows)
    notes = costs.reach(batch, context, max(chosen.gamma, 1))
    if rows[-1].gamma > taus.deepest:
        notes.append(f"acceptance was measured up to γ {taus.deepest}; beyond, its last value is taken to go on")
    if chosen.gamma and chosen.speedup.low is not None and chosen.speedup.low <= 1:
        notes.append("the interval holds 1: these requests cannot tell whether speculation pays here")
    wanted = PRECISE * (chosen.speedup.value or 0.0)
    needed = requests_for_width(chosen.speedup, requests=taus.requests, width=2 * wanted) if chosen.gamma else None
    if needed is not None and needed > taus.requests:
        notes.append(f"about {needed} held-out requests instead of {taus.requests} would make it ±{PRECISE:.0%}")
    if chosen.gamma == len(rows) - 1:
        notes.append(f"γ {chosen.gamma} is the longest looked at; a longer one may be better still")
    table = tuple(
        BestAt(b, c, found.gamma, found.speedup)
        for b in batches
        for c in contexts
        for found in [best(costs, taus, b, c)]
    )
    return Advice(
        batch=batch,
        context=context,
        dtype=dtype,
        temperature=temperature,
        gamma=chosen.gamma,
        speedup=chosen.speedup,
        tokens_per_second=chosen.tokens_per_second,
        rows=tuple(rows),
        stops_paying=_stops_paying(costs, taus, batches, context),
        largest=max(batches),
        table=table,
        intervals_from=taus.source,
        notes=tuple(notes),
    )


def _stops_paying(costs: Costs, taus: Yield, batches: Sequence[int], context: float) -> int | None:
    """The smallest batch from which on, up to the largest, no draft length pays."""
    stops = None
    for batch in range(max(batches), min(batches) - 1, -1):
        if best(costs, taus, batch, context).gamma > 0:
            break
        stops = batch
    return stops


def _scaled(one: Estimate, factor: float) -> Estimate:
    return Estimate(*(None if bound is None else bound * factor for bound in (one.value, one.low, one.high)))
