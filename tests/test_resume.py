"""Stopping anywhere and starting again gives the same weights, bit for bit; others' files stay."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.artifact import UserError
from heads.base import TargetFeatures
from tests.training_toy import ToyHead, ToyRef, ToySource, metrics_of, toy_head, toy_train, weights_of
from training.checkpoint import CheckpointFolder, differences
from training.features import BatchPlan
from training.generators import random_state, restore_random
from training.interrupt import Interrupted

ROOT = Path(__file__).resolve().parent.parent


class RaisesSignal(ToySource):
    """Sends its own process a signal when a document of the given step is read."""

    def __init__(self, step: int, number: int) -> None:
        super().__init__()
        plan = BatchPlan(self.documents, 128, 0, 32)
        batches = [batch for epoch in range(3) for batch in plan.epoch(epoch)]
        self.after = sum(map(len, batches[:step])) + 1
        self.number = number
        self.reads = 0

    def read(self, ref: ToyRef) -> TargetFeatures:
        self.reads += 1
        if self.reads == self.after:
            os.kill(os.getpid(), self.number)
        return super().read(ref)


def straight(folder: Path, **values: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    head = toy_head()
    toy_train(folder, head, **values)
    return weights_of(head), metrics_of(folder)


def assert_same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, metrics = straight(tmp_path / "straight", log_every=4)
    capsys.readouterr()
    handler = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        source = RaisesSignal(8, number)
        toy_train(tmp_path / "run", source=source, log_every=4, save_every=0, read_ahead=0, stream=sys.stderr)
    assert stopped.value.code == code and signal.getsignal(number) is handler
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"Stopped by {signal.Signals(number).name} after step 9 of 21; run the same command again")
    assert "step-00000009" in last

    head = toy_head(seed=5)
    result = toy_train(tmp_path / "run", head, log_every=4, save_every=0)
    assert result.resumed_from == 9 and result.steps == 21
    assert_same(weights, weights_of(head))
    assert metrics_of(tmp_path / "run") == metrics, "the line at step 12 has the sums from before and after the stop"


@pytest.mark.parametrize("stop", [1, 5, 7, 20])
def test_losing_everything_since_a_checkpoint_changes_nothing(tmp_path: Path, stop: int) -> None:
    """As after a kill: metrics and a half-written folder are ahead of the checkpoint."""
    weights, metrics = straight(tmp_path / "straight", accumulation=2)
    with pytest.raises(Interrupted):
        toy_train(
            tmp_path / "run",
            source=RaisesSignal(stop - 1, signal.SIGTERM),
            accumulation=2,
            save_every=0,
            read_ahead=0,
        )
    checkpoints = tmp_path / "run/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == [f"step-{stop:08}"]
    shutil.copytree(checkpoints / f"step-{stop:08}", checkpoints / ".writing-step-00000021")
    (checkpoints / f"step-{stop + 9:08}").mkdir()  # no state in it: never completed
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": stop + 1, "loss": 9.0}) + "\n" + '{"step": ' + str(stop + 2))
    head = toy_head(seed=5)
    toy_train(tmp_path / "run", head, accumulation=2, save_every=0)
    assert_same(weights, weights_of(head))
    assert metrics_of(tmp_path / "run") == metrics
    assert not list(checkpoints.glob(".*"))


def command(folder: Path, *values: str) -> list[str]:
    return [sys.executable, "-m", "tests.training_toy", str(folder), *values]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines_of(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it was disturbed"
        time.sleep(0.005)


class Dies(ToySource):
    """Kills its own process when so many documents have been read: amid a step, a save or reading ahead."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self.left = after

    def read(self, ref: ToyRef) -> TargetFeatures:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().read(ref)


KILLED = {"epochs": 12, "save_every": 3, "read_ahead": 1, "accumulation": 2, "stream": io.StringIO()}


def life(folder: Path, after: int | None) -> None:
    """One process of a run that is killed again and again."""
    torch.set_num_threads(1)
    head = toy_head()
    toy_train(folder, head, source=Dies(after), **KILLED)
    save_file(weights_of(head), folder / "weights-0.safetensors")


@pytest.mark.slow
def test_kill_minus_nine_at_twenty_random_moments(tmp_path: Path) -> None:
    """Every life begins where the checkpoints say; the weights and lines are those of a run that was left alone."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # so that a life need not import anything
    weights, metrics = straight(tmp_path / "straight", **KILLED)
    moments, kills = random.Random(0), 0
    run = tmp_path / "run"
    for after in (*(moments.randint(1, 45) for _ in range(20)), None):
        process = processes.Process(target=life, args=(run, after))
        process.start()
        process.join(60)
        kills += process.exitcode == -signal.SIGKILL
    assert kills == 20 and process.exitcode == 0
    assert_same(weights, load_file(run / "weights-0.safetensors"))
    assert metrics_of(run) == metrics


def test_kill_minus_nine_from_outside(tmp_path: Path) -> None:
    """At a moment that another process chooses, which knows nothing of steps."""
    values = ("save_every=3", "pause=0.01")
    run = tmp_path / "run"
    process = subprocess.Popen(command(run, *values), env=environment(), stderr=subprocess.DEVNULL)
    moment = random.randint(1, 8)
    # Before the first checkpoint there is nothing to resume: the weights would be those the new head starts with.
    wait_until(lambda: len(lines_of(run)) >= moment and bool(list(run.glob("checkpoints/step-*/state.json"))), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    head = toy_head(seed=5)
    assert (toy_train(run, head, save_every=3).resumed_from or 0) >= 3
    weights, metrics = straight(tmp_path / "straight", save_every=3)
    assert_same(weights, weights_of(head))
    assert metrics_of(run) == metrics


def test_sigterm_ends_a_process_with_143(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "pause=0.02", "epochs=50"), env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: bool(lines_of(tmp_path)), process)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "Traceback" not in err and "run the same command again to continue from" in err.splitlines()[-1]


def test_a_finished_run_is_recognised(tmp_path: Path) -> None:
    head = toy_head()
    result = toy_train(tmp_path, head)
    again = toy_head(seed=5)
    source = ToySource()
    source.read = None  # type: ignore[method-assign, assignment]  # nothing is read
    assert toy_train(tmp_path, again, source=source) == result
    assert_same(weights_of(head), weights_of(again))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "settings.seed was 0 and is 1"),
        ({"max_steps": 30}, "settings.max_steps was null and is 30"),
        ({"identity": {"target": "b"}}, 'target was "a" and is "b"'),
        ({"source": ToySource(seed=3)}, "data.fingerprint was"),
        ({"head": ToyHead(noise=0.2)}, "head.arguments.noise was 0.1 and is 0.2"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    toy_train(tmp_path, max_steps=None, identity={"target": "a"})
    with pytest.raises(UserError) as caught:
        toy_train(tmp_path, **({"identity": {"target": "a"}} | change))
    assert told in str(caught.value) and "choose another folder" in str(caught.value)


def test_what_changes_no_weights_may_change(tmp_path: Path) -> None:
    weights, _ = straight(tmp_path / "straight")
    with pytest.raises(Interrupted):
        toy_train(tmp_path / "run", source=RaisesSignal(8, signal.SIGTERM), read_ahead=0)
    head = toy_head()
    toy_train(tmp_path / "run", head, save_every=2, keep=1, log_every=3, read_ahead=1)
    assert_same(weights, weights_of(head))


def test_only_checkpoints_of_this_run_are_removed(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    toy_train(tmp_path / "other", max_steps=1)
    checkpoints.mkdir()
    shutil.copytree(tmp_path / "other/checkpoints/step-00000001", checkpoints / "best")
    with pytest.raises(Interrupted):
        toy_train(tmp_path, source=RaisesSignal(4, signal.SIGTERM), save_every=1, keep=2, read_ahead=0)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step-00000004", "step-00000005"]
    state = json.loads((checkpoints / "step-00000004/state.json").read_text())
    del state["digest"]
    (checkpoints / "step-00000004/state.json").write_text(json.dumps({**state, "run": "somebody else's"}))
    toy_train(tmp_path, save_every=4, keep=1)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step-00000004", "step-00000021"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": 1, "ru', "not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"format": 1}', "lacks run, step"),
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, content: str, words: str) -> None:
    toy_train(tmp_path, max_steps=1)
    (tmp_path / "checkpoints/step-00000001/state.json").write_text(content)
    with pytest.raises(UserError, match=rf"state.json.* is damaged: .*{words}.*; remove .*step-00000001, to go on"):
        toy_train(tmp_path, max_steps=1)
    assert CheckpointFolder.tracker_run(tmp_path / "checkpoints") is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_finished_checkpoint_with_a_flipped_byte_is_no_head(tmp_path: Path) -> None:
    toy_train(tmp_path, max_steps=1)
    flip(tmp_path / "checkpoints/step-00000001/weights.safetensors")
    with pytest.raises(UserError, match=r"step-00000001 is damaged: weights.safetensors changed after .* remove"):
        toy_train(tmp_path, max_steps=1)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random-00000.safetensors"])
def test_an_earlier_checkpoint_takes_the_place_of_a_damaged_one(tmp_path: Path, name: str, caplog: Any) -> None:
    values = {"max_steps": 6, "save_every": 2, "keep": 3}
    weights, lines = straight(tmp_path, **values)
    last = tmp_path / "checkpoints/step-00000006"
    whole = {path.name: path.read_bytes() for path in last.iterdir()}
    flip(last / name)
    again, repeated = straight(tmp_path, **values)
    assert "step-00000006 is damaged" in caplog.text and "from the earlier" in caplog.text
    assert_same(weights, again)
    assert repeated == lines
    assert (last / name).read_bytes() == whole[name], "the damaged one is replaced"


def test_generators_come_back() -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(()).item(),
        ]

    draw()  # leaves half a pair of gaussians behind
    state = {name: tensor.clone() for name, tensor in random_state().items()}
    first = draw()
    restore_random(state)
    assert draw() == first


def test_a_generator_used_by_the_caller_continues(tmp_path: Path) -> None:
    """on_eval may draw from Python's and NumPy's generators; training never does."""

    def on_eval(step: int, state: Any) -> dict[str, float]:
        return {"python": random.random(), "numpy": float(np.random.rand())}

    def run(folder: Path, source: ToySource | None = None) -> None:
        toy_train(folder, source=source, on_eval=on_eval, eval_every=3, read_ahead=0, save_every=0)

    random.seed(1), np.random.seed(1)
    run(tmp_path / "straight")
    random.seed(1), np.random.seed(1)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", RaisesSignal(9, signal.SIGTERM))
    random.seed(2), np.random.seed(2)
    run(tmp_path / "run")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")


def test_a_crash_before_the_rename_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, _ = straight(tmp_path / "straight")
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if target.name == "step-00000010":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        toy_train(tmp_path / "run")
    monkeypatch.undo()
    folder = CheckpointFolder(tmp_path / "run/checkpoints", identity={}, keep=2, accelerator=Accelerator(cpu=True))
    latest = folder.latest()
    assert latest is not None and latest.name == "step-00000005"
    head = toy_head(seed=5)
    assert toy_train(tmp_path / "run", head).resumed_from == 5
    assert_same(weights, weights_of(head))


def test_differences_name_the_leaves() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": True}
    new = {"a": {"b": 2, "c": [1, 2]}, "new": "x"}
    assert differences(old, new) == [
        "a.b was 1 and is 2",
        "gone was true and is null",
        'new was null and is "x"',
    ]
    assert differences(old, old) == []
