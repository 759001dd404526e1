"""What `--help` says of exit codes, by the entry point of each script."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from heads.artifact import UserError
from scripts import help as usage
from tests import e2e
from tests.test_help import SCRIPTS

NEEDED = {
    "doctor": ["target=custom", "target.path=none"],
    "medusa2": ["stage1=runs/none"],
    "refresh": ["from=runs/none"],
    "store": ["subset=runs/none"],
}
JUDGES = ("doctor", "gpu_check", "prove", "serve_check")  # whose `run` says whether all is well


def code(script: str, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"{script}.py", *words])
        try:
            import_module(f"scripts.{script}").main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("script", ["advise", "compare", "doctor", "medusa2", "refresh", "store"])
def test_what_is_not_there_is_refused_with_2(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    traffic = ["traffic=files", "traffic.path=none.jsonl"]
    assert code(script, "name=t", "target.device=cpu", *traffic, *NEEDED.get(script, [])) == 2
    assert "none" in e2e.only_sentence(capsys.readouterr().err) or script in ("advise", "compare")
    assert not (tmp_path / "runs").exists()


def test_done_is_0(finished: e2e.Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = finished.place.run
    (tmp_path / "report").symlink_to(run / "report")
    gpu = ["gpu=h100", "target_size.parameters=1e9", "draft_size.parameters=1e7"]
    (tmp_path / "mine").mkdir()
    for file in (run / "report").glob("*.json*"):
        (tmp_path / "mine" / file.name).write_bytes(file.read_bytes())
    assert code("advise", "report=mine/report.json", *gpu) == 0 and (tmp_path / "mine/advice.json").is_file()
    assert code("compare", f"runs=[{run}]", "comparison_dir=both") == 0 and (tmp_path / "both").is_dir()
    assert code("store", "name=some", f"subset={run}/features", "count=3") == 0
    assert (tmp_path / "runs/some/features/manifest.json").is_file()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_comes_to_is_its_exit_code(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Done, a check that failed, a refusal, Ctrl-C, and a fault of ours, which Python ends with 1 and its traceback."""
    monkeypatch.chdir(tmp_path)
    module, words = import_module(f"scripts.{script}"), ["name=t", *NEEDED.get(script, [])]

    def outcome(came: Any) -> int:
        def run(*_: Any) -> Any:
            if isinstance(came, BaseException):
                raise came
            return came

        monkeypatch.setattr(module, "run", run)
        return code(script, *words)

    assert outcome(True) == 0
    assert outcome(False) == (1 if script in JUDGES else 0)
    assert outcome(UserError("No.")) == 2
    assert outcome(KeyboardInterrupt()) == 130
    with pytest.raises(RuntimeError, match="ours"):
        outcome(RuntimeError("ours"))
    assert set(usage.EXIT_CODES) == {0, 1, 2, 130} and all(judge in usage.EXIT_CODES[1] for judge in JUDGES)
