"""`scripts.gpu_check`: all of it with small sizes on CPU, a fast path that is wrong is noticed, and without a GPU it
says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from tests import e2e
from tests.tiny import save_tiny

SMALL = (
    *("target.device=cpu", "target=custom", "check.hidden_size=32", "check.heads=4", "check.kv_heads=2"),
    *("check.intermediate_size=48", "check.vocab_size=80", "check.draft_vocab_size=48", "check.depth=2"),
    *("check.documents=2", "check.length=16", "check.steps=1", "check.repeats=1", "head.taps=[1,3,6]"),
    "head.draft_vocab_size=40",
)


def run(*overrides: str) -> bool:
    return gpu_check.run(e2e.config(*overrides, name="gpu_check"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None, only_traced: None) -> None:
    """Of the kinds of loss two, of which one has an eta."""
    monkeypatch.setattr("training.gpu_check.KINDS", ("kl", "lk_lambda"))


def test_without_a_gpu_it_says_so_and_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    gpu_check.main()  # ends without SystemExit, which is exit code 0
    assert capsys.readouterr().out.startswith("gpu_check no CUDA device is here") and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_of_it_runs_on_cpu(tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tiny(tmp_path / "tiny")
    assert run(*SMALL, f"target.path={target}", f"run_dir={tmp_path}")
    shown, told = capsys.readouterr().out, json.loads((tmp_path / "gpu_check.json").read_text())
    names = {check["name"] for check in told["checks"]}
    assert {"loss kl, fp32", "loss lk_lambda, compiled, bf16", "head, compiled, fp32"} <= names and len(names) == 22
    assert all(check["passed"] and check["error"] <= check["tolerance"] for check in told["checks"]) and told["passed"]
    assert [(text["by"], text["passed"]) for text in told["texts"]] == [
        *(("eagle3", True), ("prompt_lookup", True), ("no draft", True))
    ]
    assert [(speed["head"], speed["compiled"]) for speed in told["speeds"]] == [
        *(("made", False), ("made", True), ("tiny", False), ("tiny", True))
    ]
    for speed in told["speeds"]:
        assert speed["tokens_per_second"] > 0 and speed["memory"] > 0 and speed["share"] > 0 and not speed["failure"]
        assert f"{speed['tokens_per_second']:>10,.0f}{speed['memory'] / 1e9:>8.2f}" in shown
    assert "FAILED" not in shown and "Everything holds" in shown


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_wrong_is_noticed_and_hides_nothing(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is off, an attention that cannot be compiled, a way to train that runs out of memory."""
    from heads.losses import _judged

    def off(*inputs: object) -> tuple[torch.Tensor, ...]:
        loss, *more = _judged(*inputs)
        return loss * 1.001, *more

    def broken(*inputs: object) -> torch.Tensor:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr("heads.losses._judged", off)
    monkeypatch.setattr("training.gpu_check.fused_attention", broken)
    monkeypatch.setattr("training.gpu_check.KINDS", ("kl",))
    monkeypatch.setattr("heads.compiled.torch.compile", lambda one, **how: broken)
    assert not run(*SMALL, "target.path=not-there", f"run_dir={tmp_path}")
    told = json.loads((tmp_path / "gpu_check.json").read_text())
    failed = {check["name"] for check in told["checks"] if not check["passed"]}
    assert "loss kl, fp32" in failed and "head, compiled, fp32" in failed
    assert sum("FlexAttention" in name for name in failed) == 6 and not any("in blocks" in name for name in failed)
    assert [bool(speed["failure"]) for speed in told["speeds"]] == [False, True]
    shown = capsys.readouterr().out
    assert "FAILED loss kl, fp32: 1.0e-03" in shown and "out of shared memory" in shown
    assert "There is no target at not-there" in shown and "Something does not hold" in shown


@pytest.mark.parametrize(
    ("override", "said"),
    [("check.length=0", "check.length=0 must be at least 1"), ("check.heads=3", "check.heads=3 must divide")],
)
def test_sizes_that_cannot_be_are_refused(override: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = e2e.config(*SMALL, override, "target.path=x", name="gpu_check")
    assert said in e2e.sentence(gpu_check.run, cfg, capsys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_passes_on_this_gpu(tmp_path: Path) -> None:
    small = [word for word in SMALL if word != "target.device=cpu" and "hidden_size" not in word]
    assert run(*small, "check.hidden_size=256", "check.length=200", "target.path=not-there", f"run_dir={tmp_path}")
