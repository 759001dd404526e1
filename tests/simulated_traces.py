"""Seeded traces with a known truth, for the tests of the numbers and of the report. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from eval.tally import Tally
from eval.trace import RequestTrace, Round

PLAIN_SECONDS = 0.02  # a token without a draft


def formula_tokens_per_round(alpha: float, gamma: int) -> float:
    """1 + α + … + α^γ."""
    return float(np.sum(np.power(float(alpha), np.arange(gamma + 1))))


def iid_rounds(rng: np.random.Generator, *, alpha: float, gamma: int, count: int) -> list[Round]:
    """`count` complete rounds; every draft token is accepted with probability alpha, independently."""
    accepted = np.minimum(rng.geometric(1 - alpha, size=count) - 1, gamma) if alpha < 1 else [gamma] * count
    return [Round(gamma, int(a)) for a in accepted]


def trace_of(
    rounds: Sequence[Round],
    *,
    request_id: str = "r0",
    slice_name: str = "chat",
    tokens: Sequence[int] | None = None,
    seconds: float | None = None,
    finish: str = "length",
    seed: int = 0,
) -> RequestTrace:
    """A request with these rounds; one token more than they emit, out of the prompt's forward."""
    length = 1 + sum(r.emitted for r in rounds)
    if tokens is None:
        tokens = np.random.default_rng(seed).integers(0, 10_000, size=length).tolist()
    spent = seconds if seconds is not None else PLAIN_SECONDS * 1.2 * (len(rounds) + 1)
    return RequestTrace(request_id, slice_name, 12, list(tokens), list(rounds), finish, spent)


def plain_of(trace: RequestTrace) -> RequestTrace:
    """The same text without a draft."""
    rounds = [Round(0, 0)] * (len(trace.tokens) - 1)
    seconds = PLAIN_SECONDS * len(trace.tokens)
    return RequestTrace(trace.request_id, trace.slice, trace.prompt_length, trace.tokens, rounds, trace.finish, seconds)


def walk_text(right_at: Sequence[bool], *, gamma: int) -> list[Round]:
    """Rounds over a text of which it is known at which positions the draft would be right.

    Position 0 is emitted by the prompt's forward; the last round is cut where its drafts reach the end.
    """
    rounds, at, length = [], 1, len(right_at)
    while at < length:
        accepted = 0
        while accepted < gamma and at + accepted < length and right_at[at + accepted]:
            accepted += 1
        cut = at + accepted >= length
        rounds.append(Round(gamma, accepted, cut=cut))
        at += rounds[-1].emitted
    return rounds


def correlated_text(rng: np.random.Generator, *, length: int, memory: float, spread: float, level: float) -> np.ndarray:
    """Acceptance probabilities along a text whose difficulty drifts: a logistic autoregression."""
    noise = rng.standard_normal(length) * np.sqrt(1 - memory**2)
    state = np.empty(length)
    state[0] = rng.standard_normal()
    for t in range(1, length):
        state[t] = memory * state[t - 1] + noise[t]
    return 1 / (1 + np.exp(-(level + spread * state)))


def clustered_requests(
    rng: np.random.Generator, *, requests: int, rounds: int, gamma: int, shape: tuple[float, float]
) -> Iterator[RequestTrace]:
    """Every request has an α of its own, drawn from a Beta; inside it acceptances are independent."""
    for index, alpha in enumerate(rng.beta(*shape, size=requests)):
        own = iid_rounds(rng, alpha=float(alpha), gamma=gamma, count=rounds)
        yield trace_of(own, request_id=f"r{index}", slice_name=("chat", "code", "tools")[index % 3], seed=index)


def clustered_tallies(
    rng: np.random.Generator, *, runs: int, requests: int, rounds: int, gamma: int, shape: tuple[float, float]
) -> Iterator[Tally]:
    """The counts of as many evaluations of `clustered_requests`, without their traces."""
    for _ in range(runs):
        alpha_R1 = rng.beta(*shape, size=(requests, 1))
        yield tally_of(np.minimum(rng.geometric(1 - alpha_R1, size=(requests, rounds)) - 1, gamma), gamma=gamma)


def tally_of(accepted_RN: np.ndarray, *, gamma: int) -> Tally:
    """Counts of requests whose complete rounds proposed γ tokens each and accepted these."""
    depth_K = np.arange(1, gamma + 1)
    accepted_RK = (accepted_RN[..., None] >= depth_K).sum(1).astype(float)
    examined_RK = (np.minimum(accepted_RN + 1, gamma)[..., None] >= depth_K).sum(1).astype(float)
    requests, rounds = accepted_RN.shape
    lengths_RN = np.zeros((requests, gamma + 1))
    lengths_RN[:, gamma] = rounds
    at_risk_RK = (accepted_RN[..., None] + 1 >= depth_K).sum(1).astype(float)
    return Tally(accepted_RK, examined_RK, at_risk_RK, lengths_RN, *(np.zeros((requests, n)) for n in (2, 8, 2, 4)))
