"""The page's sample texts: accepted drafts, the target's own tokens and rejected drafts, told apart without colour too.

Reads the section `samples` of the report (see `eval.samples`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eval.report_style import STYLE
from eval.report_table import number

BREAK = "↵"
LEGEND = (
    '<ul class="legend tokens">'
    "<li><mark>accepted</mark> guessed by the draft, kept by the target: came for free</li>"
    "<li><b>own</b> written by the target itself, one in every pass</li>"
    "<li><del>rejected</del> guessed by the draft, overruled by the target: not part of the text</li></ul>"
)


def samples(report: Mapping[str, Any]) -> str:
    """All samples under their legend, or nothing."""
    found: Sequence[Mapping[str, Any]] = report["samples"]
    if not found:
        return ""
    words = (
        "Each mark is one token. Of every kind of traffic the text in the middle by tokens per pass is shown, and the "
        "one of all with the fewest. Guesses behind a rejected one were never judged and are left out here."
    )
    if not any(piece["dropped"] for one in found for piece in one["pieces"]):
        words += " Which tokens were rejected was not recorded here."
    return f'<p class="note">{escape(words)}</p>{LEGEND}' + "".join(map(_sample, found))


def samples_page(report: Mapping[str, Any]) -> str:
    """The same as a page of its own; empty where there are no samples."""
    inside = samples(report)
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><main>{inside}</main>" if inside else ""


def _sample(one: Mapping[str, Any]) -> str:
    which = "the weakest of all" if one["weakest"] else "a typical text"
    title = (
        f"{one['slice']}, {which}: {number(one['tokens_per_round'])} tokens per pass "
        f"({one['tokens']} tokens in {one['rounds']} passes)"
    )
    end = "" if one["complete"] else '<span class="soft"> …</span>'
    prompt = f'<p class="prompt">{escape(one["prompt"])}</p>' if one["prompt"] else ""
    return (
        f'<article class="sample"><h3>{escape(title)}</h3><p class="over">{escape(one["request"])}</p>{prompt}'
        f'<p class="text">{"".join(_tokens(one["pieces"]))}{end}</p></article>'
    )


def _tokens(pieces: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for piece in pieces:
        yield from (_mark("mark", text) for text in piece["draft"] if text)
        yield from (_mark("del", text.replace("\n", BREAK)) for text in piece["dropped"][:1] if text)
        if piece["own"]:
            yield _mark("b", piece["own"])


def _mark(tag: str, text: str) -> str:
    """A token. Where the line may break, before its space and after its own breaks, the mark does not reach."""
    word = text.lstrip(" ")
    space = text[: len(text) - len(word)] if word else ""
    rest = text[len(space) :]
    shown = rest.rstrip("\n")
    breaks = len(rest) - len(shown)
    inside = escape(shown).replace("\n", f"{BREAK}\n") + BREAK * breaks
    return f"{space}<{tag}>{inside}</{tag}>" + "\n" * breaks
