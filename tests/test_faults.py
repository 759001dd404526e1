"""What happens to a run from outside: kill -9 at any moment, a full disk, and several processes instead of one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts import collect, evaluate, train
from tests import e2e

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # minutes only where other work has the machine
LAUNCH = ("accelerate.commands.launch", "--cpu", "--num_processes", "2")
BEGUN = {
    "features": "shard-*.json",
    "head": "checkpoints/step-*",
    "report": "traces/*.jsonl",
}
"""Per stage, what appears one by one while it works."""


def test_kill_9_in_every_stage(finished: e2e.Finished, tmp_path: Path) -> None:
    """One command, killed in collect, then in train, then in evaluate, then left alone: as if nothing had happened.

    The moments are random: after some of a stage's parts, and a little later.
    """
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    place = finished.place.at(tmp_path)
    kept: dict[str, dict[str, tuple[int, int]]] = {}
    for stage, pattern in BEGUN.items():
        parts = len(list((finished.place.run / stage).glob(pattern)))
        parts = 2 if stage == "head" else dice.randint(2, parts - 2)  # checkpoints: two are kept
        kill_after(place, partial(count_is, place.run / stage, pattern, parts), dice.uniform(0, 0.03))
        assert not (place.run / stage / "manifest.json").exists(), f"{stage} had finished, seed {seed}"
        kept[stage] = e2e.stamps(place.run / stage)
    output = e2e.call(place, "pipeline")
    assert output.returncode == 0, (seed, output.stderr)
    assert_undisturbed(finished.place, place)
    # Nothing was lost: shards and traces that were there have not been made again, and training went on.
    for stage, suffix in (("features", ".safetensors"), ("report", ".jsonl")):
        now = e2e.stamps(place.run / stage)
        whole = {name: stamp for name, stamp in kept[stage].items() if name.endswith(suffix)}
        assert len(whole) >= 2 and {name: now[name] for name in whole} == whole, (stage, seed)
    last_kept = max(int(name.split("/")[1].removeprefix("step-")) for name in kept["head"] if "/step-" in name)
    assert resumed_from(place) == last_kept > 0


def count_is(folder: Path, pattern: str, least: int) -> bool:
    return len(list(folder.glob(pattern))) >= least


def resumed_from(place: e2e.Place) -> int | None:
    """The step from which the training that finished had gone on."""
    states = sorted((place.run / "head").glob("checkpoints/step-*/state.json"))
    result = json.loads(states[-1].read_text())["record"]["result"]
    step: int | None = result["resumed_from"]
    return step


def kill_after(place: e2e.Place, begun: Callable[[], bool], pause: float) -> None:
    """Start the pipeline and kill it with all its children once something is there."""
    with open(place.cwd / "log.txt", "w") as log:
        process = subprocess.Popen(
            e2e.command("pipeline", *place.overrides),
            cwd=place.cwd,
            env=e2e.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 600
            while not begun():
                assert process.poll() is None, (place.cwd / "log.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(pause)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    assert code == -signal.SIGKILL, "it had ended before it was killed"


def assert_undisturbed(calm: e2e.Place, other: e2e.Place) -> None:
    """Equal features and head to the last bit, equal losses, and an equal report."""
    shards = [e2e.manifest(one, "features")["shards"] for one in (calm, other)]
    assert shards[0] == shards[1]
    weights = [(one.run / "head" / "head.safetensors").read_bytes() for one in (calm, other)]
    assert weights[0] == weights[1], "the weights are others"
    assert e2e.losses(calm) == e2e.losses(other)
    reports = [e2e.untimed(e2e.report(one)["results"]) for one in (calm, other)]
    assert reports[0] == reports[1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disk(kilobytes)` mounts a small disk as runs/, or gives it another size."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mounted = False

    def size(kilobytes: int) -> Path:
        nonlocal mounted
        options = f"size={kilobytes}k" + (",remount" if mounted else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "draftsmith", folder], capture_output=True)
        if done.returncode != 0:
            pytest.skip("mounting a small disk needs more rights")
        mounted = True
        return folder

    yield size
    if mounted:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(
    finished: e2e.Finished,
    disk: Callable[[int], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too small for the features, then for checkpoints, then for traces; with more space each goes on and completes."""
    place = finished.place.at(tmp_path)
    monkeypatch.chdir(place.cwd)
    cfg = e2e.config(*place.overrides)
    disk(64)
    message = e2e.sentence(collect.run, cfg, capsys)
    assert "The features need up to" in message and "are free under" in message
    assert not list((place.run / "features").glob("shard-*"))
    disk(8192)
    assert e2e.call(place, "collect").returncode == 0
    disk(used(place.cwd / "runs") + 200)
    output = e2e.call(place, "train")
    assert output.returncode == 2
    assert "No space left on device; free some space" in e2e.only_sentence(output.stderr)
    disk(8192)
    assert e2e.call(place, "train").returncode == 0
    disk(used(place.cwd / "runs") + 24)
    message = e2e.sentence(evaluate.run, cfg, capsys)
    assert "No space left on device; free some space" in message
    disk(8192)
    output = e2e.call(place, "pipeline")
    assert output.returncode == 0, output.stderr
    assert_undisturbed(finished.place, place)
    assert not list((place.run).rglob("*.tmp"))


def used(folder: Path) -> int:
    """Kilobytes in use on the disk under the folder."""
    return shutil.disk_usage(folder).used // 1024


def test_two_processes_equal_one(finished: e2e.Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --cpu --num_processes 2 -m scripts.train`: the same losses as one process, over 20 steps."""
    more = ("train.mixed_precision=no", "train.global_batch_tokens=128", "train.max_steps=24")
    one, two = finished.place.at(tmp_path / "one"), finished.place.at(tmp_path / "two")
    for place in (one, two):
        for stage in ("traffic", "features"):
            shutil.copytree(finished.place.run / stage, place.run / stage)
    output = e2e.call(two, "train", *more, launcher=LAUNCH)
    assert output.returncode == 0, output.stderr
    assert output.stdout.count("24 steps") == 1, "one of two processes speaks"
    assert {path.name for path in two.cwd.iterdir()} == {"runs"}
    assert len(list((two.run / "head/checkpoints/step-00000024").glob("random-*"))) == 2
    monkeypatch.chdir(one.cwd)
    train.run(e2e.config(*one.overrides, *more))
    losses = [e2e.losses(place) for place in (one, two)]
    assert [step for step, _ in losses[0]] == [step for step, _ in losses[1]] == list(range(1, 25))
    for (_, alone), (_, together) in zip(*losses, strict=True):
        assert together == pytest.approx(alone, abs=1e-5)
    weights = [load_file(place.run / "head/head.safetensors") for place in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-5)
