"""The report's keys, its tables and its page, over fabricated evaluations: full, minimal and hostile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_traces import clustered_requests, plain_of, trace_of

from eval.acceptance import formula_tokens_per_round
from eval.exactness import Divergence
from eval.report import Run, build_report, find_rows, headline_rows
from eval.report_page import render_page
from eval.report_table import as_text, to_markdown
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


def full_runs() -> list[Run]:
    runs = []
    for dtype in ("bfloat16", "float32"):
        for temperature in (0.0, 0.7):
            traces = head_traces()
            looping = replace(traces[3], tokens=[*traces[3].tokens[:-30], *[7, 8, 9] * 10])
            traces[3] = looping
            differs = [Divergence("r4", 11, 5, 6, 0.004)] if dtype == "bfloat16" else []
            compared = differs if temperature == 0 else None
            if temperature > 0:
                traces = [replace(t, rounds=[replace(r, beta=(0.6,) * r.examined) for r in t.rounds]) for t in traces]
            runs.append(Run("eagle3", dtype, temperature, 4, traces, compared))
            runs.append(Run("prompt_lookup", dtype, temperature, 4, lookup_traces(traces), None))
            runs.append(Run("none", dtype, temperature, 0, [plain_of(t) for t in traces], None))
    return runs


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return build_report(runs=full_runs(), resamples=200, **META)


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
    assert page.tags.count("svg") == 6 and page.tags.count("h1") == 1
    assert html.count('role="img" aria-label="') == 6 and "#fe00" not in html
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


def test_matplotlib_is_loaded_only_where_a_page_is_drawn() -> None:
    code = "import sys, eval.report_page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def crowded_runs() -> list[Run]:
    """More drafts, slices and depth than a picture is made for, under long names."""
    traces = head_traces(18, 12)
    traces = [replace(t, slice=f"{'a long name of a slice, no. ' * (i % 2)}{i % 6}") for i, t in enumerate(traces)]
    plain = [replace(plain_of(t), seconds=(2 + i % 3) * t.seconds) for i, t in enumerate(traces)]
    drafts = [Run(f"{name}_of_a_rather_long_name", "float32", 0.0, 12, traces) for name in "abcde"]
    return [*drafts, Run("none", "float32", 0.0, 0, plain)]


MEASURE = """<!doctype html><body><iframe srcdoc="%s" style="width:%dpx;height:900px;border:0"></iframe><script>
onload = () => {
  const page = frames[0].document, root = page.documentElement
  const inside = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1
  const apart = (a, b) => a.right < b.left + 1 || b.right < a.left + 1 || a.bottom < b.top + 2 || b.bottom < a.top + 2
  const charts = [...page.querySelectorAll("figure svg")].map(svg => {
    const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")]
    const boxes = texts.map(text => text.getBoundingClientRect())
    return {
      width: frame.width,
      height: frame.height,
      smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize))) * svg.getScreenCTM().a,
      cut: texts.filter((_, i) => !inside(boxes[i], frame)).map(t => t.textContent),
      overlapping: texts.filter((_, i) => boxes.some((b, j) => i < j && !apart(boxes[i], b))).map(t => t.textContent),
      colours: [...new Set([...svg.querySelectorAll("path,use,text")].flatMap(
        e => [getComputedStyle(e).stroke, getComputedStyle(e).fill]))],
    }
  })
  const found = {width: root.clientWidth, needed: root.scrollWidth, charts}
  document.body.innerHTML = "<pre></pre>"
  document.querySelector("pre").textContent = JSON.stringify(found)
}
</script>"""


def measured_by_a_browser(html: str, width: int, folder: Path, dark: bool = False) -> dict[str, Any]:
    """The page in a frame of this width (a window has a least width), as the browser lays it out."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    file = folder / "measure.html"
    file.write_text(MEASURE % (escape(html, quote=True), width))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--hide-scrollbars"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("content", ["full", "crowded"])
def test_page_in_a_browser(report: dict[str, Any], content: str, width: int, tmp_path: Path) -> None:
    shown = report if content == "full" else build_report(runs=crowded_runs(), resamples=50, **META)
    found = measured_by_a_browser(render_page(shown), width, tmp_path)
    assert found["width"] == width and found["needed"] <= width  # no scrolling sideways
    assert len(found["charts"]) == 6
    for chart in found["charts"]:
        assert 250 < chart["width"] <= 440 and chart["height"] > 150
        assert chart["smallest"] >= 10.5  # pixels
        assert chart["cut"] == chart["overlapping"] == []


def test_charts_follow_dark_and_light(report: dict[str, Any], tmp_path: Path) -> None:
    html = render_page(report)
    light, dark = (measured_by_a_browser(html, 1280, tmp_path, dark=dark)["charts"] for dark in (False, True))
    for bright, dim in zip(light, dark, strict=True):
        assert {"rgb(11, 107, 99)", "rgb(93, 96, 104)"} <= set(bright["colours"])  # the first series; ticks
        assert {"rgb(85, 199, 184)", "rgb(159, 163, 171)"} <= set(dim["colours"])
        # What is no colour of either theme is black: the default of a path that has no stroke or no fill.
        assert set(bright["colours"]) & set(dim["colours"]) <= {"none", "rgb(0, 0, 0)"}


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
    meta = {
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
    assert "<script" not in markdown
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
    assert to_markdown(report)
    assert report["verdict"].endswith(".")


def test_the_first_greedy_run_of_a_trained_head_is_the_headline() -> None:
    traces = head_traces(3)
    runs = [
        Run("none", "float32", 0.0, 0, [plain_of(t) for t in traces]),
        Run("prompt_lookup", "float32", 0.0, 4, lookup_traces(traces)),
        Run("medusa", "float32", 0.7, 3, head_traces(3, 3)),
        Run("medusa", "float32", 0.0, 3, head_traces(3, 3)),
        Run("eagle3", "float32", 0.0, 4, traces),
    ]
    headline = build_report(runs=runs, resamples=0, **META)["headline"]
    assert headline == {"proposer": "medusa", "dtype": "float32", "temperature": 0.0, "gamma": 3}


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match="no run was evaluated"):
        build_report(runs=[], **META)
    run = Run("eagle3", "float32", 0.0, 4, head_traces(2))
    with pytest.raises(ValueError, match="same proposer"):
        build_report(runs=[run, run], resamples=0, **META)
