"""Sample texts for the report: which token came from the draft, which from the target, and what was thrown away.

Plain values out of traces. How token ids become text is handed in; this module knows no tokenizer and computes no
number of its own (see `eval.acceptance`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.acceptance import measure
from eval.report import Run
from eval.trace import RequestTrace

Decode = Callable[[Sequence[int]], str]

MOST = 6  # samples shown
LONGEST = 160  # tokens of a text that are shown
PROMPT = 360  # characters of a prompt's end that are shown
_BEFORE = 8  # tokens before a text that decide how its first one is written


def sample_texts(run: Run, prompts: Mapping[str, Sequence[int]], decode: Decode) -> list[dict[str, Any]]:
    """The section `samples` of `report.json`: of each slice the text in the middle of it, by tokens per round, then the
    one of all with the fewest.

    prompts: the prompt's ids of each request; decode: ids to text, special tokens included. Each sample has weakest
    (whether it is the one with the fewest), request, slice, prompt (the end of it), tokens, rounds, tokens_per_round,
    complete (whether all of it is shown) and pieces, one for each round in order: draft (accepted tokens), dropped
    (drafted, not in the text), own (the target's token, null in a cut round). The first piece is the token that the
    prompt's own pass gave.
    """
    ranked = sorted((t for t in run.traces if t.rounds), key=lambda t: (_tokens_per_round(t, run.gamma), t.request_id))
    chosen: dict[str, RequestTrace] = {}
    for name in dict.fromkeys(t.slice for t in run.traces):
        if same := [t for t in ranked if t.slice == name]:
            chosen[same[len(same) // 2].request_id] = same[len(same) // 2]
    chosen = dict(list(chosen.items())[: MOST - 1])
    for trace in ranked[:1]:
        chosen.setdefault(trace.request_id, trace)
    weakest = ranked[0].request_id if ranked else None
    return [
        {"weakest": name == weakest, **_sample(trace, run.gamma, prompts.get(name, ()), decode)}
        for name, trace in chosen.items()
    ]


def _tokens_per_round(trace: RequestTrace, gamma: int) -> float:
    value = measure([trace], gamma=gamma, resamples=0).tokens_per_round_text
    assert value is not None, "a request without rounds is not ranked"
    return value


def _sample(trace: RequestTrace, gamma: int, prompt: Sequence[int], decode: Decode) -> dict[str, Any]:
    text = decode(prompt).strip()
    pieces = _pieces(trace, list(prompt[-_BEFORE:]), decode)
    return {
        "request": trace.request_id,
        "slice": trace.slice,
        "prompt": text if len(text) <= PROMPT else "…" + text[-PROMPT:],
        "tokens": len(trace.tokens),
        "rounds": len(trace.rounds),
        "tokens_per_round": _tokens_per_round(trace, gamma),
        "complete": len(trace.tokens) <= LONGEST,
        "pieces": pieces,
    }


def _pieces(trace: RequestTrace, before: list[int], decode: Decode) -> list[dict[str, Any]]:
    """What each round added to the text and what it threw away, as text per token."""
    at = len(trace.tokens) - sum(r.emitted for r in trace.rounds)
    texts = _token_texts(before, trace.tokens[:LONGEST], decode)
    pieces: list[dict[str, Any]] = [{"draft": [], "dropped": [], "own": text} for text in texts[:at]]
    for one in trace.rounds:
        if at >= len(texts):
            break
        cut = at + one.accepted
        dropped = _token_texts([*before, *trace.tokens[:cut]][-_BEFORE:], one.dropped, decode)
        own = None if one.cut or cut >= len(texts) else texts[cut]
        pieces.append({"draft": texts[at:cut], "dropped": dropped, "own": own})
        at += one.emitted
    return pieces


def _token_texts(before: Sequence[int], tokens: Sequence[int], decode: Decode) -> list[str]:
    """What each token adds to the text. A character made of several tokens stands at its last one."""
    ids, known, texts = list(before), decode(before) if before else "", []
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
            texts.append("")
        elif text.startswith(known):
            texts.append(text[len(known) :])
            known = text
        else:  # a tokenizer that writes a token otherwise at the end of a text than within it
            texts.append(decode([token]))
            known = text
    return texts
