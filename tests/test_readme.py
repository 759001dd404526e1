"""Every command of the README and of CONTRIBUTING runs, word for word, where the names it uses are tiny things.

The blocks and the commands in the text are found here, so that a new one is tested without being entered anywhere.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scripts.help import names
from scripts.settings import check_all
from tests import e2e
from tests.tiny import bring_module, save_tiny

RECIPE = "\n## Add a head\n"  # tests/test_add_head.py runs that section
README = (e2e.ROOT / "README.md").read_text()
BEFORE, _, REST = README.partition(RECIPE)
TEXT = BEFORE + REST[REST.index("\n## ") :] + (e2e.ROOT / "CONTRIBUTING.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTS = ("make ", "python -m ", "accelerate launch ")


def blocks(text: str, language: str) -> list[str]:
    """The bodies of all fenced blocks of a language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def spans(text: str) -> list[str]:
    """Whatever stands between backquotes in the text itself."""
    return re.findall(r"`([^`]+)`", " ".join(FENCE.sub("", text).split()))


def commands(text: str) -> list[str]:
    """Every command of the shell blocks, continued lines joined, and every one that stands whole in the text."""
    lines = [line for body in blocks(text, "sh") for line in body.replace("\\\n", " ").splitlines()]
    inline = [span for span in spans(text) if span.startswith(STARTS) and "…" not in span]
    return [line for line in (*lines, *inline) if shlex.split(line, comments=True)]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def script_of(line: str) -> tuple[str, list[str]] | None:
    """(script, its arguments) of a command line, None where it is one of make. Fails on any other command."""
    words = words_of(line)
    if words[0] == "make":
        return None
    start = words.index("-m") if "-m" in words else 0
    known = words[:start] in (["python"], ["accelerate", "launch"]) or words[:2] == ["accelerate", "launch"]
    module = words[start + 1] if known else ""
    assert re.fullmatch(r"scripts\.\w+", module) and find_spec(module), f"the README has an unknown command: {line}"
    return module.removeprefix("scripts."), words[start + 2 :]


COMMANDS = commands(TEXT)
LINES = [line for line in COMMANDS if words_of(line)[0] != "make"]
MAKES = sorted({word for line in COMMANDS if words_of(line)[0] == "make" for word in words_of(line)[1:2]})
PYTHON = blocks(TEXT, "python")
SPANS = sorted({span for span in spans(TEXT) if re.match(r"'?[a-z_0-9.]+=[^\"]*$", span) and "…" not in span})


# ---- the stand-ins ----------------------------------------------------------------------------------------------

SMALL = {
    "target.dtype": "float32",
    "traffic.held_out": "0.3",
    "generation.max_new_tokens": "8",
    "generation.max_prompt_tokens": "200",
    "train.max_steps": "2",
    "train.global_batch_tokens": "128",
    "train.log_every": "1",
    "eval.dtypes": "[float32]",
    "eval.temperatures": "[0.0]",
    "eval.gammas": "[]",
    "eval.max_new_tokens": "8",
    "eval.timed_requests": "1",
}
OF_DEMO = {"traffic.code": "10", "traffic.chat": "6", "traffic.tools": "10"}
OF_SCRIPT = {
    "doctor": {"doctor.answer_tokens": "4"},
    "prove": {
        **{"prove.dtypes": "[float32]", "prove.requests": "2", "prove.max_new_tokens": "6", "prove.samples": "2000"},
        **{"prove.prefixes": "1", "prove.copies": "40"},
    },
}
OF_WORD = {  # of a command that has such a word
    "bench=cost": {"bench.batches": "[1,2]", "bench.contexts": "[16]", "bench.gammas": "[1,4]", "bench.repeats": "3"},
    "bench=peers": {"bench.requests": "2", "bench.draft_layers": "2"},
}
ENDS = {"damage=wrong_q": 1}  # what a command says of its exit code; 0 for all others


TOO_LARGE = {
    "rivals.early_exit.exit_layer=8": "rivals.early_exit.exit_layer=4",
    "load.batch=8": "load.batch=2",
    "load.context=512": "load.context=32",
}


def stand_ins(script: str, words: Sequence[str]) -> list[str]:
    """The arguments of a command with overrides that make it small, but for what the command itself says."""
    said = {word.partition("=")[0].lstrip("+") for word in words}
    small = SMALL | OF_SCRIPT.get(script, {})
    if not any(word.startswith(("traffic=", "traffic.path=")) for word in words):
        small |= OF_DEMO
    for word in set(words) & OF_WORD.keys():
        small |= OF_WORD[word]
    whole = any(name in word for word in words for name in ("medusa", "hydra_mlp"))  # which vLLM drafts with
    if not whole or any(word.startswith("experiment=") for word in words):
        small |= {"head.draft_vocab_size": "64"}
    if "experiment=compare" in words:
        small |= {"collect.taps": "[2,4,5]"}
    more = [f"{key}={value}" for key, value in small.items() if key not in said]
    return [*(TOO_LARGE.get(word, word) for word in words), *more]


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command line, here in this process and through its own entry point."""
    found = script_of(line)
    assert found is not None
    script, words = found
    monkeypatch.setattr(sys, "argv", [f"scripts/{script}.py", *stand_ins(script, words)])
    try:
        import_module(f"scripts.{script}").main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A folder with a tiny model under each name that the README gives one, prompts, and finished runs of both."""
    folder = tmp_path_factory.mktemp("readme")
    targets = folder / "runs/targets/smollm2-135m-instruct", folder / "my-org/my-model"
    for target in targets:
        bring_module(save_tiny(target))
    place = e2e.Place(targets[1], e2e.write_rows(folder / "prompts.jsonl", e2e.conversations(24)), folder)
    e2e.write_rows(folder / "week2.jsonl", e2e.conversations(40))  # the first 24 are old
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        for words in (
            "name=demo experiment=demo",
            "name=mine target=custom target.path=my-org/my-model traffic=jsonl traffic.path=prompts.jsonl",
        ):
            assert run(f"python -m scripts.pipeline {words}", patch) == 0
        (folder / "org").mkdir()
        (folder / "org/their-eagle3").symlink_to(folder / "runs/mine/export/vllm")
    return place


# ---- the tests --------------------------------------------------------------------------------------------------


def test_the_blocks_are_found() -> None:
    assert len(LINES) >= 10 and {"demo", "test"} <= set(MAKES)
    assert {language for language, _ in FENCE.findall(TEXT)} <= {"sh", "python", "", "json"}, "a block nobody runs"


@pytest.mark.parametrize("body", PYTHON)
def test_a_block_of_python_runs(body: str, place: e2e.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for a target in memory, and with short answers."""
    monkeypatch.chdir(place.cwd)
    assert len([line for line in body.splitlines() if line and not line.startswith("from ")]) <= 12
    small = body.replace("8192", "64").replace("held_out=0.1", "held_out=0.3").replace("runs/nb", str(tmp_path))
    small = small.replace("Generation()", "Generation(max_new_tokens=8, max_prompt_tokens=200)")
    small = small.replace("DecodeSettings(", "DecodeSettings(max_new_tokens=8, ")
    said: dict[str, object] = {}
    exec(compile(small, "README.md", "exec"), said)
    assert (tmp_path / "export/config.json").is_file() and len(said["traces"]) == len(said["held_out"]) > 0


def settings() -> set[str]:
    """Every group, and every setting of every file of conf/ by the name that overrides it."""
    conf, known = e2e.ROOT / "conf", {"experiment"}
    for path in conf.rglob("*.yaml"):
        group = path.parent.name
        before = {"conf": "", "experiment": "", "rival": f"rivals.{path.stem}."}.get(group, f"{group}.")
        known |= {group, *names(OmegaConf.to_container(OmegaConf.load(path)), before)}
    return known


@pytest.mark.parametrize("span", SPANS)
def test_an_override_in_the_text_is_a_setting(span: str) -> None:
    for word in shlex.split(span):
        assert word.partition("=")[0].lstrip("+") in settings(), word


@pytest.mark.parametrize("target", MAKES)
def test_a_target_of_make_is_there(target: str) -> None:
    """What it would do is asked only: `make -n` follows every recipe without running one."""
    output = subprocess.run(["make", "-n", target], cwd=e2e.ROOT, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    assert output.stdout.strip()


@pytest.mark.parametrize("line", LINES)
def test_a_command_runs(line: str, place: e2e.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.cwd)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("heads.export.hub.push", lambda folder, repository, manifest: f"hf.co/{repository}")
    script, words = script_of(line) or ("", [])
    if script == "serve_check" or any(word.startswith(("server.url=", "peer_python=")) for word in words):
        # Needs a server, or another trainer: that each of its jobs composes is what can be had here.
        taps = ["collect.taps=[2,4,5]"] if "experiment=servers" in words else []  # of the tiny target
        for job in e2e.jobs(words):
            check_all(e2e.config(*job, *taps, name=script if script in ("serve_check", "bench") else "config"))
        return
    expected = next((code for word, code in ENDS.items() if word in words_of(line)), 0)
    assert run(line, monkeypatch) == expected


@pytest.mark.parametrize(
    "line",
    ["python -m scripts.nothing name=mine", "python -m http.server", "pip install draftsmith", "draftsmith train"],
)
def test_control_an_unknown_command_is_noticed(line: str) -> None:
    [found] = commands(f"```sh\n{line}\n```\n")
    with pytest.raises(AssertionError, match="unknown command"):
        script_of(found)


def test_control_a_command_that_is_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("python -m scripts.train name=mine trian.epochs=3", monkeypatch) == 2
