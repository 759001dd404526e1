"""`--help` of every script: purpose, examples that compose, every choice with a line, what the exit codes are."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib import import_module

import pytest

from scripts import help as usage
from tests import e2e

SCRIPTS = {
    path.stem: found.group(1) or "config"
    for path in sorted((e2e.ROOT / "scripts").glob("*.py"))
    if (found := re.search(r'^@script\((?:"(\w+)")?.*\)\ndef main', path.read_text(), re.MULTILINE))
}


def told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    monkeypatch.setattr("sys.argv", [f"{name}.py", flag])
    import_module(f"scripts.{name}").main()
    return capsys.readouterr().out


def test_the_scripts_are_found() -> None:
    assert {"pipeline", "collect", "train", "evaluate", "export", "doctor"} < set(SCRIPTS) and len(SCRIPTS) == 16


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_says_it_all(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = told(name, monkeypatch, capsys)
    assert re.match(r"[A-Z].*?[.?!]\n\nUsage:", page, re.DOTALL), "no purpose on top"
    assert "…" not in page.partition("Choices, *")[2].partition("Settings of all scripts")[0], "a line is cut off"
    shown = page.partition("Examples:\n")[2].partition("\n\n")[0].replace("\\\n", " ").splitlines()
    examples = [line.strip() for line in shown if not line.startswith("  #")]
    assert len(examples) >= 3
    assert [line for line in page.splitlines() if len(line) > usage.WIDTH] == []
    for line in examples:
        words = shlex.split(line, comments=True)
        module = words[words.index("-m") + 1].removeprefix("scripts.")
        assert module == name
        for job in e2e.jobs(words[words.index("-m") + 2 :]):
            e2e.config(*job, name=SCRIPTS[name])
    for group in (path for path in (e2e.ROOT / "conf").iterdir() if path.is_dir() and path.name != "accelerate"):
        for file in group.glob("*.yaml"):
            line = re.search(rf"^  [ *] {file.stem} +(\S.*)$", page, re.MULTILINE)
            assert (line is not None and len(line[0]) <= usage.WIDTH) or (group.name == "bench" and name != "bench")
            said = usage._about(file)
            assert line is None or said in " ".join(page.split()), "the whole sentence"
            assert said.count("(") == said.count(")"), "a sentence that is not cut in the middle"
    assert all(f"\n  {code} " in page for code in (0, 1, 2, 130))
    assert "  global_batch_tokens: 2048" in page and "hydra:" not in page and "defaults:" not in page


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_own_settings_come_first_and_every_word_of_their_comments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, shown = told(name, monkeypatch, capsys), f"Settings of {name} alone:\n"
    assert (shown in page) == (SCRIPTS[name] != "config") and "_target_" not in page
    places = [page.find(shown), *(page.index(one) for one in ("Exit codes:", "Choices, *", "Settings of all scripts:"))]
    assert places == sorted(places)
    settings = (
        page.partition(shown)[2].partition("\n\nExit")[0] + "\n" + page.partition("Settings of all scripts:\n")[2]
    )
    assert [line for line in settings.splitlines() if len(line) > usage.WIDTH] == []
    for root in {SCRIPTS[name], "config"}:
        body = re.split(r"^hydra:", (e2e.ROOT / f"conf/{root}.yaml").read_text(), flags=re.MULTILINE)[0]
        body = re.sub(r"\A(#.*\n)*defaults:\n( +-.*\n)*", "", body)
        said = [word for comment in re.findall(r"#(.*)", body) for word in comment.split()]
        words = set(settings.split())
        assert [word for word in said if word not in words] == []


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    line = " ".join([*map(shlex.quote, e2e.command("store", "--help")), "| head -n 1; exit ${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", line], cwd=e2e.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_the_version_names_the_commit_and_what_numbers_depend_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = told("pipeline", monkeypatch, capsys, "--version")
    assert line.count("\n") == 1
    assert re.match(r"draftsmith at \w+ \((clean|with changes|no repository)\); python 3\.", line)
    assert "torch " in line and "transformers " in line


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("train.epoch", "train.epochs"), ("lr", "optim.lr"), ("heads", "head"), ("evaluate.gamma", "eval.gamma")],
)
def test_a_misspelt_setting_is_told_the_nearest(wrong: str, meant: str) -> None:
    assert meant in usage.nearest(wrong, "config")


def test_what_is_like_nothing_gets_no_guess() -> None:
    assert usage.nearest("qqqqqqqq", "config") == []
