"""States that no disk holds: the frozen target computes those of a batch when a training step needs them.

A store that was collected with `collect.states=online` has ids and masks only. Together with the target it is a source
of features like a store that has states: the same documents in the same order, the same values up to rounding.

The module does not know what a head does with the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heads.base import FeatureNeeds, TargetFeatures
from heads.target import FrozenTarget
from training.features import truncate
from training.states import forward_states, log_sum_exp
from training.store import DocumentRef, FeatureStore


def feature_source(
    store: FeatureStore, needs: FeatureNeeds, target: FrozenTarget, *, keep_layers: bool
) -> FeatureStore | LiveFeatures:
    """What a head with these needs is trained on: states from the disk, or from the target where the store has none.

    keep_layers: whether the caller goes on running the target; else its layers are given back once nobody needs them.
    Raises UserError when the store holds states, but not these.
    """
    if store.online:
        needs.check(target.num_layers)
        return LiveFeatures(store, needs, target)
    selected = store.select(needs)
    if not keep_layers:
        target.drop_layers()
    return selected


class LiveFeatures:
    """The documents of a store with states [T, …] that the target computes, on its device and in its dtype."""

    def __init__(self, store: FeatureStore, needs: FeatureNeeds, target: FrozenTarget) -> None:
        self.store, self.needs, self.target = store, needs, target
        self.documents = store.documents

    @property
    def identity(self) -> Any:
        """What decides the features: the documents and the number format of the target that reads them."""
        return {"documents": self.store.identity, "computed_in": str(self.target.dtype).removeprefix("torch.")}

    def read_batch(self, refs: Sequence[DocumentRef], max_length: int | None) -> list[TargetFeatures]:
        """Documents, cut at `max_length`."""
        documents = [truncate(self.store.read(ref), max_length) for ref in refs]
        # The last position of a whole document has no state: nothing is predicted from it.
        rows = [document.ids_T[: ref.length - 1] for ref, document in zip(refs, documents, strict=True)]
        states = forward_states(self.target, rows, taps=self.needs.taps)
        return [
            self._features(document, taps_TE, last_TD, ref.answer_start)
            for ref, document, (taps_TE, last_TD) in zip(refs, documents, states, strict=True)
        ]

    @torch.no_grad()
    def _features(self, document: TargetFeatures, taps_TE: Tensor, last_TD: Tensor, start: int) -> TargetFeatures:
        length = len(document.ids_T)
        lse_T = log_sum_exp(self.target, last_TD, start=min(start - 1, length))[:length]
        return replace(
            document,
            ids_T=document.ids_T.to(self.target.device),
            supervised_T=document.supervised_T.to(self.target.device),
            taps_TE=_filled(taps_TE, length),
            last_TD=_filled(last_TD if self.needs.last else last_TD[:, :0], length),
            lse_T=lse_T.to(self.target.device),
        )


def _filled(states: Tensor, length: int) -> Tensor:
    """A copy with zeros up to `length`."""
    return torch.cat([states, states.new_zeros(length - len(states), states.shape[1])])
