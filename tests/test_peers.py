"""Our loop and transformers' assisted generation do the same with the same drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.decode import DecodeSettings
from eval.peers import Answer, Comparison, compare, drafts, first_layers
from heads.artifact import UserError
from heads.target import FrozenTarget
from tests.test_decode import NEW, requests
from tests.tiny import FAMILIES, load_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_and_texts_are_those_of_assisted_generation(tmp_path: Path, family: str) -> None:
    """In fp64, request by request, for both drafts; a draft of 7 of 8 layers is right now and then."""
    target = load_tiny(tmp_path, family)
    batch, settings = requests(), DecodeSettings(3, max_new_tokens=NEW)
    for proposer, options in drafts(first_layers(target, 7), target, 3, 2).values():
        found = compare(target, batch, proposer, options, settings)
        assert found.same_texts == len(batch) and not found.different_rounds
        assert found.tokens_per_round[0] == found.tokens_per_round[1] > 1


def test_first_layers_are_a_model_of_their_own(tmp_path: Path) -> None:
    target = load_tiny(tmp_path)
    draft = first_layers(target, 3)
    assert draft.num_layers == 3 and isinstance(draft, FrozenTarget)
    ids = torch.tensor([[8, 9, 10]])
    boundary = target.forward(ids, taps=(3,)).taps_BTE
    assert torch.equal(draft.forward(ids).last_BTD, target.model.base_model.norm(boundary))
    with pytest.raises(UserError, match="between 1 and 7"):
        first_layers(target, 8)


def test_what_is_compared() -> None:
    """Tokens and passes after the first of each; seconds of theirs over ours."""
    same = Answer("a", [1, 2, 3, 4, 5], 2, 1.0, [1, 2, 3, 4, 5], 2, 1.5)
    other = Answer("b", [1, 2, 3], 1, 1.0, [1, 2, 4], 2, 2.5)
    found = Comparison([same, other])
    assert found.same_texts == 1 and found.different_rounds == [other]
    assert found.tokens_per_round == (6 / 3, 6 / 4)
    assert found.speed == (2.0, None, None)
    value, low, high = Comparison([same, other] * 5).speed
    assert low is not None and high is not None and 1.5 <= low < value < high <= 2.5
