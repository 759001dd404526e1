"""The exported head behind a real server's API: one request at a time, many at once, a restart, and a clean end.

`eval.server_check` asks the engine inside one process; here the server is started with the model card's command and
everything goes over HTTP, as its users will have it. Each finding is a line of its own that can fail. In fp32, one at
a time, every request's counters must be ours; at once, the text may leave ours only at a tie of two logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.acceptance import VllmCounters, vllm_counters
from eval.api import Answer, ServerApi
from eval.api_process import Ending, running
from eval.decode import Request
from eval.exactness import WIDE, Divergence
from eval.sampling import Sampling
from eval.served import Served, serve, speculating
from eval.server import Limits, Server, longest_text
from eval.server_check import acceptance_length
from eval.trace import RequestTrace
from heads.artifact import UserError

AGAIN = 4  # requests that are repeated after the restart
SHOWN = 3  # requests named in a finding
LookCloser = Callable[[Sequence[Request], Sequence[list[int]], Sequence[list[int]]], list[Divergence]]
"""(requests, texts, truths) -> where each text leaves its truth, with the gap of the two logits there."""


@dataclass(frozen=True)
class Finding:
    """One line of the check: what was looked at, whether it is as it must be, and what was found."""

    name: str
    passed: bool
    found: str

    @property
    def line(self) -> str:
        return f"{self.name}: {'' if self.passed else 'MISMATCH: '}{self.found}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_api(
    server: Server,
    requests: Sequence[Request],
    ours: Sequence[RequestTrace],
    limits: Limits,
    *,
    at_once: int,
    folder: Path,
    look_closer: LookCloser,
    say: Callable[[str], None],
) -> list[Finding]:
    """Start the server twice and ask it over HTTP. server: with the draft, its `batch` at least `at_once`; ours: our
    decoder's traces of the same requests in the same number format."""
    longest = longest_text(server, requests, limits)
    findings: list[Finding] = []

    def found(*new: Finding) -> None:
        findings.extend(new)
        for one in new:
            say(one.line)

    with running(server, max_model_len=longest, log=folder / "api-1.log") as first:
        say(f"the model card's command answers at {first.url} after {first.load_seconds:.0f} s")
        with ServerApi(first.url, timeout=server.timeout, at_once=at_once) as api:
            alone = serve(api, requests, Sampling(), limits.max_new_tokens, at_once=1)
            found(*one_at_a_time(alone, ours))
            together = serve(api, requests, Sampling(), limits.max_new_tokens, at_once=at_once)
            found(*many_at_once(together, ours, look_closer))
        port = first.port
        ending = first.stop()
    found(ended(ending, "stopped"))
    with running(server, max_model_len=longest, log=folder / "api-2.log", port=port) as second:
        with ServerApi(second.url, timeout=server.timeout) as api:
            start = speculating(api).counters
            assert start is not None
            again = serve(api, requests[:AGAIN], Sampling(), limits.max_new_tokens, at_once=1)
        found(restarted(start, again, alone, second.load_seconds), ended(second.stop(), "stopped again"))
    return findings


def one_at_a_time(served: Served, ours: Sequence[RequestTrace]) -> list[Finding]:
    """Text and counters of each request must be ours."""
    assert served.each is not None
    gamma = len(served.total.accepted_per_pos)
    texts = [a.request.request_id for a, b in zip(served.answers, ours, strict=True) if ids_of(a) != b.tokens]
    counted = [
        trace.request_id
        for own, trace in zip(served.each, ours, strict=True)
        if own != vllm_counters([trace], gamma=gamma)
    ]
    expected = vllm_counters(ours, gamma=gamma)
    of = len(ours)
    return [
        Finding("one at a time, text", not texts, f"{of - len(texts)} of {of} are ours{_named(texts)}"),
        Finding(
            "one at a time, counters",
            not counted,
            f"{of - len(counted)} of {of} requests are counted as ours{_named(counted)}; in all "
            f"{_short(served.total)}, ours {_short(expected)}",
        ),
    ]


def many_at_once(served: Served, ours: Sequence[RequestTrace], look_closer: LookCloser) -> list[Finding]:
    """Text but for ties, and the acceptance length inside our interval."""
    texts, truths = [ids_of(answer) for answer in served.answers], [trace.tokens for trace in ours]
    left = look_closer([answer.request for answer in served.answers], texts, truths)
    ties = [one for one in left if one.gap is not None and one.gap < WIDE["float32"]]
    of, listed = len(ours), "".join(f"; {_place(one)}" for one in left)
    interval, length = acceptance_length(ours), served.total.acceptance_length
    low, high = interval.low, interval.high
    inside = low is not None and high is not None and low <= length <= high
    return [
        Finding(
            f"{served.at_once} at once, text",
            len(ties) == len(left),
            f"{of - len(left)} of {of} are ours, {len(ties)} leave it at a tie{listed}",
        ),
        Finding(
            f"{served.at_once} at once, counters",
            inside,
            f"acceptance length {length:.3f}, ours {interval.value:.3f} "
            + ("without an interval" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"),
        ),
    ]


def restarted(start: VllmCounters, again: Served, before: Served, seconds: float) -> Finding:
    """Whether the second server begins at zero, and answers and counts as the first one did."""
    assert again.each is not None and before.each is not None
    zero = start == VllmCounters(0, 0, 0, (0,) * len(start.accepted_per_pos))
    pairs = zip(again.answers, again.each, before.answers, before.each, strict=False)
    other = [a.request.request_id for a, mine, b, theirs in pairs if ids_of(a) != ids_of(b) or mine != theirs]
    of = len(again.answers)
    return Finding(
        "started again",
        zero and not other,
        f"after {seconds:.0f} s, counters {'at zero' if zero else f'at {_short(start)}, not at zero'}, "
        f"{of - len(other)} of {of} requests as before{_named(other)}",
    )


def ended(ending: Ending, name: str) -> Finding:
    """Whether a server ended by itself when it was told to, with all of its processes."""
    how = "had to be killed" if ending.code is None else f"ended with code {ending.code}"
    port = "its port is free" if ending.port_free else "its port is still taken"
    found = f"{how} {ending.seconds:.0f} s after SIGTERM, {ending.left} of its processes left, {port}"
    return Finding(name, ending.clean, found)


def ids_of(answer: Answer) -> list[int]:
    """The tokens of an answer. Raises UserError where the server does not tell them."""
    if answer.ids is None:
        raise UserError("This server does not return token ids (return_token_ids); vLLM 0.32 does.")
    return list(answer.ids)


def _named(requests: Sequence[str]) -> str:
    return f" (not {', '.join(requests[:SHOWN])}{', …' if len(requests) > SHOWN else ''})" if requests else ""


def _place(one: Divergence) -> str:
    gap = "of another length" if one.gap is None else f"gap {one.gap:.2g}"
    return f"{one.request} from token {one.position} ({one.token} for {one.other}, {gap})"


def _short(counters: VllmCounters) -> str:
    return f"{counters.num_drafts} drafts, accepted {list(counters.accepted_per_pos)}"
