"""Command lines that Hydra or argparse would answer in their own way, and sweeps: one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from heads.artifact import UserError
from scripts import pipeline
from scripts.common import script
from tests import e2e


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=3", "There is no setting train.epoch"),
        ("nonsense=1", "There is no setting nonsense"),
        ("head=nothing", "head=nothing is unknown; there are eagle, eagle3, hydra_mlp"),
        ("experiment=nothing", "experiment=nothing is unknown; there are chat_70b, chat_8b, code, compare"),
        ("target=my-org/my-model", "for a model of your own type target=custom target.path=my-org/my-model"),
        ("rival=[prompt_lookup,jacoby]", "rival=jacoby is unknown; do you mean rival=jacobi?"),
        ("head.loss=kl,tv", "head.loss=kl,tv is several values, which takes --multirun"),
        ("~traffic", "~traffic takes away what every script needs"),
        ("head=eagel3", "head=eagel3 is unknown; do you mean head=eagle3? Of head there are eagle, eagle3, hydra_mlp"),
        ("head.taps=[1", "The override head.taps=[1 cannot be read"),
        ("--name=mine", "There is no option --name=mine; overrides take no dashes: name=mine."),
        ("--name mine", "There is no option --name; overrides take no dashes: name=mine."),
        ("-m --run-dir runs/x", "There is no option --run-dir; overrides take no dashes: run_dir=runs/x."),
        ("--fast seed=1", "There is no option --fast; overrides take no dashes: fast=…"),
        ("seed=1 --multirun head.loss=kl,tv", "before head.loss=kl,tv; put all options, such as --multirun, first."),
        ("--cfg jobs", "Argument --cfg/-c: invalid choice: 'jobs'"),
    ],
)
def test_what_hydra_refuses(
    override: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point itself, in this process."""
    monkeypatch.setattr("sys.argv", ["scripts/pipeline.py", *override.split(" ")])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stop:
        pipeline.main()
    assert stop.value.code == 2
    assert words in e2e.only_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(("crash", "code"), [(None, 2), (2, 1)])
def test_a_refused_job_of_a_multirun_lets_the_others_run(
    crash: int | None,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[int] = []

    @script()
    def small(cfg: DictConfig) -> None:
        ran.append(cfg.seed)
        if cfg.seed == 1:
            raise UserError("seed=1 is not wanted.")
        if cfg.seed == crash:
            raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("sys.argv", ["small", "--multirun", "seed=0,1,2,3"])
    with pytest.raises(SystemExit) as stop:
        small()
    assert ran == [0, 1, 2, 3] and stop.value.code == code
    told = capsys.readouterr().err
    assert "error: seed=1 is not wanted." in told
    assert ("ZeroDivisionError: a fault of ours" in told) == (crash is not None)
    end = "; seed=2 (crashed)." if crash else "."
    assert told.splitlines()[-1].endswith(f"of the jobs did not finish, the others did: seed=1 (refused){end}")


def test_two_jobs_of_a_sweep_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    @script(one_folder=True)
    def small(cfg: DictConfig) -> None:
        ran.append(cfg.head.loss)

    monkeypatch.setattr("sys.argv", ["small", "--multirun", "head.loss=kl,tv"])
    with pytest.raises(SystemExit) as stop:
        small()
    assert ran == ["kl"] and stop.value.code == 2
    assert "Another job of this sweep has written to runs/default" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["small", "--multirun", "head.loss=kl,tv", "run_dir=runs/x/${head.loss}"])
    small()
    assert ran == ["kl", "kl", "tv"]
    assert list(tmp_path.iterdir()) == [], "Hydra's multirun.yaml is nobody's"
