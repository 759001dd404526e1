"""Every experiment of conf/, as its own first command says it: two steps of training over a tiny target."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from scripts import collect, train
from tests import e2e
from tests.tiny import save_tiny

FILES = sorted((e2e.ROOT / "conf/experiment").glob("*.yaml"))
SMALL = (
    *(
        "target.dtype=float32",
        "traffic.held_out=0.3",
        "generation.max_new_tokens=6",
        "generation.max_prompt_tokens=200",
    ),
    *("train.max_steps=2", "train.max_length=200", "train.global_batch_tokens=200", "train.eval_every=null"),
    *("train.log_every=1", "head.depth=2", "eval.max_new_tokens=8"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    folder = tmp_path_factory.mktemp("experiments")
    return e2e.Place(save_tiny(folder / "tiny"), e2e.write_rows(folder / "t.jsonl", e2e.conversations(16)), folder)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_trains_two_steps(file: Path, place: e2e.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = e2e.jobs(shlex.split(file.read_text().splitlines()[1].removeprefix("# "))[3:])[0]
    given = [word for word in job if not word.startswith(("target.path=", "traffic.path="))]
    brought = [f"target.path={place.target}", "run_dir=runs/t"]
    if len(given) < len(job):  # the user brings target and traffic; the other experiments have both
        brought.append(f"traffic.path={place.traffic}")
    else:
        brought += ["traffic.code=8", "traffic.chat=4", "traffic.tools=8"]
    cfg = e2e.config(*given, *brought, *SMALL)
    cfg.head.draft_vocab_size = cfg.head.draft_vocab_size and 64
    cfg.collect.taps = cfg.collect.taps and [2, 4, 5]
    collect.run(cfg)
    train.run(cfg)
    assert [step for step, _ in e2e.losses(e2e.Place(place.target, place.traffic, tmp_path))] == [1, 2]
