"""Several heads on one collection, one table of them, and what it refuses to compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig

from eval.acceptance import measure
from eval.comparison import compare as table_of
from eval.comparison_table import to_markdown
from eval.decode import DecodeSettings, Request, decode
from eval.proposers.prompt_lookup import PromptLookup
from eval.trace import RequestTrace, Round
from heads.artifact import UserError
from heads.base import Proposal
from scripts import collect, compare, pipeline, train
from tests import e2e
from tests.tiny import load_tiny, save_tiny

TAPS = "collect.taps=[2,4,5]"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    folder = tmp_path_factory.mktemp("compare")
    return e2e.Place(save_tiny(folder / "tiny"), e2e.write_rows(folder / "t.jsonl", e2e.conversations(30)), folder)


def config(place: e2e.Place, head: str, *more: str) -> Any:
    quick = (
        *("experiment=compare", f"head={head}", f"run_dir=runs/compare/{head}", "target.dtype=float32"),
        *("head.draft_vocab_size=64", "traffic.held_out=0.4", "generation.max_new_tokens=12", "rival=[]"),
        *("train.max_steps=3", "eval.max_new_tokens=8", "eval.timed_requests=2", "eval.dtypes=[float32]"),
        *("eval.tree={top_k:2,nodes:4}", "train.mixed_precision=no"),
    )
    return e2e.config(*e2e.uses(place.target, place.traffic), *quick, *more)


@pytest.fixture(scope="module")
def compared(place: e2e.Place) -> dict[str, Any]:
    """Two heads through the experiment, the one without taps first, and the table that the second one leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.cwd)
        pipeline.run(config(place, "medusa", TAPS))
        before = e2e.stamps(place.cwd / "runs/compare/features")
        pipeline.run(config(place, "eagle3", TAPS))
        assert e2e.stamps(place.cwd / "runs/compare/features") == before, "it was collected twice"
    return dict(json.loads((place.cwd / "runs/compare/comparison.json").read_text()))


# ---- one collection ---------------------------------------------------------------------------------------------


def test_what_is_shared_and_what_is_each_heads_own(place: e2e.Place, compared: dict[str, Any]) -> None:
    folder = place.cwd / "runs/compare"
    assert {path.name for path in folder.iterdir()} >= {
        "traffic",
        "features",
        "medusa",
        "eagle3",
        "comparison.md",
        "comparison.html",
    }
    names = {path.name for path in (folder / "eagle3").iterdir()}
    assert {name for name in names if not name.startswith(".")} == {"head", "report"}
    assert json.loads((folder / "features/manifest.json").read_text())["needs"]["taps"] == [2, 4, 5]


def test_a_head_learns_the_same_from_more_than_it_needs(
    place: e2e.Place, compared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three stored taps, against a collection of these two alone: the same weights, bit for bit."""
    monkeypatch.chdir(tmp_path)
    shared = f"features_dir={place.cwd / 'runs/compare/features'}"
    alone = ("collect.taps=[]", "traffic_dir=${run_dir}/traffic", "features_dir=${run_dir}/features")
    collect.run(config(place, "eagle3", "head.taps=[2,5]", *alone))
    train.run(config(place, "eagle3", "head.taps=[2,5]", *alone))
    train.run(config(place, "eagle3", "head.taps=[2,5]", shared, "run_dir=both"))
    hashes = [
        json.loads(Path(run, "head/manifest.json").read_text())["sha256"] for run in ("runs/compare/eagle3", "both")
    ]
    assert hashes[0] == hashes[1]


def test_taps_that_are_not_there_are_named(
    place: e2e.Place, compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.cwd)
    for stage in (collect, train):
        said = e2e.sentence(stage.run, config(place, "eagle3", TAPS, "head.taps=[1,4,6]", "run_dir=other"), capsys)
        assert "[1, 6]" in said and "[2, 4, 5]" in said and "collect.taps" in said


def test_each_job_of_a_sweep_has_a_folder_of_its_own() -> None:
    """By the head's file under conf/head, in the runs of a sweep as in a single one."""
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("config", ["experiment=compare", "head=mtp"], return_hydra_config=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        assert (cfg.run_dir, cfg.head_dir) == ("runs/compare/mtp", "runs/compare/mtp/head")
        assert cfg.features_dir == "runs/compare/features"
    finally:
        HydraConfig.instance().cfg = before


def test_stages_are_checked_and_obeyed(place: e2e.Place, capsys: pytest.CaptureFixture[str]) -> None:
    said = e2e.sentence(pipeline.run, config(place, "eagle3", "stages=[collect,tain]"), capsys)
    assert "'tain'" in said and "collect, train, evaluate, export, compare" in said
    assert "leaves nothing to do" in e2e.sentence(pipeline.run, config(place, "eagle3", "stages=[]"), capsys)


# ---- the table --------------------------------------------------------------------------------------------------


def test_every_head_has_a_row_with_all_its_numbers(compared: dict[str, Any]) -> None:
    rows = {row["proposer"]: row for row in compared["rows"]}
    assert set(rows) == {"eagle3", "medusa"} and compared["gamma"] == 4 and compared["requests"] > 8
    for row in rows.values():
        for value in (row["alpha"], row["tokens_per_round"], row["tree"]["tokens_per_round"]):
            assert value["low"] is None or value["low"] <= value["value"] <= value["high"]
        assert 0 < row["draft_cost"]["value"] < 5 and row["speedup"]["value"] > 0
        assert row["parameters"] > 1000 and row["seconds"] >= 0
    assert rows["eagle3"]["tokens"] == rows["medusa"]["tokens"] > 100, "they have not seen as much"
    assert "not the c of costs.json" in compared["definitions"]["draft_cost"]
    first, second = compared["rows"]
    assert first["difference"] is None and second["difference"]["requests"] == compared["requests"]
    text = to_markdown(compared)
    assert text.count("| medusa |") == text.count("| eagle3 |") == 2  # over all requests, and by slice


def reports(place: e2e.Place) -> dict[str, dict[str, Any]]:
    folder = place.cwd / "runs/compare"
    return {name: json.loads((folder / name / "report/report.json").read_text()) for name in ("medusa", "eagle3")}


def test_runs_that_were_measured_on_something_else_are_refused(place: e2e.Place, compared: dict[str, Any]) -> None:
    assert {row["run"] for row in table_of(reports(place))["rows"]} == {"eagle3", "medusa"}
    changes = {
        "the held-out requests": lambda report: report["traffic"]["fingerprints"].update(held_out="0" * 64),
        "the target": lambda report: report["target"].update(weights="0" * 64),
        "eval.gamma": lambda report: [row.update(gamma=3) for row in [report["headline"], *report["results"]]],
        "eval.max_new_tokens": lambda report: report["provenance"]["config"]["eval"].update(max_new_tokens=9),
    }
    for what, change in changes.items():
        both = reports(place)
        change(both["eagle3"])
        with pytest.raises(UserError, match=f"eagle3 and medusa cannot be compared: they differ in {what}"):
            table_of(both)
    with pytest.raises(UserError, match="no evaluated run"):
        table_of({})


def test_the_script_takes_any_runs(
    place: e2e.Place, compared: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    medusa = place.cwd / "runs/compare/medusa"
    compare.run(e2e.config(f"runs=[{medusa}]", f"comparison_dir={tmp_path}", name="compare"))
    assert [row["run"] for row in json.loads((tmp_path / "comparison.json").read_text())["rows"]] == ["medusa"]
    assert "medusa" in capsys.readouterr().out and "| medusa |" in (tmp_path / "comparison.md").read_text()
    cfg = e2e.config(f"runs=[{tmp_path / 'none'}]", name="compare")
    assert "holds no report/report.json" in e2e.sentence(compare.run, cfg, capsys)
    twice = e2e.config("runs=[runs/a,./runs/a]", name="compare")
    assert "names a run twice; give each once." in e2e.sentence(compare.run, twice, capsys)


# ---- what a draft costs -----------------------------------------------------------------------------------------


def test_the_cost_of_a_draft_is_counted_by_hand() -> None:
    """Two requests: (0.6 + 0.2) s for (3 + 4) + 4 drafts behind the first rounds, against 2 s for 20 plain tokens."""
    rounds = [[Round(4, 4), Round(3, 1), Round(4, 0)], [Round(4, 0), Round(4, 2)]]
    drafted = [
        RequestTrace(str(n), "all", 3, [7] * (1 + sum(r.emitted for r in own)), own, "length", 2.0, 0.5, seconds)
        for n, (own, seconds) in enumerate(zip(rounds, (0.6, 0.2), strict=True))
    ]
    plain = [RequestTrace(str(n), "all", 3, [7] * 11, [Round(0, 0)] * 10, "length", 1.5, 0.5) for n in range(2)]
    found = measure(drafted, gamma=4, plain=plain, resamples=0).draft_cost
    assert found is not None and found.value == pytest.approx((0.8 / 11) / (2.0 / 20))
    trees = [replace(one, rounds=[replace(r, tree=True) for r in one.rounds]) for one in drafted]
    assert measure(trees, gamma=4, plain=plain, resamples=0).draft_cost is None
    assert measure(drafted, gamma=4, resamples=0).draft_cost is None


def test_the_first_round_does_not_count_as_drafting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the draft moves: 100 s in the first round, 1 s in each later one."""
    seconds = [0.0]
    monkeypatch.setattr("eval.decode.time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    class Slow(PromptLookup):
        def propose(self, state: Any, depth: int, draw: Any) -> Proposal:
            seconds[0] += 1.0 if seconds[0] else 100.0
            return super().propose(state, depth, draw)

    request = Request("one", "all", (9, 10, 11, 9, 10))
    [trace] = decode(load_tiny(tmp_path), [request], Slow(), DecodeSettings(gamma=2, max_new_tokens=12))
    assert len(trace.rounds) > 3 and trace.draft_seconds == len(trace.rounds) - 1
    assert trace.seconds == 100 + trace.draft_seconds
    assert trace.drafted_tokens == sum(r.proposed for r in trace.rounds[1:])
