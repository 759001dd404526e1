"""Drafts side by side: ranked by what is said, differences in pairs, the worst slice in sight, on a page that holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_traces import iid_rounds, plain_of, trace_of

from eval.comparison import compare, label, tables
from eval.comparison_page import render_page
from eval.comparison_table import render_table, to_markdown
from eval.kept import kept_runs
from eval.paired import compare_paired
from eval.report import Run, build_report
from eval.trace import RequestTrace, dump_traces
from heads.artifact import UserError
from scripts.compare import write_comparison
from tests.test_report import HOSTILE, Page, advice

REQUESTS = 24


def traces_of(shift: float, seed: int, seconds: float = 1.0) -> list[RequestTrace]:
    """Requests whose difficulty is the same whatever the seed; `shift` is what a draft adds to every α."""
    levels = np.random.default_rng(0).beta(6, 4, size=REQUESTS)
    rng = np.random.default_rng(seed)
    made = []
    for i, level in enumerate(levels):
        alpha = float(np.clip(level + shift - 0.15 * (i % 3 == 1), 0.02, 0.95))
        one = trace_of(iid_rounds(rng, alpha=alpha, gamma=4, count=30), request_id=f"r{i}", seed=i)
        made.append(replace(one, slice=("chat", "code", "tools")[i % 3], seconds=seconds * one.seconds))
    return made


def evaluated(
    name: str, shift: float, seed: int, *, lookup: bool = False, load: dict[str, Any] | None = None, factor: float = 1.0
) -> tuple[dict[str, Any], list[Run]]:
    """A run: its report and what is behind it."""
    runs = []
    for temperature in (0.0, 1.0):
        traces = traces_of(shift, seed, factor)
        runs.append(Run(name, "float32", temperature, 4, traces, timed=traces if temperature == 0 else []))
        if lookup:
            runs.append(Run("prompt_lookup", "float32", temperature, 4, traces_of(-0.3, 99)))
    runs.append(Run("none", "float32", 0.0, 0, [plain_of(t) for t in traces_of(shift, seed)]))
    report = build_report(
        runs=runs,
        target={"name": "tiny", "weights": "ab" * 32, "tokenizer": "t", "template": "m"},
        head={"name": name, "sha256": "0" * 64, "parameters": 10_000, "seconds": 3.0, "tokens": 400},
        traffic={"name": "demo", "held_out": True, "fingerprints": {"held_out": "f" * 64}},
        provenance={"config": {"eval": {"max_new_tokens": 64, "top_p": 1.0}}},
        measured_on={"device": "cpu", "threads": 2},
        load=load,
        resamples=100,
    )
    return report, runs


def compared(*found: tuple[dict[str, Any], list[Run]], names: Sequence[str] = "abc") -> dict[str, Any]:
    pairs = dict(zip(names, found, strict=False))
    reports, runs = ({name: one[i] for name, one in pairs.items()} for i in (0, 1))
    return compare(reports, runs, resamples=200)


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    """The best is named neither first nor last; prompt lookup was measured in one run."""
    return compared(
        evaluated("weak", -0.05, 1, lookup=True), evaluated("strong", 0.08, 2), evaluated("middle", 0.02, 3)
    )


def test_rows_are_ranked_and_say_by_what(comparison: dict[str, Any]) -> None:
    (greedy, rows), (sampled, others) = tables(comparison)
    assert (greedy["by"], greedy["temperature"]) == ("speedup", 0.0)
    assert (sampled["by"], sampled["temperature"]) == ("tokens_per_round", 1.0)
    for shown, measure in ((rows, "speedup"), (others, "tokens_per_round")):
        assert [row["rank"] for row in shown] == [1, 2, 3, 4]
        values = [row[measure]["value"] for row in shown]
        assert values == sorted(values, reverse=True)
        assert [label(row) for row in shown] == ["strong (b)", "middle (c)", "weak (a)", "prompt_lookup"]
    json.dumps(comparison, allow_nan=False)


def test_differences_are_in_pairs_and_tell_what_two_intervals_do_not(comparison: dict[str, Any]) -> None:
    (_, rows), _ = tables(comparison)
    best, second = rows[:2]
    assert best["difference"] is None
    difference = second["difference"]["tokens_per_round"]
    assert difference["value"] == pytest.approx(
        second["tokens_per_round"]["value"] - best["tokens_per_round"]["value"], abs=1e-12
    )
    assert difference["high"] < 0 and second["difference"]["better"] is False
    assert second["tokens_per_round"]["high"] > best["tokens_per_round"]["low"], "the single intervals overlap"
    own = compare_paired(traces_of(0.02, 3), traces_of(0.08, 2), gamma=4, resamples=200)
    assert second["difference"]["tokens_per_round"] == asdict(own.tokens_per_round)
    assert second["difference"]["speed_ratio"] is None, "seconds of two runs are no pair"
    for part in second["slices"]:
        assert part["difference"]["requests"] == part["requests"] == REQUESTS // 3


def test_the_worst_slice_is_in_sight(comparison: dict[str, Any]) -> None:
    (_, rows), _ = tables(comparison)
    for row in rows:
        values = {part["slice"]: part["tokens_per_round"]["value"] for part in row["slices"]}
        assert row["worst_slice"] == min(values, key=lambda name: values[name])
    assert {row["worst_slice"] for row in rows[:3]} == {"code"}
    text, html = to_markdown(comparison), render_page(comparison)
    assert text.count("(worst)") == html.count("(worst)") == 8
    assert "strong (b) is weakest on code" in html


def test_the_verdict_says_who_is_first_and_what_is_known(comparison: dict[str, Any]) -> None:
    verdict = comparison["verdict"]
    assert verdict.startswith("strong (b) comes first by measured speed, ") and "before middle (c)" in verdict
    assert "fewer tokens per round on the same 24 requests." in verdict
    twins = compared(evaluated("one", 0.0, 1), evaluated("two", 0.0, 4))
    assert "cannot tell the two apart" in twins["verdict"]
    slow = compared(evaluated("slow", -0.3, 1, factor=9.0))
    assert "slower than without a draft; it is the only draft" in slow["verdict"]


def test_a_prediction_for_the_same_load_comes_first_where_all_heads_have_one() -> None:
    slow, quick = advice(), {**advice(), "speedup": {"value": 1.9, "low": 1.8, "high": 2.0}}
    one, two = evaluated("one", 0.08, 1, lookup=True, load=slow), evaluated("two", -0.05, 2, load=quick)
    found = compared(one, two)
    (ranking, rows), (sampled, _) = tables(found)
    assert ranking["by"] == "predicted" and ranking["load"] == {"batch": 8, "context": 1024}
    assert [(label(row), row["rank"]) for row in rows] == [("two (b)", 1), ("one (a)", 2), ("prompt_lookup", None)]
    assert "batch 8, context 1024" in to_markdown(found) and sampled["by"] == "tokens_per_round"
    elsewhere = evaluated("two", -0.05, 2, load={**quick, "batch": 64})
    assert tables(compared(one, elsewhere))[0][0]["by"] == "speedup"


def test_a_prediction_stands_only_where_it_was_made() -> None:
    """Advice for temperature 1 ranks the sampled table alone; advice in another number format ranks none."""
    warm = {**advice(), "temperature": 1.0}
    (greedy, rows), (sampled, others) = tables(compared(*(evaluated(n, 0.0, i, load=warm) for i, n in enumerate("xy"))))
    assert greedy["by"] == "speedup" and greedy["load"] is None and all(row["predicted"] is None for row in rows)
    assert sampled["by"] == "predicted" and all(row["predicted"]["value"] == 1.5 for row in others)
    narrow = {**advice(), "dtype": "bfloat16"}
    found = compared(*(evaluated(n, 0.0, i, load=narrow) for i, n in enumerate("xy")))
    assert all(ranking["by"] != "predicted" for ranking, _ in tables(found))
    older = {key: value for key, value in advice().items() if key not in ("dtype", "temperature")}
    assert tables(compared(evaluated("x", 0.0, 1, load=older)))[0][0]["by"] == "speedup"


def test_differing_machines_are_named() -> None:
    one, two = evaluated("one", 0.0, 1, load=advice()), evaluated("two", 0.0, 2, load=advice())
    assert compared(one, two)["machines"] == []
    two[0]["measured_on"] = {"device": "cpu", "threads": 8}
    two[0]["load"]["costs"] = {"device": "H200", "threads": 2}
    found = compared(one, two)
    assert "The speed of b was measured on cpu with 8 threads." in found["machines"] and len(found["machines"]) == 4
    for text in (to_markdown(found), render_page(found)):
        assert "The costs of b were measured on H200 with 2 threads." in text


def test_a_comparison_without_traces_says_that_differences_are_missing(comparison: dict[str, Any]) -> None:
    reports = {"a": evaluated("one", 0.0, 1)[0], "b": evaluated("two", 0.05, 2)[0]}
    found = compare(reports)
    assert all(row["difference"] is None for row in found["rows"])
    assert "Differences are missing" in render_page(found) and "Differences are missing" not in render_page(comparison)
    assert "to the first" not in to_markdown(found).partition("Intervals")[0]


def test_what_cannot_be_compared_is_refused() -> None:
    one, other = evaluated("one", 0.0, 1)[0], evaluated("two", 0.0, 2)[0]
    other["traffic"]["fingerprints"]["held_out"] = "e" * 64
    with pytest.raises(UserError, match="b and a cannot be compared: they differ in the held-out requests"):
        compare({"a": one, "b": other})
    with pytest.raises(UserError, match="no evaluated run"):
        compare({})


@pytest.mark.parametrize(
    ("part", "key", "words"),
    [
        ("target", "tokenizer", "the target's tokenizer"),
        ("target", "template", "the target's chat template"),
        ("eval", "top_p", "eval.top_p"),
    ],
)
def test_what_else_must_be_the_same(part: str, key: str, words: str) -> None:
    one, other = evaluated("one", 0.0, 1)[0], evaluated("two", 0.0, 2)[0]
    place = other["target"] if part == "target" else other["provenance"]["config"]["eval"]
    place[key] = "another"
    with pytest.raises(UserError, match=f"they differ in {words}"):
        compare({"a": one, "b": other})
    if part == "eval":  # it does not matter to greedy decoding
        other["results"] = [row for row in other["results"] if row["temperature"] == 0]
        assert compare({"a": one, "b": other})
    place[key] = None
    assert compare({"a": one, "b": other}), "what an older report does not know is no difference"


def test_the_page_is_self_contained_and_escapes() -> None:
    found = compared(evaluated(HOSTILE, 0.0, 1, lookup=True), evaluated("two", 0.02, 2), names=[HOSTILE, "b"])
    html = render_page(found)
    page = Page(html)
    assert page.open == [] and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("h1") == 1 and page.tags.count("svg") == 5 and len(html.encode()) < 200_000
    assert "<script" not in to_markdown(found)
    assert render_page(found) == html


def write_run(folder: Path, name: str, shift: float, seed: int) -> Path:
    """A run as scripts.evaluate leaves it, as far as a comparison reads it."""
    report, runs = evaluated(name, shift, seed)
    (folder / "report" / "traces").mkdir(parents=True)
    (folder / "report" / "report.json").write_text(json.dumps(report))
    for run in runs:
        facts = {"timed": [t.request_id for t in run.clock]}
        file = folder / "report" / "traces" / f"{run.proposer}-{run.dtype}-T{run.temperature:g}-g{run.gamma}.jsonl"
        file.write_text(json.dumps(facts) + "\n" + dump_traces(run.traces))
    return folder


def test_the_command_reads_traces_and_writes_three_twins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    places = [write_run(tmp_path / name, name, shift, i) for i, (name, shift) in enumerate([("x", 0.0), ("y", 0.2)])]
    write_comparison(places, tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["proposer"] for row in found["rows"][:2]] == ["y", "x"]
    assert found["rows"][1]["difference"]["better"] is False and found["provenance"]["versions"]
    assert (tmp_path / "comparison.md").read_text() == to_markdown(found)
    assert (tmp_path / "comparison.html").read_text() == render_page(found)
    printed = capsys.readouterr().out
    assert "worst: code" in printed and found["verdict"].split(",")[0] in printed
    assert render_table(found)


def test_a_report_without_results_is_one_sentence(tmp_path: Path) -> None:
    place = write_run(tmp_path / "x", "x", 0.0, 1)
    report = json.loads((place / "report/report.json").read_text())
    (place / "report/report.json").write_text(json.dumps({**report, "results": []}))
    with pytest.raises(UserError, match=r"x/report/report\.json, an evaluation's report, is empty: .* evaluate again"):
        write_comparison([place], tmp_path)


def test_one_slice_is_not_told_apart_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table would repeat the numbers over all requests."""
    usual = [compared(evaluated("one", 0.0, 1)), compared(evaluated("one", 0.0, 1))]
    for row in usual[1]["rows"]:
        row["slices"] = row["slices"][:1]
    for found, told in zip(usual, (True, False), strict=True):
        text, page = to_markdown(found), render_page(found)
        assert ("Tokens a round by slice" in text) == ("worst slice" in text.partition("\n\nIntervals")[0]) == told
        assert ("Tokens per pass by slice" in page) == told and ("| chat" in text) == told


def test_traces_of_another_evaluation_are_left_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", "x", 0.0, 1) / "report"
    report = json.loads((folder / "report.json").read_text())
    assert len(kept_runs(folder, report)) == 3
    other = dump_traces(traces_of(0.1, 7))
    (folder / "traces" / "x-float32-T0-g4.jsonl").write_text('{"timed": []}\n' + other)
    assert [(run.proposer, run.temperature) for run in kept_runs(folder, report)] == [("x", 1.0), ("none", 0.0)]
    (folder / "traces" / "x-float32-T1-g4.jsonl").write_text('{"timed": []}\n{"request_id": "r0"}\n')
    (folder / "traces" / "none-float32-T0-g0.jsonl").unlink()
    assert kept_runs(folder, report) == []
