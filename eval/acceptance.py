"""The numbers of speculative decoding, defined here and nowhere else: α, α_k, S(k), τ, the formula, its gap.

Input: the traces of one proposer at one draft length γ and one temperature. This module does not know models,
tokenizers or files. `DEFINITIONS` says in a sentence each what the reports show.

How rounds enter, exactly:

* A position is *examined* when the target judged a draft token there and the verdict is in the text: every
  accepted one, and the rejected one of a round that has one. Nothing behind a rejection is examined.
* A *cut* round (`Round.cut`: the text ended inside its accepted drafts) enters with the positions examined
  before the cut. Leaving it out would drop the rounds that went well (a long round is likelier to hold the
  end); counting it as short would blame the draft for the end of the text. So α and α_k take its positions as
  they are, and S(k) takes it as right-censored (product-limit estimator): at risk at depth k only up to its
  last examined position. Without cut rounds S(k) is simply the share of rounds with k acceptances. Where every
  round that came to depth k was cut there, nothing is known of S(k) and of τ: they are null, not 0. That
  happens to small slices and to single requests, which the macro mean then leaves out. Cut rounds are also
  counted apart (`rounds_cut`), and the two naive means stand beside τ.
* A proposal shorter than γ (prompt lookup), or none, is a round that ends where it ends. What was not
  proposed is not accepted in S(k) and τ, and not examined in α and α_k; the formula is averaged over the
  proposed lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.bootstrap import MIN_CLUSTERS, RESAMPLES
from eval.tally import Estimate, estimates, nothing_known, numbers, tally, weigh
from eval.trace import RequestTrace

LOOP_MAX_PERIOD = 32
LOOP_MIN_REPEATS = 3
LOOP_MIN_TAIL = 24

DEFINITIONS: dict[str, str] = {
    "round": "One forward of the target: it judges up to gamma draft tokens and adds one token of its own.",
    "beta": "Of one examined draft token, the probability of being accepted: sum(min(p, q)) over the vocabulary; "
    "greedy decoding accepts or does not.",
    "alpha": "Accepted / examined draft tokens, pooled over all rounds (micro). Examined: the target judged "
    "it inside the text, which is every accepted one and the first rejected one of a round.",
    "alpha_macro": "The mean over requests of each request's own alpha: every request weighs the same.",
    "alpha_expected": "Temperature > 0: the mean of sum(min(p, q)) over examined positions, the probability "
    "of acceptance itself; the same quantity as alpha without the noise of the accept draws.",
    "alpha_by_position": "At depth k: accepted / examined, given that all before it were accepted.",
    "teacher_forced": "Acceptance by depth as training counts it: drafts from every place of a finished text, on true "
    "tokens, given that all before were right. Its gap is the decoder's alpha_by_position minus it.",
    "coverage": "The target's probability on tokens the draft can propose: no alpha can be above it. coverage_of_text: "
    "the share of the text's own tokens, the ceiling for greedy decoding.",
    "survival": "S(k): share of rounds whose first k drafts were all accepted (joint, as vLLM's per-position "
    "rate); a round cut by the end of the text is censored there (product-limit estimator), and null where all rounds "
    "that came so far are.",
    "tokens_per_round": "Measured: 1 + S(1) + ... + S(gamma), accepted drafts plus the target's own token; "
    "the mean over rounds where no round is cut; null where some S(k) is. Assumes nothing about independence.",
    "tokens_per_round_macro": "The mean over requests of each request's own tokens per round, where that is known: a "
    "request whose deepest rounds were all cut by its end is left out.",
    "tokens_per_round_uncut": "Mean of accepted + 1 over rounds that are not cut; runs low, because long "
    "rounds are cut more often.",
    "tokens_per_round_text": "Tokens in the text / rounds, cut rounds with what was kept: what these very "
    "texts saved; runs low, the more so the shorter the texts.",
    "expected_tokens_per_round": "The formula (1 - alpha^(gamma+1)) / (1 - alpha) at the pooled alpha "
    "(gamma + 1 at alpha = 1), which assumes independent acceptances; averaged over proposed lengths where "
    "these vary. Not defined for trees.",
    "formula_gap": "Formula / measured - 1: above 0 the formula promises more than the decoder delivers.",
    "interval": "95 % interval by resampling whole requests (cluster bootstrap, percentile, widened for few "
    f"requests); null below {MIN_CLUSTERS} requests or where a resample leaves the number undefined.",
    "speedup": "Tokens per second of decoding, after the prompt's own forward, with the draft / without it: same loop, "
    "same requests, resampled in pairs; where the texts are equal this is seconds without / seconds with.",
    "speedup_with_prompt": "The same over the whole request, the prompt's forward included; it falls towards 1 as "
    "prompts grow and answers shrink.",
    "draft_cost": "Seconds of drafting for one drafted token, settling what was accepted included / seconds of plain "
    "decoding for one token, same requests and same timed run; not the c of costs.json, the slope of a round's cost "
    "over its drafts, which leaves aside what every round costs once. The first round of a request, in which a head "
    "also reads the prompt, does not count. Not defined for trees.",
    "rounds_cut": "Rounds whose accepted drafts hold the end of the text (end token or length limit).",
    "looping_requests": f"Requests whose text ends in a loop of period <= {LOOP_MAX_PERIOD}, over at least "
    f"{LOOP_MIN_REPEATS} periods and {LOOP_MIN_TAIL} tokens (end token aside). Loops inflate alpha.",
    "without_looping": "The same numbers with the looping requests left out.",
    "identical_requests": "Greedy: requests whose text is, token for token, the target's own greedy text.",
}


@dataclass(frozen=True)
class Measurement:
    """Everything measured on one set of traces; `DEFINITIONS` explains each name."""

    requests: int
    rounds: int
    rounds_cut: int
    tokens: int
    proposed: int
    examined: int
    accepted: int
    seconds: float
    tokens_per_second: float | None
    alpha: Estimate
    alpha_macro: Estimate
    alpha_expected: Estimate | None
    alpha_by_position: list[Estimate]
    survival: list[Estimate]
    tokens_per_round: Estimate
    tokens_per_round_macro: Estimate
    tokens_per_round_uncut: float | None
    tokens_per_round_text: float | None
    expected_tokens_per_round: Estimate
    formula_gap: Estimate
    speedup: Estimate | None
    speedup_with_prompt: Estimate | None
    draft_cost: Estimate | None
    paired_requests: int
    paired_equal_texts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class VllmCounters:
    """What vLLM counts for the same rounds: before it cuts the text, and only rounds with a proposal."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]

    def since(self, before: VllmCounters) -> VllmCounters:
        """What was counted after `before`, which the same server had counted then."""
        return VllmCounters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_pos, before.accepted_per_pos, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """vLLM's "mean acceptance length": 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """vLLM's per-position acceptance rates: joint, like S(k)."""
        return tuple(count / max(self.num_drafts, 1) for count in self.accepted_per_pos)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_pos": list(self.accepted_per_pos),
            "acceptance_length": self.acceptance_length,
        }


def vllm_counters(traces: Sequence[RequestTrace], *, gamma: int) -> VllmCounters:
    """The counters vLLM would show after decoding the same requests with the same draft."""
    drafted = [r for t in traces for r in t.rounds if r.proposed]
    return VllmCounters(
        num_drafts=len(drafted),
        num_draft_tokens=sum(r.proposed for r in drafted),
        num_accepted_tokens=sum(r.server_accepted for r in drafted),
        accepted_per_pos=tuple(sum(r.server_accepted > k for r in drafted) for k in range(gamma)),
    )


def is_looping(trace: RequestTrace) -> bool:
    """Whether the text ends in a loop, as `DEFINITIONS` says. The end token is not looked at."""
    tokens = trace.tokens[:-1] if trace.finish == "stop" else trace.tokens
    for period in range(1, LOOP_MAX_PERIOD + 1):
        length = max(LOOP_MIN_REPEATS * period, LOOP_MIN_TAIL)
        tail = tokens[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def requests_for_width(estimate: Estimate, *, requests: int, width: float) -> int | None:
    """Requests needed for an interval this wide in all, if requests vary as measured (width ~ 1/√n)."""
    if estimate.low is None or estimate.high is None:
        return None
    return math.ceil(requests * ((estimate.high - estimate.low) / width) ** 2)


def measure(
    traces: Sequence[RequestTrace],
    *,
    gamma: int,
    plain: Sequence[RequestTrace] = (),
    timed: Sequence[RequestTrace] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Measurement:
    """All numbers of one run.

    plain: the same requests decoded without a draft, for the speed-up; matched by id. timed: the traces whose
    seconds count, where the timing was a run of its own; None: `traces`. `resamples=0` leaves intervals out.
    """
    rounds = [r for t in traces for r in t.rounds]
    uncut = [r for r in rounds if not r.cut]
    trees = any(r.tree for r in rounds)  # their depth depends on what was accepted, which the formula does not know
    clocks = {t.request_id: t for t in (traces if timed is None else timed)}
    twins = {t.request_id: t for t in plain if t.request_id in clocks}
    pairs = {t.request_id: (clocks[t.request_id], twins[t.request_id]) for t in traces if t.request_id in twins}
    clocked = [clocks[t.request_id] for t in traces if t.request_id in clocks]
    seconds = math.fsum(t.seconds for t in clocked)
    got = nothing_known(gamma)
    if traces:
        sums = tally(traces, pairs, gamma)
        got = estimates(
            lambda weights_BR: numbers(weigh(sums, weights_BR)), clusters=len(traces), resamples=resamples, seed=seed
        )
    return Measurement(
        requests=len(traces),
        rounds=len(rounds),
        rounds_cut=len(rounds) - len(uncut),
        tokens=sum(len(t.tokens) for t in traces),
        proposed=sum(r.proposed for r in rounds),
        examined=sum(r.examined for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        seconds=seconds,
        tokens_per_second=sum(len(t.tokens) for t in clocked) / seconds if seconds > 0 else None,
        alpha=got["alpha"][0],
        alpha_macro=got["alpha_macro"][0],
        alpha_expected=got["alpha_expected"][0] if any(r.beta for r in rounds) else None,
        alpha_by_position=got["alpha_by_position"],
        survival=got["survival"],
        tokens_per_round=got["tokens_per_round"][0],
        tokens_per_round_macro=got["tokens_per_round_macro"][0],
        tokens_per_round_uncut=sum(r.emitted for r in uncut) / len(uncut) if uncut else None,
        tokens_per_round_text=sum(r.emitted for r in rounds) / len(rounds) if rounds else None,
        expected_tokens_per_round=Estimate(None) if trees else got["expected_tokens_per_round"][0],
        formula_gap=Estimate(None) if trees else got["formula_gap"][0],
        speedup=got["speedup"][0] if pairs else None,
        speedup_with_prompt=got["speedup_with_prompt"][0] if pairs else None,
        draft_cost=got["draft_cost"][0] if pairs and not trees else None,
        paired_requests=len(pairs),
        paired_equal_texts=sum(drafted.tokens == alone.tokens for drafted, alone in pairs.values()),
    )
