"""Predicted against measured tokens per second, at every γ and batch.

The batches of `eval.decode` are not refilled: a finished row idles, at full cost, until the last one has finished. A
server fills its place. So the measured rate is that of a batch whose rows all work: tokens per round of a row, times
rows, times rounds of the batch per second. Tokens per round are those of `eval.acceptance`, in what is measured as in
what is predicted: a server's next request does not cut a round, so a round cut by the end of a text is censored.

This module takes traces and costs; it decodes nothing itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from eval.cost_table import Costs
from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.speedup import Yield, best
from eval.tally import numbers, tally, weigh
from eval.trace import RequestTrace
from heads.artifact import UserError
from heads.target import FrozenTarget


@dataclass(frozen=True)
class Measured:
    """One γ at one batch. tokens_per_second: of a full batch; as_decoded: with the idle rows as they are."""

    batch: int
    gamma: int
    context: float
    tokens_per_round: float
    tokens_per_second: float
    as_decoded: float


@dataclass(frozen=True)
class Compared:
    """A measurement and what was predicted of it; given_acceptance: predicted from the tokens per round of these very
    requests, so that what remains is the error of the costs; speedup_error: of the speed-up over γ 0 at this batch,
    which a machine that has become slower as a whole does not touch (None: γ 0 was not measured)."""

    measured: Measured
    predicted: float
    given_acceptance: float
    speedup_error: float | None = None

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured.tokens_per_second - 1

    @property
    def cost_error(self) -> float:
        """The same for the costs alone."""
        return self.given_acceptance / self.measured.tokens_per_second - 1


@dataclass(frozen=True)
class Choice:
    """The advised γ of one batch. share: its measured tokens per second over those of the best measured γ."""

    batch: int
    advised: int
    best: int
    share: float


@dataclass(frozen=True)
class Comparison:
    """All of it, with the medians of the absolute errors."""

    rows: tuple[Compared, ...]
    choices: tuple[Choice, ...]
    median_error: float
    median_cost_error: float
    median_speedup_error: float | None

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"error": row.error, "cost_error": row.cost_error} for row in self.rows]
        return asdict(self) | {"rows": rows}


def measure_rates(
    target: FrozenTarget,
    requests: Sequence[Request],
    proposer: Proposer,
    settings: DecodeSettings,
    *,
    batch: int,
    gammas: Sequence[int],
    on_done: Callable[[RequestTrace], None] | None = None,
) -> list[Measured]:
    """Decode groups of `batch` requests of like length at every γ in turn; requests that fill no group are left out."""
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    groups = [ordered[first : first + batch] for first in range(0, len(ordered) - batch + 1, batch)]
    assert groups, "fewer requests than rows"
    plans = {gamma: replace(settings, rows=batch, gamma=gamma) for gamma in gammas}
    for plan in plans.values():
        decode(target, groups[0], proposer, replace(plan, max_new_tokens=min(8, plan.max_new_tokens)))
    found: dict[int, list[list[RequestTrace]]] = {gamma: [] for gamma in gammas}
    order = list(gammas)
    for group in groups:
        for gamma in order:
            found[gamma].append(decode(target, group, proposer, plans[gamma], on_done))
        order = order[1:] + order[:1]
    return [_rate(found[gamma], batch, gamma) for gamma in gammas]


def _rate(groups: Sequence[Sequence[RequestTrace]], batch: int, gamma: int) -> Measured:
    traces = [trace for group in groups for trace in group]
    seconds = sum(max(trace.decoding_seconds for trace in group) for group in groups)
    passes = sum(max(len(trace.rounds) for trace in group) for group in groups)
    rounds = sum(len(trace.rounds) for trace in traces)
    # Where a row stands, on average over its rounds: behind its prompt and half of its answer.
    context = sum((trace.prompt_length + len(trace.tokens) / 2) * len(trace.rounds) for trace in traces) / rounds
    each = _tokens_per_round(traces, gamma)
    as_decoded = sum(trace.decoded_tokens for trace in traces) / seconds
    return Measured(batch, gamma, context, each, batch * each * passes / seconds, as_decoded)


def _tokens_per_round(traces: Sequence[RequestTrace], gamma: int) -> float:
    whole = weigh(tally(traces, {}, gamma), np.ones((1, len(traces))))
    return _known(float(numbers(whole)["tokens_per_round"][0, 0]), gamma)


def _known(tau: float | None, gamma: int) -> float:
    if tau is None or math.isnan(tau):
        raise UserError(
            f"At draft length {gamma} every round that came far was cut by the end of its text; "
            f"decode longer ones with eval.max_new_tokens=…."
        )
    return tau


def compare_rates(measured: Sequence[Measured], costs: Costs, taus: Yield) -> Comparison:
    """Hold every measurement against the prediction at its batch and context."""
    rows = []
    for one in measured:
        round_seconds = costs.step_seconds(one.batch, one.context) * costs.round_cost(one.batch, one.context, one.gamma)
        tau = _known(taus.by_gamma[one.gamma].value, one.gamma)
        rows.append(Compared(one, one.batch * tau / round_seconds, one.batch * one.tokens_per_round / round_seconds))
    plain = {row.measured.batch: row.error for row in rows if row.measured.gamma == 0}
    rows = [
        replace(row, speedup_error=(1 + row.error) / (1 + plain[row.measured.batch]) - 1)
        if row.measured.batch in plain
        else row
        for row in rows
    ]
    choices = []
    for batch in sorted({one.batch for one in measured}):
        here = {one.gamma: one for one in measured if one.batch == batch}
        fastest = max(here.values(), key=lambda one: one.tokens_per_second)
        # Of the γ that were measured, so that the choice can be held against them.
        within = replace(taus, by_gamma=taus.by_gamma[: max(here) + 1])
        advised = best(costs, within, batch, statistics.mean(one.context for one in here.values())).gamma
        if advised in here:
            share = here[advised].tokens_per_second / fastest.tokens_per_second
            choices.append(Choice(batch, advised, fastest.gamma, share))
    speedups = [abs(e) for row in rows if row.measured.gamma > 0 and (e := row.speedup_error) is not None]
    return Comparison(
        rows=tuple(rows),
        choices=tuple(choices),
        median_error=statistics.median(abs(row.error) for row in rows),
        median_cost_error=statistics.median(abs(row.cost_error) for row in rows),
        median_speedup_error=statistics.median(speedups) if speedups else None,
    )
