"""Every experiment of conf/, as its own first command says it: two steps of training over a tiny target."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from heads.target import FrozenTarget
from scripts import collect, train
from tests import e2e
from tests.answering import answering
from tests.test_extracted import Fake, make_fake, stored_ids
from tests.tiny import save_tiny
from training.store import FeatureStore

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
    given = [word for word in job if not word.startswith(("target.path=", "traffic.path=", "target.device="))]
    brought = [f"target.path={place.target}", "run_dir=runs/t"]
    if len(given) < len(job):  # the user brings target and traffic; the other experiments have both
        brought.append(f"traffic.path={place.traffic}")
    else:
        brought += ["traffic.code=8", "traffic.chat=4", "traffic.tools=8"]
    cfg = e2e.config(*given, *brought, *SMALL)
    cfg.head.draft_vocab_size = cfg.head.draft_vocab_size and 64
    cfg.collect.taps = cfg.collect.taps and [2, 4, 5]
    if cfg.collect.features == "vllm":
        collect_from_servers(cfg, make_fake(tmp_path, monkeypatch))
    else:
        collect.run(cfg)
    train.run(cfg)
    assert [step for step, _ in e2e.losses(e2e.Place(place.target, place.traffic, tmp_path))] == [1, 2]


def collect_from_servers(cfg: DictConfig, stand_in: Fake) -> None:
    """Over a stand-in for the server that answers and one for the vLLM that computes the states."""
    target = FrozenTarget.load(cfg.target.path, dtype=cfg.target.dtype)
    here = OmegaConf.merge(cfg, {"run_dir": "runs/here", "collect": {"features": "transformers", "tensor_parallel": 1}})
    assert isinstance(here, DictConfig)
    with answering(target) as server:
        cfg.collect.url = here.collect.url = server.url
        collect.run(here)  # which documents will be asked for
        store = FeatureStore.open(here.features_dir)
        stand_in.prepare(target, stored_ids(Path(here.features_dir)), taps=store.needs.taps)
        cfg.serve_python = stand_in.python
        collect.run(cfg)
    assert stand_in.seen()[0]["tensor_parallel_size"] == cfg.collect.tensor_parallel > 1
