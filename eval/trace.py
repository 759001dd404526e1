"""What one decoded request leaves behind: its text and, round by round, what was proposed and accepted.

Values only. This module does not know how a request was decoded, nor any number computed from a trace:
those are defined once, in `eval.acceptance`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FINISHES = ("stop", "length")


@dataclass(frozen=True)
class Round:
    """One forward of the target over a proposal; it emits the accepted drafts and one token of its own.

    proposed  draft tokens the target judged in this round; 0 where nothing was proposed.
    accepted  of these, the accepted ones *that are in the text*; never the target's own token.
    cut       the text ended inside the accepted drafts (end of text among them, or the length limit), so that
              the target's own token is not in the text. A round whose own token is the last of the text is
              complete, not cut. Only the last round of a request can be cut.
    beta      T > 0: Σ min(p, q) at each examined position, in order; empty for greedy decoding.
    verified  accepted drafts before the text was cut, which is what a server counts; None: the same.
    tree      the proposal was no chain; `proposed` is then how deep it could have been followed along this path.
    dropped   the drafted tokens of a chain that did not get into the text: the rejected one and all behind it. Empty in
              a cut round and for trees; only shown, no number is computed from it.
    """

    proposed: int
    accepted: int
    cut: bool = False
    beta: tuple[float, ...] = ()
    verified: int | None = None
    tree: bool = False
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.accepted <= self.server_accepted <= self.proposed, self
        assert self.accepted > 0 or not self.cut, f"a cut round keeps at least one draft: {self}"
        assert self.cut or self.server_accepted == self.accepted, f"only a cut round loses drafts: {self}"
        assert len(self.beta) in (0, self.examined), f"one beta per examined position: {self}"
        assert len(self.dropped) in (0, self.proposed - self.accepted), f"one token per draft that was dropped: {self}"

    @property
    def examined(self) -> int:
        """Positions judged inside the text: the accepted ones, plus the rejected one of a complete round."""
        return self.accepted + int(not self.cut and self.accepted < self.proposed)

    @property
    def emitted(self) -> int:
        """Tokens this round added to the text."""
        return self.accepted + int(not self.cut)

    @property
    def server_accepted(self) -> int:
        return self.accepted if self.verified is None else self.verified


@dataclass(frozen=True)
class RequestTrace:
    """One request, decoded. `tokens`: the generated text without the prompt, end token included.

    seconds: wall clock of the whole request; prompt_seconds: of these, what the target's forward over the prompt took;
    draft_seconds: what the proposer took in the rounds after the first, in which it also reads the prompt.
    """

    request_id: str
    slice: str
    prompt_length: int
    tokens: list[int]
    rounds: list[Round]
    finish: str
    seconds: float
    prompt_seconds: float = 0.0
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.finish in FINISHES, self.finish
        assert not any(r.cut for r in self.rounds[:-1]), f"{self.request_id}: a round before the last is cut"
        # The first token comes either out of the prompt's own forward (no round) or out of the first round.
        outside = len(self.tokens) - sum(r.emitted for r in self.rounds)
        assert outside in (0, 1), f"{self.request_id}: {outside} tokens belong to no round"

    @property
    def decoding_seconds(self) -> float:
        """Wall clock of the rounds: everything after the prompt's own forward."""
        return self.seconds - self.prompt_seconds

    @property
    def decoded_tokens(self) -> int:
        """Tokens that the rounds added to the text."""
        return sum(r.emitted for r in self.rounds)

    @property
    def drafted_tokens(self) -> int:
        """Tokens that `draft_seconds` were spent on."""
        return sum(r.proposed for r in self.rounds[1:])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RequestTrace:
        """The inverse of `to_json`, from parsed JSON."""
        missing = [f.name for f in fields(cls) if f.name not in value]
        if missing:
            raise ValueError(f"A trace lacks {', '.join(missing)}: written by another version; evaluate again.")
        # What was dropped is only shown: traces from before it was kept are as good.
        lists = [{"beta": tuple(r["beta"]), "dropped": tuple(r.get("dropped", ()))} for r in value["rounds"]]
        rounds = [Round(**{**r, **own}) for r, own in zip(value["rounds"], lists, strict=True)]
        return cls(**{**{f.name: value[f.name] for f in fields(cls)}, "rounds": rounds})


def dump_traces(traces: Iterable[RequestTrace]) -> str:
    """JSON lines, one request a line."""
    return "".join(json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in traces)


def parse_traces(text: str) -> Sequence[RequestTrace]:
    """The inverse of `dump_traces`; a line that is not complete JSON is an error that names it."""
    traces = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also split inside strings
        if not line:
            continue
        try:
            traces.append(RequestTrace.from_json(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of the traces is no JSON; delete it, evaluate again.") from error
    return traces


def read_traces(path: Path) -> tuple[dict[str, Any], Sequence[RequestTrace]] | None:
    """A file of one line of facts and then traces; None where it is cut off, damaged or of another version."""
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        facts = json.loads(first)
        return (facts, parse_traces(rest)) if isinstance(facts, dict) else None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError):
        return None
