"""A tiny target, its traffic and a command line that takes them through all stages; ways to call it. Not a test."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from scripts.common import one_sentence
from scripts.precision import settle
from tests.tiny import bring_module, save_tiny

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("traffic", "features", "head", "report", "export")
NAME = "t"
SETTINGS = (
    f"name={NAME}",
    "target.dtype=bfloat16",  # on every CPU
    "train.mixed_precision=bf16",
    "traffic.held_out=0.3",
    "head.taps=[1,3,6]",
    "head.draft_vocab_size=64",
    "generation.max_new_tokens=24",
    "generation.batch_size=4",
    "train.epochs=4",
    "train.global_batch_tokens=256",
    "train.save_every=3",
    "train.log_every=1",
    "eval.max_new_tokens=16",
    "eval.gammas=[2]",
    "eval.timed_requests=4",
)
TIMES = {"seconds", "speedup", "speedup_with_prompt", "draft_cost", "tokens_per_second"}


@dataclass(frozen=True)
class Place:
    """A target and traffic, and the working directory in which runs/<name> appears."""

    target: Path
    traffic: Path
    cwd: Path

    @property
    def run(self) -> Path:
        return self.cwd / "runs" / NAME

    @property
    def overrides(self) -> list[str]:
        return [*uses(self.target, self.traffic), *SETTINGS]

    def at(self, cwd: Path) -> Place:
        """The same commands elsewhere."""
        cwd.mkdir(parents=True, exist_ok=True)
        return Place(self.target, self.traffic, cwd)


@dataclass(frozen=True)
class Finished:
    """A place where the whole pipeline has run, and what it printed."""

    place: Place
    output: subprocess.CompletedProcess[str]


def new_place(folder: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    target = bring_module(save_tiny(folder / "tiny"))
    return Place(target, write_rows(folder / "traffic.jsonl", conversations(60)), folder)


def uses(target: Path, traffic: Path) -> list[str]:
    """Overrides that name a target of one's own and a file of traffic."""
    return ["target=custom", f"target.path={target}", "traffic=jsonl", f"traffic.path={traffic}"]


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows of two slices; every third has two turns."""
    dice = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        turns = [" ".join(f"w{dice.randint(0, 40)}" for _ in range(dice.randint(2, 9))) for _ in range(2)]
        rows.append({"turns": turns[: 2 if number % 3 == 0 else 1], "slice": "ab"[number % 2]})
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- two ways to run a script -----------------------------------------------------------------------------------


def command(module: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", f"scripts.{module}", *overrides]


def environment() -> dict[str, str]:
    """One thread, as sums in another order round otherwise; a width that no table needs to break at."""
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return {**os.environ, **more}


def call(place: Place, module: str, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script as a process of its own; `launcher` is a module that starts it."""
    line = command(module, *place.overrides, *more)
    line[2:2] = [*launcher, "-m"] if launcher else []
    return subprocess.run(line, cwd=place.cwd, env=environment(), capture_output=True, text=True, timeout=600)


def jobs(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each run that a command line starts: one, or with --multirun one for each choice."""
    if "--multirun" not in words:
        return [list(words)]
    pairs = [word.partition("=") for word in words if word != "--multirun"]
    choices = [[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]
    return [list(job) for job in itertools.product(*choices)]


def composed(*overrides: str, name: str = "config") -> DictConfig:
    """What conf/ says for these overrides."""
    with initialize_config_module("conf", version_base="1.3"):
        return compose(name, list(overrides))


def config(*overrides: str, name: str = "config") -> DictConfig:
    """What a script is given for these overrides."""
    cfg = composed(*overrides, name=name)
    settle(cfg)
    return cfg


def sentence(run: Callable[[DictConfig], Any], cfg: DictConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a script refuses this config, here in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        one_sentence(run)(cfg)
    assert stop.value.code == 2
    return only_sentence(capsys.readouterr().err)


def only_sentence(stderr: str) -> str:
    """The error of a process: one line, whole, and no traceback."""
    assert "Traceback" not in stderr, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and stderr.rstrip().endswith(errors[0]), stderr
    assert errors[0].endswith("."), errors[0]
    return errors[0].removeprefix("error: ")


# ---- what a run has left ----------------------------------------------------------------------------------------


def manifest(place: Place, stage: str) -> dict[str, Any]:
    folder = place.run / ("export/vllm" if stage == "export" else stage)
    return dict(json.loads((folder / "manifest.json").read_text()))


def report(place: Place) -> dict[str, Any]:
    return dict(json.loads((place.run / "report" / "report.json").read_text()))


def untimed(value: Any) -> Any:
    """A report without what a clock has measured."""
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if key not in TIMES}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def metrics(place: Place) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place.run / "head" / "metrics.jsonl").read_text().splitlines()]


def losses(place: Place) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics(place) if "loss" in row]


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file below: both stay when a file is not written again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
