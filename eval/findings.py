"""The sentences under the verdict: what qualifies it. Reads the dictionary of `eval.report`; computes no number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.report import find_rows, headline_rows
from eval.report_table import gap_text, loops, number, setting, with_interval

Row = Mapping[str, Any]


def findings(report: Row) -> Iterable[str]:
    """Sentences under the verdict: what qualifies it."""
    first = headline_rows(report)[0]
    run = {key: first[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    slices = [r for r in find_rows(report, **run) if r["slice"] != "all" and r["tokens_per_round"]["value"]]
    if len(slices) > 1:
        worst = min(slices, key=lambda r: r["tokens_per_round"]["value"])
        yield f"Weakest slice: {worst['slice']}, {with_interval(worst['tokens_per_round'])} tokens per pass."
    rival = find_rows(report, **{**run, "proposer": "prompt_lookup", "slice": "all"})
    if rival and first["proposer"] != "prompt_lookup":
        yield (
            "For comparison, prompt lookup (copying from the text so far, nothing trained) yields "
            f"{with_interval(rival[0]['tokens_per_round'])} tokens per pass on the same requests."
        )
    if first["formula_gap"]["value"] is not None:
        yield _formula_finding(first)
    if report["load"]:
        yield _load_finding(report["load"])
    if first["looping_requests"]:
        yield f"Loops make a text easy to guess: {loops(first)}"
    if first["alpha"]["low"] is None and first["alpha"]["value"] is not None:
        yield f"Measured on {first['requests']} request(s): too few for intervals."


def _formula_finding(row: Row) -> str:
    gap = row["formula_gap"]
    start = (
        f"The usual formula at this α promises {number(row['expected_tokens_per_round'])} tokens per pass, "
        f"{gap_text(gap)} against the measured {number(row['tokens_per_round']['value'])}"
    )
    if gap["low"] is None:
        return start + "."
    holds = "agrees with these data" if gap["low"] <= 0 <= gap["high"] else "does not hold here"
    return f"{start}: its assumption, that acceptances are independent of each other, {holds}."


def _load_finding(load: Row) -> str:
    """What the head is expected to do at the load that was asked about."""
    many = "one request" if load["batch"] == 1 else f"{load['batch']:g} requests"
    where = f"With {many} at once and {load['context']:g} tokens of context"
    later = load["stops_paying"] is not None and load["stops_paying"] > load["batch"]
    stop = f" From {load['stops_paying']} requests at once on, drafting no longer pays." if later else ""
    if load["gamma"] == 0:
        return f"{where} no draft is expected to pay: decode plainly there.{stop}"
    expected = f"γ = {load['gamma']} is expected to be best, {with_interval(load['speedup'])} times as fast"
    served = f", {setting(load)}" if "dtype" in load else ""  # an older advice does not say
    return f"{where} {expected} as plain decoding, predicted from measured costs{served}.{stop}"
