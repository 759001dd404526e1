"""One command from traffic to an exported head: what it leaves, that it repeats nothing, and that its parts are it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from heads.checkpoint import FACTS, TENSORS
from heads.export.folder import check_export
from tests import e2e
from training.store import FeatureStore

KEYS = {
    *("temperature", "gamma", "slice", "alpha", "alpha_by_position", "survival", "tokens_per_round"),
    *("expected_tokens_per_round", "formula_gap", "requests", "rounds", "identical_requests", "looping_requests"),
    *("speedup", "proposer"),
}
pytestmark = pytest.mark.timeout(900)  # minutes only where other work has the machine
WORK = ("regenerate ", "loss ", " requests, ")  # what only a stage that does something prints


def test_every_stage_leaves_a_finished_artifact(finished: e2e.Finished) -> None:
    place = finished.place
    for stage in e2e.STAGES:
        manifest = e2e.manifest(place, stage)
        assert manifest["kind"] == stage
        assert manifest["provenance"]["config"]["name"] == e2e.NAME
        assert manifest["provenance"]["argv"][1:] == place.overrides
    names = {path.name for path in place.run.iterdir()}
    # Locks, and proofs of this run whose tests may have come before, stand beside the stages.
    assert {name for name in names if not name.startswith(("certificate", "."))} == set(e2e.STAGES)
    FeatureStore.open(place.run / "features").verify()
    check_export(place.run / "export/vllm")
    assert not list(place.cwd.rglob("*.tmp"))
    assert {path.name for path in place.cwd.iterdir()} == {"tiny", "traffic.jsonl", "runs"}, "Hydra left something"


def test_the_report_has_its_stable_keys(finished: e2e.Finished) -> None:
    report = e2e.report(finished.place)
    for row in report["results"]:
        assert row.keys() >= KEYS
        assert row["alpha"].keys() >= {"value", "low", "high"}
        assert row["tokens_per_round"].keys() >= {"value", "low", "high"}
        assert row["formula_gap"].keys() >= {"value", "low", "high"}
        if row["proposer"] != "none":
            assert len(row["alpha_by_position"]) == len(row["survival"]) == row["gamma"]
    seen = {(row["proposer"], row["temperature"], row["gamma"]) for row in report["results"]}
    assert seen == {
        *((proposer, temperature, 4) for proposer in ("eagle3", "prompt_lookup") for temperature in (0.0, 1.0)),
        ("none", 0.0, 0),
        ("eagle3", 0.0, 2),
    }
    assert {row["slice"] for row in report["results"]} == {"all", "a", "b"}
    timed = [row for row in report["results"] if row["slice"] == "all" and row["speedup"] is not None]
    assert {(row["proposer"], row["dtype"]) for row in timed} >= {("eagle3", "float32"), ("eagle3", "bfloat16")}


def test_the_text_is_the_targets_own_in_float32(finished: e2e.Finished) -> None:
    """Of every proposer, on every held-out request."""
    report = e2e.report(finished.place)
    held_out = e2e.manifest(finished.place, "traffic")["conversations"]["held_out"]
    count = sum(entry["conversations"] for entry in held_out.values())
    rows = [row for row in report["results"] if (row["dtype"], row["temperature"]) == ("float32", 0.0)]
    assert {row["proposer"] for row in rows} == {"eagle3", "prompt_lookup", "none"}
    assert all(row["identical_requests"] == row["requests"] for row in rows)
    assert {row["requests"] for row in rows if row["slice"] == "all"} == {count}
    assert f"{count} of {count}" in report["verdict"]


def test_what_it_prints(finished: e2e.Finished) -> None:
    """Its first line, a line for each stage, the table, the verdict and how to serve the head."""
    printed = finished.output.stdout
    assert printed.splitlines()[0].startswith(f"Draftsmith: {e2e.NAME}")
    assert [printed.count(f"] {number}/4 ") for number in (1, 2, 3, 4)] == [1] * 4
    assert "tokens/round" in printed and "prompt_lookup" in printed
    assert " ".join(printed.split()).count(e2e.report(finished.place)["verdict"]) == 1
    assert "vllm serve" in printed
    assert "Traceback" not in finished.output.stderr


def test_the_first_line_waits_for_nothing_heavy() -> None:
    """It is printed before a stage begins, and nothing slow is imported before."""
    heavy = "sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    probe = "import sys; from scripts import pipeline; sys.argv += ['experiment=quick']; "
    probe += f"pipeline.check_all = lambda cfg: sys.exit(str({heavy})); pipeline.main()"  # what follows the first line
    found = subprocess.run(
        [sys.executable, "-c", probe], env=e2e.environment(), cwd=e2e.ROOT, capture_output=True, text=True
    )
    assert found.stdout.startswith("Draftsmith: quick") and found.stderr.strip() == "[]"


@pytest.mark.slow
def test_a_second_run_reuses_every_stage(finished: e2e.Finished, tmp_path: Path) -> None:
    place = finished.place.at(tmp_path)
    shutil.copytree(finished.place.run, place.run)
    before = {stage: e2e.stamps(place.run / stage) for stage in ("features", "head", "report/traces")}
    again = e2e.call(place, "pipeline")
    assert again.returncode == 0, again.stderr
    for stage, stamps in before.items():
        assert e2e.stamps(place.run / stage) == stamps, f"{stage} was written again"
    assert not any(mark in again.stderr for mark in WORK), again.stderr
    assert e2e.report(place)["results"] == e2e.report(finished.place)["results"]


@pytest.mark.slow
def test_the_scripts_one_by_one_are_the_pipeline(finished: e2e.Finished, tmp_path: Path) -> None:
    place = finished.place.at(tmp_path)
    for module in ("collect", "train", "evaluate", "export"):
        output = e2e.call(place, module)
        assert output.returncode == 0, output.stderr
    for name in (FACTS, TENSORS):
        assert e2e.manifest(place, "head")["sha256"] == e2e.manifest(finished.place, "head")["sha256"], name
    assert (place.run / "head" / TENSORS).read_bytes() == (finished.place.run / "head" / TENSORS).read_bytes()
    shards = [e2e.manifest(one, "features")["shards"] for one in (place, finished.place)]
    assert shards[0] == shards[1] and len(shards[0]) > 8
    reports = [e2e.report(one) for one in (place, finished.place)]
    assert e2e.untimed(reports[0]["results"]) == e2e.untimed(reports[1]["results"])
    exported = [e2e.manifest(one, "export")["files"] for one in (place, finished.place)]
    assert {name: exported[0][name] for name in ("config.json", "model.safetensors")} == {
        name: exported[1][name] for name in ("config.json", "model.safetensors")
    }
