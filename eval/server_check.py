"""Is what the server does what we measured? Text, and acceptance counters to the last count.

A head that is exported wrongly still serves the right text, so the counters decide: in fp32 they must be equal round
by round, in half precision the server's acceptance length must lie inside our interval. Wrong exports made on purpose
(`eval.damage`) are the control of this check. It knows no head and no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from eval.acceptance import VllmCounters, vllm_counters
from eval.bootstrap import FloatArray, cluster_intervals
from eval.decode import Request
from eval.server import Limits, Server, ServerRun, ask
from eval.tally import Estimate
from eval.trace import RequestTrace, dump_traces
from heads.artifact import write_atomic

EXACT = ("float32", "float64")
SHOWN = 3  # requests named in a complaint
NOTHING = "–"


@dataclass(frozen=True)
class Comparison:
    """One number format. ours, server: the counters of both; interval: of our acceptance length.

    same_text: requests whose text is the same with and without speculation on the server; complaints: what is wrong,
    a sentence each, empty when all is well.
    """

    dtype: str
    requests: int
    same_text: int
    same_as_ours: int
    ours: VllmCounters
    server: VllmCounters
    interval: Estimate
    complaints: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ours": self.ours.to_json(), "server": self.server.to_json()}


def compare(
    dtype: str,
    ours: Sequence[RequestTrace],
    plain: Sequence[RequestTrace],
    server: Sequence[RequestTrace],
    gamma: int,
) -> Comparison:
    """Our decoder's traces against the server's without (`plain`) and with (`server`) the head, in the same order."""
    interval = acceptance_length(ours)
    own, theirs = vllm_counters(ours, gamma=gamma), vllm_counters(server, gamma=gamma)
    if dtype in EXACT:
        complaints = _different_texts(plain, server) + _different_counters(own, theirs, ours, server)
    else:
        complaints = _outside(own, theirs, interval)
    return Comparison(
        dtype=dtype,
        requests=len(server),
        same_text=_same(plain, server),
        same_as_ours=_same(ours, server),
        ours=own,
        server=theirs,
        interval=interval,
        complaints=complaints,
    )


def check(
    server: Server,
    drafts: Mapping[str, Path],
    requests: Sequence[Request],
    ours: Sequence[RequestTrace],
    limits: Limits,
    *,
    gamma: int,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Comparison]:
    """Start the server without a draft and then with each of `drafts`, and compare.

    Our traces are laid beside the server's answers in `folder`; `say` is told of every start.
    """
    write_atomic(folder / f"{server.dtype}-ours.jsonl", dump_traces(ours))

    def answers(name: str, which: Server) -> ServerRun:
        answer = ask(which, requests, limits, folder=folder, name=f"{server.dtype}-{name}")
        seconds = f"{answer.load_seconds:.0f} s to load, {answer.generate_seconds:.0f} s to answer"
        say(f"vLLM {answer.version}, {server.dtype}, {name}: {seconds}")
        return answer

    plain = answers("plain", server)
    result = {}
    for name, draft in drafts.items():
        drafting = replace(server, draft=str(draft.resolve()), gamma=gamma)
        result[name] = compare(server.dtype, ours, plain.traces, answers(name, drafting).traces, gamma)
    return result


def to_lines(comparison: Comparison) -> list[str]:
    """What was found, for a person."""
    of, interval = comparison.requests, comparison.interval
    low_high = "" if interval.low is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
    lines = [
        f"text with the head = without it: {comparison.same_text} of {of}; = ours: {comparison.same_as_ours} of {of}",
        f"we count       {_counters(comparison.ours)}{low_high}",
        f"vLLM counts    {_counters(comparison.server)}",
    ]
    return lines + [f"MISMATCH: {complaint}" for complaint in comparison.complaints]


def overview(checks: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each run and number format out of the manifests of its check, for a console of 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="Checked in vLLM", title_justify="left", title_style="bold")
    for title in ("run", "method", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("same text", "ours", "vLLM", "control", "seconds", ""):
        table.add_column(title, justify="right")
    for run, manifest in checks.items():
        for dtype, found in manifest["found"].items():
            head, control = found["head"], found.get("control")
            table.add_row(
                run,
                manifest["method"],
                dtype,
                f"{head['same_text']}/{head['requests']}",
                *(f"{head[side]['acceptance_length']:.3f}" for side in ("ours", "server")),
                NOTHING if control is None else "noticed" if control["complaints"] else "MISSED",
                str(manifest["seconds"]),
                "passed" if manifest["passed"] else "FAILED",
            )
    return table


def acceptance_length(traces: Sequence[RequestTrace]) -> Estimate:
    """vLLM's acceptance length, 1 + accepted / drafts before the text is cut, with an interval over requests."""
    drafted = [[r for r in trace.rounds if r.proposed] for trace in traces]
    sums_R2 = np.array([[sum(r.server_accepted for r in rounds), len(rounds)] for rounds in drafted], dtype=np.float64)

    def statistic(weights_BR: FloatArray) -> FloatArray:
        accepted_B, rounds_B = (weights_BR @ sums_R2).T
        lengths_B1: FloatArray = (1 + accepted_B / np.maximum(rounds_B, 1))[:, None]
        return lengths_B1

    value = float(statistic(np.ones((1, len(traces))))[0, 0])
    bounds = cluster_intervals(statistic, clusters=len(traces))
    return Estimate(value) if bounds is None else Estimate(value, float(bounds[0][0]), float(bounds[1][0]))


def _same(one: Sequence[RequestTrace], other: Sequence[RequestTrace]) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(one, other, strict=True))


def _different_texts(plain: Sequence[RequestTrace], server: Sequence[RequestTrace]) -> list[str]:
    pairs = [(a, b) for a, b in zip(plain, server, strict=True) if a.tokens != b.tokens]
    if not pairs:
        return []
    named = ", ".join(f"{a.request_id} from token {_first_difference(a.tokens, b.tokens)}" for a, b in pairs[:SHOWN])
    return [f"the server's text with the head differs from its text without it in {len(pairs)} requests: {named}"]


def _different_counters(
    own: VllmCounters, theirs: VllmCounters, ours: Sequence[RequestTrace], server: Sequence[RequestTrace]
) -> list[str]:
    """Nothing when every round of every request was counted alike; a request's own differences can cancel out."""
    pairs = [(a, b) for a, b in zip(ours, server, strict=True) if _accepted(a) != _accepted(b)]
    if not pairs and own == theirs:
        return []
    named = "; ".join(
        f"{a.request_id} from round {_first_difference(_accepted(a), _accepted(b))}" for a, b in pairs[:SHOWN]
    )
    return [
        f"we count {_counters(own)} but the server counts {_counters(theirs)}; {len(pairs)} of {len(ours)} requests "
        f"differ: {named}"
    ]


def _outside(own: VllmCounters, theirs: VllmCounters, interval: Estimate) -> list[str]:
    if interval.low is None or interval.high is None:
        return ["there are too few requests for an interval"]
    if interval.low <= theirs.acceptance_length <= interval.high:
        return []
    return [
        f"we count {_counters(own)}, interval [{interval.low:.3f}, {interval.high:.3f}], but the server counts "
        f"{_counters(theirs)}"
    ]


def _accepted(trace: RequestTrace) -> list[int]:
    return [r.server_accepted for r in trace.rounds]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def _counters(counters: VllmCounters) -> str:
    return (
        f"{counters.num_accepted_tokens} accepted in {counters.num_drafts} drafts, per position "
        f"{list(counters.accepted_per_pos)}, acceptance length {counters.acceptance_length:.3f}"
    )
