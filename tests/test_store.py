"""The store gives back what was put in, notices damage, and never loses what was whole."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import artifact
from heads.artifact import UserError, locked
from heads.base import FeatureNeeds
from training import store
from training.store import FeatureStore, check_disk, estimate_bytes
from training.store_writer import Document, StoreWriter, wider_needs

WIDTH, VOCABULARY = 8, 50
NEEDS = FeatureNeeds((1, 3), True)


def documents(count: int, needs: FeatureNeeds = NEEDS, seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        start, length = 2 + index % 3, 5 + index % 4

        def states(width: int, length: int = length) -> torch.Tensor:
            return torch.randn(length, width, generator=generator).to(torch.bfloat16)

        made.append(
            Document(
                conversation=f"c{seed}-{index}",
                slice="ab"[index % 2],
                turn=0,
                ids_T=torch.randint(VOCABULARY, (length,), generator=generator),
                answer_start=start,
                finish_reason="stop",
                text=f"answer {index}",
                taps_TE=states(len(needs.taps) * WIDTH) if needs.taps else None,
                last_TD=states(WIDTH) if needs.last else None,
                lse_T=torch.randn(length, generator=generator),
            )
        )
    return made


def settings(needs: FeatureNeeds = NEEDS, **more: Any) -> dict[str, Any]:
    return {
        "needs": {"taps": list(needs.taps), "last": needs.last},
        "target": {"name": "t", "weights": "w"},
        **more,
    }


def fill(folder: Path, shards: Sequence[list[Document]], needs: FeatureNeeds = NEEDS) -> StoreWriter:
    """What a collection does: take over whole shards, make the others, finish."""
    writer = StoreWriter(folder, settings(needs))
    if writer.finished() is None:
        names = [f"shard-{index:05d}" for index in range(len(shards))]
        for name, content in zip(names, shards, strict=True):
            key = [document.conversation for document in content]
            if writer.shard(name, key) is None:
                writer.add(name, key, content, {})
        writer.finish(names, refused=[], vocab_size=VOCABULARY, body={})
    return writer


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, whose provenance holds the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("needs", [NEEDS, FeatureNeeds((2,), False), FeatureNeeds((), True)])
def test_documents_come_back_bit_by_bit(tmp_path: Path, needs: FeatureNeeds) -> None:
    given = {document.conversation: document for document in documents(7, needs) + documents(4, needs, seed=1)}
    fill(tmp_path / "f", [documents(7, needs), documents(4, needs, seed=1)], needs)
    opened = FeatureStore.open(tmp_path / "f")
    opened.verify()
    assert [ref.id for ref in opened.documents] == sorted(f"{name}#0" for name in given)
    assert opened.needs == needs
    for ref in opened.documents:
        document, read = given[ref.conversation], opened.read(ref)
        length = len(document.ids_T)
        assert (ref.length, ref.slice, ref.finish_reason) == (length, document.slice, "stop")
        assert read.lengths == (length,) and read.ids_T.dtype == torch.long
        assert torch.equal(read.ids_T, document.ids_T)
        assert torch.equal(read.supervised_T, torch.arange(length) >= document.answer_start)
        assert torch.equal(read.lse_T, document.lse_T)
        for got, put in ((read.taps_TE, document.taps_TE), (read.last_TD, document.last_TD)):
            assert got.shape == (length, 0) if put is None else torch.equal(got, put)


@pytest.mark.parametrize("taps", [(1, 3), (1,), (3,), ()])
def test_selected_states_are_the_stored_ones(tmp_path: Path, taps: tuple[int, ...]) -> None:
    """A head reads its own taps, as they would be if they had been stored alone, and nothing else from the disk."""
    fill(tmp_path / "f", [documents(5)])
    whole = FeatureStore.open(tmp_path / "f")
    selected, seen = whole.select(FeatureNeeds(taps, True)), []
    file = selected._shard("shard-00000")

    class Watched:
        def get_slice(self, name: str) -> Any:
            seen.append(name)
            return file.get_slice(name)

    selected._shard = lambda name: Watched()  # type: ignore[assignment]
    for ref in whole.documents:
        every, own = whole.read(ref), selected.read(ref)
        expected = [every.taps_TE[:, index * WIDTH :][:, :WIDTH] for index, tap in enumerate(NEEDS.taps) if tap in taps]
        assert torch.equal(own.taps_TE, torch.cat([*expected, every.taps_TE[:, :0]], 1))
        assert torch.equal(own.last_TD, every.last_TD) and torch.equal(own.ids_T, every.ids_T)
    assert ("taps" in seen) == bool(taps) and "last" in seen


def test_a_store_without_the_taps_of_a_head_names_them(tmp_path: Path) -> None:
    fill(tmp_path / "f", [documents(3, FeatureNeeds((1, 3), False))], FeatureNeeds((1, 3), False))
    opened = FeatureStore.open(tmp_path / "f")
    with pytest.raises(UserError, match=r"lacks the taps \[2, 5\] .*holds the taps \[1, 3\].*collect.taps=\[2, 5\]"):
        opened.select(FeatureNeeds((2, 3, 5), False))
    with pytest.raises(UserError, match="lacks the state after the final norm"):
        opened.select(FeatureNeeds((1,), True))


def test_the_manifest_and_the_counts_agree_with_the_documents(tmp_path: Path) -> None:
    given = documents(9)
    fill(tmp_path / "f", [given[:5], given[5:]])
    opened = FeatureStore.open(tmp_path / "f")
    ids = torch.cat([document.ids_T for document in given])
    supervised = torch.cat([torch.arange(len(item.ids_T)) >= item.answer_start for item in given])
    counts = opened.token_counts()
    assert torch.equal(counts.supervised_V, torch.bincount(ids[supervised], minlength=VOCABULARY))
    assert torch.equal(counts.prompt_V, torch.bincount(ids[~supervised], minlength=VOCABULARY))
    manifest = opened.manifest
    assert (manifest["documents"], manifest["tokens"]) == (9, len(ids))
    assert manifest["supervised_tokens"] == int(supervised.sum())
    assert sum(shard["tokens"] for shard in manifest["shards"]) == len(ids)
    answers = [json.loads(line) for line in (tmp_path / "f" / "answers.jsonl").read_text().splitlines()]
    assert answers[0] == {
        "id": "c0-0#0",
        "conversation": "c0-0",
        "turn": 0,
        "text": "answer 0",
        "finish_reason": "stop",
        "tokens": 3,
    }


def test_more_shards_than_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_OPEN_SHARDS", 2)
    shards = [documents(2, seed=seed) for seed in range(5)]
    fill(tmp_path / "f", shards)
    opened = FeatureStore.open(tmp_path / "f")
    for _ in range(2):
        for ref in opened.documents:
            opened.read(ref)
    assert opened._shard.cache_info().currsize == 2


def test_one_flipped_byte_is_named_and_only_that_shard_is_made_again(tmp_path: Path) -> None:
    folder, shards = tmp_path / "f", [documents(3, seed=seed) for seed in range(3)]
    fill(folder, shards)
    before = contents(folder)
    bad = folder / "shard-00001.safetensors"
    data = bytearray(bad.read_bytes())
    data[-3] ^= 1
    bad.write_bytes(data)
    with pytest.raises(UserError, match=r"damaged: shard-00001\.safetensors changed .* repeat the command"):
        FeatureStore.open(folder).verify()
    bad.unlink()
    with pytest.raises(UserError, match=r"lacks shard-00001\.safetensors"):
        FeatureStore.open(folder)
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.safetensors")}
    fill(folder, shards)
    assert contents(folder) == before
    kept = [name for name, time in times.items() if (folder / name).stat().st_mtime_ns == time]
    assert sorted(kept) == ["shard-00000.safetensors", "shard-00002.safetensors"]


@pytest.mark.parametrize("name", ["documents.jsonl", "token_counts.safetensors"])
def test_a_cut_off_file_beside_the_shards_is_named_when_the_store_is_opened(tmp_path: Path, name: str) -> None:
    folder, shards = tmp_path / "f", [documents(3)]
    fill(folder, shards)
    before = contents(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    with pytest.raises(UserError, match=rf"damaged: {name} changed .* repeat the command"):
        FeatureStore.open(folder)
    (folder / name).unlink()
    fill(folder, shards)
    assert contents(folder) == before


def test_only_a_large_store_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "f", [documents(3)])
    told: list[int] = []
    FeatureStore.open(tmp_path / "f").verify(told.append)
    assert not told
    monkeypatch.setattr(store, "_LARGE", 1)
    FeatureStore.open(tmp_path / "f").verify(told.append)
    assert told == [sum(path.stat().st_size for path in (tmp_path / "f").glob("shard-*.safetensors"))]


@pytest.mark.parametrize("content", ['{"key": [', "[]", '{"key": []}'])
def test_a_damaged_index_or_list_of_settings_is_no_crash(tmp_path: Path, content: str) -> None:
    """The index of a shard is made again; what the store was begun with cannot be, and is named."""
    folder, shards = tmp_path / "f", [documents(3), documents(3, seed=1)]
    fill(folder, shards)
    before = contents(folder)
    (folder / "manifest.json").unlink()
    (folder / "shard-00001.json").write_text(content)
    fill(folder, shards)
    assert contents(folder) == before
    (folder / "settings.json").write_text(content)
    for begin in (lambda: StoreWriter(folder, settings()), lambda: wider_needs(folder, NEEDS)):
        with pytest.raises(UserError, match=r"settings\.json.* is damaged: .*; delete .* and collect again"):
            begin()


def test_a_manifest_that_is_no_object_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "f", [documents(3)])
    (tmp_path / "f/manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json.* is damaged: it holds no JSON object; delete"):
        FeatureStore.open(tmp_path / "f")


HOLD = """
import sys
from heads.artifact import locked
with locked(sys.argv[1], "trains into"):
    print("held", flush=True)
    input()
"""


def test_a_folder_is_filled_by_one_process_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run/head"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"Another process trains into {folder}; wait"),
            locked(folder, "trains into"),
        ):
            raise AssertionError("two have the lock")
        with locked(tmp_path / "run/features", "collects into"):
            pass
        other.kill()
        other.wait()
    with locked(folder, "trains into"), locked(tmp_path / "run/features", "collects into"):
        assert not folder.exists(), "the lock lies beside what it is for"
    with locked(folder, "trains into"):
        pass


def test_where_there_can_be_no_lock_it_goes_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with locked(tmp_path / "file/head", "trains into"):
        pass


def test_an_unfinished_store_is_not_opened(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "f", settings()).add("shard-00000", ["x"], documents(2), {})
    with pytest.raises(UserError, match="no finished features"):
        FeatureStore.open(tmp_path / "f")


def test_a_shard_made_from_other_requests_is_made_again(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "f", settings())
    writer.add("shard-00000", ["x"], documents(2), {})
    assert writer.shard("shard-00000", ["y"]) is None and writer.shard("shard-00000", ["x"]) is not None


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "f", settings(generation={"seed": 0, "top_p": 1.0}))
    StoreWriter(tmp_path / "f", settings(generation={"seed": 2, "top_p": 1.0}))  # nothing was made yet
    writer = StoreWriter(tmp_path / "f", settings(generation={"seed": 0, "top_p": 1.0}))
    writer.add("shard-00000", ["x"], documents(2), {})
    with pytest.raises(UserError, match=r"generation\.seed=0, but generation\.seed=1 is asked .* name= or delete"):
        StoreWriter(tmp_path / "f", settings(generation={"seed": 1, "top_p": 1.0}))
    moved = settings(generation={"seed": 0, "top_p": 1.0})
    moved["target"] = {"name": "the same target elsewhere", "weights": "w"}
    StoreWriter(tmp_path / "f", moved)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no features"):
        StoreWriter(tmp_path, settings())


def test_the_estimate_is_the_size_of_the_tensors(tmp_path: Path) -> None:
    given = documents(20)
    fill(tmp_path / "f", [given])
    tokens = sum(len(document.ids_T) for document in given)
    estimate = estimate_bytes(NEEDS, tokens, hidden_size=WIDTH, dtype=torch.bfloat16)
    size = (tmp_path / "f" / "shard-00000.safetensors").stat().st_size
    assert 0 < size - estimate < 600, "the rest is the header"


def test_a_small_disk_is_refused_with_both_figures(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there", 1000)
    with pytest.raises(UserError, match=r"need up to 1000000000\.0 GB, but only [\d.]+ GB are free"):
        check_disk(tmp_path / "not" / "there", 10**18)


def test_a_disk_that_fills_up_is_one_sentence_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, shards = tmp_path / "f", [documents(3, seed=seed) for seed in range(3)]
    fill(tmp_path / "whole", shards)
    failures = 0
    for files in range(20):  # each time the disk takes one file more

        def full(handle: int, left: Iterator[int] = iter(range(files))) -> None:  # noqa: B008  one per round
            if stat.S_ISREG(os.fstat(handle).st_mode) and next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(artifact.os, "fsync", full)
            try:
                fill(folder, shards)
                break
            except UserError as error:
                failures += 1
                assert "No space left" in str(error) and "free some space" in str(error)
    assert failures == 5 and contents(folder) == contents(tmp_path / "whole")
