"""Traffic that is token ids with a mask: the documents that its text would give, and nothing of another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.target import FrozenTarget
from scripts import collect as collect_script
from scripts import doctor, evaluate, prompts, train
from tests import e2e
from tests.test_regenerate import answers_of, gather, quarantine_of, traffic
from tests.tiny import TEMPLATE, load_tiny, save_tiny
from training.messages import RowError
from training.readers import parse_row, read_files
from training.store import FeatureStore
from training.traffic import LOGGED, Conversation, position

END = 2


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def parsed(row: Any) -> Conversation:
    return parse_row(row, keep_answers=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The documents of a store as rows, named as they are."""
    store = FeatureStore.open(folder)
    rows = []
    for ref in store.documents:
        read = store.read(ref)
        mask = [int(flag) for flag in read.supervised_T]
        rows.append({"id": ref.id, "slice": ref.slice, "input_ids": read.ids_T.tolist(), "loss_mask": mask})
    return rows


# Rows


def test_all_masks_say_the_same() -> None:
    ids, mask = [5, 6, 9, END, 4, 7, 8, END], [0, 0, 1, 1, 0, 0, 1, 1]
    labels = [index if flag else -100 for index, flag in zip(ids, mask, strict=True)]
    rows: list[dict[str, Any]] = [
        {"input_ids": ids, "loss_mask": mask},
        {"input_ids": ids, "labels": labels},
        {"token_ids": ids, "assistant_masks": [bool(flag) for flag in mask]},
        {"input_ids": [0, 0, *ids, 0], "loss_mask": [0, 0, *mask, 0], "attention_mask": [0, 0, *[1] * 8, 0]},
        {"input_ids": ids, "loss_mask": mask, "position_ids": list(range(8)), "labels": None},
    ]
    for row in rows:
        conversation = parsed(row)
        assert conversation.ids == tuple(ids) and conversation.answers == ((2, 4), (6, 8)) and conversation.count == 2
        assert [conversation.prompt_ids(answer) for answer in range(2)] == [(5, 6), (5, 6, 9, END, 4, 7)]
        again = json.loads(json.dumps(conversation.to_row()))
        assert Conversation.from_row(again) == conversation == parsed(again)
    assert len({parsed(row).id for row in rows}) == 1, "an id out of the content"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2]}, "token ids without a mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask is not as long as the token ids"),
        ({"input_ids": [1, 2], "loss_mask": "01"}, "loss_mask is not as long as the token ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask holds something else than 0 and 1"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "token ids are not whole numbers from 0"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "token ids are not whole numbers from 0"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "token ids are not whole numbers from 0"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels are neither -100 nor the token id at their place"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "nothing is supervised"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "no prompt before the first supervised token"),
        ({"input_ids": [0, 1], "loss_mask": [0, 1], "attention_mask": [0, 1]}, "no prompt before the first"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "position_ids": [0, 0]}, "position_ids begin anew"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "position_ids": ["a", "b"]}, "position_ids begin anew"),
    ],
)
def test_rows_that_cannot_be_used(row: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parsed(row)


def test_the_split_goes_by_the_first_prompt() -> None:
    """So that a conversation that has grown by an answer stays on its side; and it spreads."""
    short = parsed({"input_ids": [5, 6, 9, END], "loss_mask": [0, 0, 1, 1]})
    grown = parsed({"input_ids": [5, 6, 9, END, 4, 8], "loss_mask": [0, 0, 1, 1, 0, 1]})
    assert position(short) == position(grown)
    places = [position(parsed({"input_ids": [5, n, 9], "loss_mask": [0, 0, 1]})) for n in range(300)]
    assert 0.03 < sum(place < 0.1 for place in places) / 300 < 0.2


def test_what_needs_text_is_refused(tmp_path: Path) -> None:
    path = e2e.write_rows(tmp_path / "t.jsonl", [{"input_ids": [5, n, 9], "loss_mask": [0, 0, 1]} for n in range(4)])
    with pytest.raises(
        UserError, match=r"t\.jsonl holds token ids, which the target cannot answer anew; set collect\."
    ):
        read_files(str(path))
    for setting in ({"near_duplicates": 0.9}, {"redact": ["emails"]}, {"longest": 9}, {"empty_answers": False}):
        with pytest.raises(UserError, match=rf"traffic\.{next(iter(setting))}=.* works on text, but .*t\.jsonl holds"):
            read_files(str(path), answers=LOGGED, **setting)  # type: ignore[arg-type]
    assert len(read_files(str(path), answers=LOGGED, format="tokens").conversations) == 4


# Documents


def test_ids_give_the_documents_that_writing_them_gave(target: FrozenTarget, tmp_path: Path) -> None:
    """States included; a row with both answers of a conversation gives both."""
    gather(target, traffic(9), tmp_path / "written")
    path = e2e.write_rows(tmp_path / "t.jsonl", rows_of(tmp_path / "written"))
    given = list(read_files(str(path), answers=LOGGED).conversations)
    manifest = gather(target, given, tmp_path / "logged", answers=LOGGED)
    stores = [FeatureStore.open(tmp_path / name) for name in ("written", "logged")]
    assert not manifest["quarantined"] and manifest["documents"] == len(stores[0].documents) == 18
    assert manifest["cut_off"] == sum(ref.finish_reason == "length" for ref in stores[0].documents) > 0
    found = {ref.conversation: ref for ref in stores[1].documents}
    for ref in stores[0].documents:
        assert found[ref.id].id == f"{ref.id}#0" and found[ref.id].finish_reason == ref.finish_reason
        one, other = stores[0].read(ref), stores[1].read(found[ref.id])
        assert torch.equal(one.ids_T, other.ids_T) and torch.equal(one.supervised_T, other.supervised_T)
        torch.testing.assert_close(one.taps_TE, other.taps_TE, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(one.last_TD, other.last_TD, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(one.lse_T, other.lse_T, atol=1e-5, rtol=1e-5)


def test_where_an_answer_ends_and_what_is_set_aside(target: FrozenTarget, tmp_path: Path) -> None:
    def row(name: str, ids: list[int], mask: list[int]) -> dict[str, Any]:
        return {"id": name, "input_ids": ids, "loss_mask": mask}

    rows = [
        row("two", [9, 8, 10, END, 9, 11, 12, END], [0, 0, 1, 1, 0, 0, 1, 1]),
        row("before its end", [9, 10, END, 9], [0, 1, 0, 0]),
        row("pads too", [9, 10, END, 0, 0], [0, 1, 1, 1, 1]),
        row("cut off", [9, 10, 11], [0, 1, 1]),
        row("runs on", [9, 10, END, 12, 13], [0, 1, 1, 1, 1]),
        row("empty", [9, END, 9, 10, END], [0, 1, 0, 1, 1]),
        row("foreign", [9, 96, 10], [0, 0, 1]),
        row("long", [9] * 250 + [10] * 20, [0] * 250 + [1] * 20),
    ]
    path = e2e.write_rows(tmp_path / "t.jsonl", rows)
    given = list(read_files(str(path), answers=LOGGED).conversations)
    manifest = gather(target, given, tmp_path / "f", answers=LOGGED)
    store = FeatureStore.open(tmp_path / "f")
    found = {ref.id: (store.read(ref).ids_T.tolist(), ref.answer_start, ref.finish_reason) for ref in store.documents}
    assert found == {
        "two#0": ([9, 8, 10, END], 2, "stop"),
        "two#1": ([9, 8, 10, END, 9, 11, 12, END], 6, "stop"),
        "before its end#0": ([9, 10, END], 1, "stop"),
        "pads too#0": ([9, 10, END], 1, "stop"),
        "cut off#0": ([9, 10, 11], 1, "length"),
        "empty#0": ([9, END], 1, "stop"),
        "empty#1": ([9, END, 9, 10, END], 3, "stop"),
    }
    assert {row["id"]: row["reason"] for row in quarantine_of(tmp_path / "f")} == {
        "runs on#0": "supervised text behind the end token of an answer",
        "foreign#0": "tokens outside the target's vocabulary",
        "long#0": "longer than the context of 256 tokens",
    }
    assert manifest["cut_off"] == 1 and manifest["answers"] == LOGGED
    with pytest.raises(UserError, match=r"is token ids, which the target cannot answer anew; set collect\.answers="):
        gather(target, given, tmp_path / "g")


@pytest.mark.parametrize(
    ("header", "refused"),
    [
        ("<|assistant|>", [-1, -3]),
        ("<|assistant|> w1 w2", [-1, -2, -3, -5]),
        ("w1 w2", [-1, -2]),  # plain words further back could be the answer's own
        ("", []),
    ],
)
def test_a_mask_over_the_templates_header_is_noticed(tmp_path: Path, header: str, refused: list[int]) -> None:
    """By the target's own template: what it writes between question and answer is none of the answer."""
    target = load_tiny(tmp_path)
    target.tokenizer.chat_template = TEMPLATE.replace("<|assistant|>", header)
    written = {"<|assistant|>": 6, "w1": 9, "w2": 10}
    prompt = [5, 20, 21, END, *(written[word] for word in header.split())]
    ids = [*prompt, 10, 31, END]  # an answer may begin with a word of the header
    rows = [
        {"id": str(shift), "input_ids": ids, "loss_mask": [int(n >= len(prompt) + shift) for n in range(len(ids))]}
        for shift in {0, *refused}
    ]
    rows.append({"id": "no header", "input_ids": [20, 9, 30, END], "loss_mask": [0, 1, 1, 1]})
    given = read_files(str(e2e.write_rows(tmp_path / "t.jsonl", rows)), answers=LOGGED).conversations
    gather(target, list(given), tmp_path / "f", answers=LOGGED)
    reasons = {row["id"]: row["reason"] for row in quarantine_of(tmp_path / "f")}
    assert set(reasons) == {f"{shift}#0" for shift in refused}
    assert all("holds the template's header of an answer" in reason for reason in reasons.values())


def test_ids_of_another_tokenizer_are_noticed(tmp_path: Path) -> None:
    """The target's own answers, all tokens but the end's renamed; as they are they pass."""
    target = FrozenTarget.load(save_tiny(tmp_path / "sure", scale=0.6), dtype="float64")
    gather(target, traffic(9), tmp_path / "written")
    rows = rows_of(tmp_path / "written")
    path = e2e.write_rows(tmp_path / "t.jsonl", rows)
    gather(target, list(read_files(str(path), answers=LOGGED).conversations), tmp_path / "good", answers=LOGGED)
    for one in rows:
        one["input_ids"] = [3 + (index * 41 + 7) % 93 if index != END else index for index in one["input_ids"]]
    path = e2e.write_rows(tmp_path / "t.jsonl", rows)
    given = read_files(str(path), answers=LOGGED).conversations
    with pytest.raises(UserError, match=r"cannot be of the target's tokenizer: each .* \d+\.\d nats, .* by 4\.6;"):
        gather(target, given, tmp_path / "f", answers=LOGGED)


# All stages


def test_collect_train_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Of a base model without a chat template too: nothing is rendered."""
    monkeypatch.chdir(tmp_path)
    first = e2e.new_place(tmp_path / "text")
    target = FrozenTarget.load(first.target, dtype="float32")
    asked = list(read_files(str(first.traffic)).conversations)
    gather(target, asked, tmp_path / "written", taps=(1, 3, 6), max_new_tokens=24)
    rows = [row for row in rows_of(tmp_path / "written") if row["id"].endswith("#0")]
    rows.append({"id": "foreign", "input_ids": [500, 9, 9], "loss_mask": [0, 0, 1]})
    path = e2e.write_rows(tmp_path / "ids.jsonl", rows)
    (first.target / "chat_template.jinja").unlink()
    place = e2e.Place(first.target, path, tmp_path)
    words = [*place.overrides, "target.dtype=float32", "collect.answers=logged", "train.max_steps=4"]
    words += ["eval.dtypes=[float32]", "eval.temperatures=[0.0]", "eval.max_new_tokens=6", "rival=[]"]
    words = [word for word in words if not word.startswith(("eval.gammas", "eval.timed"))]
    words += ["eval.gammas=[]", "eval.timed_requests=0"]
    cfg = e2e.config(*words)
    assert prompts.tokenizer_of(cfg).chat_template is None
    collect_script.run(cfg)
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 file read as tokens" in printed and "answers were cut off: the head learns from them" in printed
    train.run(cfg)
    evaluate.run(cfg)
    held_out = [json.loads(line) for line in (place.run / "traffic/held_out.jsonl").read_text().splitlines()]
    answers, report = answers_of(place.run / "features"), e2e.report(place)
    requests = {request.request_id: list(request.prompt) for request in prompts.held_out_requests(cfg)}
    by_id = {row["id"]: row for row in rows}
    assert requests and set(requests) == {row["id"] for row in held_out} - {"foreign"}
    for name, prompt in requests.items():
        assert prompt == by_id[name]["input_ids"][: by_id[name]["loss_mask"].index(1)]
    assert len(answers) + len(requests) == len(rows) - 1
    everything = next(row for row in report["results"] if row["proposer"] == "eagle3" and row["slice"] == "all")
    assert everything["requests"] == len(requests) and everything["identical_requests"] == len(requests)


def test_the_doctor_looks_at_ids(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    place = e2e.new_place(tmp_path)
    rows = [{"input_ids": [9, 8 + n % 80, 10, END], "labels": [-100, -100, 10, END], "id": str(n)} for n in range(30)]
    path = e2e.write_rows(tmp_path / "ids.jsonl", rows)
    words = [*e2e.Place(place.target, path, tmp_path).overrides, "collect.answers=logged"]
    sections = {section.title: section for section in doctor.examine(e2e.config(*words, name="doctor"))}
    assert dict(sections["traffic"].rows)["turns"] == "30"
    assert "30 can be asked" in dict(sections["prompts"].rows)["prompts"]
    assert "template" not in dict(sections["answers"].rows)
