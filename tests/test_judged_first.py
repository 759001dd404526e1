"""What is wrong with target and training is said before the traffic is read; what collecting says when it is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from omegaconf import DictConfig
from transformers import modeling_gguf_pytorch_utils as gguf_files

from heads.artifact import UserError
from heads.target import FrozenTarget
from heads.target_files import check_is_there, layers_told, quiet_transformers
from scripts import collect, pipeline
from tests import e2e
from tests.tiny import save_tiny


@pytest.mark.parametrize("run", [collect.run, pipeline.run])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("~target.path", "target=custom needs target.path=<folder, Hub id or .gguf file>"),
        ("target.path=/no/such/model", "/no/such/model is neither a folder"),
        ("target.path=no/such/model.gguf", "no/such/model.gguf is neither a folder"),
        ("target.gguf_file=no.gguf", "There is no file no.gguf"),
        ("optim.lr=-1", "optim.lr=-1 must be a positive number"),
        ("+optim.momenta=1", "There is no setting optim.momenta"),
        ("train.epochs=0", "train.epochs=0 is not possible"),
        ("train.mixed_precision=fp16", "train.mixed_precision='fp16' is unknown; choose one of auto, bf16, no."),
    ],
)
def test_target_and_training_are_judged_before_the_traffic_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[DictConfig], Any],
    override: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    line = [*e2e.uses(tmp_path / "x", Path("/no/such/file.jsonl")), override]
    if override == "~target.path":  # it is not named
        line = [word for word in line if "target.path" not in word]
    assert words in e2e.sentence(run, e2e.config(*line), capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "[]", "its config.json holds no JSON object"),
        ("config.json", "5", "its config.json holds no JSON object"),
        ("config.json", "{", "its config.json is not JSON"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', "could not be loaded ("),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', "Field 'hidden_size' expected int, got str"),
        ("generation_config.json", "[]", "its generation_config.json holds no JSON object"),
        ("tokenizer_config.json", "null", "its tokenizer_config.json holds no JSON object"),
        ("tokenizer.json", "[]", "could not be loaded ("),
    ],
)
def test_a_target_whose_files_are_none(tmp_path: Path, name: str, content: str, words: str) -> None:
    folder = save_tiny(tmp_path / "odd")
    (folder / name).write_text(content)
    if "its " in words:
        with pytest.raises(UserError) as refused:
            check_is_there(folder)
        assert words in str(refused.value)
    with pytest.raises(UserError) as refused:
        FrozenTarget.load(folder)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert layers_told(str(folder)) in (None, 8)


def test_no_bar_of_the_library_is_shown_between_our_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """That of a GGUF file comes by another way than all others."""
    before = gguf_files.tqdm
    try:
        quiet_transformers()
        assert list(gguf_files.tqdm(range(3), desc="Converting")) == [0, 1, 2]
        assert capsys.readouterr().err == ""
    finally:
        gguf_files.tqdm = before
        transformers.utils.logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("regenerate", "more of them end with generation.max_new_tokens=8 (now 4), under another name="),
        ("logged", "if the logs cut them off, that is how they were served"),
    ],
)
def test_answers_that_were_cut_off_are_told_with_what_to_do(answers: str, words: str) -> None:
    cfg = e2e.config("generation.max_new_tokens=4", f"collect.answers={answers}")
    told = " ".join(collect.cut_off(cfg, {"cut_off": 3, "documents": 20}).split())
    assert told.startswith("3 of 20 answers were cut off: the head learns from them as they are, without an end; ")
    assert told.endswith(words)
