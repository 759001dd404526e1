"""Training in turns: the protocol between processes, what a worker that fails says, and both benches on tiny things.

speculators itself is not needed: a stand-in worker answers in its place. The real one is the business of the bench.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.vocab import DraftVocabulary
from scripts import bench
from scripts.common import build_head, load_target
from tests import e2e
from tests.tiny import save_tiny
from training import peer_driver
from training.bench import StepBench, made_up_features
from training.optim import OptimSettings
from training.turns import Spread, Turn, Worker, forget_peak, in_turn, memory

# Writes down who took a turn; a line of text that it is started with is run first.
STAND_IN = """
    import json, sys
    request = json.load(open(sys.argv[1]))
    exec(request["first"])
    print(json.dumps({"loaded": 10, "version": "0.0-fake", "trained": 7}), flush=True)
    for line in sys.stdin:
        with open(request["diary"], "a") as diary:
            diary.write(request["name"] + line)
        exec(request["then"])
        print(json.dumps({"seconds": 2.0, "positions": 5 * int(line), "memory": 30, "share": 0.5}), flush=True)
"""
REQUEST: dict[str, Any] = {
    **{"target": "t", "taps": [1], "passes": 3, "vocabulary": [0, 1], "lengths": [4], "precision": "bfloat16"},
    **{"threads": 1, "seed": 0, "norm_before_residual": False, "fc_norm": False, "norm_output": False},
    "qk_norm": False,
}


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of a tiny target in plain fp32."""
    target = save_tiny(tmp_path / "tiny")
    return ["target=custom", f"target.path={target}", "target.dtype=float32", "train.mixed_precision=no"]


@pytest.fixture
def stand_in(tmp_path: Path):
    """Returns a maker of workers under a name that write into one diary."""
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(STAND_IN))

    def make(name: str, first: str = "", then: str = "") -> Worker:
        request = {"name": name, "diary": str(tmp_path / "diary.txt"), "first": first, "then": then}
        return Worker(name, [sys.executable, str(program)], request, os.environ)

    return make


def test_workers_take_turns_and_are_gone_afterwards(tmp_path: Path, stand_in) -> None:
    with stand_in("a") as a, stand_in("b") as b:
        assert [worker.ready()["loaded"] for worker in (a, b)] == [10, 10]
        turns = list(in_turn([a, b], steps=3, repeats=2))
    assert (tmp_path / "diary.txt").read_text().split() == ["a3", "b3", "a3", "b3"]
    assert turns == [[Turn(2.0, 15, 30, {"share": 0.5})] * 2] * 2 and turns[0][0].rate == 7.5
    for worker in (a, b):
        assert worker._process.returncode is not None and not worker._log.parent.exists()


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ("print('This is wrong; do that.', file=sys.stderr); sys.exit(2)", "", "^This is wrong; do that.$"),
        ("raise OSError('no such thing')", "", "a ended with code 1; .*\n(.*\n)*.*OSError: no such thing$"),
        ("", "sys.exit(3)", "a ended with code 3"),
        ("print('hello')", "", "a answered 'hello', which lacks loaded"),
        ("", "print('{\"seconds\": 1}', flush=True)", "which lacks seconds, positions, memory"),
    ],
)
def test_a_worker_that_fails_says_why(stand_in, first: str, then: str, words: str) -> None:
    with stand_in("a", first, then) as worker, pytest.raises(UserError, match=words):
        worker.ready()
        worker.turn(1)


def test_an_interpreter_that_is_none() -> None:
    with pytest.raises(UserError, match="speculators cannot be started: /nowhere/python .*No such file"):
        Worker("speculators", ["/nowhere/python", "x.py"], {}, os.environ)


def drive(tmp_path: Path, request: object) -> str:
    """What the peer's driver says when it refuses, run in an interpreter without speculators."""
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, str(peer_driver.__file__), str(tmp_path / "request.json")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == peer_driver.REFUSED and not done.stdout, done
    return done.stderr.splitlines()[-1]


def test_what_the_peers_driver_refuses(tmp_path: Path) -> None:
    assert "must have exactly the keys" in drive(tmp_path, {**REQUEST, "more": 1})
    assert "must have exactly the keys" in drive(tmp_path, [])
    said = drive(tmp_path, REQUEST)
    assert "cannot import speculators" in said and "pip install speculators==0.9.0" in said


def test_the_driver_asks_for_the_same_shapes() -> None:
    """On CPU only what CUDA does not need changes."""
    there, here = peer_driver.model_arguments(REQUEST, cuda=True), peer_driver.model_arguments(REQUEST, cuda=False)
    assert {name for name in here if here[name] != there[name]} == {"draft_attn_impl", "loss_implementation"}
    assert here["draft_vocab_size"] == 2 and here["ttt_steps"] == 3 and here["target_layer_ids"] == [1]
    batch = peer_driver.batch_of({**REQUEST, "lengths": [3, 2]}, vocab_size=4, hidden_size=8)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]] and batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["loss_mask"].all() and batch["hidden_states"].shape == (1, 5, 8)


def test_the_spread_of_some_values() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_memory_is_told_and_its_peak_forgotten() -> None:
    """A tensor of 200 MB is in the peak, and out of it once that is forgotten."""
    cpu = torch.device("cpu")
    forget_peak(cpu)
    before, _ = memory(cpu)
    torch.ones(50_000_000)
    assert memory(cpu)[1] - before > 150e6
    if Path("/proc/self/clear_refs").exists():
        forget_peak(cpu)
        assert memory(cpu)[1] - before < 100e6


def test_a_step_is_a_whole_one(tiny: list[str]) -> None:
    """It clips as training does, and every turn moves the weights."""
    cfg = e2e.config(*tiny)
    target = load_target(cfg)
    head = build_head(cfg, target, DraftVocabulary.identity(target.vocab_size))
    features = made_up_features(head, hidden_size=target.hidden_size, lengths=[9, 12], prompt_share=0.0)
    assert features.supervised_T.all() and features.lengths == (9, 12)
    steps = StepBench(head, features, OptimSettings(clip_norm=1e-3), bf16=False)
    norm = torch.nn.utils.get_total_norm([p.grad for p in head.parameters() if p.grad is not None])
    assert norm == pytest.approx(1e-3, rel=1e-2) and steps.flops > 0
    before = [parameter.detach().clone() for parameter in head.parameters() if parameter.requires_grad]
    seconds, share = steps.turn(2)
    after = [parameter for parameter in head.parameters() if parameter.requires_grad]
    assert seconds > 0 and 0 < share and steps.peak > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- the benches ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_growth_shows_every_combination(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("bench.lengths=[24]", "bench.depths=[1,2]", "bench.vocabularies=[null]", "bench.repeats=1")
    bench.run(e2e.config("bench=train_growth", *tiny, *sizes, name="bench"))
    rows = capsys.readouterr().out.splitlines()[1:]
    assert ["1 passes" in rows[0], "2 passes" in rows[1], len(rows)] == [True, True, 2]
    assert all("vocabulary 96, length 24" in row and "GB" in row for row in rows)
    assert "1.00× the time of 1 passes" in rows[0]


def test_the_peer_is_met_in_turns(
    tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides by the stand-in: half of 20 bytes above 10, at the same speed."""
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(STAND_IN))
    start = Worker.__init__

    def replaced(self: Worker, name: str, command: list[str], request: dict[str, Any], environment: Any) -> None:
        assert request["lengths"] == [6, 6] and len(request["vocabulary"]) == 96
        if name == "speculators":
            assert command == ["py", str(peer_driver.__file__)] and set(request) == set(peer_driver.FIELDS)
            assert "PYTHONPATH" not in environment
        more = {"name": name[:1], "diary": str(tmp_path / "diary"), "first": "", "then": ""}
        start(self, name, [sys.executable, str(program)], {**request, **more}, environment)

    monkeypatch.setattr(Worker, "__init__", replaced)
    sizes = ("bench.documents=2", "bench.length=6", "bench.vocabularies=[null]", "bench.repeats=2")
    bench.run(e2e.config("bench=train_peer", *tiny, "peer_python=py", *sizes, name="bench"))
    out = capsys.readouterr().out
    assert (tmp_path / "diary").read_text().split() == ["s1", "T1", "s1", "T1"]
    assert "vocabulary 96, 3 passes" in out and "speculators 0.0-fake: 2 positions/s" in out
    assert "1.00× their speed (1.00 … 1.00), 1.00× their memory" in out and "50% of the matmul peak" in out


def test_what_the_benches_refuse(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def said(kind: str, *more: str) -> str:
        return e2e.sentence(bench.run, e2e.config(f"bench={kind}", *tiny, *more, name="bench"), capsys)

    assert "choose head=eagle3" in said("train_peer", "head=medusa")
    assert "above the target's 96" in said("train_growth", "bench.vocabularies=[97]")
    assert "bench.vocabularies=[0] is not possible" in said("train_growth", "bench.vocabularies=[0]")
    assert "bench.lengths=[] is not possible" in said("train_growth", "bench.lengths=[]")
    here = ("bench.vocabularies=[null]", f"peer_python={sys.executable}")
    assert "cannot import speculators" in said("train_peer", *here)
