"""Values that cannot be are refused from the config alone, before the first stage begins."""

from __future__ import annotations

import errno
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from heads.artifact import UserError
from scripts import advise, bench, pipeline
from scripts.ranges import check_target
from scripts.settings import check_all
from scripts.train import check_something_is_left
from tests import e2e
from training.readers import read_files

RIVALS = "rival=[prompt_lookup,lookahead,early_exit]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optim.clip_norm=-1"],
            "optim.clip_norm=-1 is not possible; set optim.clip_norm to a positive number, or",
        ),
        (["optim.clip_norm=nan"], "optim.clip_norm=nan is not possible"),
        (["optim.clip_norm=null", "optim.clip_value=0"], "optim.clip_value=0 is not possible"),
        (["optim.weight_decay=-0.1"], "optim.weight_decay=-0.1 is not possible"),
        (["optim.weight_decay=nan"], "optim.weight_decay=nan is not possible"),
        (["optim.betas=[0.9,1.0]"], "optim.betas=[0.9, 1.0] is not possible"),
        (["optim.betas=[nan,0.9]"], "is not possible"),
        (["optim.eps=0"], "optim.eps=0 is not possible"),
        (["optim.eps=2"], "optim.eps=2 is not possible"),
        (["optim.lr=1e300"], "optim.lr=1e+300 must be a positive number, at most 1; 1e-3 is a good start"),
        (["optim.lr=inf"], "optim.lr=inf must be a positive number"),
        (["optim.lr=0.5", "optim.weight_decay=3"], "at most 1 / optim.lr"),
        (["+optim.lr_multipliers.lm_head=2000"], "factors of 0 (frozen) or more, at most 1 / optim.lr"),
        (["head.depth=1000000"], "head.depth=1000000 is beyond any sense"),
        (["head=mtp_native", "head.depth=65", "stages=[train]"], "give at most 64, 4 to 7 are usual"),
        (["head=medusa", "head.blocks=1000000"], "there are 1 to 64 blocks"),
        (["train.epochs=10001"], "train.epochs=10001 is beyond any sense; give at most 10000"),
        (["train.accumulation=100000"], "train.accumulation=100000 is beyond any sense"),
        (["generation.answers=5000", "generation.temperature=1"], "generation.answers=5000 is not allowed"),
        (["generation.temperature=1e9"], "generation.temperature=1000000000.0 is not allowed"),
        (["optim.warmup_share=nan"], "optim.warmup_share=nan must be"),
        (["+optim.lr_multipliers.lm_head=-1"], "factors of 0 (frozen) or more"),
        (["export.dtype=int8"], "export.dtype='int8' is unknown; choose one of bfloat16"),
        (["tracking=wandb", "tracking.mode=foo"], "tracking.mode=foo is unknown; choose online, offline, disabled"),
        (["train.global_batch_tokens=0"], "train.global_batch_tokens=0 is not possible; give at least 1"),
        (["train.max_length=1"], "train.max_length=1 is not possible; give at least 2"),
        (["eval.temperatures=[nan]"], "eval.temperatures=[nan] must be some finite values"),
        (["eval.temperatures=[0.0,inf]"], "must be some finite values"),
        (["generation.temperature=inf"], "generation.temperature=inf is not allowed; choose a value ≥ 0 and finite"),
        (["generation.temperature=nan"], "generation.temperature=nan is not allowed"),
        ([RIVALS, "rivals.prompt_lookup.max_ngram=0"], "rivals.prompt_lookup.max_ngram=0 must be at least 1"),
        ([RIVALS, "rivals.lookahead.window=0"], "rivals.lookahead.window=0 must be at least 1"),
        ([RIVALS, "rivals.lookahead.candidates=-1"], "rivals.lookahead.candidates=-1 must be at least 1"),
        ([RIVALS, "rivals.early_exit.exit_layer=0"], "rivals.early_exit.exit_layer=0 must be at least 1"),
        (
            ["rival=[draft_model]", "rivals.draft_model.path=/no/model"],
            "path=/no/model is not there",
        ),
        (["rival=[given_prediction]", "rivals.given_prediction.path=/no/file"], "/no/file"),
    ],
)
def test_what_the_config_alone_tells(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as refused:
        check_all(e2e.config(*overrides))
    assert words in str(refused.value)


def test_what_is_allowed_goes_through() -> None:
    at_their_ends = ("optim.betas=[0,0.99]", "optim.clip_norm=null", "train.max_length=null", "export.dtype=float32")
    check_all(e2e.config(RIVALS, *at_their_ends, "+optim.lr_multipliers.lm_head=0", "rivals.early_exit.exit_layer=1"))
    check_all(e2e.config("rival=[draft_model]", "rivals.draft_model.path=org/model", "tracking=wandb"))


def test_what_only_the_target_tells() -> None:
    target: Any = SimpleNamespace(max_length=64, num_layers=8, check_decodes=lambda: None)
    early = [RIVALS, "rivals.early_exit.exit_layer=8"]
    with pytest.raises(UserError, match="exit_layer=8 must be below the 8 layers"):
        check_target(e2e.config("eval.max_new_tokens=63", *early), target)
    with pytest.raises(UserError, match="eval.max_new_tokens=64 leaves no room for a prompt"):
        check_target(e2e.config("eval.max_new_tokens=64"), target)
    check_target(e2e.config("eval.max_new_tokens=64", "stages=[collect,train]", *early), target)
    check_target(e2e.config("eval.max_new_tokens=63", RIVALS, "rivals.early_exit.exit_layer=7"), target)


@pytest.mark.parametrize(
    ("override", "words"),
    [("stages=null", "stages=None is of the wrong type"), ("stages=[]", "stages=[] leaves nothing to do")],
)
def test_no_stages(override: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in e2e.sentence(pipeline.run, e2e.config(override), capsys)


def test_a_length_that_leaves_nothing_to_learn() -> None:
    store: Any = SimpleNamespace(documents=[SimpleNamespace(answer_start=start, length=20) for start in (9, 6)])
    with pytest.raises(UserError, match="train.max_length=6 cuts every document.*at least train.max_length=7"):
        check_something_is_left(store, 6)
    check_something_is_left(store, 7)
    check_something_is_left(store, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": 0}, "traffic.limit=0 is not possible; give at least 1, or null for all"),
        ({"limit": -1}, "traffic.limit=-1 is not possible"),
        ({"shortest": -1}, "traffic.shortest=-1 is not possible; give 1 character or more"),
        ({"longest": 0}, "traffic.longest=0 is not possible"),
    ],
)
def test_traffic_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        read_files("nowhere.jsonl", **settings)
    assert words in str(refused.value)


def test_a_plain_file_that_is_called_gz(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    row = b'{"messages": [{"role": "user", "content": "w1"}]}\n'
    path.write_bytes(row)
    with pytest.raises(UserError, match="is not gzip, though its name ends in .gz"):
        read_files(str(path))
    path.write_bytes(gzip.compress(row))
    assert len(read_files(str(path)).conversations) == 1


def test_a_run_dir_that_nobody_can_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "none" / "run"

    def refused(cfg: DictConfig) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(wanted.parent))

    assert "choose another run_dir=" in e2e.sentence(refused, e2e.config(f"run_dir={wanted}"), capsys)
    wanted.mkdir(parents=True)
    with pytest.raises(FileNotFoundError):  # a file that is missing in a run is a fault of ours
        e2e.sentence(refused, e2e.config(f"run_dir={wanted}"), capsys)


@pytest.mark.parametrize(
    ("kind", "override", "words"),
    [
        (
            "decode",
            "bench.gammas=[-1]",
            "bench.gammas=[-1] is not possible; give bench.gammas some whole",
        ),
        ("decode", "bench.gammas=[]", "bench.gammas=[] is not possible"),
        ("decode", "bench.gammas=3", "bench.gammas=3 is of the wrong type"),
        ("decode", "bench.requests=0", "bench.requests=0 is not possible; give bench.requests a whole number ≥ 1"),
        ("decode", "bench.kind=foo", "bench.kind=foo is unknown; choose one of train, decode, peers, collect, "),
        ("decode", "bench.kind=null", "bench.kind=None is of the wrong type"),
        ("train", "bench.documents=0", "bench.documents=0 is not possible"),
        ("train", "bench.length=long", "bench.length='long' is of the wrong type"),
        ("train", "bench.repeats=0", "bench.repeats=0 is not possible"),
        ("train_growth", "bench.lengths=[2]", "bench.lengths=[2] is not possible"),
        ("train_growth", "bench.vocabularies=[8,0]", "bench.vocabularies=[8, 0] is not possible"),
        ("train_peer", "bench.steps=0", "bench.steps=0 is not possible"),
        ("peers", "bench.max_ngram=0", "bench.max_ngram=0 is not possible"),
        ("peers", "bench.draft_layers=-1", "bench.draft_layers=-1 is not possible"),
        ("cost", "bench.gammas=[0,1]", "bench.gammas=[0, 1] is not possible"),
        ("cost", "bench.contexts=null", "bench.contexts=None is of the wrong type"),
        ("cost", "bench.dtype=int8", "bench.dtype=int8 is unknown; choose one of bfloat16"),
        ("prediction", "bench.gammas=[-1]", "each ≥ 0"),
        ("prediction", "+bench.rounds=1", "There is no setting bench.rounds"),
    ],
)
def test_what_a_measurement_refuses(kind: str, override: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in e2e.sentence(bench.run, e2e.config(f"bench={kind}", override, name="bench"), capsys)


@pytest.mark.parametrize("kind", ["train", "train_growth", "train_peer", "decode", "peers", "cost", "prediction"])
def test_the_documented_measurements_go_through(kind: str) -> None:
    bench.check_settings(e2e.config(f"bench={kind}", name="bench"), [kind])


GPU = ("gpu=h100", "target_size.parameters=7.5e9", "draft_size.parameters=4e8")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["load=3"], "load=3 is no load; give load.batch=8"),
        (["report=null"], "report=None is of the wrong type"),
        (["batches=[0]"], "batches=[0] must name some whole numbers ≥ 1"),
        (["contexts=[-1]"], "contexts=[-1] must name some whole numbers ≥ 1"),
        (["batches=[1,1]"], "batches=[1, 1] says something twice"),
        (["batches=[]"], "batches=[] must name some"),
        ([*GPU, "target_size.parameters=0"], "target_size.parameters=0 is not possible"),
        ([*GPU, "target_size.parameters=nan"], "target_size.parameters=nan is not possible"),
        ([*GPU, "draft_size.bytes_per_parameter=-2"], "draft_size.bytes_per_parameter=-2 is not possible"),
        (
            [*GPU, "target_size.kv_bytes_per_token=-1"],
            "target_size.kv_bytes_per_token to a finite number, 0",
        ),
        ([*GPU, "draft_size.window=-1"], "draft_size.window=-1 is not possible"),
        ([*GPU, "target_size=3"], "target_size=3 is no size"),
        ([*GPU, "gpu={bandwidth_TBs: nan, tflops: 1}"], "is unknown; choose h200"),
        ([*GPU, "gpu={bandwidth_TBs: 1, tflops: fast}"], "is unknown; choose h200"),
    ],
)
def test_what_cannot_be_advised(overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in e2e.sentence(advise.run, e2e.config(*overrides, name="advise"), capsys)
