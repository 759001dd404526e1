"""Training on states that the target computes as they are needed is training on those that were stored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError, read_json, write_json
from heads.base import FeatureNeeds
from scripts import collect, train
from tests import e2e
from tests.test_two_processes import ACCELERATE
from tests.tiny import FAMILIES, load_tiny, save_tiny
from training import live
from training.interrupt import Interrupted
from training.live import LiveFeatures, feature_source
from training.states import forward_states
from training.store import FeatureStore

HEADS = {"eagle3": ["head=eagle3", "head.taps=[1,3,6]"], "medusa": ["head=medusa"]}
COLLECT = [
    *("name=t", "target.dtype=float32", "head.taps=[1,3,6]", "traffic.held_out=0.2"),
    *("generation.max_new_tokens=24", "generation.batch_size=4", "head.draft_vocab_size=64"),
]
TRAIN = [
    *("name=t", "target.dtype=float32", "train.mixed_precision=no", "head.draft_vocab_size=64", "train.log_every=1"),
    *("train.global_batch_tokens=128", "train.max_steps=22", "train.epochs=9", "train.max_length=28"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, e2e.Place]:
    """The same answers collected both ways."""
    first = e2e.new_place(tmp_path_factory.mktemp("both"))
    places = {}
    for states in ("stored", "online"):
        place = places[states] = first.at(first.cwd / states)
        own = [*COLLECT, f"run_dir={place.run}", f"collect.states={states}"]
        collect.run(e2e.config(*e2e.uses(place.target, place.traffic), *own))
    return places


def words(place: e2e.Place, folder: Path, *more: str) -> list[str]:
    own = [f"run_dir={folder}", f"traffic_dir={place.run}/traffic", f"features_dir={place.run}/features"]
    return [*e2e.uses(place.target, place.traffic), *TRAIN, *own, *more]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return e2e.losses(e2e.Place(folder, folder, folder.parent.parent))


def run_at(tmp_path: Path, name: str) -> Path:
    return tmp_path / name / "runs" / e2e.NAME


def assert_same(one: Path, other: Path, steps: int = 22) -> None:
    first, second = losses_of(one), losses_of(other)
    assert [step for step, _ in first] == [step for step, _ in second] == list(range(1, steps + 1))
    assert [loss for _, loss in second] == pytest.approx([loss for _, loss in first], abs=1e-5)
    assert first[0][1] > first[-1][1] + 0.05, "nothing was learnt"


def test_a_store_without_states_is_the_same_documents(both: dict[str, e2e.Place]) -> None:
    stored, online = (FeatureStore.open(both[name].run / "features") for name in ("stored", "online"))
    online.verify()
    assert stored.documents == online.documents and not stored.online and online.online
    assert all(map(torch.equal, stored.token_counts(), online.token_counts()))
    assert stored.manifest["target"] == online.manifest["target"]
    sizes = [sum(shard["bytes"] for shard in one.manifest["shards"]) for one in (stored, online)]
    headers = 700 * len(online.manifest["shards"])
    tokens = online.manifest["tokens"]
    assert 0 <= sizes[0] - tokens * (4 * 32 * 4 + 9) < headers and 0 <= sizes[1] - tokens * 5 < headers


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("taps", [(), (0, 3, 6)])
@pytest.mark.parametrize("family", FAMILIES)
def test_live_states_are_those_of_a_plain_forward(
    both: dict[str, e2e.Place], tmp_path: Path, family: str, taps: tuple[int, ...], max_length: int | None
) -> None:
    """Of whole documents and cut ones, of all lengths together: states and log-sum-exp where heads look at them."""
    store = FeatureStore.open(both["online"].run / "features")
    target = load_tiny(tmp_path, family)
    refs = store.documents[:16]
    features = LiveFeatures(store, FeatureNeeds(taps), target).read_batch(refs, max_length)
    starts = [ref.answer_start for ref in refs]
    assert len({ref.length for ref in refs}) > 3 and min(starts) < 12 < max(starts)
    for ref, found in zip(refs, features, strict=True):
        length = min(ref.length, max_length or ref.length)
        assert found.lengths == (length,) and torch.equal(found.ids_T, store.read(ref).ids_T[:length])
        plain = target.forward(found.ids_T[None], taps=taps)
        for got, want in ((found.taps_TE, plain.taps_BTE[0]), (found.last_TD, plain.last_BTD[0])):
            assert got.shape == want.shape
            torch.testing.assert_close(got[:-1], want[:-1], rtol=1e-9, atol=1e-9)
            assert bool(got[-1:].any()) == (length < ref.length and got.shape[1] > 0)
        places = found.supervised_T.nonzero()[:, 0] - 1
        want_T = target.logits(plain.last_BTD[0, places]).logsumexp(-1).float()
        torch.testing.assert_close(found.lse_T[places], want_T)


@pytest.mark.parametrize("head", HEADS)
def test_losses_are_those_of_stored_states(both: dict[str, e2e.Place], tmp_path: Path, head: str) -> None:
    for name, place in both.items():
        train.run(e2e.config(*words(place, run_at(tmp_path, name), *HEADS[head])))
    assert_same(run_at(tmp_path, "stored"), run_at(tmp_path, "online"))
    kept = [e2e.manifest(e2e.Place(tmp_path, tmp_path, tmp_path / name), "head") for name in both]
    assert kept[0]["draft_vocabulary"] == kept[1]["draft_vocabulary"]


def test_control_another_target_is_noticed(
    both: dict[str, e2e.Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above sees states that are off by a little."""

    def off(*given: Any, **more: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(taps_TE * 1.001, last_TD) for taps_TE, last_TD in forward_states(*given, **more)]

    for name, place in both.items():
        monkeypatch.setattr(live, "forward_states", off)
        train.run(e2e.config(*words(place, run_at(tmp_path, name), *HEADS["eagle3"])))
    with pytest.raises(AssertionError):
        assert_same(run_at(tmp_path, "stored"), run_at(tmp_path, "online"))


def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    both: dict[str, e2e.Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, taken = both["online"], 0
    plain = LiveFeatures.read_batch

    def stopping(self: LiveFeatures, refs: list, max_length: int | None) -> list:
        nonlocal taken
        taken += 1
        if taken == 12:
            raise Interrupted(130)
        return plain(self, refs, max_length)

    with monkeypatch.context() as patch:
        patch.setattr(LiveFeatures, "read_batch", stopping)
        with pytest.raises(SystemExit):
            train.run(e2e.config(*words(place, run_at(tmp_path, "online"), *HEADS["eagle3"], "train.save_every=5")))
    assert len(losses_of(run_at(tmp_path, "online"))) < 22
    train.run(e2e.config(*words(place, run_at(tmp_path, "online"), *HEADS["eagle3"], "train.save_every=5")))
    train.run(e2e.config(*words(both["stored"], run_at(tmp_path, "stored"), *HEADS["eagle3"])))
    assert_same(run_at(tmp_path, "stored"), run_at(tmp_path, "online"))


def test_two_processes_are_one(both: dict[str, e2e.Place], tmp_path: Path) -> None:
    own = [*HEADS["eagle3"], "train.max_steps=10"]
    two = e2e.call(both["online"], "train", *words(both["online"], run_at(tmp_path, "two"), *own), launcher=ACCELERATE)
    assert two.returncode == 0, two.stderr
    train.run(e2e.config(*words(both["stored"], run_at(tmp_path, "one"), *own)))
    assert_same(run_at(tmp_path, "one"), run_at(tmp_path, "two"), steps=10)


def test_the_layers_stay_only_where_they_are_needed(both: dict[str, e2e.Place], tmp_path: Path) -> None:
    for name, place in both.items():
        for keep in (True, False):
            target = load_tiny(tmp_path, dtype="float32")
            source = feature_source(
                FeatureStore.open(place.run / "features"), FeatureNeeds((1,)), target, keep_layers=keep
            )
            assert hasattr(target.model.base_model, "layers") == (keep or name == "online")
            assert source.documents == FeatureStore.open(place.run / "features").documents


def test_another_number_format_of_the_target_is_another_run(both: dict[str, e2e.Place], tmp_path: Path) -> None:
    store = FeatureStore.open(both["online"].run / "features")
    targets = [load_tiny(tmp_path, dtype=dtype) for dtype in ("float32", "bfloat16")]
    found = [feature_source(store, FeatureNeeds(), target, keep_layers=False).identity for target in targets]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["collect.states=live"], "collect.states=live is unknown; choose stored or online"),
        (["collect.dtype=int4"], "collect.dtype=int4 is unknown; choose target or fp8"),
        (["collect.states=online", "collect.dtype=fp8"], "collect.states=online stores none; leave one of them out"),
        (["collect.states=1"], "collect.states=1 is of the wrong type"),
        (
            ["+collect.kind=x"],
            "There is no setting collect.kind; there are answers, ",
        ),
    ],
)
def test_what_collect_refuses(
    both: dict[str, e2e.Place], capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    place = both["online"]
    own = [*e2e.uses(place.target, place.traffic), *COLLECT, f"run_dir={place.run}"]
    assert sentence in e2e.sentence(collect.run, e2e.config(*own, *more), capsys)


@pytest.mark.parametrize(("begun", "asked"), [("stored", "online"), ("online", "stored")])
def test_a_folder_is_filled_one_way(
    both: dict[str, e2e.Place], capsys: pytest.CaptureFixture[str], begun: str, asked: str
) -> None:
    place = both[begun]
    own = [*e2e.uses(place.target, place.traffic), *COLLECT, f"run_dir={place.run}", f"collect.states={asked}"]
    said = e2e.sentence(collect.run, e2e.config(*own), capsys)
    assert f"holds features with collect.states={begun}, but collect.states={asked} is asked" in said


def test_what_needs_stored_states_says_so(both: dict[str, e2e.Place]) -> None:
    with pytest.raises(UserError, match="holds no states .*collect again .*collect.states=stored"):
        FeatureStore.open(both["online"].run / "features").select(FeatureNeeds())


def test_another_target_and_impossible_taps_are_refused(
    both: dict[str, e2e.Place], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    own = words(both["online"], run_at(tmp_path, "x"), f"target.path={other}", *HEADS["eagle3"])
    assert "was collected from the target tiny, not from" in e2e.sentence(train.run, e2e.config(*own), capsys)
    own = words(both["online"], run_at(tmp_path, "x"), "head=eagle3", "head.taps=[1,3,9]")
    assert "must be ascending, distinct and between 0 and 7" in e2e.sentence(train.run, e2e.config(*own), capsys)


def test_a_folder_from_before_there_was_a_choice_goes_on(both: dict[str, e2e.Place], tmp_path: Path) -> None:
    place = both["stored"].at(tmp_path)
    shutil.copytree(both["stored"].run, place.run)
    for name in ("settings.json", "manifest.json"):
        values = read_json(place.run / "features" / name, "", "")
        del values["collect"]
        write_json(place.run / "features" / name, values)
    before = e2e.stamps(place.run / "features")
    collect.run(e2e.config(*e2e.uses(place.target, place.traffic), *COLLECT, f"run_dir={place.run}"))
    assert e2e.stamps(place.run / "features") == before
    assert not FeatureStore.open(place.run / "features").online
