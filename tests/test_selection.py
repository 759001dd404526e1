"""The best evaluated head comes out, a run that gets no better ends, and a stop in between changes neither."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from heads.artifact import UserError
from scripts.train import outcome
from tests.test_resume import RaisesSignal, assert_same
from tests.training_toy import metrics_of, toy_head, toy_settings, toy_train, weights_of
from training.interrupt import Interrupted
from training.selection import Selection

VALUES = {3: 1.5, 6: 2.0, 9: 1.8, 12: 2.0, 15: 1.7, 18: 1.6, 21: 1.0}  # the first of equals is the best


def by_table(values: Mapping[int, float | None], seen: dict[int, dict[str, Tensor]] | None = None) -> Callable:
    """An evaluation whose outcome is given; `seen` is filled with the heads it was asked about."""

    def on_eval(step: int, state: Mapping[str, Tensor]) -> dict[str, float]:
        if seen is not None:
            seen[step] = {name: tensor.clone() for name, tensor in state.items()}
        value = values[step]
        return {} if value is None else {"tokens_per_round": value}

    return on_eval


def test_the_best_head_comes_out_with_its_numbers(tmp_path: Path) -> None:
    seen: dict[int, dict[str, Tensor]] = {}
    head, last = toy_head(), toy_head()
    result = toy_train(tmp_path / "best", head, eval_every=3, keep_best=True, on_eval=by_table(VALUES, seen))
    toy_train(tmp_path / "last", last, eval_every=3, on_eval=by_table(VALUES))
    assert result.chosen == {"by": "tokens_per_round", "step": 6, "value": 2.0, "last": 1.0, "evaluations": 7}
    assert result.steps == 21 and not result.stopped_early and result.evaluation_seconds > 0
    assert_same(seen[6], weights_of(head))
    assert_same(seen[21], weights_of(last))  # the control: without the setting it is the last one
    checkpoint = load_file(tmp_path / "best/checkpoints/step-00000021/weights.safetensors")
    assert_same(checkpoint, weights_of(last))
    assert outcome(result)[0].startswith("the best of 7 evaluations is kept: 2.000 tokens per round after step 6")
    assert "% of the time" in outcome(result)[-1]


def test_the_last_step_is_a_candidate_although_it_is_no_multiple(tmp_path: Path) -> None:
    asked: dict[int, dict[str, Tensor]] = {}
    values = {8: 1.0, 16: 1.1, 21: 1.2}
    result = toy_train(tmp_path, eval_every=8, keep_best=True, on_eval=by_table(values, asked))
    assert result.chosen is not None and result.chosen["step"] == 21 and list(asked) == [8, 16, 21]


def test_patience_ends_the_run(tmp_path: Path) -> None:
    head, seen = toy_head(), {}
    values = {"eval_every": 3, "keep_best": True, "patience": 2, "on_eval": by_table(VALUES, seen), "log_every": 5}
    result = toy_train(tmp_path, head, **values)
    assert result.steps == 12 and result.stopped_early and list(seen) == [3, 6, 9, 12]
    assert [line["step"] for line in metrics_of(tmp_path) if "loss" in line] == [5, 10, 12]
    assert_same(seen[6], weights_of(head))
    again = toy_head(seed=5)
    assert toy_train(tmp_path, again, **values | {"on_eval": None}) == result, "it is finished"
    assert_same(seen[6], weights_of(again))
    assert "train.patience ended the run after step 12" in outcome(result)


@pytest.mark.parametrize(("stop", "patience"), [(7, None), (9, None), (12, None), (20, None), (9, 2), (12, 2)])
def test_a_stop_changes_no_choice(tmp_path: Path, stop: int, patience: int | None) -> None:
    """At 9 and 12 the signal comes in the step before an evaluation, which is then made after the resume."""
    values: dict[str, Any] = {"eval_every": 3, "keep_best": True, "patience": patience, "save_every": 4}
    whole, resumed = toy_head(), toy_head(seed=5)
    expected = toy_train(tmp_path / "whole", whole, on_eval=by_table(VALUES), **values)
    source = RaisesSignal(stop - 1, signal.SIGTERM)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        toy_train(run, source=source, read_ahead=0, on_eval=by_table(VALUES), **values)
    assert max(path.name for path in (run / "checkpoints").iterdir()) == f"step-{stop:08}"
    result = toy_train(run, resumed, on_eval=by_table(VALUES), **values)
    assert (result.chosen, result.steps, result.stopped_early) == (
        expected.chosen,
        expected.steps,
        expected.stopped_early,
    )
    assert_same(weights_of(whole), weights_of(resumed))
    assert metrics_of(run) == metrics_of(tmp_path / "whole")


def test_an_evaluation_of_nothing_is_no_improvement() -> None:
    selection = Selection()
    assert not selection.take(1, None, 0.5) and selection.facts() is None
    assert selection.take(2, 1.0, 0.5) and not selection.take(3, 1.0, 0.5)
    assert selection.is_over(1) and not selection.is_over(2) and not selection.is_over(None)
    assert selection.seconds == 1.5


def test_how_often_is_evaluated_decides_the_weights_then(tmp_path: Path) -> None:
    """So another rhythm is another run; without a choice it may change."""
    asked: dict[str, Any] = {"keep_best": True, "on_eval": by_table(dict.fromkeys(range(22), 1.0))}
    toy_train(tmp_path / "best", eval_every=3, **asked)
    with pytest.raises(UserError, match=r"settings.eval_every was 3 and is 4"):
        toy_train(tmp_path / "best", eval_every=4, **asked)
    toy_train(tmp_path / "last", max_steps=3, eval_every=3, on_eval=asked["on_eval"])
    toy_train(tmp_path / "last", max_steps=3, eval_every=2)


@pytest.mark.parametrize("given", [{"keep_best": True}, {"patience": 2}])
def test_a_choice_without_evaluations_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"needs evaluations; set train.eval_every=<steps>"):
        toy_settings(**given)


def test_the_best_weights_are_in_the_checkpoint_and_checked(tmp_path: Path, caplog: Any) -> None:
    values = {"eval_every": 3, "keep_best": True, "save_every": 10, "on_eval": by_table(VALUES)}
    head, again = toy_head(), toy_head(seed=5)
    toy_train(tmp_path, head, **values)
    path = tmp_path / "checkpoints/step-00000021/best.safetensors"
    assert "best.safetensors" in json.loads((path.parent / "state.json").read_text())["files"]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    toy_train(tmp_path, again, **values)
    assert "best.safetensors changed after it was written" in caplog.text
    assert_same(weights_of(head), weights_of(again))


def test_without_a_choice_no_second_copy_is_stored(tmp_path: Path) -> None:
    toy_train(tmp_path, eval_every=3, patience=9, on_eval=by_table(VALUES))
    assert not list(tmp_path.rglob("best.safetensors"))
