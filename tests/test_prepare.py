"""Unpacking the embedded target: clear errors, nothing done twice, nothing half-made taken for whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from heads.artifact import MANIFEST, UserError
from scripts import prepare as module
from scripts.prepare import FILES, FOLDER, INSTALL, find_gguf, missing_files, prepare

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Puts a quick stand-in where wheel and conversion are; lists the folders it was asked to fill."""
    gguf = tmp_path / "wheel" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert source == gguf
        calls.append(folder)
        for name in FILES:
            if name != MANIFEST:
                (folder / name).write_text("new")

    monkeypatch.setattr(module, "find_gguf", lambda: gguf)
    monkeypatch.setattr(module, "convert", convert)
    monkeypatch.setattr(module.metadata, "version", lambda name: "0.1.2")
    return calls


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("old")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    line = [sys.executable, "-m", "scripts.prepare", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_missing_wheel_is_one_sentence_with_the_remedy(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MODULE", "llm_of_no_such_name")
    monkeypatch.setattr(sys, "argv", ["prepare", str(tmp_path / "target")])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"is not installed here; run `{INSTALL}`." in error
    assert not (tmp_path / "target").exists()


def test_a_wheel_without_the_model_file_is_told_the_same(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "llm_empty").mkdir()
    (tmp_path / "llm_empty" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "MODULE", "llm_empty")
    with pytest.raises(UserError, match="is not installed here"):
        find_gguf()


def test_the_command_refuses_a_half_folder_without_a_traceback(tmp_path: Path) -> None:
    answer = command(str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1 and "it lacks config.json" in answer.stderr


def test_finding_the_wheel_does_not_import_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_that_must_not_load"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / module.GGUF).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "MODULE", package.name)
    assert find_gguf() == package / module.GGUF


def test_a_complete_folder_is_left_alone(converted: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "targets" / "small"
    fill(folder)
    assert prepare(folder) is False
    assert converted == []
    assert all((folder / name).read_text() == "old" for name in FILES)


def test_it_is_made_once_under_its_final_name_only(converted: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "targets" / "small"
    assert prepare(folder) is True
    assert prepare(folder) is False
    assert len(converted) == 1 and converted[0] != folder
    assert missing_files(folder) == []
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["small"]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["kind"] == "target" and manifest["origin"]["version"] == "0.1.2"


def test_an_interrupted_conversion_is_done_again(converted: list[Path], tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "targets" / "small"
    whole = module.convert

    def stopped(source: Path, partial: Path) -> None:
        whole(source, partial)
        (partial / "left-over").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder)
    assert not folder.exists() and converted[-1].exists(), "what was half made must lie elsewhere"

    monkeypatch.setattr(module, "convert", whole)
    assert prepare(folder) is True
    assert missing_files(folder) == [] and not (folder / "left-over").exists()
    assert not converted[0].exists()


@pytest.mark.parametrize("lost", FILES)
def test_a_folder_that_lost_a_file_is_refused_and_kept(lost: str, converted: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    fill(folder)
    (folder / lost).unlink()
    with pytest.raises(UserError, match=f"it lacks {lost}; name a folder that is not there"):
        prepare(folder)
    assert converted == [] and len(list(folder.iterdir())) == len(FILES) - 1


def test_too_little_space_is_refused_with_the_figure(converted: list[Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "NEEDED_BYTES", 10**18)
    with pytest.raises(UserError, match="needs 1,000,000,000,000,000,000 bytes"):
        prepare(tmp_path / "small")
    assert converted == []


def test_the_command_named_in_the_error_is_the_pinned_version() -> None:
    assert INSTALL.split()[-1] in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_real_target_loads_and_answers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / FOLDER
    if missing_files(folder):
        folder = tmp_path / "target"
        answer = command(str(folder))
        assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    assert command(str(folder)).stdout == f"Target smollm2-135m-instruct: ready ({folder})\n"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (
        576,
        30,
        49152,
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        text = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text
