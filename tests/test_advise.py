"""scripts.advise and the measurements it rests on, over a finished run of a tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from heads.artifact import sha256_file
from scripts import advise, bench, evaluate, twins
from scripts.costs import kept_load
from tests import e2e

CELLS = (
    "bench.batches=[1,2]",
    "bench.contexts=[16,32]",
    "bench.gammas=[1,4]",
    "bench.repeats=3",
    "bench.dtype=float32",
)
GPU = ("gpu=h100", "target_size.parameters=7.5e9", "draft_size.parameters=4e8")


@pytest.fixture(scope="module")
def costed(finished: e2e.Finished, tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """The finished run with its costs."""
    place = finished.place.at(tmp_path_factory.mktemp("costed"))
    shutil.copytree(finished.place.run, place.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.cwd)
        bench.run(e2e.config("bench=cost", *place.overrides, *CELLS, name="bench"))
    return place


@pytest.fixture
def here(costed: e2e.Place, monkeypatch: pytest.MonkeyPatch) -> e2e.Place:
    monkeypatch.chdir(costed.cwd)
    monkeypatch.setattr(advise, "write_report", lambda folder, report: None)  # drawing takes longer than all the rest
    return costed


def advice(place: e2e.Place, *more: str) -> dict[str, Any]:
    """advice.json for some overrides, at a load that was measured."""
    advise.run(e2e.config(*place.overrides, "load.context=32", *more, name="advise"))
    return dict(json.loads((place.run / "report" / "advice.json").read_text()))


def test_the_costs_are_a_full_table_with_its_facts(costed: e2e.Place) -> None:
    costs = json.loads((costed.run / "costs.json").read_text())
    assert [(cell["batch"], cell["context"]) for cell in costs["cells"]] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    assert {"s", "c", "overhead", "step", "rounds"} <= set(costs["cells"][0])
    assert costs["dtype"] == "float32" and costs["head"] == e2e.report(costed)["head"]["sha256"]


def test_the_advice_is_said_and_written(
    here: e2e.Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise, "write_report", twins.write_report)
    found = advice(here)
    rows = found["rows"]
    assert [row["gamma"] for row in rows] == [0, 1, 2, 3, 4] and rows[0]["speedup"]["value"] == 1.0
    fastest = max(row["speedup"]["value"] for row in rows)
    assert rows[found["gamma"]]["speedup"]["value"] >= 0.998 * fastest
    tau = e2e.report(here)["results"]
    wanted = {"proposer": "eagle3", "dtype": "float32", "temperature": 0.0, "gamma": 4, "slice": "all"}
    (row,) = [one for one in tau if all(one[key] == value for key, value in wanted.items())]
    assert rows[4]["tokens_per_round"]["value"] == pytest.approx(row["tokens_per_round"]["value"])
    assert found["intervals_from"] == "requests resampled" and len(found["table"]) == 4
    printed = capsys.readouterr().out
    assert ("Do not speculate at batch 1" if found["gamma"] == 0 else f"γ = {found['gamma']} at batch 1") in printed
    assert "Chains only" in printed and "best γ and its speed-up" in printed
    assert e2e.report(here)["load"] == {name: value for name, value in found.items() if name != "provenance"}
    assert (found["dtype"], found["temperature"]) == ("float32", 0.0)
    for twin in ("report.html", "report.md"):
        assert "With one request at once and 32 tokens of context" in (here.run / "report" / twin).read_text()
    assert "Speed under load" in (here.run / "report/report.html").read_text()


def test_the_report_holds_teacher_forced_against_decoder(finished: e2e.Finished) -> None:
    taught = e2e.report(finished.place)["teacher_forced"]
    rows = e2e.report(finished.place)["results"]
    chain = {
        "proposer": "eagle3",
        "dtype": taught["dtype"],
        "temperature": 0.0,
        "gamma": taught["gamma"],
        "slice": "all",
    }
    (row,) = [one for one in rows if all(one[key] == value for key, value in chain.items())]
    own = row["alpha_by_position"]
    assert len(taught["teacher"]) == 4 and 0 < taught["coverage"]["value"] <= 1
    for depth, gap in enumerate(taught["gap"]):
        if gap["value"] is not None:
            assert taught["decoder"][depth]["value"] == pytest.approx(own[depth])
            assert gap["value"] == pytest.approx(own[depth] - taught["teacher"][depth]["value"])
    assert row["alpha_by_position"][0] <= taught["coverage_of_text"]["high"] + 0.05


CHANGES: dict[str, tuple[list[str], Callable[[dict[str, Any]], Any]]] = {
    # setting: (what is set, what differs)
    "load.batch": (["load.batch=2"], lambda found: found["rows"][1]["tokens_per_second"]),
    "load.context": (["load.context=20"], lambda found: found["context"]),
    "max_gamma": (["max_gamma=2"], lambda found: len(found["rows"])),
    "batches": (["batches=[1]"], lambda found: found["largest"]),
    "contexts": (["contexts=[16]"], lambda found: len(found["table"])),
    "gpu": ([*GPU], lambda found: found["notes"]),
}
GPU_CHANGES = {
    "proposer": ["proposer=prompt_lookup"],
    "gpu": ["gpu={bandwidth_TBs: 1, tflops: 10}"],
    "target_size.parameters": ["target_size.parameters=1e9"],
    "target_size.bytes_per_parameter": ["target_size.bytes_per_parameter=1"],
    "target_size.kv_bytes_per_token": ["target_size.kv_bytes_per_token=1e6"],
    "draft_size.parameters": ["draft_size.parameters=1e9"],
    "draft_size.bytes_per_parameter": ["draft_size.bytes_per_parameter=1"],
    "draft_size.kv_bytes_per_token": ["draft_size.kv_bytes_per_token=1e6"],
    "draft_size.passes": ["draft_size.passes=one"],
    "draft_size.window": ["draft_size.kv_bytes_per_token=1e6", "draft_size.window=4"],
}


def test_draft_lengths_beyond_the_measured_are_named(here: e2e.Place) -> None:
    said = "acceptance was measured up to γ 4; beyond, its last value is taken to go on"
    assert said in advice(here, "max_gamma=6")["notes"] and said not in advice(here)["notes"]


@pytest.mark.parametrize("setting", CHANGES)
def test_every_setting_changes_the_advice(here: e2e.Place, setting: str) -> None:
    more, what = CHANGES[setting]
    assert what(advice(here)) != what(advice(here, *more))


@pytest.mark.parametrize("setting", GPU_CHANGES)
def test_every_figure_of_a_gpu_changes_the_advice(here: e2e.Place, setting: str) -> None:
    base = ["draft_size.kv_bytes_per_token=1e6"] if setting.endswith("window") else []
    speeds = [advice(here, *GPU, *more)["rows"][2]["tokens_per_second"] for more in (base, GPU_CHANGES[setting])]
    assert speeds[0] != speeds[1]


def test_paths_and_temperature_choose_what_is_read(here: e2e.Place, tmp_path: Path) -> None:
    """Another report without traces, other costs, and a temperature of its own."""
    costs, report = json.loads((here.run / "costs.json").read_text()), e2e.report(here)
    (tmp_path / "costs.json").write_text(json.dumps({**costs, "dtype": "bfloat16"}))
    (tmp_path / "report.json").write_text(json.dumps(report))
    advise.run(
        e2e.config(
            *here.overrides,
            *(f"report={tmp_path}/report.json", f"costs={tmp_path}/costs.json"),
            *("load.context=32", "load.temperature=1.0"),
            name="advise",
        )
    )
    found = json.loads((tmp_path / "advice.json").read_text())
    wanted = {"proposer": "eagle3", "dtype": "bfloat16", "temperature": 1.0, "gamma": 4, "slice": "all"}
    (row,) = [one for one in report["results"] if all(one[key] == value for key, value in wanted.items())]
    assert found["rows"][4]["tokens_per_round"] == row["tokens_per_round"]
    assert found["intervals_from"].startswith("the report's own")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["report=nowhere.json"], "nowhere.json is not there; evaluate the head first"),
        (["costs=nowhere.json"], "bench=cost"),
        (["load.batch=64"], "load.batch=64 is far beyond the measured 1…2"),
        (["load.batch=0"], "must be 1 or more"),
        (["load.batch=some"], "give a whole number"),
        (["load.temperature=0.5"], "load.temperature=0 | 1"),
        (["proposer=nobody", *GPU], "proposer=eagle3 | prompt_lookup"),
        (["proposer=prompt_lookup"], "costs are those of the head eagle3, not of proposer=prompt_lookup"),
        (["max_gamma=0"], "max_gamma=0 must be 1 or more"),
        (["max_gamma=20"], "far beyond the measured 4"),
        (["gpu=h1000", *GPU[1:]], "choose h200, h100, a100, l4"),
        (["gpu=h100"], "target_size.parameters"),
        ([*GPU, "draft_size.passes=some"], "choose each or one"),
    ],
)
def test_what_cannot_be_advised(
    here: e2e.Place, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    cfg = e2e.config(*here.overrides, "load.context=32", *more, name="advise")
    assert words in e2e.sentence(advise.run, cfg, capsys)


def test_a_report_without_results_is_one_sentence(
    here: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**e2e.report(here), "results": []}))
    cfg = e2e.config(*here.overrides, *GPU, f"report={tmp_path}/report.json", name="advise")
    assert "report.json, an evaluation's report, is empty: its results hold no row" in e2e.sentence(
        advise.run, cfg, capsys
    )


def test_a_draft_that_has_learned_nothing_is_named(
    here: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And intervals are spoken of where one is shown."""

    def told(first: float, own: float, free: float, low: float | None) -> str:
        report = e2e.report(here)
        for row in report["results"]:
            own_row = row["proposer"] == "eagle3"
            row["alpha_by_position"][:1] = [first] if own_row else []
            row["tokens_per_round"] = {"value": own if own_row else free, "low": low, "high": low and own}
            row["survival_interval"] = [{"value": 0.5, "low": low and 0.4, "high": low and 0.6}] * 4
        (tmp_path / "report.json").write_text(json.dumps(report))
        capsys.readouterr()
        advise.run(e2e.config(*here.overrides, *GPU, f"report={tmp_path}/report.json", name="advise"))
        return capsys.readouterr().out

    weak, good = told(0.04, 1.1, 1.2, None), told(0.6, 1.9, 1.2, 1.5)
    assert "accepts 4% of the first drafts: this head has hardly learned; train it longer" in weak
    assert "prompt lookup, which needs no training and costs nothing to draft, yields as much: 1.20" in weak
    assert "hardly learned" not in good and "prompt lookup" not in good
    assert "Intervals: 95 %" in good and "[" in good
    assert "Intervals: 95 %" not in weak and "No intervals" in weak


def test_costs_of_another_head_are_refused(here: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = json.loads((here.run / "costs.json").read_text())
    (tmp_path / "costs.json").write_text(json.dumps({**costs, "head": "another"}))
    cfg = e2e.config(*here.overrides, f"costs={tmp_path}/costs.json", name="advise")
    assert "another head than the report's" in e2e.sentence(advise.run, cfg, capsys)


def test_advice_outlives_a_repeated_evaluation_of_the_same_alone(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    load = {"gamma": 3, "costs": {"path": str(costs), "sha256": sha256_file(costs)}}
    report = tmp_path / "report.json"
    assert kept_load(report, "head", "key") == (None, "")

    def found(**changed: Any) -> tuple[dict[str, Any] | None, str]:
        report.write_text(json.dumps({"head": {"sha256": "head"}, "key": "key", "load": load, **changed}))
        return kept_load(report, "head", "key")

    assert found() == (load, "") and found(load=None) == (None, "")
    for what, changed in (("head", {"head": {"sha256": "b"}}), ("evaluation", {"key": "b"})):
        assert found(**changed)[0] is None and f"another {what}; run scripts.advise" in found(**changed)[1]
    assert "another costs" in found(load={"gamma": 3})[1], "advice of an older version"
    costs.write_text("[]")
    assert found()[0] is None and "another costs" in found()[1]


def test_an_evaluation_takes_the_advice_of_the_report_before_over(
    here: e2e.Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(evaluate, "write_report", lambda folder, report: written.append(dict(report)))
    monkeypatch.setattr(evaluate, "track", lambda *unused: None)
    monkeypatch.setattr(advise, "write_report", lambda folder, report: written.append(dict(report)))
    advice(here)
    file, before = here.run / "report/report.json", (here.run / "report/report.json").read_text()
    file.write_text(json.dumps(written[0]))
    evaluate.run(e2e.config(*here.overrides))
    assert written[1]["load"] == json.loads(json.dumps(written[0]["load"])) and "dropped" not in capsys.readouterr().out
    file.write_text(json.dumps({**written[0], "key": "another"}))
    evaluate.run(e2e.config(*here.overrides))
    file.write_text(before)
    assert written[2]["load"] is None and "rests on another evaluation" in capsys.readouterr().out


def test_every_setting_is_here() -> None:
    """What conf/advise.yaml documents; paths and the temperature have a test of their own."""
    shown = OmegaConf.to_container(OmegaConf.load(e2e.ROOT / "conf" / "advise.yaml"))
    assert isinstance(shown, dict)
    named = {f"{key}.{one}" if isinstance(value, dict) else key for key, value in shown.items() for one in value or [0]}
    assert named - {"defaults", "report", "costs", "load.temperature"} == {*CHANGES, *GPU_CHANGES}


def test_prediction_against_the_decoder(here: e2e.Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs, and says what it found; whether a clock agrees is no matter for a target this small."""
    few = ("bench.batches=[1,2]", "bench.gammas=[0,1,4]", "bench.requests=4")
    bench.run(e2e.config("bench=prediction", *here.overrides, *few, name="bench"))
    found = json.loads((here.run / "prediction.json").read_text())
    assert [(row["measured"]["batch"], row["measured"]["gamma"]) for row in found["rows"]] == [
        (batch, gamma) for batch in (1, 2) for gamma in (0, 1, 4)
    ]
    assert all(row["predicted"] > 0 and row["measured"]["tokens_per_second"] > 0 for row in found["rows"])
    assert "median error" in capsys.readouterr().out
    (here.run / "costs.json").rename(here.run / "elsewhere.json")
    try:
        cfg = e2e.config("bench=prediction", *here.overrides, *few, name="bench")
        assert "measure the costs first" in e2e.sentence(bench.run, cfg, capsys)
    finally:
        (here.run / "elsewhere.json").rename(here.run / "costs.json")
