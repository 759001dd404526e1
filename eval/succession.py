"""Whether a new head takes the place of the last one: decided by tokens per round over the same requests, in pairs.

The last head stays unless the interval of the difference lies above zero: a refresh that may have made nothing better
is not worth a deployment. Definitions are those of `eval.acceptance` and `eval.paired`; this module knows no file.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from eval.acceptance import measure
from eval.bootstrap import MIN_CLUSTERS, RESAMPLES
from eval.paired import compare_paired
from eval.report import Run
from eval.report_table import number, with_interval

PREVIOUS, CANDIDATE = "previous", "candidate"
PARTS = {"all": "all", "before": "held out before", "new": "of the new traffic"}


def succession(previous: Run, candidate: Run, new: Set[str], *, resamples: int = RESAMPLES) -> dict[str, Any]:
    """The content of `refresh.json` out of the same run of both heads; new: ids of the requests of the new traffic.

    kept: `previous` or `candidate`; verdict: the sentence; gamma, dtype, temperature: of the runs; parts: for all
    requests, those held out before and the new ones, each with tokens_per_round of either head and its difference,
    candidate minus previous (`eval.paired.PairedComparison`), null for a part without requests. Raises UserError
    when the two did not decode the same requests.
    """
    parts = {
        "all": _part(previous, candidate, {trace.request_id for trace in previous.traces}, resamples),
        "before": _part(previous, candidate, {t.request_id for t in previous.traces} - new, resamples),
        "new": _part(previous, candidate, new & {t.request_id for t in previous.traces}, resamples),
    }
    whole = parts["all"]
    assert whole is not None, "runs have requests"
    kept = CANDIDATE if whole["difference"]["better"] else PREVIOUS
    how = {"dtype": candidate.dtype, "temperature": candidate.temperature, "gamma": candidate.gamma}
    return {"format": 1, "verdict": _verdict(whole["difference"]), "kept": kept, **how, "parts": parts}


def _part(previous: Run, candidate: Run, names: Set[str], resamples: int) -> dict[str, Any] | None:
    if not names:
        return None
    # The candidate may have been given others; the comparison refuses those.
    others = {trace.request_id for trace in previous.traces} - names
    one, two = ([t for t in run.traces if t.request_id not in others] for run in (candidate, previous))
    gamma = max(candidate.gamma, previous.gamma)
    found = compare_paired(one, two, gamma=gamma, resamples=resamples)
    sides = {CANDIDATE: measure(one, gamma=gamma, resamples=0), PREVIOUS: measure(two, gamma=gamma, resamples=0)}
    return {
        "tokens_per_round": {name: side.tokens_per_round.value for name, side in sides.items()},
        "difference": found.to_json(),
    }


def _verdict(found: dict[str, Any]) -> str:
    requests, gap = found["requests"], found["tokens_per_round"]
    if gap["low"] is None:
        few = requests < MIN_CLUSTERS
        why = f"takes at least {MIN_CLUSTERS}" if few else "wants more drafts that get as deep as γ; lower eval.gamma"
        return f"The last head stays: {requests} held-out requests tell nothing for certain, as an interval {why}."
    size = f"{with_interval(gap, 3)} tokens a round (new minus last, 95 % interval) on the same {requests} requests"
    if found["better"]:
        return f"The new head is kept: {size}."
    if found["better"] is False:
        return f"The last head stays, as the new one is worse: {size}."
    more = found["requests_to_tell"]
    enough = f"; about {more:,} requests could tell a difference of this size" if more else ""
    return f"The last head stays, as the interval includes zero: {size}{enough}."


def to_markdown(outcome: dict[str, Any]) -> str:
    """The outcome as a page of Markdown."""
    lines = [
        "# Refresh",
        "",
        outcome["verdict"],
        "",
        f"Tokens per round, the target's own included; γ {outcome['gamma']}, {outcome['dtype']}, temperature "
        f"{outcome['temperature']}. The difference is new minus last over the same requests, with its 95 % interval "
        f"(resampled by request); requests are held out from every head of the lineage.",
        "",
        "| held-out requests | number | last head | new head | difference | difference of α |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, part in outcome["parts"].items():
        if part is not None:
            found, of = part["difference"], part["tokens_per_round"]
            values = (number(of[PREVIOUS]), number(of[CANDIDATE]))
            gaps = (with_interval(found[one], 3) for one in ("tokens_per_round", "alpha"))
            lines.append(f"| {' | '.join((PARTS[name], str(found['requests']), *values, *gaps))} |")
    return "\n".join([*lines, ""])
