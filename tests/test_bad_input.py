"""Whatever a user gets wrong is one clear sentence on stderr, exit code 2 and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from scripts import collect, evaluate, export, pipeline, train
from scripts.common import one_sentence
from tests import e2e
from tests.tiny import save_tiny, tiny_tokenizer

GOOD = {"messages": [{"role": "user", "content": "w1 w2 w3"}]}
Refuse = Callable[..., str]


@pytest.fixture
def refuse(
    finished: e2e.Finished,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refuse:
    """`refuse(run, *overrides)`: the sentence, here in this process, with a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    overrides = finished.place.overrides

    def call(run: Callable[[DictConfig], Any], *more: str, base: list[str] | None = None) -> str:
        return e2e.sentence(run, e2e.config(*(overrides if base is None else base), *more), capsys)

    return call


@pytest.fixture
def copied(finished: e2e.Finished, tmp_path: Path) -> e2e.Place:
    """The finished run, in the working directory of `refuse`."""
    place = finished.place.at(tmp_path)
    shutil.copytree(finished.place.run, place.run)
    return place


@pytest.mark.slow
def test_only_what_shares_its_work_is_launched_several_times(
    refuse: Refuse, finished: e2e.Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["/some/where/scripts/evaluate.py"])
    assert refuse(evaluate.run) == (
        "scripts.evaluate was started as one of 2 processes, but it runs as one; start it with `python -m "
        "scripts.evaluate`: `accelerate launch` is for scripts.collect, scripts.train and scripts.pipeline only."
    )
    seen: list[DictConfig] = []
    one_sentence(seen.append, launched=True)(e2e.config(*finished.place.overrides))
    assert len(seen) == 1


# ---- traffic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; give a file with one conversation per line"),
        ("\n\n", "is empty; give a file with one conversation per line"),
        ('{"messages": [{"role": "user", "content": "w1"', "not JSON (cut off in the last line): 1"),
        ("{]\nnothing\n", "not JSON: 2, first in line 1"),
        (
            '{"text": "w1", "label": 3}\n' * 2,
            "no messages: 2, first in line 1); the first of these has the fields",
        ),
        ('{"text": "w1"}\n', "a row needs messages, turns, conversations, prompt, instruction with output, request"),
        ('{"messages": []}\n', "no user message: 1"),
        (
            '{"messages": [{"role": "robot", "content": "w1"}]}\n',
            "unknown role: 1, first in line 1); mend them",
        ),
        ('{"messages": [{"role": "user", "content": 5}]}\n', "content is not text: 1"),
        ("[1, 2]\n", "not an object: 1"),
        ("\x00\x01\x02\n", "not JSON: 1"),
    ],
)
def test_traffic_that_cannot_be_used(refuse: Refuse, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    message = refuse(collect.run, f"traffic.path={path}")
    assert words in message and str(path) in message
    assert not (tmp_path / "runs").exists(), "nothing may be left of a run that could not begin"


def test_broken_rows_among_good_ones_are_set_aside_and_counted(
    finished: e2e.Finished, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps(row) for row in e2e.conversations(20)]
    bad = ['{"text": "w1"}', '{"messages": [{"role": "robot", "content": "w1"}]}', '{"messages": [{"role": "us']
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([*rows, *bad]))
    monkeypatch.chdir(tmp_path)
    place = e2e.Place(finished.place.target, path, tmp_path)
    collect.run(e2e.config(*place.overrides, "generation.max_new_tokens=4"))
    printed = " ".join(capfd.readouterr().out.split())
    assert "1 file read as messages read 23 kept 20 set aside: no messages 1 set aside: unknown role 1" in printed
    manifest = e2e.manifest(place, "traffic")
    assert manifest["rows"] == {"read": 23, "kept": 20, "quarantined": 3, "over_limit": 0}
    aside = [json.loads(line) for line in (place.run / "traffic/quarantine.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in aside] == [
        (21, "no messages"),
        (22, "unknown role"),
        (23, "not JSON (cut off in the last line)"),
    ]
    assert e2e.manifest(place, "features")["documents"] > 10


def test_traffic_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    assert "does not exist; set traffic.path=" in refuse(collect.run, "traffic.path=/no/such/file.jsonl")
    assert "holds no file ending in" in refuse(collect.run, f"traffic.path={tmp_path}")
    assert "traffic.path is not set; give a file" in refuse(collect.run, "traffic.path=null")
    assert "is not a share" in refuse(collect.run, "traffic.held_out=1")
    assert "held-out side is empty" in refuse(collect.run, "traffic.held_out=1e-9")


def test_other_traffic_under_the_same_name(refuse: Refuse, copied: e2e.Place) -> None:
    other = e2e.write_rows(copied.cwd / "other.jsonl", e2e.conversations(30))
    assert "holds other traffic" in refuse(collect.run, f"traffic.path={other}")


def test_prompts_that_are_all_too_long(refuse: Refuse) -> None:
    message = refuse(collect.run, "generation.max_prompt_tokens=1")
    assert "gave an answer to learn from (longer than max_prompt_tokens=1" in message


# ---- targets ----------------------------------------------------------------------------------------------------


def test_a_target_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    assert "/no/such/model is neither a folder" in refuse(collect.run, "target.path=/no/such/model")
    assert "org/no-such-model is neither a folder" in refuse(collect.run, "target.path=org/no-such-model")
    assert "could not be loaded" in refuse(collect.run, f"target.path={tmp_path}")
    base = [f"traffic.path={tmp_path}/t.jsonl", "target=custom", "traffic=jsonl"]
    e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(20))
    assert "target=custom needs target.path=<folder, Hub id or .gguf file>" in refuse(collect.run, base=base)


def test_the_embedded_target_that_was_never_made(refuse: Refuse, tmp_path: Path) -> None:
    traffic = e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(20))
    message = refuse(collect.run, base=["traffic=jsonl", f"traffic.path={traffic}"])
    assert "smollm2-135m-instruct has not been made yet; run `make setup`" in message


def test_a_target_without_a_template(refuse: Refuse, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "mute")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(chat_template=None).save_pretrained(folder)
    assert "has no chat template; add a chat_template.jinja" in refuse(collect.run, f"target.path={folder}")


def test_a_target_that_is_damaged(refuse: Refuse, finished: e2e.Finished, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(finished.place.target, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "could not be loaded" in refuse(collect.run, f"target.path={folder}")
    (folder / "config.json").write_text("{")
    assert "could not be loaded" in refuse(collect.run, f"target.path={folder}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("target.dtype=int8", "target.dtype='int8' is unknown; choose one of auto, bfloat16"),
        ("target.device=tpu", "target.device=tpu is not there; choose auto, cpu or cuda"),
        ("target.attention=magic", "could not be loaded"),
        ("target.gguf_file=no.gguf", "There is no file no.gguf"),
        ("target.adapter=/no/adapter", "The adapter /no/adapter"),
    ],
)
def test_a_target_loaded_wrongly(refuse: Refuse, override: str, words: str) -> None:
    assert words in refuse(collect.run, override)


def test_a_head_of_another_target(refuse: Refuse, copied: e2e.Place) -> None:
    """In evaluation and in training on, of features and of heads; both targets are named."""
    other = save_tiny(copied.cwd / "other", seed=1)
    message = refuse(evaluate.run, f"target.path={other}", "eval.timed_requests=0")
    assert "belongs to the target 'tiny', but 'other' was given" in message and "weights" in message
    message = refuse(train.run, f"target.path={other}")
    assert "was collected from the target tiny, not from" in message
    assert "holds features with target." in refuse(collect.run, f"target.path={other}")
    message = refuse(export.run, f"target.path={other}")
    assert f"belongs to the target 'tiny', but target.path={other} has other weights" in message


def test_a_head_dir_of_another_run(refuse: Refuse, finished: e2e.Finished, tmp_path: Path) -> None:
    """A second run over another target that asks for the head of the first."""
    other = save_tiny(tmp_path / "other", seed=1)
    place = e2e.Place(other, finished.place.traffic, tmp_path)
    quick = [*place.overrides, "generation.max_new_tokens=2"]
    collect.run(e2e.config(*quick))
    head = finished.place.run / "head"
    message = refuse(evaluate.run, f"head_dir={head}", base=quick)
    assert str(head) in message and "belongs to the target 'tiny', but 'other' was given" in message


# ---- artifacts --------------------------------------------------------------------------------------------------


def test_stages_out_of_order(refuse: Refuse) -> None:
    assert "holds no finished features artifact" in refuse(train.run)
    assert "holds no finished head artifact" in refuse(evaluate.run)
    assert "holds no trained head" in refuse(export.run)
    assert "holds no finished head artifact" in refuse(evaluate.run, "head_dir=/no/head")


@pytest.mark.parametrize(
    ("run", "override", "words"),
    [
        (evaluate.run, "eval.gamma=0", "eval.gamma=0 and eval.gammas=[2] must be at least 1"),
        (evaluate.run, "eval.tree={depth: 3}", "must give nodes"),
        (evaluate.run, "rivals.prompt_lookup.max_ngram=0", "rivals.prompt_lookup.max_ngram=0 must be at least 1"),
        (export.run, "export.dtype=int8", "export.dtype='int8' is unknown; choose one of"),
        (export.run, "export.layout=tgi", "The layout 'tgi' is unknown; choose one of vllm"),
    ],
)
def test_values_are_judged_before_a_head_is_missed(
    refuse: Refuse, run: Callable[[DictConfig], Any], override: str, words: str
) -> None:
    assert words in refuse(run, override)


def test_a_given_prediction_is_judged_before_the_target_is_loaded(
    refuse: Refuse, copied: e2e.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "load_target", None)
    rival = ["rival=[given_prediction]", "rivals.given_prediction.path=given.jsonl", "eval.rows=3"]
    assert "given.jsonl cannot be read as text" in refuse(evaluate.run, *rival)
    (copied.cwd / "given.jsonl").write_text('{"id": "nobody", "prediction": "w1"}')
    assert "given.jsonl has no prediction for any of the" in refuse(evaluate.run, *rival)


@pytest.mark.parametrize("wrong", ["file", "absent"])
def test_a_folder_that_cannot_be_made_is_named_by_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    """Not by run_dir=, where it is another."""
    (tmp_path / "file").write_text("")
    place = {"file": tmp_path / "file/below", "absent": Path("/proc/no/such")}[wrong]

    def makes(setting: str) -> Callable[[DictConfig], None]:
        return lambda cfg: (Path(cfg[setting]) / "x").mkdir(parents=True)

    for setting in ("comparison_dir", "traffic_dir", "run_dir"):
        cfg = e2e.config(f"{setting}={place}", name="compare")
        assert e2e.sentence(makes(setting), cfg, capsys).endswith(f"; mend that or choose another {setting}=.")


def test_artifacts_that_are_damaged(refuse: Refuse, copied: e2e.Place) -> None:
    weights = copied.run / "head/head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "is not the file that head.json describes" in refuse(export.run)
    (copied.run / "head/manifest.json").write_text("{")
    assert "is not valid JSON" in refuse(evaluate.run)
    shutil.copy(copied.run / "features/manifest.json", copied.run / "head/manifest.json")
    assert "is a 'features' artifact" in refuse(evaluate.run)
    next(copied.run.glob("features/shard-*.safetensors")).unlink()
    assert "lacks shard-" in refuse(train.run)
    (copied.run / "traffic/held_out.jsonl").write_text("")
    (copied.run / "head/manifest.json").unlink()
    shutil.rmtree(copied.run / "features")
    (copied.run / "features").write_text("")
    assert "holds no finished features artifact" in refuse(train.run)


def test_features_that_changed_after_they_were_written(refuse: Refuse, copied: e2e.Place) -> None:
    """Neither a flipped byte of a shard nor a list of documents that was cut off is trained on."""
    shard = min(copied.run.glob("features/shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert f"{shard.name} changed after it was written; repeat the command" in refuse(train.run)
    documents = copied.run / "features/documents.jsonl"
    documents.write_text("".join(documents.read_text().splitlines(keepends=True)[:5]))
    sentence = refuse(train.run, "train.verify=false")  # a small file is always compared
    assert "documents.jsonl changed after it was written" in sentence and shard.name not in sentence


def test_a_run_that_goes_on_with_other_settings(refuse: Refuse, copied: e2e.Place) -> None:
    assert "belongs to another run (settings.optim.lr" in refuse(train.run, "optim.lr=0.5")
    assert "holds features with generation.temperature=0.0" in refuse(collect.run, "generation.temperature=1.0")
    began = e2e.config(*copied.overrides).target.dtype
    other = "float16" if began == "bfloat16" else "bfloat16"
    assert f"set target.dtype={began}, choose another name=" in refuse(collect.run, f"target.dtype={other}")
    began = e2e.config(*copied.overrides).train.mixed_precision
    other = "no" if began == "bf16" else "bf16"
    sentence = refuse(train.run, f"train.mixed_precision={other}")
    assert f"set train.mixed_precision={began}, choose another folder" in sentence
    assert "lacks the taps [2] of what the head needs (it holds the taps [1, 3, 6])" in refuse(
        train.run, "head.taps=[1,2,3]"
    )


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("head.taps=[3,3,6]", "head.taps=[3, 3, 6] must be ascending, distinct and ≥ 0"),
        ("head.taps=[6,3,1]", "head.taps=[6, 3, 1] must be ascending, distinct and ≥ 0"),
        ("head.taps=[1,3,8]", "must be ascending, distinct and between 0 and 7"),
        ("head.depth=0", "head.depth=0 trains nothing; give at least 1"),
        ("head.draft_vocab_size=97", "A draft vocabulary of 97 is not between 1 (special tokens) and 96"),
        ("head.loss=mse", "set head.loss to one of ce, kl"),
        ("generation.max_new_tokens=0", "generation.max_new_tokens=0 is not allowed"),
        ("generation.temperature=-1", "generation.temperature=-1 is not allowed"),
        ("generation.max_new_tokens=100000", "no room for max_new_tokens"),
    ],
)
def test_what_collect_refuses(refuse: Refuse, override: str, words: str) -> None:
    assert words in refuse(collect.run, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("head.taps=[6,3,1]", "head.taps=[6, 3, 1] must be ascending, distinct and ≥ 0; set head.taps="),
        ("head.taps=[1,3,8]", "[1, 3, 8] must be ascending, distinct and between 0 and 7 for a target of 8 layers"),
        ("collect.taps=[5,2]", "collect.taps=[5, 2] must be ascending, distinct and ≥ 0; set collect.taps="),
        ("collect.taps=[-1]", "collect.taps=[-1] must be ascending, distinct and ≥ 0; set collect.taps="),
        ("collect.taps=[2,8]", "[1, 2, 3, 6, 8] must be ascending, distinct and between 0 and 7"),
    ],
)
def test_taps_are_judged_before_the_target_is_loaded(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.setattr(collect, "load_target", None)
    assert words in refuse(collect.run, override)
    assert words in refuse(pipeline.run, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("head.draft_vocab_size=0", "A draft vocabulary of 0 is not between 1"),
        ("head.draft_vocab_size=-5", "A draft vocabulary of -5 is not between 1"),
        ("head.draft_vocab_size=97", "A draft vocabulary of 97 is not between 1 (special tokens) and 96"),
        ("train.epochs=0", "train.epochs=0 is not possible"),
        ("train.mixed_precision=fp16", "train.mixed_precision='fp16' is unknown; choose one of auto, bf16, no."),
        ("train.global_batch_tokens=0", "train.global_batch_tokens=0 is not possible; give at least 1"),
        ("train.max_length=0", "train.max_length=0 is not possible; give at least 2"),
        ("optim.schedule=steps", "optim.schedule=steps is unknown"),
        ("optim.lr=-1", "optim.lr=-1 must be a positive number"),
        ("optim.clip_value=1", "exclude each other"),
        ("+optim.lr_multipliers.nothing=2", "optim.lr_multipliers names 'nothing'"),
    ],
)
def test_what_train_refuses(refuse: Refuse, copied: e2e.Place, override: str, words: str) -> None:
    shutil.rmtree(copied.run / "head")
    assert words in refuse(train.run, override)
    assert not (copied.run / "head/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.gamma=0", "must be at least 1 and below eval.max_new_tokens=16"),
        ("eval.gamma=1000", "must be at least 1 and below eval.max_new_tokens=16"),
        ("eval.gammas=[1,16]", "must be at least 1 and below eval.max_new_tokens=16"),
        ("eval.gammas=[2,2]", "says something twice"),
        ("eval.temperatures=[-1]", "must be some finite values ≥ 0"),
        ("eval.top_p=0", "eval.top_p=0 above 0"),
        ("eval.dtypes=[int8]", "eval.dtypes=['int8']: int8 is unknown; choose some of target, bfloat16"),
        ("eval.rows=0", "eval.rows=0 ≥ 1"),
        ("eval.max_new_tokens=1000", "but the target has 256; shorten the prompt or lower eval.max_new_tokens"),
        ("generation.max_prompt_tokens=1", "no held-out request"),
    ],
)
def test_what_evaluate_refuses(refuse: Refuse, copied: e2e.Place, override: str, words: str) -> None:
    assert words in refuse(evaluate.run, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs=many", "train.epochs='many' is of the wrong type; give a whole number"),
        ("train.epochs=1.5", "train.epochs=1.5 is of the wrong type; give a whole number"),
        ("train.max_steps=true", "train.max_steps=True is of the wrong type; give a whole number or null"),
        ("optim.lr=fast", "optim.lr='fast' is of the wrong type; give a number"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] is of the wrong type; give [a number, a number]"),
        ("eval.gamma=four", "eval.gamma='four' is of the wrong type; give a whole number"),
        ("eval.gammas=4", "eval.gammas=4 is of the wrong type; give a list [a whole number, …]"),
        ("head.taps=3", "head.taps=3 is of the wrong type; give a list [a whole number, …] or null"),
        ("head.fc_norm=maybe", "head.fc_norm='maybe' is of the wrong type; give true or false"),
        ("head.draft_vocab_size=big", "head.draft_vocab_size='big' is of the wrong type"),
        ("traffic.held_out=some", "traffic.held_out='some' is of the wrong type; give a number"),
        ("generation.batch_size=null", "generation.batch_size=None is of the wrong type; give a whole number"),
        ("export.dtype=16", "export.dtype=16 is of the wrong type; give text"),
        ("target.trust_remote_code=sure", "target.trust_remote_code='sure' is of the wrong type"),
        ("seed=lucky", "seed='lucky' is of the wrong type; give a whole number"),
        ("head_dir=5", "head_dir=5 is of the wrong type; give text"),
        ("+train.momentum=1", "There is no setting train.momentum; there are"),
        ("+train.seed=1", "There is no setting train.seed; there are"),
        ("+head.layers=2", "There is no setting head.layers; there are"),
        ("optim._target_=no.such.Thing", "optim._target_=no.such.Thing cannot be imported"),
        ("traffic.held_out=0", "traffic.held_out=0 leaves nothing to measure the head on"),
        ("run_dir=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_the_pipeline_refuses_before_it_begins(refuse: Refuse, tmp_path: Path, override: str, words: str) -> None:
    """Also what only a later stage would use."""
    assert words in refuse(pipeline.run, override)
    assert not (tmp_path / "runs").exists()


def test_a_run_dir_that_cannot_be_written(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert "runs" in refuse(collect.run)


def test_control_c_is_no_fault(finished: e2e.Finished, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        one_sentence(stopped)(e2e.config(*finished.place.overrides))
    assert stop.value.code == 130
    assert capsys.readouterr().err.strip() == "Stopped; the same command goes on from here."


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run_dir=", "run_dir= is empty; give a folder such as run_dir=runs/mine"),
        ("features_dir=", "features_dir= is empty"),
        ("name=", "name= cannot name a run under runs/; give a word"),
        ("name=null", "name=null cannot name a run"),
        ("name=../x", "name=../x cannot name a run"),
        ("name=a//b", "name=a//b cannot name a run"),
        ("seed=-1", "seed=-1 must be at least 0 and below 2^32"),
        ("seed=99999999999999999999", "must be at least 0 and below 2^32"),
    ],
)
def test_what_every_script_refuses_first(tmp_path: Path, capsys: Any, override: str, words: str) -> None:
    ran: list[DictConfig] = []
    assert words in e2e.sentence(ran.append, e2e.config(override), capsys)
    assert not ran
    one_sentence(ran.append)(e2e.config("name=a/b", "seed=4294967295"))
    assert len(ran) == 1, "and what is allowed goes through"


def test_a_broken_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert "WORLD_SIZE=abc in the environment must be" in e2e.sentence(lambda cfg: None, e2e.config(), capsys)


@pytest.mark.parametrize(
    ("module", "override", "words"),
    [
        ("pipeline", "traffic.path=/no/such/file.jsonl", "does not exist; set traffic.path="),
        ("train", "train.epoch=3", "There is no setting train.epoch"),
        ("evaluate", "head_dir=/no/head", "holds no finished head artifact"),
    ],
)
def test_as_a_process(finished: e2e.Finished, tmp_path: Path, module: str, override: str, words: str) -> None:
    output = e2e.call(finished.place.at(tmp_path), module, override)
    assert output.returncode == 2
    assert words in e2e.only_sentence(output.stderr)
