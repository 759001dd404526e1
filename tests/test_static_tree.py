"""Static trees as users get them: measured once on train prompts, kept with the head, exact, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eval.decode import DecodeSettings, Request, decode
from eval.static_tree import FILE, Measuring, tree_drafter
from eval.tree import best_static_tree
from heads.artifact import UserError
from heads.checkpoint import save_head
from heads.eagle3 import Eagle3Head
from heads.tree_draft import StaticTree
from scripts import evaluate, prove, serve_check
from scripts.common import load_target
from scripts.drafters import plan_tree
from scripts.settings import build
from tests import e2e
from tests.drafting_cases import PROMPTS
from tests.test_medusa import make_head
from tests.tiny import load_tiny

TRAIN = [Request(f"t{n}", "all", (20 + n, 9, 10 + n)) for n in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return load_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(target):
    """Own projections make it right now and then, as the tiny target repeats itself."""
    head = make_head(target, depth=4, projection="own")
    head.initialise(target)
    return head


@pytest.fixture
def folder(head, target, tmp_path: Path) -> Path:
    save_head(head, tmp_path, target_fingerprint=target.fingerprint)
    return tmp_path


def test_a_tree_is_measured_once_and_used_again(head, target, folder: Path) -> None:
    begun: list[str] = []

    def drafter(nodes: int = 7, depth: int = 3, requests=TRAIN):
        return tree_drafter(
            Measuring(nodes, requests, depth), head, folder, target, lambda text, count: begun.append(text)
        )

    first = drafter()
    kept = json.loads((folder / FILE).read_text())
    assert kept["request_ids"] == [request.request_id for request in TRAIN] and len(begun) == 1
    assert kept["acceptance"][0][0] == kept["counts"][0][0] / kept["reached"][0]
    assert kept["head"] == json.loads((folder / "head.json").read_text())["sha256"]
    for depth, tree in enumerate(kept["trees"], 1):
        chosen = StaticTree(tuple(tree["parents"]), tuple(tree["ranks"]))
        assert chosen == first.trees[depth - 1] == best_static_tree(kept["acceptance"][:depth], 7)
        assert len(chosen.parents) == 7 and max(chosen.depths) <= depth
    stamp = e2e.stamps(folder)
    assert list(drafter().trees) == list(first.trees) and list(drafter(depth=2).trees) == list(first.trees[:2])
    assert len(begun) == 1 and e2e.stamps(folder) == stamp, "the same, or a shallower one, is read from the file"
    for change in ({"nodes": 5}, {"depth": 4}, {"requests": TRAIN[:4]}):
        drafter(**{"nodes": 7, **change})
    assert len(begun) == 4
    save_head(make_head(target, depth=4), folder, target_fingerprint=target.fingerprint)
    drafter(requests=TRAIN[:4])
    assert len(begun) == 5, "a tree of another head is not used"


def test_a_shallow_tree_has_the_nodes_that_there_are(head, target, folder: Path) -> None:
    found = tree_drafter(Measuring(40, TRAIN, 2), head, folder, target)
    assert [len(tree.parents) for tree in found.trees] == [10, 40]


@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_text_is_the_targets_own(head, target, folder: Path, gamma: int) -> None:
    """And rounds are fewer than a chain's."""
    requests = [Request(str(n), "all", tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    settings = DecodeSettings(gamma=gamma, max_new_tokens=30, rows=3)
    found = {
        name: decode(target, requests, one, settings)
        for name, one in {
            "tree": tree_drafter(Measuring(12, TRAIN, 4), head, folder, target),
            "chain": head,
            "plain": None,
        }.items()
    }
    texts = {name: [trace.tokens for trace in traces] for name, traces in found.items()}
    assert texts["tree"] == texts["plain"]
    rounds = {name: sum(len(trace.rounds) for trace in traces) for name, traces in found.items()}
    assert rounds["tree"] < rounds["chain"] < rounds["plain"]


def test_what_cannot_be_measured_or_read_is_refused(head, target, folder: Path) -> None:
    with pytest.raises(UserError, match="no train prompt"):
        Measuring(4, [], 3)
    (folder / FILE).write_text("{}")
    with pytest.raises(UserError, match="delete it"):
        tree_drafter(Measuring(4, TRAIN, 3), head, folder, target)


# ---- as commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def place(finished: e2e.Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> e2e.Place:
    """Traffic, head and export of the finished run, in a working directory of their own."""
    place = finished.place.at(tmp_path)
    for stage in ("traffic", "head", "export"):
        shutil.copytree(finished.place.run / stage, place.run / stage)
    monkeypatch.chdir(tmp_path)
    return place


SMALL = ("eval.dtypes=[float32]", "eval.temperatures=[0.0]", "eval.max_new_tokens=8", "eval.timed_requests=0")


def test_evaluation_with_a_static_tree(place: e2e.Place, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Train prompts only; further draft lengths that the head cannot reach are left out aloud."""
    monkeypatch.setattr(Eagle3Head, "longest", 3)
    settings = (*SMALL, "eval.tree={nodes:6,prompts:5}", "eval.gamma=3", "eval.gammas=[2,7]")
    evaluate.run(e2e.config(*place.overrides, *settings))
    assert "γ [7] left out: this head drafts at most 3 tokens" in capsys.readouterr().out
    kept = json.loads((place.run / "head" / FILE).read_text())
    rows = (place.run / "traffic" / "train.jsonl").read_text().splitlines()
    assert len(kept["request_ids"]) == 5 and set(kept["request_ids"]) <= {json.loads(row)["id"] for row in rows}
    assert [len(tree["parents"]) for tree in kept["trees"]] == [6, 6, 6]
    traces = {path.name for path in (place.run / "report/traces").iterdir()}
    assert {"eagle3_tree-float32-T0-g3.jsonl", "eagle3-float32-T0-g2.jsonl"} <= traces
    assert not any("g7" in name for name in traces)


def test_a_proof_takes_the_same_setting(place: e2e.Place, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tree that an evaluation of this depth has kept, if there is one."""
    cfg = e2e.config(
        *place.overrides, "prove.tree={top_k:null,nodes:5}", "+prove.tree.prompts=4", "prove.gamma=2", name="prove"
    )
    tree, target = plan_tree(cfg, build(cfg, "prove").tree, "prove.tree", cfg.prove.gamma), load_target(cfg, "float32")
    for _ in range(2):
        found = prove._proposers(cfg, tree, target, [])
    assert capsys.readouterr().out.count("for its static tree") == 1
    assert [len(one.parents) for one in found["head, tree"].trees] == [5, 5]


def test_a_draft_longer_than_the_head_can_make_is_refused_at_once(place: e2e.Place, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Eagle3Head, "longest", 3)
    for run, name, setting in (
        (evaluate.run, "config", "eval.gamma"),
        (prove.run, "prove", "prove.gamma"),
        (serve_check.run, "serve_check", "gamma"),
    ):
        told = e2e.sentence(run, e2e.config(*place.overrides, f"{setting}=4", name=name), capsys)
        assert told.startswith(f"{setting}=4 is beyond the 3 tokens") and f"set {setting}=3 or less" in told
    assert not (place.run / "report").exists() and not (place.run / "certificate").exists()
