"""Stores merged, cut down, sent away and read from there hold the same documents, bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from scripts import collect, store, train
from tests import e2e, s3_server
from tests.test_store import NEEDS, VOCABULARY, documents, settings
from training import remote
from training.remote import download, open_store, upload
from training.store import FeatureStore
from training.store_tools import merge, subset
from training.store_writer import Document, StoreWriter

GENERATION = {"temperature": 0.0, "seed": 0}


def make(folder: Path, seed: int, needs: FeatureNeeds = NEEDS, **more: Any) -> dict[str, Document]:
    """A store of three shards of a dozen documents."""
    given = documents(12, needs, seed)
    own = {"dtype": "bfloat16", "traffic": {"fingerprint": str(seed), "conversations": 12}, "generation": GENERATION}
    writer = StoreWriter(folder, settings(needs, **own | more))
    for number in range(3):
        content = given[4 * number : 4 * number + 4]
        writer.add(f"shard-{number:05d}", [one.conversation for one in content], content, {})
    refused = [{"id": f"c{seed}-x#0", "reason": "too long"}]
    names = [f"shard-{number:05d}" for number in range(3)]
    writer.finish(names, refused=refused, vocab_size=VOCABULARY, body={})
    return {f"{one.conversation}#0": one for one in given}


def assert_holds(folder: Path | FeatureStore, wanted: dict[str, Document]) -> None:
    opened = folder if isinstance(folder, FeatureStore) else FeatureStore.open(folder)
    assert [ref.id for ref in opened.documents] == sorted(wanted)
    for ref in opened.documents:
        read, given = opened.read(ref), wanted[ref.id]
        assert given.taps_TE is not None and given.last_TD is not None and given.lse_T is not None
        assert torch.equal(read.ids_T, given.ids_T) and torch.equal(read.lse_T, given.lse_T)
        assert torch.equal(read.taps_TE, given.taps_TE) and torch.equal(read.last_TD, given.last_TD)
    opened.verify()
    ids = torch.cat([one.ids_T[one.answer_start :] for one in wanted.values()])
    assert torch.equal(opened.token_counts().supervised_V, torch.bincount(ids, minlength=VOCABULARY))
    assert opened.manifest["documents"] == len(wanted)
    assert opened.manifest["tokens"] == sum(len(one.ids_T) for one in wanted.values())


def test_merged_stores_hold_all_documents(tmp_path: Path) -> None:
    wanted = make(tmp_path / "a", 0) | make(tmp_path / "b", 1, generation={**GENERATION, "seed": 4})
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert_holds(tmp_path / "c", wanted)
    assert len((tmp_path / "c/quarantine.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "c/answers.jsonl").read_text().splitlines()) == 24
    before = e2e.stamps(tmp_path / "c")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert e2e.stamps(tmp_path / "c") == before
    (tmp_path / "c/manifest.json").unlink()
    (tmp_path / "c/shard-00004.safetensors").unlink()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert_holds(tmp_path / "c", wanted)


def test_where_files_cannot_be_linked_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", no_link)
    wanted = make(tmp_path / "a", 0) | make(tmp_path / "b", 1)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert_holds(tmp_path / "c", wanted)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": {"name": "t", "weights": "x"}}, "target.weights is w in one and x in the other"),
        ({"needs": FeatureNeeds((1, 4), True)}, r"needs.taps is \[1, 3\] in one and \[1, 4\] in the other"),
        ({"generation": {"temperature": 1.0}}, "generation.temperature is 0.0 in one and 1.0"),
        ({"collect": {"states": "stored", "dtype": "fp8"}}, "collect.dtype is target in one and fp8 in the other"),
    ],
)
def test_stores_of_different_kinds_are_not_merged(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    make(tmp_path / "a", 0)
    make(tmp_path / "b", 1, **more)
    with pytest.raises(UserError, match=f"cannot be merged, as {words}"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_document_that_is_in_both_is_named(tmp_path: Path) -> None:
    for name in "ab":
        make(tmp_path / name, 0)
    with pytest.raises(UserError, match="12 documents are in more than one of the stores, such as c0-0#0"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(UserError, match="needs at least two folders"):
        merge([tmp_path / "a"], tmp_path / "c")


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_a_subset_is_some_of_the_documents(tmp_path: Path, dtype: str) -> None:
    wanted = make(tmp_path / "a", 0, collect={"states": "stored", "dtype": dtype})
    whole = FeatureStore.open(tmp_path / "a")
    subset(tmp_path / "a", tmp_path / "b", slices=["a"])
    subset(tmp_path / "a", tmp_path / "c", count=5)
    subset(tmp_path / "a", tmp_path / "d", count=3)
    for name, count in {"b": 6, "c": 5, "d": 3}.items():
        part = FeatureStore.open(tmp_path / name)
        part.verify()
        assert len(part.documents) == count == part.manifest["documents"]
        for ref in part.documents:
            old = next(one for one in whole.documents if one.id == ref.id)
            assert all(map(torch.equal, _tensors(part.read(ref)), _tensors(whole.read(old))))
    assert {ref.slice for ref in FeatureStore.open(tmp_path / "b").documents} == {"a"}
    kept = [{ref.id for ref in FeatureStore.open(tmp_path / name).documents} for name in "cd"]
    assert kept[1] < kept[0] < set(wanted), "fewer are among more"
    if dtype == "target":
        assert_holds(tmp_path / "c", {name: wanted[name] for name in kept[0]})


def _tensors(features: Any) -> list[torch.Tensor]:
    return [features.ids_T, features.supervised_T, features.taps_TE, features.last_TD, features.lse_T]


def test_what_a_subset_refuses(tmp_path: Path) -> None:
    make(tmp_path / "a", 0)
    with pytest.raises(UserError, match="has no slice code; choose among a, b"):
        subset(tmp_path / "a", tmp_path / "b", slices=["code"])
    for count in (0, 13):
        with pytest.raises(UserError, match=f"count={count} is not between 1 and the 12 conversations"):
            subset(tmp_path / "a", tmp_path / "b", count=count)


# ---- object storage ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server.running():
        yield


@pytest.fixture(params=["memory", "file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{s3_server.BUCKET}/{tmp_path.name}/store"
    return f"memory://{tmp_path.name}/store" if request.param == "memory" else f"file://{tmp_path}/far/store"


def files_at(address: str) -> Any:
    return fsspec.core.url_to_fs(address)


def test_there_and_back(tmp_path: Path, address: str) -> None:
    wanted = make(tmp_path / "a", 0)
    assert upload(tmp_path / "a", address) == (3, 0)
    assert upload(tmp_path / "a", address) == (0, 3), "what is there is not sent again"
    assert download(address, tmp_path / "b") == (3, 0)
    assert download(address, tmp_path / "b") == (0, 3)
    assert_holds(tmp_path / "b", wanted)
    names = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert names == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_a_cut_off_upload_goes_on(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are whole stay; until the manifest is there nobody takes the store for finished."""
    make(tmp_path / "a", 0)
    plain, sent = remote._Remote.send, []

    def cut(self: Any, path: Path) -> None:
        sent.append(path.name)
        if path.name == "shard-00001.json":
            raise UserError("the network is gone")
        plain(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(remote._Remote, "send", cut)
        with pytest.raises(UserError, match="gone"):
            upload(tmp_path / "a", address)
    both = [f"shard-0000{number}.{end}" for number in (0, 1) for end in ("safetensors", "json")]
    assert sent == ["settings.json", *both], "an index goes after its tensors"
    with pytest.raises(UserError, match="holds no finished features"):
        download(address, tmp_path / "b")
    with pytest.raises(UserError, match="holds no finished features"):
        open_store(address, tmp_path / "cache")
    assert upload(tmp_path / "a", address) == (2, 1)


def test_shards_are_fetched_when_they_are_read(tmp_path: Path, address: str) -> None:
    wanted = make(tmp_path / "a", 0)
    upload(tmp_path / "a", address)
    opened = open_store(address, tmp_path / "cache")
    shards = lambda: sorted(path.name for path in opened.folder.glob("*.safetensors") if "shard" in path.name)  # noqa: E731
    assert shards() == []
    opened.select(FeatureNeeds((1,), False)).read(opened.documents[0])
    assert shards() == [f"{opened.documents[0].shard}.safetensors"]
    assert_holds(opened, wanted)
    assert len(shards()) == 3
    files, root = files_at(address)
    for shard in shards():
        files.rm_file(f"{root}/{shard}")
    assert_holds(open_store(address, tmp_path / "cache"), wanted)


def test_damage_on_the_way_is_noticed(tmp_path: Path, address: str) -> None:
    make(tmp_path / "a", 0)
    upload(tmp_path / "a", address)
    files, root = files_at(address)
    data = bytearray(files.cat_file(f"{root}/shard-00001.safetensors"))
    data[-1] ^= 1
    files.pipe_file(f"{root}/shard-00001.safetensors", bytes(data))
    opened = open_store(address, tmp_path / "cache")
    for read in (
        lambda: [opened.read(ref) for ref in opened.documents],
        lambda: download(address, tmp_path / "b"),
    ):
        with pytest.raises(UserError, match=r"shard-00001.safetensors at .* is damaged"):
            read()
    assert not (opened.folder / "shard-00001.safetensors").exists()
    assert not (tmp_path / "b/manifest.json").exists() and not list(tmp_path.rglob("*.tmp"))


def test_what_is_refused(tmp_path: Path, address: str) -> None:
    make(tmp_path / "a", 0)
    make(tmp_path / "b", 1)
    upload(tmp_path / "a", address)
    with pytest.raises(UserError, match="holds other features than .*; choose another address"):
        upload(tmp_path / "b", address)
    with pytest.raises(UserError, match="holds something else than .*; choose another name"):
        download(address, tmp_path / "b")
    bad = tmp_path / "b/shard-00002.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="shard-00002.safetensors changed after it was written"):
        upload(tmp_path / "b", f"{address}2")
    with pytest.raises(UserError, match="is no address that fsspec knows"):
        upload(tmp_path / "a", "nowhere://x")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/x", rf"is not here \(Install s3fs\); `pip install s3fs=={fsspec.__version__}`"),
        ("gs://bucket/x", rf"is not here \(Install s3fs\); `pip install gcsfs=={fsspec.__version__}`"),
        ("az://bucket/x", r"is not here \(Install s3fs\); `pip install adlfs`"),
        ("oci://bucket/x", r"is not here \(Install s3fs\); install it"),
    ],
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: str) -> None:
    def missing(url: str) -> Any:
        raise ImportError("Install s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=f"{url} needs a package that {words}"):
        open_store(url, tmp_path)


# ---- the commands -----------------------------------------------------------------------------------------------


def run(*words: str) -> None:
    store.run(e2e.config(*words, name="store"))


@pytest.mark.parametrize("address", ["memory", "s3"], indirect=True)
def test_the_commands_and_training_from_an_address(
    finished: e2e.Finished,
    tmp_path: Path,
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    features = finished.place.run / "features"
    for slice_ in "ab":
        run(f"name={slice_}", f"subset={features}", f"slices=[{slice_}]")
    run("name=both", "merge=[runs/a/features,runs/b/features]")
    run("name=both", f"upload={address}")
    run("name=again", f"download={address}")
    assert "shards sent, 0 were there" in capsys.readouterr().out
    own = [*finished.place.overrides, f"traffic_dir={finished.place.run}/traffic", "train.max_steps=4"]
    for name, place in {"here": "runs/both/features", "far": address}.items():
        train.run(e2e.config(*own, f"run_dir=runs/{name}", f"features_dir={place}", "features_cache=cache"))
    assert list((tmp_path / "cache").glob("*/shard-*.safetensors"))
    weights = [(tmp_path / f"runs/{name}/head/head.safetensors").read_bytes() for name in ("here", "far")]
    assert weights[0] == weights[1]
    whole, both = (FeatureStore.open(one) for one in (features, "runs/both/features"))
    assert [ref.id for ref in whole.documents] == [ref.id for ref in both.documents]
    assert all(map(torch.equal, whole.token_counts(), both.token_counts()))
    said = e2e.sentence(collect.run, e2e.config(*own, f"features_dir={address}"), capsys)
    assert f"cannot be filled in place; collect into a folder, then `python -m scripts.store upload={address}`" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "does one thing at a time; give one of merge=, subset=, upload=, download="),
        (["upload=a", "download=b"], "does one thing at a time"),
        (["upload=memory://x", "count=3"], "slices= and count= belong to subset="),
        (["subset=x", "count=many"], "count='many' is of the wrong type; give a whole number or null"),
        (["upload=memory://x", "features_dir=memory://y"], "must be a folder here; the address goes to upload="),
        (["subset=nowhere"], "nowhere holds no finished features"),
    ],
)
def test_what_the_command_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in e2e.sentence(store.run, e2e.config(*words, name="store"), capsys)
