"""The doctor on a run that has features, a head, a report: what held-out text says, and why acceptance is low."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.doctor_run import causes
from tests import e2e
from tests.test_doctor import examine, told, wrong
from training.doctor_vocabulary import TokenUse, look_at_vocabulary
from training.store import TokenCounts


def test_coverage_is_told_for_conversations_that_the_vocabulary_was_not_chosen_from() -> None:
    """Forty conversations with a token of their own each: known by heart, and of no use to the others."""
    documents = [SimpleNamespace(conversation=f"c{index}", index=index) for index in range(40)]

    def read(ref: Any) -> Any:
        return SimpleNamespace(
            ids_T=torch.tensor([90, ref.index]), supervised_T=torch.tensor([False, True]), lengths=(2,)
        )

    counts = TokenCounts(torch.bincount(torch.arange(40), minlength=96), torch.bincount(torch.tensor([90] * 40)))
    counts = TokenCounts(counts.supervised_V, torch.nn.functional.pad(counts.prompt_V, (0, 5)))
    store: Any = SimpleNamespace(documents=documents, online=True, token_counts=lambda: counts, read=read)
    target: Any = SimpleNamespace(vocab_size=96, eos_token_ids=())
    use = TokenUse.of(target, None, set(), store)  # type: ignore[arg-type]
    assert use.chosen_V.sum() == 36 and use.measured_V.sum() == 4
    assert use.coverage(36, ()) == (1.0, 0.0) and use.coverage(37, ()) == (1.0, 0.0), "the prompts' token comes next"
    section = look_at_vocabulary(target, use, 36)
    assert ("36 (head.draft_vocab_size)", "100.0%", "0.0%") in section.table
    assert "36 conversations that it is chosen from and 4 others, held out here" in told(section)
    (finding,) = section.findings
    assert "covers 0.0% of the tokens of answers that it was not chosen from" in finding.sentence


# ---- a run that has a head --------------------------------------------------------------------------------------


def test_a_finished_run_is_read(finished: e2e.Finished) -> None:
    run, began = finished.place.run, f"target.dtype={e2e.manifest(finished.place, 'features')['dtype']}"
    sections = examine(finished.place, f"run_dir={run}", began)
    section, report = sections["run"], e2e.report(finished.place)
    assert section.table[0] == ("depth", "training text", "held-out text", "decoder")
    assert len(section.table) == 1 + len(report["teacher_forced"]["decoder"])
    trained = e2e.manifest(finished.place, "head")["teacher_forced"]["acceptance"][0]
    assert section.table[1][1] == f"{trained:.2f}" and section.findings
    assert not wrong(sections)
    other = examine(finished.place, f"run_dir={run}", began, "target.template={loud: true}")
    said = wrong(other)
    assert len(said) == 2 and all("in its template" in sentence for sentence in said), "of its features, of its head"


def estimate_of(value: float | None, width: float = 0.02) -> dict[str, float | None]:
    if value is None:
        return dict.fromkeys(("value", "low", "high"))
    return {"value": value, "low": value - width, "high": value + width}


def told_of(
    trained: float = 0.5,
    teacher: float = 0.5,
    deep: float = 0.45,
    covered: float = 1.0,
    slices: tuple[float, float] = (0.5, 0.5),
    hot: float = 0.5,
) -> list[str]:
    """What is said of made-up numbers; all agree where nothing is given."""
    report = {
        "headline": {"proposer": "h", "dtype": "float32", "temperature": 0.0, "gamma": 2},
        "teacher_forced": {
            "teacher": [estimate_of(teacher), estimate_of(0.45)],
            "decoder": [estimate_of(teacher), estimate_of(deep)],
            "gap": [estimate_of(0.0), estimate_of(deep - 0.45)],
            "coverage_of_text": estimate_of(covered),
        },
        "results": [
            {"proposer": "h", "dtype": "float32", "gamma": 2, "temperature": heat, "slice": name, "alpha": alpha}
            for heat, name, alpha in (
                (0.0, "all", estimate_of(0.5)),
                (0.0, "code", estimate_of(slices[0])),
                (0.0, "chat", estimate_of(slices[1])),
                (1.0, "all", estimate_of(hot)),
            )
        ],
    }
    head = {"teacher_forced": {"acceptance": [trained, trained]}}
    return [finding.sentence for finding in causes(head, report, e2e.config("target=custom", "target.path=x"))]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "agree on what this head is right on (0.50 at depth 1): more of it takes more traffic"),
        ({"trained": 0.9}, "right on 0.90 of the text that it was trained on and on 0.50 of the held-out one"),
        ({"deep": 0.2}, "At depth 2 the decoder accepts 0.20, where the head on true tokens is right on 0.45"),
        ({"covered": 0.8}, "20% of the tokens of the held-out texts are outside the draft vocabulary"),
        ({"slices": (0.6, 0.3)}, "α is 0.30 on chat and 0.60 on code; give more traffic of the kind chat"),
        ({"hot": 0.2}, "α is 0.20 at temperature 1 and 0.50 at 0, at which the answers were collected"),
    ],
)
def test_a_low_acceptance_is_told_its_cause(numbers: dict[str, Any], words: str) -> None:
    (sentence,) = told_of(**numbers)
    assert words in sentence and sentence.endswith(".") and "=" in sentence
