"""The report's keys, its tables and its page, over fabricated evaluations: full, minimal and hostile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from simulated_traces import clustered_requests, formula_tokens_per_round, plain_of, trace_of

from eval.elsewhere import NAMES
from eval.exactness import Divergence
from eval.findings import findings
from eval.plots import exact
from eval.report import Run, build_report, find_rows, headline_rows
from eval.report_markdown import whole_markdown
from eval.report_page import render_page
from eval.report_samples import samples
from eval.report_style import STYLE
from eval.report_table import as_text, to_markdown
from eval.samples import LONGEST, sample_texts
from eval.trace import RequestTrace, Round

META: dict[str, Any] = {
    "target": {"name": "tiny", "weights": "ab" * 32},
    "head": {"name": "eagle3", "parameters": 7_000_000},
    "traffic": {"name": "demo", "held_out": True},
    "provenance": {"argv": ["evaluate"], "commit": "0" * 40, "config": {"eval": {"gamma": [4]}}},
}


def head_traces(requests: int = 24, gamma: int = 4, seed: int = 0) -> list[RequestTrace]:
    rng = np.random.default_rng(seed)
    return list(clustered_requests(rng, requests=requests, rounds=20, gamma=gamma, shape=(6, 4)))


def lookup_traces(traces: list[RequestTrace], seed: int = 1) -> list[RequestTrace]:
    """A draft that often proposes nothing and is seldom right."""
    rng = np.random.default_rng(seed)
    made = []
    for t in traces:
        rounds = [Round(n, int(rng.random() < 0.3 and n > 0)) for n in rng.choice([0, 0, 2, 4], size=40).tolist()]
        made.append(trace_of(rounds, request_id=t.request_id, slice_name=t.slice))
    return made


def dropped_of(one: Round) -> tuple[int, ...]:
    """Ids for what was drafted in vain."""
    return tuple(range(one.proposed - one.accepted))


def full_runs() -> list[Run]:
    runs = []
    for dtype in ("bfloat16", "float32"):
        for temperature in (0.0, 0.7):
            traces = head_traces()
            looping = replace(traces[3], tokens=[*traces[3].tokens[:-30], *[7, 8, 9] * 10])
            traces[3] = looping
            differs = [Divergence("r4", 11, 5, 6, 0.004)] if dtype == "bfloat16" else []
            compared = differs if temperature == 0 else None
            traces = [replace(t, rounds=[replace(r, dropped=dropped_of(r)) for r in t.rounds]) for t in traces]
            if temperature > 0:
                traces = [replace(t, rounds=[replace(r, beta=(0.6,) * r.examined) for r in t.rounds]) for t in traces]
            runs.append(Run("eagle3", dtype, temperature, 4, traces, compared))
            runs.append(Run("prompt_lookup", dtype, temperature, 4, lookup_traces(traces), None))
            runs.append(Run("none", dtype, temperature, 0, [plain_of(t) for t in traces], None))
    return runs


def words_of(ids: Sequence[int]) -> str:
    """Stands in for a tokenizer: a word, a piece of code or a line break for every token."""
    return "".join((" word", "(", ":\n", "\n    ", " <b>", "longer")[token % 6] for token in ids)


def advice(columns: int = 6) -> dict[str, Any]:
    """What `eval.speedup` would say of a server."""
    table = [
        {"batch": 2**b, "context": 128 * 2**c, "gamma": max(0, 5 - b), "speedup": exact(2.0 / (1 + b / (8 + c)))}
        for b in range(6)
        for c in range(columns)
    ]
    asked = {"batch": 8, "context": 1024, "dtype": "float32", "temperature": 0.0, "gamma": 3, "stops_paying": 40}
    return {**asked, "speedup": {"value": 1.5, "low": 1.4, "high": 1.6}, "table": table}


def taught() -> dict[str, Any]:
    """What `eval.teacher` would say of two depths."""
    deep = {"value": None, "low": None, "high": None}
    by_depth = {"teacher": [exact(0.81), exact(0.62)], "decoder": [exact(0.77), deep], "gap": [exact(-0.04), deep]}
    return {"dtype": "float32", "gamma": 4, **by_depth, "coverage": exact(0.93), "coverage_of_text": exact(0.97)}


def full_report() -> dict[str, Any]:
    """Everything that a report can hold."""
    runs = full_runs()
    prompts = {trace.request_id: [1, 2, 3, 0] * 9 for trace in runs[0].traces}
    texts = sample_texts(runs[0], prompts, words_of)
    return build_report(runs=runs, samples=texts, load=advice(), teacher_forced=taught(), resamples=200, **META)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return full_report()


def is_estimate(value: Any) -> bool:
    return set(value) == {"value", "low", "high"} and all(v is None or isinstance(v, float) for v in value.values())


ESTIMATES = ("alpha", "alpha_macro", "tokens_per_round", "tokens_per_round_macro", "formula_gap")
COUNTS = ("requests", "rounds", "rounds_cut", "tokens", "looping_requests")


def test_stable_keys_and_their_types(report: dict[str, Any]) -> None:
    assert {"verdict", "headline", "target", "head", "traffic", "results"} <= set(report)
    assert {"identity", "definitions", "provenance", "format"} <= set(report)
    assert len(report["results"]) == 12 * 4  # 12 runs, each over all requests and three slices
    for row in report["results"]:
        gamma = row["gamma"]
        assert isinstance(row["proposer"], str) and isinstance(row["dtype"], str) and isinstance(row["slice"], str)
        assert isinstance(row["temperature"], float) and isinstance(gamma, int)
        assert all(is_estimate(row[key]) for key in ESTIMATES)
        assert all(isinstance(row[key], int) for key in COUNTS)
        assert row["speedup"] is None or is_estimate(row["speedup"])
        assert isinstance(row["expected_tokens_per_round"], float)
        assert len(row["alpha_by_position"]) == len(row["survival"]) == gamma
        assert all(is_estimate(e) for e in row["survival_interval"] + row["alpha_by_position_interval"])
        assert row["identical_requests"] is None or isinstance(row["identical_requests"], int)
        assert (row["alpha_expected"] is not None) == (row["temperature"] > 0 and row["proposer"] == "eagle3")
        assert set(ESTIMATES) | {"survival", "requests", "rounds", "speedup"} <= set(row["without_looping"])
    assert all(isinstance(text, str) and text for text in report["definitions"].values())


def test_report_survives_json(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_rows_say_what_was_measured(report: dict[str, Any]) -> None:
    (row,) = find_rows(report, proposer="eagle3", dtype="float32", temperature=0.0, slice="all")
    alpha = row["alpha"]["value"]
    assert row["expected_tokens_per_round"] == pytest.approx(formula_tokens_per_round(alpha, 4))
    assert row["formula_gap"]["value"] == pytest.approx(
        row["expected_tokens_per_round"] / row["tokens_per_round"]["value"] - 1
    )
    assert row["tokens_per_round"]["value"] == pytest.approx(1 + sum(row["survival"]))
    slices = [r for r in find_rows(report, proposer="eagle3", dtype="float32", temperature=0.0) if r is not row]
    for key in ("requests", "rounds", "tokens", "looping_requests"):
        assert sum(r[key] for r in slices) == row[key]
    assert row["looping_requests"] == 1 and row["without_looping"]["requests"] == row["requests"] - 1


def test_speedup_is_against_plain_decoding_of_the_same_setting() -> None:
    traces = head_traces()
    slow = [replace(plain_of(t), seconds=2 * t.seconds) for t in traces]
    runs = [
        Run("eagle3", "float32", 0.0, 4, traces),
        Run("none", "float32", 0.0, 0, slow),
        Run("eagle3", "bfloat16", 0.0, 4, traces),
    ]
    rows = headline_rows(build_report(runs=runs, resamples=100, **META))
    assert rows[0]["speedup"]["value"] == pytest.approx(2.0)
    assert rows[0]["speedup"]["low"] == pytest.approx(2.0)
    assert rows[1]["speedup"] is None
    timed = replace(runs[1], timed=[replace(t, seconds=3 * own.seconds) for t, own in zip(slow, traces, strict=True)])
    rows = headline_rows(build_report(runs=[runs[0], timed], resamples=0, **META))
    assert rows[0]["speedup"]["value"] == pytest.approx(3.0)


def test_identity(report: dict[str, Any]) -> None:
    assert report["identity"]["float32"] == {"requests": 24, "identical": 24, "divergences": []}
    half = report["identity"]["bfloat16"]
    assert (half["requests"], half["identical"]) == (24, 23)
    (found,) = half["divergences"]
    where = {"request": "r4", "position": 11, "token": 5, "other": 6, "gap": 0.004}
    assert found == {**where, "proposer": "eagle3", "gamma": 4}
    greedy = find_rows(report, proposer="eagle3", dtype="bfloat16", temperature=0.0)
    assert [row["identical_requests"] for row in greedy] == [23, 8, 7, 8]
    assert all(row["identical_requests"] is None for row in find_rows(report, temperature=0.7))


def test_verdict_names_every_dtype_and_hides_nothing(report: dict[str, Any]) -> None:
    verdict = report["verdict"]
    assert verdict.startswith("At γ = 4 with the head, every pass of the target yields ")
    assert "on held-out traffic" in verdict and verdict.count(".") > 1 and verdict.endswith(".")
    assert re.search(r"decoding is \d\.\d\d× as fast in bfloat16 and \d\.\d\d× in float32", verdict)
    assert "24 of 24 requests in float32 and on 23 of 24 in bfloat16" in verdict


@pytest.mark.parametrize(("factor", "words"), [(0.5, "slower than without"), (1.0, "no measurable difference")])
def test_verdict_admits_what_is_not_faster(factor: float, words: str) -> None:
    traces = head_traces()
    noise = np.random.default_rng(0).normal(1, 0.05, size=len(traces))
    plain = [replace(plain_of(t), seconds=factor * t.seconds * n) for t, n in zip(traces, noise, strict=True)]
    runs = [Run("eagle3", "float32", 0.0, 4, traces), Run("none", "float32", 0.0, 0, plain)]
    assert words in build_report(runs=runs, resamples=200, **META)["verdict"]


def test_traffic_that_was_trained_on_is_called_so() -> None:
    runs = [Run("eagle3", "float32", 0.0, 4, head_traces(3))]
    for held_out, words in ((False, "traffic the head was trained on"), (None, "on this traffic")):
        traffic = {"name": "demo"} if held_out is None else {"name": "demo", "held_out": held_out}
        assert words in build_report(runs=runs, resamples=0, **{**META, "traffic": traffic})["verdict"]


# Tables


def test_terminal_table_fits_eighty_columns(report: dict[str, Any]) -> None:
    lines = as_text(report).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in "".join(lines)
    assert sum(line.startswith(("eagle3 ", "prompt_lookup ", "none ")) for line in lines) >= 12
    assert any("24/24" in line for line in lines) and any("23/24" in line for line in lines)


def test_terminal_table_fits_with_the_widest_numbers_that_occur() -> None:
    traces = [
        trace_of([Round(16, 16)] * 9 + [Round(16, int(i % 16))], request_id=f"r{i}", slice_name="a_long_slice_name")
        for i in range(240)
    ]
    runs = [Run("a_rather_long_proposer", "bfloat16", 0.0, 16, traces, [])]
    lines = as_text(build_report(runs=runs, resamples=100, **META)).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any("240/240" in line for line in lines)


def test_markdown_has_a_row_per_result(report: dict[str, Any]) -> None:
    rows = [line for line in to_markdown(report).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 8 * 4 + 4  # heading; two drafts in four settings by slice; plain decoding once each
    assert len({row.count("|") for row in rows}) == 1


# The page


class Page(HTMLParser):
    """Collects what a page refers to, and whether its tags close."""

    VOID = {"meta", "br", "img", "link"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [v or "" for k, v in attrs if k == "id"]
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "xlink:href", "data")]
        assert not [k for k, _ in attrs if k.startswith("on")], attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page_is_one_self_contained_file(report: dict[str, Any]) -> None:
    html = render_page(report)
    page = Page(html)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)) and set(page.references) == {f"#{i}" for i in page.ids}
    assert not {"script", "link", "iframe", "img", "object", "base", "form"} & set(page.tags)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    assert len(html.encode()) < 200_000  # the limit is 2 MB
    assert page.tags.count("svg") == 8 and page.tags.count("h1") == 1
    assert html.count('role="img" aria-label="') == 8 and "#fe00" not in html
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert render_page(report) == html  # no date, no random name
    assert "prefers-color-scheme:dark" in html and "@media print" in html and "width=device-width" in html


def test_page_shows_the_numbers(report: dict[str, Any]) -> None:
    text = "".join(Page(render_page(report)).words)
    row = headline_rows(report)[0]
    for value in (row["tokens_per_round"], row["alpha"], row["speedup"]):
        assert f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]" in text
    assert report["verdict"] in text
    assert all(name in text and sentence in text for name, sentence in report["definitions"].items())
    assert "bfloat16: 23 of 24 requests identical" in text and "r4" in text
    assert "nan" not in text.lower().split() and "None" not in text


def test_samples_tell_every_token_apart(report: dict[str, Any]) -> None:
    (trace,) = (t for t in full_runs()[0].traces if t.request_id == report["samples"][0]["request"])
    assert {s["slice"] for s in report["samples"]} == {"chat", "code", "tools"}
    assert [s["weakest"] for s in report["samples"]].count(True) == 1
    first = report["samples"][0]
    assert first["pieces"][0] == {"draft": [], "dropped": [], "own": words_of(trace.tokens[:1])}
    for piece, one in zip(first["pieces"][1:], trace.rounds, strict=True):
        assert len(piece["draft"]) == one.accepted and piece["dropped"] == [words_of([t]) for t in one.dropped]
    assert "".join("".join(p["draft"]) + (p["own"] or "") for p in first["pieces"]) == words_of(trace.tokens)
    html = samples(report)
    shown = [s for s in report["samples"] for p in s["pieces"] if p["dropped"]]
    assert html.count("<del>") == 1 + len(shown)  # the legend's, and the overruled one of each round
    assert html.count("<mark>") == 1 + sum(len(p["draft"]) for s in report["samples"] for p in s["pieces"])
    older = {**report, "samples": [{**first, "pieces": [{**p, "dropped": []} for p in first["pieces"]]}]}
    assert "was not recorded" in samples(older) and "was not recorded" not in html


def test_a_character_of_several_tokens_stands_at_the_last_of_them() -> None:
    letters = "né €".encode()
    run = Run("eagle3", "float32", 0.0, 4, [trace_of([Round(4, 4), Round(4, 0)], tokens=list(range(len(letters))))])
    (one,) = sample_texts(run, {}, lambda ids: bytes(letters[i] for i in ids).decode(errors="replace"))
    assert [p["own"] for p in one["pieces"]] == ["n", "", "€"]
    assert [p["draft"] for p in one["pieces"]] == [[], ["", "é", " ", ""], []]


def test_a_long_text_is_cut_and_says_so() -> None:
    run = Run("eagle3", "float32", 0.0, 4, [trace_of([Round(4, 4)] * 40)])
    (one,) = sample_texts(run, {"r0": [0] * 900}, words_of)
    assert not one["complete"] and one["prompt"].startswith("…") and len(one["prompt"]) < 400
    assert sum(len(p["draft"]) + (p["own"] is not None) for p in one["pieces"]) == LONGEST


def test_the_formula_is_checked_where_most_lengths_were_decoded() -> None:
    runs = [Run("eagle3", "float32", 0.0, 4, head_traces(12))]
    runs += [Run("eagle3", "bfloat16", 0.0, gamma, head_traces(12, gamma)) for gamma in (2, 5)]
    found = build_report(runs=runs, resamples=0, **META)["formula"]
    assert (found["dtype"], found["gamma"]) == ("bfloat16", 5)
    assert [row["gamma"] for row in found["rows"] if row["measured"]] == [0, 2, 5]


def test_advice_is_shown_where_there_is_any(report: dict[str, Any]) -> None:
    words = " ".join(findings(report))
    assert "With 8 requests at once and 1024 tokens of context γ = 3 is expected to be best, 1.50 [1.40, 1.60]" in words
    assert "From 40 requests at once on, drafting no longer pays." in words
    assert "predicted from measured costs, greedy, fp32." in words
    assert "temperature 0.7, bf16." in " ".join(
        findings({**report, "load": {**report["load"], "temperature": 0.7, "dtype": "bfloat16"}})
    )
    without = {**report, "load": {**report["load"], "gamma": 0, "stops_paying": None}}
    assert "no draft is expected to pay" in whole_markdown(without)
    assert "at once and" not in " ".join(findings({**report, "load": None}))


def test_what_training_says_and_drift_are_shown_by_depth(report: dict[str, Any]) -> None:
    page, text = "".join(Page(render_page(report)).words), whole_markdown(report)
    drift = report["formula"]["drift"]
    for shown in (page, text):
        assert "Teacher-forced against the decoder, greedy, fp32, γ 4." in shown
        assert "what the draft can propose: 0.93" in shown and "0.97" in shown
        assert all(f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" in shown for one in drift)
    assert "## Acceptance by depth\n" in text and "| 1 | 0.81" in text and "| 2 | 0.62" in text
    without = {**report, "teacher_forced": None, "formula": None}
    assert "Acceptance by depth\n" not in whole_markdown(without)
    assert "Teacher-forced against" not in render_page(without)


def test_the_names_of_others_stand_with_the_definitions(report: dict[str, Any]) -> None:
    page, text = "".join(Page(render_page(report)).words), whole_markdown(report)
    assert len(NAMES) > 8 and all(word in page and word in text for name in NAMES for word in name)


def test_the_headline_is_the_head_by_name_and_no_rival_is_called_so() -> None:
    traces = head_traces(12)
    runs = [Run(name, "float32", 0.0, 4, traces) for name in ("lookahead", "draft_model", "eagle3")]
    found = build_report(runs=runs, resamples=0, **META)
    assert found["headline"]["proposer"] == "eagle3" and "with the head," in found["verdict"]
    alone = build_report(runs=runs[:1], resamples=0, **META)
    assert alone["headline"]["proposer"] == "lookahead" and "with lookahead," in alone["verdict"]


def test_the_markdown_twin_says_all_that_the_page_says(report: dict[str, Any]) -> None:
    text = whole_markdown(report)
    assert report["verdict"] in text and "Weakest slice" in text and "0" * 40 in text and "ab" * 32 in text
    assert all(name in text for name in report["definitions"]) and "bfloat16: 23 of 24" in text
    assert [line for line in text.splitlines() if line.startswith("#")][0] == "# Draftsmith report"


def test_what_is_coloured_can_be_read() -> None:
    """Contrast of text on its ground, as WCAG 2 defines it: 4.5 for text, in every theme."""
    themes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root{(.*?)}", STYLE, re.DOTALL)]
    assert len(themes) == 3  # light, dark, print

    def light(colour: str) -> float:
        wide = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        parts = [int(wide[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for theme in themes:
        for name in ("ink", "soft", "s1", "s2", "s3", "s4", "s5", "s6", "good", "bad"):
            for ground in ("paper", "card"):
                bright, dim = sorted([light(theme[name]), light(theme[ground])], reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, ground)


def test_matplotlib_is_loaded_only_where_a_page_is_drawn() -> None:
    code = "import sys, eval.report_page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;|$\\frac{$\n'


def test_page_and_tables_escape_what_comes_from_data() -> None:
    traces = [
        trace_of([Round(4, 2)] * 3, request_id=f"{HOSTILE}{i}", slice_name=HOSTILE, seconds=1.0) for i in range(9)
    ]
    found = [Divergence(f"{HOSTILE}1", 3, 1, None, None)]
    runs = [
        Run(HOSTILE, HOSTILE, 0.0, 4, traces, found),
        Run("none", HOSTILE, 0.0, 0, [plain_of(t) for t in traces], None),
    ]
    texts = sample_texts(runs[0], {t.request_id: [0] for t in traces}, lambda ids: HOSTILE * len(ids))
    meta = {
        "samples": texts,
        "target": {"name": HOSTILE, HOSTILE: HOSTILE},
        "head": {"name": HOSTILE},
        "traffic": {"name": HOSTILE},
        "provenance": {"argv": [HOSTILE], "config": {HOSTILE: HOSTILE}},
    }
    report = build_report(runs=runs, resamples=50, **meta)
    page = Page(render_page(report))
    assert "script" not in page.tags and "img" not in page.tags
    assert all(reference.startswith("#") for reference in page.references)
    markdown = to_markdown(report)
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len({row.count("|") - row.count("\\|") for row in rows}) == 1
    assert "<script" not in markdown and "<script" not in whole_markdown(report)
    assert as_text(report)


def minimal(kind: str) -> list[Run]:
    traces = head_traces(12)
    return {
        "one request": [Run("eagle3", "float32", 0.0, 4, traces[:1], [])],
        "no speed-up": [Run("eagle3", "float32", 0.0, 4, traces, [])],
        "sampling only": [Run("eagle3", "float32", 0.7, 4, traces)],
        "plain only": [Run("none", "float32", 0.0, 0, [plain_of(t) for t in traces], [])],
        "lookup only": [Run("prompt_lookup", "float32", 0.0, 4, lookup_traces(traces), [])],
        "never proposes": [Run("prompt_lookup", "float32", 0.0, 4, [trace_of([Round(0, 0)] * 3)])],
        "never right": [Run("eagle3", "float32", 0.0, 4, [trace_of([Round(4, 0)] * 3)])],
        "always right": [Run("eagle3", "float32", 0.0, 4, [trace_of([Round(4, 4)] * 3)])],
        "end at once": [Run("eagle3", "float32", 0.0, 4, [RequestTrace("r", "chat", 2, [0], [], "stop", 0.1)])],
        "all looping": [Run("eagle3", "float32", 0.0, 4, [trace_of([Round(4, 4)] * 8, tokens=[1] * 41)])],
        "several gamma": [Run("eagle3", "float32", 0.0, g, head_traces(12, g), []) for g in (1, 3, 5)],
        "no request": [Run("eagle3", "float32", 0.0, 4, [], [])],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "one request", "no speed-up", "sampling only", "plain only", "lookup only", "never proposes",
        "never right", "always right", "end at once", "all looping", "several gamma", "no request",
    ],
)  # fmt: skip
def test_less_than_everything_still_gives_a_report(kind: str) -> None:
    meta = {**META, "head": None} if "only" in kind else META
    report = build_report(runs=minimal(kind), resamples=100, **meta)
    json.dumps(report, allow_nan=False)
    page = Page(render_page(report))
    assert page.open == [] and page.tags.count("h1") == 1
    words = "".join(page.words)
    assert "nan" not in words.lower().split() and "None" not in words
    assert max(len(line) for line in as_text(report).splitlines()) <= 80
    assert to_markdown(report) and whole_markdown(report)
    assert report["verdict"].endswith(".")


def test_the_first_greedy_run_of_the_head_is_the_headline() -> None:
    traces = head_traces(3)
    runs = [
        Run("none", "float32", 0.0, 0, [plain_of(t) for t in traces]),
        Run("prompt_lookup", "float32", 0.0, 4, lookup_traces(traces)),
        Run("medusa", "float32", 0.7, 3, head_traces(3, 3)),
        Run("medusa", "float32", 0.0, 3, head_traces(3, 3)),
        Run("eagle3", "float32", 0.0, 4, traces),
    ]
    headline = build_report(runs=runs, resamples=0, **{**META, "head": {"name": "medusa"}})["headline"]
    assert headline == {"proposer": "medusa", "dtype": "float32", "temperature": 0.0, "gamma": 3}


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match="no run was evaluated"):
        build_report(runs=[], **META)
    run = Run("eagle3", "float32", 0.0, 4, head_traces(2))
    with pytest.raises(ValueError, match="same proposer"):
        build_report(runs=[run, run], resamples=0, **META)
