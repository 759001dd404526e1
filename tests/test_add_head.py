"""The README's recipe for a new head, taken out of it word for word: it trains, keeps the contract, and is measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import heads
from heads.target import FrozenTarget
from scripts import collect, evaluate, export, train
from tests import e2e
from tests import test_head_contract as contract
from tests.tiny import save_tiny

README = (e2e.ROOT / "README.md").read_text().partition("\n## Add a head\n")[2].partition("\n## ")[0]
CODE, FORMULA = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
[YAML] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
LONGEST = 60  # lines of code


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[e2e.Place]:
    """A folder that `heads` and Hydra look into as well, with the files of the recipe, a target and traffic."""
    folder = tmp_path_factory.mktemp("recipe")
    for name, text in (("heads/mix.py", CODE), ("conf/head/mix.yaml", YAML)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    traffic = e2e.write_rows(folder / "traffic.jsonl", e2e.conversations(24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "__path__", [*heads.__path__, str(folder / "heads")])
        patch.setitem(contract.FORMULAS, "mix", eval("{" + FORMULA + "}")["mix"])
        patch.chdir(folder)
        yield e2e.Place(save_tiny(folder / "tiny"), traffic, folder)
    sys.modules.pop("heads.mix", None)


def overrides(place: e2e.Place, *more: str) -> list[str]:
    quick = (
        *("name=t", "head=mix", "traffic.held_out=0.3", "target.dtype=float32", "head.draft_vocab_size=64"),
        *(
            "generation.max_new_tokens=12",
            "train.max_steps=6",
            "train.epochs=9",
            "train.log_every=1",
            "eval.dtypes=[float32]",
        ),
        *("eval.gammas=[]", "eval.max_new_tokens=8", "eval.timed_requests=1", "rival=[]"),
    )
    return [*found_by(place), *e2e.uses(place.target, place.traffic), *quick, *more]


def found_by(place: e2e.Place) -> list[str]:
    return [f"hydra.searchpath=[file://{place.cwd / 'conf'}]"]


def test_the_recipe_is_short() -> None:
    assert len(CODE.splitlines()) <= LONGEST


def test_it_trains_and_is_measured(place: e2e.Place, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = e2e.config(*overrides(place))
    for stage in (collect, train, evaluate):
        stage.run(cfg)
    steps = e2e.losses(place)
    assert len(steps) == 6 and steps[-1][1] < steps[0][1]
    report = e2e.report(place)
    rows = {(row["proposer"], row["temperature"]) for row in report["results"]}
    assert rows == {("mix", 0.0), ("mix", 1.0), ("none", 0.0)}
    assert all(row["identical_requests"] == row["requests"] for row in report["results"] if row["temperature"] == 0)
    assert report["head"]["name"] == "mix" and e2e.manifest(place, "features")["needs"]["taps"] == []
    said = e2e.sentence(export.run, cfg, capsys)
    assert "no layout of vLLM for a head of the kind heads.mix.MixHead; export one of " in said
    assert "drafts chains only" in e2e.sentence(evaluate.run, e2e.config(*overrides(place, TREE)), capsys)


TREE = "eval.tree={top_k:2,nodes:4}"
CHECKS = [name for name in vars(contract) if name.startswith("test_") and "enrolled" not in name]


@pytest.fixture(scope="module")
def case(place: e2e.Place) -> contract.Case:
    return contract.make_case("mix", FrozenTarget.load(place.target, dtype="float64"), *found_by(place))


@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_contract(case: contract.Case, name: str, tmp_path: Path) -> None:
    """All that is asked of the heads under conf/head."""
    check = getattr(contract, name)
    more = {"tmp_path": tmp_path, "tree": None}
    check(case, **{key: more[key] for key in check.__annotations__ if key in more})
