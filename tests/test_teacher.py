"""Teacher-forced acceptance and coverage against plain counting, and the decoder's own acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated_traces import trace_of

from eval.decode import DecodeSettings, Request, decode
from eval.tally import Estimate
from eval.teacher import TeacherCounts, count_teacher_forced, teacher_gap
from eval.trace import RequestTrace, Round
from heads.base import DraftHead
from heads.target import FrozenTarget
from tests.drafting_cases import begun
from tests.test_eagle3 import make_head
from tests.tiny import features_of, load_tiny

DEPTH = 3


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(f"r{n}", "all", tuple(torch.randint(8, 40, (5 + n,), generator=generator).tolist())) for n in range(4)
    ]


def learn(target: FrozenTarget, head: DraftHead, asked: list[Request], traces: list[RequestTrace]) -> None:
    """A few steps on half of the texts, so that some drafts are right."""
    texts = [
        (len(request.prompt), [*request.prompt, *trace.tokens]) for request, trace in zip(asked, traces, strict=True)
    ]
    documents = [(text, [at >= start for at in range(len(text))]) for start, text in texts[::2]]
    features = features_of(target, documents, head.needs.taps)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        head.loss(features).loss.backward()
        optimizer.step()


def test_counts_are_those_of_a_draft_from_every_place(tmp_path: Path) -> None:
    """Each place of a text is drafted from as a decoder would, with the true token put in place of each draft."""
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=target.vocab_size, depth=DEPTH)
    asked = requests()
    traces = decode(target, asked, None, DecodeSettings(gamma=0, max_new_tokens=14))
    learn(target, head, asked, traces)
    counts = count_teacher_forced(target, head, asked, traces)
    for request, trace, one in zip(asked, traces, counts, strict=True):
        text = [*request.prompt, *trace.tokens]
        right, reached = [0] * DEPTH, [0] * DEPTH
        for end in range(len(request.prompt) + 1, len(text)):  # as many tokens are known, the last of them written
            truth, seen = text[end : end + DEPTH], []

            def forced(logits_BW, seen=seen, truth=truth, **unused):
                seen.append(int(head.vocab.to_target(logits_BW.argmax(-1))))
                index = (head.vocab.ids_W == truth[min(len(seen), len(truth)) - 1]).nonzero()
                return index[0] if len(index) else torch.zeros(1, dtype=torch.long), None

            head.propose(begun(target, head, [text[:end]]), DEPTH, forced)
            for k, (drafted, true) in enumerate(zip(seen, truth, strict=False)):
                reached[k] += 1
                right[k] += drafted == true
                if drafted != true:
                    break
        assert list(one.right) == right and list(one.reached) == reached
        assert one.places == one.inside == len(trace.tokens) - 1 and one.covered == pytest.approx(one.places)
    assert sum(one.right[2] for one in counts) > 0, "no draft was right to its end"
    assert sum(one.right[2] for one in counts) < sum(one.reached[2] for one in counts), "and none was wrong there"


def test_coverage_is_the_probability_on_draftable_tokens(tmp_path: Path) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=60)
    chosen = head.vocab
    (request, *_) = requests()
    (trace,) = decode(target, [request], None, DecodeSettings(gamma=0, max_new_tokens=10))
    (one,) = count_teacher_forced(target, head, [request], [trace])
    covered, text = 0.0, list(request.prompt) + trace.tokens
    for at in range(len(request.prompt), len(text) - 1):
        last = target.forward(torch.tensor([text[: at + 1]])).last_BTD[0, -1]
        covered += float(target.logits(last).softmax(-1)[chosen.ids_W].sum())
    assert one.covered == pytest.approx(covered) and 0 < one.covered < one.places
    assert one.inside == sum(token in chosen.ids_W.tolist() for token in trace.tokens[1:])


def test_logits_are_taken_of_the_answer_alone_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_tiny(tmp_path)
    head = make_head(target, draft_size=60)
    request = Request("long", "all", tuple(range(8, 38)))
    traces = decode(target, [request], None, DecodeSettings(gamma=0, max_new_tokens=10))
    whole = count_teacher_forced(target, head, [request], traces)
    seen, logits = [], target.logits
    monkeypatch.setattr(target, "logits", lambda last: (seen.append(len(last)), logits(last))[1])
    monkeypatch.setattr("eval.teacher.CHUNK", 4)
    (one,) = count_teacher_forced(target, head, [request], traces)
    assert seen == [4, 4, 3], "the place before the answer and its ten tokens"
    assert one.covered == pytest.approx(whole[0].covered) and one.right == whole[0].right


def test_the_gap_by_hand() -> None:
    """Teacher-forced 6 of 10 and 3 of 6; the decoder 2 of 3 and 1 of 2."""
    counts = [TeacherCounts("a", (4, 2), (6, 4), 8.0, 7, 10), TeacherCounts("b", (2, 1), (4, 2), 10.0, 9, 10)]
    traces = [trace_of([Round(3, 0)], request_id="b"), trace_of([Round(3, 1), Round(3, 3)], request_id="a")]
    found = teacher_gap(counts, traces, gamma=3)
    assert [one.value for one in found.teacher] == pytest.approx([0.6, 0.5])
    assert [one.value for one in found.decoder] == pytest.approx([2 / 3, 1 / 2])
    assert [one.value for one in found.gap] == pytest.approx([2 / 3 - 0.6, 0.0])
    assert found.coverage == Estimate(0.9) and found.coverage_of_text == Estimate(0.8)
    short = [*counts, TeacherCounts("c", (), (), 0.0, 0, 0)]
    more = [*traces, trace_of([Round(3, 0)], request_id="c")]
    assert [one.value for one in teacher_gap(short, more, gamma=3).teacher] == pytest.approx([0.6, 0.5])
