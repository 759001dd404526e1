"""The plan of batches, packing and reading ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from heads.artifact import UserError
from tests.training_toy import ToyRef, ToySource, toy_head
from training.features import BatchPlan, pack, read_ahead, truncate, unpack


def plan_of(lengths: list[int], budget: int, seed: int = 0, max_length: int | None = None) -> BatchPlan:
    return BatchPlan([ToyRef(f"d{i}", n) for i, n in enumerate(lengths)], budget, seed, max_length)


def test_every_epoch_holds_each_document_once_in_another_order() -> None:
    plan = plan_of(list(range(5, 45)), 100)
    epochs = [[ref.id for batch in plan.epoch(number) for ref in batch] for number in range(3)]
    for ids in epochs:
        assert sorted(ids) == sorted(ref.id for ref in plan.documents)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_plan_depends_on_the_seed_only() -> None:
    lengths = list(range(5, 45))
    assert plan_of(lengths, 100, seed=1).epoch(4) == plan_of(lengths, 100, seed=1).epoch(4)
    assert plan_of(lengths, 100, seed=1).epoch(4) != plan_of(lengths, 100, seed=2).epoch(4)


def test_batches_are_filled_up_to_the_budget_and_a_longer_document_is_alone() -> None:
    plan = plan_of([30] * 20 + [250], 100)
    batches = plan.epoch(0)
    for batch, following in zip(batches, batches[1:], strict=False):
        total = sum(ref.length for ref in batch)
        assert total <= 100 or len(batch) == 1
        assert total + following[0].length > 100, "the next document would still have fitted"
    assert any([ref.length for ref in batch] == [250] for batch in batches)


def test_long_documents_are_cut_and_counted() -> None:
    plan = plan_of([10, 50, 51, 200], 100, max_length=50)
    assert plan.truncated == 2
    assert plan.tokens == 10 + 50 + 50 + 50
    document = ToySource().read(ToyRef("d", 80))
    cut = truncate(document, 50)
    assert cut.lengths == (50,) and len(cut.ids_T) == len(cut.last_TD) == len(cut.lse_T) == 50
    assert torch.equal(cut.ids_T, document.ids_T[:50])
    assert truncate(document, None) is document


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_a_global_batch_is_divided_whole_and_evenly(parts: int) -> None:
    plan = plan_of(list(range(5, 45)), 600)
    for batch in plan.epoch(0):
        divided = plan.split(batch, parts)
        assert len(divided) == parts
        assert sorted(ref.id for part in divided for ref in part) == sorted(ref.id for ref in batch)
        loads = [sum(ref.length for ref in part) for part in divided]
        assert max(loads) - min(loads) <= max(ref.length for ref in batch)


def test_more_parts_than_documents_leave_some_empty() -> None:
    plan = plan_of([10, 20], 100)
    divided = plan.split(plan.epoch(0)[0], 4)
    assert sorted(map(len, divided)) == [0, 0, 1, 1]
    assert plan.load(ToySource(), ()) is None


def test_a_micro_batch_without_supervision_is_empty() -> None:
    source = ToySource()
    source.unsupervised = {source.documents[0].id}
    plan = BatchPlan(source.documents, 100, 0)
    assert plan.load(source, (source.documents[0],)) is None
    assert plan.load(source, source.documents[:2]) is not None


def test_sizes_stop_at_the_last_batch_that_is_needed() -> None:
    plan = plan_of([30] * 20, 100)  # 7 batches an epoch
    assert plan.sizes(3) == [7, 7, 7]
    assert plan.sizes(1000, 16) == [7, 7, 2]
    assert plan.sizes(2, 1000) == [7, 7]


def test_packing_keeps_borders_and_can_be_undone() -> None:
    source = ToySource()
    documents = [source.read(ref) for ref in source.documents[:5]]
    packed = pack(documents)
    assert packed.lengths == tuple(len(doc.ids_T) for doc in documents)
    assert len(packed.ids_T) == sum(packed.lengths) == len(packed.last_TD)
    for before, after in zip(documents, unpack(packed), strict=True):
        assert torch.equal(before.ids_T, after.ids_T) and torch.equal(before.last_TD, after.last_TD)
        assert torch.equal(before.supervised_T, after.supervised_T) and before.lengths == after.lengths


def test_packed_loss_equals_the_sum_over_documents() -> None:
    source, head = ToySource(), toy_head(noise=0.0)
    documents = [truncate(source.read(ref), 32) for ref in source.documents]
    documents = [doc.__class__(**{**doc.__dict__, "last_TD": doc.last_TD.float()}) for doc in documents]
    alone = [head(doc) for doc in documents]
    together = head(pack(documents))
    torch.testing.assert_close(together.loss, torch.stack([sums.loss for sums in alone]).sum())
    assert together.count == sum(sums.count for sums in alone)
    hits = together.metrics["acceptance"][0]
    assert torch.equal(hits, sum(sums.metrics["acceptance"][0] for sums in alone))


def test_nothing_to_train_on_is_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match="no document"):
        plan_of([], 100)
    with pytest.raises(UserError, match="global_batch_tokens=0"):
        plan_of([5], 0)


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_reading_ahead_keeps_the_order(depth: int) -> None:
    assert list(read_ahead(range(20), lambda item: item * item, depth)) == [i * i for i in range(20)]


def test_reading_ahead_reads_before_it_is_asked_but_not_further() -> None:
    read: list[int] = []
    third = threading.Event()

    def load(item: int) -> int:
        read.append(item)
        if item == 2:
            third.set()
        return item

    stream = read_ahead(range(100), load, 2)
    assert next(stream) == 0
    assert third.wait(5), "two items ahead are read in the background"
    stream.close()
    assert len(read) <= 4


def test_an_error_while_reading_arrives_at_its_turn() -> None:
    def load(item: int) -> int:
        if item == 3:
            raise UserError("shard 3 is damaged")
        return item

    def consume(stream: Iterator[int], seen: list[int]) -> None:
        for item in stream:
            seen.append(item)

    seen: list[int] = []
    with pytest.raises(UserError, match="shard 3"):
        consume(read_ahead(range(10), load, 2), seen)
    assert seen == [0, 1, 2]
