"""The checks of drafting_cases: EAGLE-3 passes them too, and heads with a mistake on purpose do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heads.hydra_mlp import HydraHead
from heads.medusa import MedusaHead
from heads.mtp_blocks import MTPBlocksHead
from heads.pairs import supervised_pairs
from tests import recurrent_cases, test_eagle3, test_hydra, test_medusa, test_mtp_blocks
from tests.drafting_cases import check_rejection_leaves_no_trace, check_trained_is_served
from tests.tiny import features_of, load_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return load_tiny(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("kind", test_medusa.TREES)
def test_eagle3_keeps_no_trace_of_a_rejection(target, kind: str) -> None:
    check_rejection_leaves_no_trace(target, test_eagle3.make_head(target), depth=3, tree=test_medusa.TREES[kind])


@pytest.mark.parametrize("kind", test_medusa.TREES)
def test_modules_in_a_row_keep_no_trace_of_a_rejection(target, kind: str) -> None:
    check_rejection_leaves_no_trace(target, test_mtp_blocks.make_head(target), depth=4, tree=test_medusa.TREES[kind])


class Padded(MedusaHead):
    """Takes the last column for every row, padding or not."""

    def commit(self, state, committed) -> None:
        super().commit(state, replace(committed, count_B=torch.full_like(committed.count_B, committed.count_B.max())))


class Losing(HydraHead):
    """Its prefix block loses a slot of every longer row in each round."""

    def commit(self, state, committed) -> None:
        state.cache.keep([-1 if length > 6 else 0 for length in state.cache.lengths])
        super().commit(state, committed)


class Stale(MTPBlocksHead):
    """Its modules are fed the slot before what they drafted, rejected or not, where that of true tokens belongs."""

    def _ahead(self, state, paths_BMk, drafted_BMkD):
        made_BMkD = super()._ahead(state, paths_BMk, drafted_BMkD)
        state.newest[paths_BMk.shape[2]] = made_BMkD[:, 0, -1]
        return made_BMkD


@pytest.mark.parametrize(
    ("wrong", "make", "flags"),
    [
        (Padded, test_medusa.make_head, {}),
        (Losing, test_hydra.make_head, {"prefix_attention": True}),
        (Stale, test_mtp_blocks.make_head, {}),
    ],
)
def test_a_head_that_keeps_the_wrong_slots_is_noticed(target, wrong: type, make, flags: dict) -> None:
    head = make(target, **flags)
    head.__class__ = wrong
    with pytest.raises(AssertionError):
        check_rejection_leaves_no_trace(target, head, depth=3)


def test_training_that_is_one_token_off_is_noticed(target) -> None:
    head = test_hydra.make_head(target)
    features = features_of(target, recurrent_cases.documents(), ())
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, 3)
    hidden = head.outputs(replace(features, ids_T=features.ids_T.roll(-1)), starts)
    with pytest.raises(AssertionError):
        check_trained_is_served(target, head, features, lambda k, n: head.logits(k, hidden[k, n]), depth=3)
