"""Two processes started by `accelerate launch` do what one does with the same global batches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.artifact import UserError
from tests.test_resume import RaisesSignal
from tests.training_toy import metrics_of, toy_head, toy_train, weights_of
from training.interrupt import Interrupted
from training.optim import OptimSettings
from training.processes import processes_missing, requested_processes, start_missing_processes, wait_or_end

ROOT = Path(__file__).resolve().parent.parent


def launch(folder: Path, *values: str, launcher: tuple[str, ...], **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", *launcher, "-m", "tests.training_toy", str(folder), *values]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


ACCELERATE = ("accelerate.commands.launch", "--cpu", "--num_processes", "2")
CONFIGURED = ("accelerate.commands.launch", "--config_file", str(ROOT / "conf/accelerate/cpu.yaml"))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what accelerate launch makes of fsdp2.yaml


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Twenty steps, some batches of one document so that a rank has nothing: losses to 1e-5.

    Noise is drawn per micro-batch, so one process with two micro-batches draws the same.
    """
    values = {"max_steps": 20, "global_batch_tokens": 48, "epochs": 9}
    two = launch(tmp_path / "two", *(f"{k}={v}" for k, v in values.items()), launcher=ACCELERATE)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("finished 20, resumed from None") == 2, "two processes must have trained"
    head = toy_head()
    toy_train(tmp_path / "one", head, accumulation=2, **values)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    ranks = [load_file(tmp_path / f"two/weights-{rank}.safetensors") for rank in (0, 1)]
    for name, tensor in weights_of(head).items():
        assert torch.equal(ranks[0][name], ranks[1][name]), "the ranks drifted apart"
        torch.testing.assert_close(ranks[0][name], tensor, rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "two/checkpoints/step-00000020").glob("random-*"))) == 2


def test_two_processes_can_go_on_where_one_stopped(tmp_path: Path) -> None:
    """Also under torchrun; no noise, because one micro-batch has become two."""
    values: dict[str, Any] = {"max_steps": 12}
    toy_train(tmp_path / "one", toy_head(noise=0.0), **values)
    with pytest.raises(Interrupted):
        toy_train(tmp_path / "two", toy_head(noise=0.0), source=RaisesSignal(5, 15), read_ahead=0, **values)
    two = launch(tmp_path / "two", "max_steps=12", "noise=0.0", launcher=TORCHRUN)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("finished 12, resumed from 6") == 2
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_signal_to_one_of_two_stops_both_and_one_goes_on(tmp_path: Path) -> None:
    """Two micro-batches on each of two processes, then all four on one: the same batches, and with them the same noise.

    Only the first process is sent the signal.
    """
    values: dict[str, Any] = {"max_steps": 12}
    toy_train(tmp_path / "one", toy_head(), accumulation=4, **values)
    two = launch(tmp_path / "two", "max_steps=12", "accumulation=2", "stop=5", "save_every=0", launcher=CONFIGURED)
    assert two.returncode != 0 and "finished" not in two.stdout
    assert two.stderr.count("Stopped by SIGTERM after step 6 of 12; run the same command again") == 1
    (checkpoint,) = (tmp_path / "two/checkpoints").iterdir()
    assert checkpoint.name == "step-00000006" and len(list(checkpoint.glob("random-*"))) == 2
    head = toy_head(seed=5)
    assert toy_train(tmp_path / "two", head, accumulation=4, **values).resumed_from == 6
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


def test_shards_go_on_where_one_process_stopped_and_the_other_way_round(tmp_path: Path) -> None:
    """FSDP2: steps 1 to 4 whole, 5 to 8 in two shards, the rest whole again; as if it had been one process."""
    values: dict[str, Any] = {"max_steps": 12, "save_every": 0}
    straight, head = toy_head(noise=0.0), toy_head(noise=0.0)
    toy_train(tmp_path / "one", straight, **values)
    with pytest.raises(Interrupted):
        toy_train(tmp_path / "two", head, source=RaisesSignal(3, 15), read_ahead=0, **values)
    command = ("max_steps=12", "save_every=0", "noise=0.0")
    two = launch(tmp_path / "two", *command, "stop=7", launcher=TORCHRUN, **FSDP2)
    assert two.returncode != 0 and "Stopped by SIGTERM after step 8 of 12" in two.stderr, two.stderr
    last = toy_head(seed=5, noise=0.0)
    assert toy_train(tmp_path / "two", last, **values).resumed_from == 8
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    for name, tensor in weights_of(straight).items():
        torch.testing.assert_close(weights_of(last)[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_sharded_run_leaves_a_whole_head(tmp_path: Path) -> None:
    """Muon needs whole matrices for its update, and gets them."""
    values: dict[str, Any] = {"max_steps": 6, "save_every": 0}
    head = toy_head(noise=0.0)
    toy_train(tmp_path / "one", head, optim=OptimSettings(name="muon", lr=1e-2, weight_decay=0.01), **values)
    command = ("max_steps=6", "save_every=0", "noise=0.0", 'optimizer="muon"')
    two = launch(tmp_path / "two", *command, launcher=TORCHRUN, **FSDP2)
    assert two.stdout.count("finished 6") == 2, two.stderr
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    for rank in (0, 1):
        found = load_file(tmp_path / f"two/weights-{rank}.safetensors")
        for name, tensor in weights_of(head).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def assert_equal_runs(one: Path, two: Path) -> None:
    pairs = list(zip(metrics_of(one), metrics_of(two), strict=True))
    for first, second in pairs:
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
        for name in ("step", "tokens", "acceptance/1", "acceptance/2", "lr"):
            assert first[name] == second[name]


@pytest.mark.parametrize(("imported", "left"), [("training.processes", "False"), ("training", "True")])
def test_the_group_ends_before_the_interpreter(tmp_path: Path, imported: str, left: str) -> None:
    """Whatever a process of a launch ends with; without our module, the control, the group is there to the last."""
    code = (
        "import atexit, sys, torch.distributed as dist\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        f"import {imported}\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "sys.exit(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (2, left), done.stderr


def test_a_launcher_that_started_too_few_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    assert processes_missing()
    with pytest.raises(UserError, match="started one CPU process although several were asked for"):
        toy_train(tmp_path)
    with pytest.raises(UserError, match="torchrun"):
        start_missing_processes()  # the parent is pytest's, which asked for nothing
    monkeypatch.setenv("RANK", "0")
    assert not processes_missing()


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("accelerate launch --cpu --num_processes 2 -m scripts.train", 2),
        ("python -m accelerate.commands.launch --num_processes=3 --cpu train.py", 3),
        ("accelerate launch --num-processes 4 train.py", 4),
        ("accelerate launch --config_file not_there.yaml train.py", None),
        (f"accelerate launch --config_file {ROOT}/conf/accelerate/cpu.yaml -m scripts.train", 2),
        (f"accelerate launch --config_file={ROOT}/conf/accelerate/cpu.yaml --num_processes 3 -m scripts.train", 3),
    ],
)
def test_how_many_were_asked_for(command: str, count: int | None) -> None:
    assert requested_processes(command.split()) == count


@pytest.mark.parametrize(("seconds", "code"), [(0, 0), (60, -signal.SIGKILL)])
def test_a_process_that_still_waits_for_one_that_failed_is_ended(seconds: int, code: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    wait_or_end(child, grace=20 if not seconds else 0.1)
    assert child.returncode == code
