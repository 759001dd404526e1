"""Our numbers out of a server's counters: requests sent to a running server, and α, α_k, S(k), τ of what it counted.

The definitions are those of `eval.acceptance`. A server counts a round before it cuts the text, so no round is
censored here: position k was examined in every round whose first k − 1 drafts were accepted. Intervals need counts for
each request: of the answers themselves (vLLM's `--per-request-spec-decode-metrics`), or of `/metrics` read after each
one, when they are sent one at a time. Sent together to a server that only counts in sum, there is no interval.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from eval.acceptance import VllmCounters
from eval.api import Answer, Reading, ServerApi
from eval.bootstrap import MIN_CLUSTERS, RESAMPLES
from eval.decode import Request
from eval.report_table import number, percent, with_interval
from eval.sampling import Sampling
from eval.tally import Estimate, Tally, estimates, numbers, weigh
from heads.artifact import UserError

NUMBERS = (
    *("alpha", "alpha_macro", "alpha_by_position", "survival", "tokens_per_round", "tokens_per_round_macro"),
    *("expected_tokens_per_round", "formula_gap"),
)
_OF_FULL_DRAFTS = ("alpha", "alpha_macro", "alpha_by_position", "expected_tokens_per_round", "formula_gap")
_LISTS = ("alpha_by_position", "survival")
SOURCES = {
    "answers": "counts of each request out of its answer; intervals are resampled by request",
    "one at a time": "counts of each request out of /metrics after it, as they were sent one at a time; intervals are "
    "resampled by request",
    "sum": "no interval: the server only counts in sum; start it with --per-request-spec-decode-metrics summary, or "
    "leave server.at_once=null",
}


@dataclass(frozen=True)
class Served:
    """Requests that a server has answered under one sampling. total: what `/metrics` counted; each: the same by request
    (None where it is not known); source: a key of SOURCES; seconds: wall clock of all."""

    sampling: Sampling
    answers: list[Answer]
    total: VllmCounters
    each: list[VllmCounters] | None
    source: str
    at_once: int
    seconds: float


def speculating(api: ServerApi) -> Reading:
    """The counters as they are. Raises UserError where the server does not speculate."""
    reading = api.reading()
    if reading.counters is None:
        raise UserError(
            f"The server at {api.url} does not speculate: its /metrics has no vllm:spec_decode_ counters; start it "
            f"with the --speculative-config of the model card."
        )
    return reading


def counts_itself(api: ServerApi, request: Request) -> bool:
    """Whether the answers of this server tell what was accepted of their own drafts; asks for four tokens."""
    before = api.reading()
    answer = api.complete(request, Sampling(), 4)
    api.settled(before, answer.tokens)
    return answer.counted is not None


def serve(
    api: ServerApi,
    requests: Sequence[Request],
    sampling: Sampling,
    max_new_tokens: int,
    *,
    at_once: int,
    seed: int = 0,
    on_done: Callable[[int], None] = lambda tokens: None,
) -> Served:
    """Send all requests, `at_once` at a time; on_done is told the length of each answer.

    Above T = 0 each request has a seed of its own. Raises UserError when the server fails, does not speculate, or has
    counted other requests too.
    """
    before = first = speculating(api)
    started = time.monotonic()
    read: list[VllmCounters] = []
    telling = threading.Lock()

    def ask(index: int) -> Answer:
        own = None if sampling.greedy else seed + index
        answer = api.complete(requests[index], sampling, max_new_tokens, seed=own)
        with telling:
            on_done(answer.tokens)
        return answer

    if at_once == 1:
        answers = []
        for index in range(len(requests)):
            answers.append(ask(index))
            after = api.settled(before, answers[-1].tokens)
            read.append(_between(before, after))
            before = after
        seconds = time.monotonic() - started
    else:
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(ask, range(len(requests))))
        seconds = time.monotonic() - started
        before = api.settled(first, sum(answer.tokens for answer in answers))
    own_counts = [answer.counted for answer in answers if answer.counted is not None]
    each, source = (read, "one at a time") if read else (None, "sum")
    if not read and len(own_counts) == len(answers):
        each, source = own_counts, "answers"
    total = _between(first, before)
    if each is not None and added(each, len(total.accepted_per_pos)) != total:
        raise UserError(
            f"The server's counters {total.to_json()} are not the sum of those of its answers; it answered others "
            f"meanwhile, or counts in another way than vLLM 0.32."
        )
    return Served(sampling, answers, total, each, source, at_once, seconds)


def rows_of(served: Served, *, resamples: int = RESAMPLES) -> list[dict[str, Any]]:
    """The numbers over all requests and, where each is counted for itself, of each slice."""
    whole = [served.total] if served.each is None else served.each
    rows = [_row(served, "all", served.answers, whole, resamples)]
    if served.each is not None:
        for name in sorted({answer.request.slice for answer in served.answers}):
            chosen = [i for i, answer in enumerate(served.answers) if answer.request.slice == name]
            own = [served.answers[i] for i in chosen]
            rows.append(_row(served, name, own, [served.each[i] for i in chosen], resamples))
    return rows


def added(each: Sequence[VllmCounters], gamma: int) -> VllmCounters:
    """The sum of several servers' or requests' counters; γ positions."""
    return VllmCounters(
        sum(one.num_drafts for one in each),
        sum(one.num_draft_tokens for one in each),
        sum(one.num_accepted_tokens for one in each),
        tuple(sum(one.accepted_per_pos[k] for one in each if k < len(one.accepted_per_pos)) for k in range(gamma)),
    )


def measured(each: Sequence[VllmCounters], gamma: int, *, resamples: int = RESAMPLES) -> dict[str, list[Estimate]]:
    """Every number of NUMBERS, with intervals over requests. Where a round proposed fewer than γ tokens, the counters
    do not tell what was examined: α and the formula are then unknown."""
    sums = to_tally(each, gamma)
    found = estimates(lambda weights_BR: numbers(weigh(sums, weights_BR)), clusters=len(each), resamples=resamples)
    full = all(one.num_draft_tokens == gamma * one.num_drafts for one in each)
    unknown = () if full else _OF_FULL_DRAFTS
    return {name: [Estimate(None)] * len(found[name]) if name in unknown else found[name] for name in NUMBERS}


def to_tally(each: Sequence[VllmCounters], gamma: int) -> Tally:
    """The counts of each request as those of traces whose rounds all proposed γ tokens and were not cut."""
    accepted_RK = np.array(
        [[one.accepted_per_pos[k] if k < len(one.accepted_per_pos) else 0 for k in range(gamma)] for one in each],
        dtype=np.float64,
    ).reshape(len(each), gamma)
    rounds_R1 = np.array([[one.num_drafts] for one in each], dtype=np.float64)
    examined_RK = np.concatenate([rounds_R1, accepted_RK[:, :-1]], axis=1)
    lengths_RN = np.concatenate([np.zeros((len(each), gamma)), rounds_R1], axis=1)
    none_R2, none_R8 = np.zeros((len(each), 2)), np.zeros((len(each), 8))
    sums = Tally(accepted_RK, examined_RK, examined_RK, lengths_RN, none_R2, none_R8, none_R2, np.zeros((len(each), 4)))
    own = numbers(sums)
    alpha_R, tau_R = own["alpha"][:, 0], own["tokens_per_round"][:, 0]
    macro = [np.nan_to_num(alpha_R), ~np.isnan(alpha_R), np.nan_to_num(tau_R), ~np.isnan(tau_R)]
    return sums._replace(macro_R4=np.stack(macro, axis=1).astype(np.float64))


def _row(
    served: Served, name: str, answers: Sequence[Answer], each: Sequence[VllmCounters], resamples: int
) -> dict[str, Any]:
    gamma, tokens = len(served.total.accepted_per_pos), sum(answer.tokens for answer in answers)
    counters = added(each, gamma)
    found = measured(each, gamma, resamples=resamples if served.each is not None else 0)
    told: dict[str, Any] = {
        key: [asdict(one) for one in value] if key in _LISTS else asdict(value[0]) for key, value in found.items()
    }
    if served.each is None:  # a mean over requests is none of their sum
        told |= {key: asdict(Estimate(None)) for key in ("alpha_macro", "tokens_per_round_macro")}
    whole = name == "all"
    return {
        "temperature": served.sampling.temperature,
        "top_p": served.sampling.top_p,
        "gamma": gamma,
        "slice": name,
        "requests": len(answers),
        "at_once": served.at_once,
        "rounds": counters.num_drafts,
        "tokens": tokens,
        "seconds": served.seconds if whole else None,
        "tokens_per_second": tokens / served.seconds if whole and served.seconds > 0 else None,
        **told,
        "counted": served.source,
        "vllm_counters": counters.to_json(),
    }


def _between(before: Reading, after: Reading) -> VllmCounters:
    assert before.counters is not None, "speculating() has seen them"
    if after.counters is None:
        raise UserError("The server's speculation counters are gone from /metrics; was it started anew meanwhile?")
    return after.counters.since(before.counters)


def to_table(rows: Sequence[dict[str, Any]]) -> Table:
    """For a console of 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("served", no_wrap=True)
    for name in ("γ", "α", "tokens/round", "formula", "gap", "at once", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        overall = row["slice"] == "all"
        title = "greedy" if row["temperature"] == 0 else f"T = {row['temperature']:g}"
        table.add_row(
            Text(title if overall else f"  {row['slice']}"),
            str(row["gamma"]) if overall else "",
            _short(row["alpha"]),
            _short(row["tokens_per_round"]),
            number(row["expected_tokens_per_round"]["value"]),
            percent(row["formula_gap"]["value"]),
            str(row["at_once"]) if overall else "",
            number(row["tokens_per_second"], 1) if overall else "",
            style="bold" if overall else None,
        )
    return table


def _short(estimate: dict[str, Any]) -> str:
    """Without the comma, and below 1 without the zeros before the point: it has to fit."""
    text = with_interval(estimate).replace(",", "")
    return text.replace("0.", ".") if estimate["value"] is None or estimate["value"] < 1 else text


def no_interval(rows: Sequence[dict[str, Any]]) -> str | None:
    """Why a row over all requests has no interval, where that is so."""
    (row, *_) = rows
    if row["counted"] == "sum":
        return SOURCES["sum"]
    return (
        f"no interval: {row['requests']} requests are below {MIN_CLUSTERS}" if row["requests"] < MIN_CLUSTERS else None
    )
