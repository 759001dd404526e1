"""What the twins of a report show of its rows: no slice that is all, and each first difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_traces import plain_of

from eval.report import Run, build_report, find_rows, verdict
from eval.report_markdown import whole_markdown
from eval.report_page import render_page
from eval.report_table import as_text, to_markdown
from eval.succession import _verdict
from tests.test_report import META, Page, full_report, head_traces


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return full_report()


def test_the_markdown_twin_names_each_first_difference(report: dict[str, Any]) -> None:
    text = whole_markdown(report)
    assert "First differences in bfloat16, largest distance first (1 of 1):" in text
    assert "| r4 | eagle3 | 4 | 11 | 0.004 | 5 | 6 |" in text and "First differences in float32" not in text


def test_the_verdict_says_why_the_tokens_of_a_pass_are_not_known(report: dict[str, Any]) -> None:
    """Where no draft gets as deep as γ; a dash is no sentence."""
    rows = [{**row, "tokens_per_round": {"value": None, "low": None, "high": None}} for row in report["results"]]
    said = verdict({**report, "results": rows})
    assert (
        said.startswith("At γ = 4 with the head, too few drafts get as deep as that on held-out traffic")
        and "–" not in said
    )
    refreshed = _verdict({"requests": 28, "tokens_per_round": {"value": None, "low": None, "high": None}})
    assert refreshed.endswith("as an interval wants more drafts that get as deep as γ; lower eval.gamma.")


def test_one_slice_is_not_told_apart_from_all() -> None:
    """Its rows would repeat those over all requests; report.json keeps them."""
    for slices, told in ((("chat",), False), (("chat", "code"), True)):
        traces = [replace(t, slice=slices[i % len(slices)]) for i, t in enumerate(head_traces(12))]
        runs = [
            Run("eagle3", "float32", 0.0, 4, traces, []),
            Run("none", "float32", 0.0, 0, [plain_of(t) for t in traces]),
        ]
        found = build_report(runs=runs, resamples=0, **META)
        assert find_rows(found, slice="chat")
        assert ("  chat" in as_text(found)) == ("| chat |" in to_markdown(found)) == told
        assert ("chat" in Page(render_page(found)).words) == told
