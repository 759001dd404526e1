"""States of known ids are those that the target has when it writes them, and each row's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.target import FrozenTarget
from tests.tiny import FAMILIES, load_tiny
from training import states
from training.chat import Encoded
from training.regenerate import Generation, answer_batch
from training.states import Answer, alike, as_features, forward_states, known_states

TAPS = (0, 2, 5)
# Rounding only: a row of a padded batch is computed in other blocks than alone, or than token by token. Relative to
# the largest state. bfloat16 rounds at 2^-8, which eight layers of large random weights make twenty times as much of.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.15}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def written(target: FrozenTarget, count: int = 7) -> list[Answer]:
    """Answers that the target wrote, of different lengths."""
    dice = random.Random(0)
    prompts = [[dice.randrange(8, 90) for _ in range(dice.randrange(1, 20))] for _ in range(count)]
    return answer_batch(target, prompts, taps=TAPS, generation=Generation(max_new_tokens=20), seed=0)


def known(answer: Answer) -> Encoded:
    features = as_features(answer)
    return Encoded(tuple(features.ids_T.tolist()), tuple(features.supervised_T.tolist()))


def assert_close(got: Answer, want: Answer, bound: float) -> None:
    assert torch.equal(got.ids_T, want.ids_T)
    assert (got.answer_start, got.finish_reason) == (want.answer_start, want.finish_reason)
    for mine, other in ((got.taps_TE, want.taps_TE), (got.last_TD, want.last_TD), (got.lse_T, want.lse_T)):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert not mine[-1].any(), "nothing is predicted from the last position"
        assert (mine - other).abs().max() <= bound * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_text_are_those_of_writing_it(tmp_path: Path, family: str, dtype: str) -> None:
    target = load_tiny(tmp_path, family, dtype)
    answers = written(target)
    assert len({len(answer.ids_T) for answer in answers}) > 3 and len({answer.answer_start for answer in answers}) > 3
    for got, want in zip(known_states(target, [known(one) for one in answers], taps=TAPS), answers, strict=True):
        assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_of_a_batch_is_the_row_alone(tmp_path: Path, dtype: str) -> None:
    target = load_tiny(tmp_path, dtype=dtype)
    documents = [known(answer) for answer in written(target)]
    for document, together in zip(documents, known_states(target, documents, taps=TAPS), strict=True):
        (alone,) = known_states(target, [document], taps=TAPS)
        assert_close(together, alone, TOLERANCE[dtype])
        plain = target.forward(torch.tensor([document.ids]), taps=TAPS)
        scale = float(plain.last_BTD.abs().max())
        assert (together.last_TD[:-1] - plain.last_BTD[0, :-1]).abs().max() <= TOLERANCE[dtype] * scale


def test_rows_of_like_length_go_together(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a group is padding at most, on a CPU none is larger than its caches; the order is that of the rows."""
    assert alike([3, 40, 20, 19, 41, 1, 2]) == [[4, 1], [2, 3], [0, 6], [5]]
    assert alike([3, 40, 20, 19, 41, 1, 2], 41) == [[4], [1], [2, 3], [0, 6], [5]]
    assert alike([]) == []
    rows = [torch.arange(length) for length in (3, 9, 2, 8, 30)]
    whole = forward_states(target, rows, taps=TAPS)
    monkeypatch.setattr(states, "_CPU_POSITIONS", 10)
    for (taps_TE, last_TD), (want_TE, want_TD), ids_T in zip(
        forward_states(target, rows, taps=TAPS), whole, rows, strict=True
    ):
        assert len(taps_TE) == len(last_TD) == len(ids_T)
        torch.testing.assert_close(taps_TE, want_TE, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last_TD, want_TD, rtol=1e-4, atol=1e-5)


def test_other_ids_have_other_states(target: FrozenTarget) -> None:
    """The control: one token changed moves the states behind it, none before."""
    document = known(written(target)[0])
    ids = list(document.ids)
    ids[3] = 8 if ids[3] != 8 else 9
    before, after = known_states(target, [document, Encoded(tuple(ids), document.supervised)], taps=TAPS)
    moved = (before.last_TD - after.last_TD).abs().amax(1) > 1e-6
    assert not moved[:3].any() and moved[3:-1].all()


def test_without_taps_and_with_everything_supervised(target: FrozenTarget) -> None:
    ids = known(written(target)[0]).ids
    (answer,) = known_states(target, [Encoded(ids, (True,) * len(ids))], taps=())
    assert answer.taps_TE.shape == (len(ids), 0) and answer.answer_start == 0
    whole = target.logits(target.forward(torch.tensor([ids])).last_BTD[0]).logsumexp(-1).float()
    torch.testing.assert_close(answer.lse_T[:-1], whole[:-1])


def test_the_target_is_left_as_it_was(target: FrozenTarget, monkeypatch: Any) -> None:
    document = known(written(target)[0])
    monkeypatch.setattr(target, "logits", lambda last: torch.full((len(last), 96), torch.nan))
    with pytest.raises(RuntimeError, match="states are not finite"):
        known_states(target, [document], taps=TAPS)
    output = target.model(input_ids=torch.tensor([document.ids]), output_hidden_states=True)
    assert len(output.hidden_states) == target.num_layers + 1, "the hook is gone"
