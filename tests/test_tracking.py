"""Trackers: the JSONL file always has every step once, and W&B neither asks nor stops anything."""

from __future__ import annotations

import io
import json
import logging
import math
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from eval.report import headline_rows
from eval.report_table import flat_rows, headline_numbers
from heads.artifact import UserError
from heads.checkpoint import FACTS, TENSORS
from scripts import evaluate
from scripts.settings import check_all
from tests import e2e
from tests.test_report import full_report
from tests.training_toy import metrics_of, toy_head, toy_train, weights_of
from training.checkpoint import CheckpointFolder
from training.tracking import BarDisplay, Evaluation, JsonlTracker, LineDisplay, open_display
from training.wandb_tracker import WandbTracker


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nobody ever logged in."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def test_continuing_removes_later_and_cut_off_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval/alpha": 0.5}\n{"step": 3}\n{"step": 4, "lo')
    tracker = JsonlTracker(tmp_path)
    tracker.open(step=2, run_id=None, config={})
    tracker.log(3, {"loss": 0.25, "acceptance/3": math.nan})
    line = '{"step": 3, "loss": 0.25, "acceptance/3": null}'
    assert path.read_text().splitlines()[3:] == [line], "readable before it is closed"
    tracker.sync()
    tracker.close(finished=True)
    tracker.open(step=0, run_id=None, config={})
    tracker.close(finished=True)
    assert path.read_text() == ""


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.path = Path("/dev/full")
    tracker._file = open("/dev/full", "a")
    with pytest.raises(UserError, match="No space left"):
        tracker.log(1, {"loss": 1.0})


def test_wandb_records_offline_without_a_login_and_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("W&B asked for something")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("getpass.getpass", asked)
    run = tmp_path / "run"
    first, plain = toy_head(), toy_head()
    tracker = WandbTracker(run, project="toy")
    toy_train(run, first, tracker, max_steps=3, stream=io.StringIO())
    recorded = list((run / "wandb").glob("offline-run-*"))
    assert tracker.run_id is not None and [path.name.endswith(tracker.run_id) for path in recorded] == [True]
    state = json.loads((run / "checkpoints/step-00000003/state.json").read_text())
    assert state["record"]["tracker_run"] == tracker.run_id
    assert capfd.readouterr().err == ""

    toy_train(tmp_path / "plain", plain, max_steps=3, stream=io.StringIO())
    assert metrics_of(run) == metrics_of(tmp_path / "plain")
    assert all((tensor == weights_of(plain)[name]).all() for name, tensor in weights_of(first).items())

    again = WandbTracker(run, project="toy")
    again.open(step=3, run_id=tracker.run_id, config={})
    again.log(4, {"loss": 1.0})
    again.close(finished=True)
    assert again.run_id == tracker.run_id


class FakeRun:
    """A W&B run that fails from the given call on."""

    id = "abc"
    url = "https://example.invalid/abc"
    dir = "/nowhere"

    def __init__(self, fails_after: int, step: int = 0) -> None:
        self.left = fails_after
        self.step = step
        self.logged: list[int] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the network is gone")
        self.logged.append(step)

    def finish(self, exit_code: int) -> None:
        raise RuntimeError("nor can it finish")


def fake(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))


def train_with_wandb(tmp_path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Train; returns the warnings. The numbers must be those of a run without W&B."""
    with caplog.at_level(logging.WARNING):
        result = toy_train(tmp_path / "run", tracker=WandbTracker(tmp_path / "run", **options), max_steps=5)
    toy_train(tmp_path / "plain", max_steps=5)
    assert result.steps == 5 and metrics_of(tmp_path / "run") == metrics_of(tmp_path / "plain")
    return [record.getMessage() for record in caplog.records if record.name == "training.wandb_tracker"]


def test_a_run_survives_wandb_failing_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake(monkeypatch, lambda **_: FakeRun(fails_after=2))
    warnings = train_with_wandb(tmp_path, caplog)
    assert len(warnings) == 1 and "the network is gone" in warnings[0] and "metrics.jsonl" in warnings[0]


def test_a_run_survives_wandb_failing_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake(monkeypatch, lambda **_: FakeRun(fails_after=9))
    assert len(train_with_wandb(tmp_path, caplog)) == 1


def test_a_run_survives_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings = train_with_wandb(tmp_path, caplog)
    assert len(warnings) == 1 and "ModuleNotFoundError" in warnings[0]


def test_online_that_cannot_begin_becomes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[str] = []
    run = FakeRun(fails_after=99)
    run.finish = lambda exit_code: None  # type: ignore[method-assign]

    def init(settings: dict[str, Any], **_: Any) -> FakeRun:
        modes.append(settings["mode"])
        if settings["mode"] == "online":
            raise RuntimeError("the key is not valid")
        return run

    fake(monkeypatch, init)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    warnings = train_with_wandb(tmp_path, caplog)
    assert modes == ["online", "offline"] and run.logged == [1, 2, 3, 4, 5]
    assert len(warnings) == 1 and "the key is not valid" in warnings[0] and "offline" in warnings[0]


def test_steps_that_an_online_run_already_has_are_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(fails_after=99, step=6)
    fake(monkeypatch, lambda **_: run)
    tracker = WandbTracker(tmp_path)
    tracker.open(step=3, run_id="abc", config={})
    for step in range(4, 8):
        tracker.log(step, {"loss": 1.0})
    assert run.logged == [6, 7]
    assert [line["step"] for line in metrics_of(tmp_path)] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("environment", "netrc", "asked", "mode"),
    [
        ({}, None, None, "offline"),
        ({}, "machine api.wandb.ai login user password k", None, "online"),
        ({}, "machine elsewhere.example login user password k", None, "offline"),
        ({"WANDB_API_KEY": "k"}, None, None, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, None, None, "offline"),
        ({"WANDB_MODE": "disabled"}, None, None, "disabled"),
        ({"WANDB_API_KEY": "k"}, None, "offline", "offline"),
    ],
)
def test_which_mode_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    netrc: str | None,
    asked: str | None,
    mode: str,
) -> None:
    seen: list[str] = []

    def init(settings: dict[str, Any], **_: Any) -> FakeRun:
        seen.append(settings["mode"])
        return FakeRun(9)

    fake(monkeypatch, init)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "home/.netrc").write_text(netrc + "\n")
        (tmp_path / "home/.netrc").chmod(0o600)
    WandbTracker(tmp_path, mode=asked).open(step=0, run_id=None, config={})
    assert seen == [mode]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    display = open_display(stream, 10, 0, 5)
    assert isinstance(display, BarDisplay)
    display.update(4, {"loss": 1.5, "acceptance/1": 0.5, "acceptance/2": 0.25, "tokens_per_second": 100.0})
    display.close()
    assert "loss 1.5000  acceptance 0.50 0.25  100 tokens/s" in stream.getvalue() and "4/10" in stream.getvalue()
    assert isinstance(open_display(io.StringIO(), 10, 0, 5), LineDisplay)


# ---- an evaluation ----------------------------------------------------------------------------------------------


def test_an_evaluation_is_added_to_the_run_of_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With W&B itself, offline, read back from its file: the numbers, the table, the pages, and the head as an artifact
    lie in the run's own files, under the name of the training."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    report = full_report()
    cfg = e2e.config("tracking=wandb", f"run_dir={tmp_path}")
    toy_train(tmp_path / "head", tracker=WandbTracker(tmp_path / "head"), max_steps=2, stream=io.StringIO())
    trained = CheckpointFolder.tracker_run(tmp_path / "head" / "checkpoints")
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.html").write_text("<p>seen</p>")
    for name in (FACTS, TENSORS):
        (tmp_path / "head" / name).write_text(name)
    evaluate.track(cfg, folder, report)
    (run,) = (folder / "wandb").glob("offline-run-*")
    assert trained is not None and run.name.endswith(trained)
    (page,) = run.glob("files/media/html/report/page_*.html")
    (samples,) = run.glob("files/media/html/report/samples_*.html")
    (table,) = run.glob("files/media/table/report/results_*.table.json")
    shown = json.loads(table.read_text())
    assert page.read_text() == "<p>seen</p>" and len(shown["data"]) == len(report["results"])
    assert "<mark>" in samples.read_text() and "<del>" in samples.read_text()
    assert {"proposer", "slice", "alpha", "alpha_low", "speedup_high"} <= set(shown["columns"])
    assert capfd.readouterr().err == "" and not (folder / "metrics.jsonl").exists()

    records = wandb_records(run)
    kept = [one.artifact for one in records if one.WhichOneof("record_type") == "artifact"]
    (artifact,) = [one for one in kept if one.type == "model"]  # the table is one too
    facts = json.loads(artifact.metadata)
    assert artifact.type == "model" and artifact.name == f"eagle3-{trained}"
    assert facts["alpha"] == headline_numbers(report)["alpha"] and facts["head"] == report["head"]
    assert {entry.path for entry in artifact.manifest.contents} == {FACTS, TENSORS}
    summary = {"/".join(item.nested_key) or item.key for one in records for item in one.summary.update}
    assert {"report/alpha", "report/tokens_per_round", "report/gap/1", "report/acceptance/1"} <= summary


def wandb_records(run: Path) -> list[Any]:
    """What an offline run has in its file, in the order of writing: the log format of LevelDB behind seven bytes."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # finish() does not wait until its service has written the last of it; the end of a process does
    (file,) = run.glob("*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:  # no room for a head in this block
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def test_an_offline_run_has_the_numbers_of_its_twin_and_says_what_made_it(tmp_path: Path) -> None:
    """Each line of metrics.jsonl stands in W&B's file with the same numbers, and the config with the command."""
    about = {"commit": "c0ffee", "argv": ["train", "head=eagle3"], "config": {"seed": 3}}
    tracker = WandbTracker(tmp_path / "run", about=about)
    toy_train(tmp_path / "run", tracker=tracker, max_steps=4, stream=io.StringIO())
    (run,) = (tmp_path / "run/wandb").glob("offline-run-*")
    records = wandb_records(run)
    rows = []
    for one in records:
        if one.WhichOneof("record_type") == "history":
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in one.history.item}
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and rows == [{k: v for k, v in line.items() if k != "step"} for line in lines]
    assert {"loss", "acceptance/1", "acceptance/2", "tokens_per_second", "memory_gb"} <= set(rows[-1])
    assert rows[-1]["memory_gb"] > 0.01
    config = {item.key: json.loads(item.value_json) for one in records for item in one.run.config.update}
    assert config["about"] == about and config["settings"]["optim"]["lr"] == 1e-2
    twin = json.loads((tmp_path / "run/run.json").read_text())
    assert twin["commit"] == "c0ffee" and twin["identity"]["settings"] == config["settings"]


def test_the_sweep_in_the_comments_is_one_that_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its YAML, with what an agent puts into it; and the run takes the name that the agent gave it."""
    text = (e2e.ROOT / "conf/tracking/wandb.yaml").read_text()
    block = text.partition("(collect first):\n#\n")[2].partition("\n_target_")[0]
    lines = [line.removeprefix("# ").removeprefix("#") for line in block.splitlines()]
    sweep = OmegaConf.to_container(OmegaConf.create("\n".join(lines)), resolve=False)
    tried = [f"{name}={rule.get('min', rule.get('values', [None])[0])}" for name, rule in sweep["parameters"].items()]
    words = [word.replace("${envvar:WANDB_RUN_ID}", "abc123") for word in sweep["command"]]
    assert words[:4] == ["${env}", "python", "-m", "scripts.pipeline"] and words[-1] == "${args_no_hyphens}"
    cfg = e2e.config(*words[4:-1], *tried)
    check_all(cfg)
    assert cfg.run_dir == "runs/sweep/abc123" and cfg.optim.lr == 1e-4 and cfg.head.depth == 3
    assert sweep["metric"]["name"].removeprefix("report/") in headline_numbers(full_report())
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    tracker = WandbTracker(tmp_path)
    tracker.open(step=0, run_id=None, config={})
    tracker.close(finished=True)
    assert tracker.run_id == "abc123"


def test_numbers_of_an_evaluation_are_those_of_its_headline() -> None:
    report = full_report()
    row, numbers = headline_rows(report)[0], headline_numbers(report)
    assert numbers["alpha"] == row["alpha"]["value"] and numbers["speedup"] == row["speedup"]["value"]
    assert numbers["identical_share"] == row["identical_requests"] / row["requests"]
    assert all(math.isfinite(value) for value in numbers.values())
    assert len({tuple(one) for one in flat_rows(report)}) == 1


def test_an_evaluation_survives_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = Evaluation(
        numbers={"alpha": 0.5},
        rows=[{"proposer": "eagle3", "alpha": 0.5}],
        page="<p>page</p>",
        samples="",
        head="eagle3",
        files=[],
        facts={},
    )
    for module in (SimpleNamespace(init=lambda **_: FakeRun(0)), None):
        monkeypatch.setitem(sys.modules, "wandb", module)
        with caplog.at_level(logging.WARNING):
            WandbTracker(tmp_path).publish(evaluation, run_id=None, config={})
    assert len(caplog.records) == 2 and all(str(tmp_path) in one.getMessage() for one in caplog.records)
    JsonlTracker(tmp_path).publish(evaluation, run_id=None, config={})
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]


def test_a_head_without_checkpoints_has_no_run(tmp_path: Path) -> None:
    assert CheckpointFolder.tracker_run(tmp_path / "none") is None
